"""A study: how directions and magnitudes from few examples are best had, at equal data.

Every method sees the same 2b training examples of a draw (some, told by their names, further ones).
One pass over them in small groups serves all K-FAC methods, whose factors are sums of the groups'.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias import metrics
from laplace_debias.curvature.blocks import Block, curvature_blocks
from laplace_debias.curvature.columns import Fisher
from laplace_debias.curvature.kfac.backends import choose_backend
from laplace_debias.curvature.kfac.crossfit import exact_crossfit
from laplace_debias.curvature.kfac.directions import Eigenbasis, eigenbasis
from laplace_debias.curvature.kfac.fit import FactorSums, Problem, exact_sums, factor_sums
from laplace_debias.curvature.likelihood import likelihood_from
from laplace_debias.curvature.selection import select_parameters
from laplace_debias.experiments.debiasing_report import StudyResult, report
from laplace_debias.experiments.debiasing_schemes import (
    FULL,
    MINI,
    USUAL_FOLDS,
    Factors,
    Plan,
    crossfit_name,
    magnitudes_of,
    split_name,
)
from laplace_debias.experiments.evaluation import device_from
from laplace_debias.functional import Wanted, functional_moments
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.posterior import GaussianPosterior
from laplace_debias.problems import DataSource, Images, get_problem, load_problem
from laplace_debias.problems.storage import read_tensors, write_tensors
from laplace_debias.report.tables import read_csv, write_csv

_MEMORY_BOUND = 2**28
_PLACES = ("data", "checkpoint", "cache", "output", "device", "progress", "draws", "ekfac_draws")
"""Settings that do not change what is found in a draw."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DebiasingStudySettings:
    """What is studied, and on how much data.

    Attributes:
        problem: Name of the test problem.
        data: Its data, as `DataSource` takes it; none for the digits.
        checkpoint: The trained network, a file of `laplace-debias train`.
        cache: Folder for decoded images.
        output: Folder of the results. A run goes on where one of the same settings stopped.
        batch_size: b: every method sees 2b examples.
        draws: How many times these are drawn; no example comes twice, or in the reference.
        ekfac_draws: In how many of the draws EKFAC is fitted too.
        groups: Into how many groups the 2b examples are cut, the largest number of folds.
        folds: Numbers of folds to cross-fit with, divisors of `groups`.
        further_batches: How many further magnitude batches of b examples there are.
        average_batch_size: Examples in a batch of the running averages, which go through the
            further batches too.
        average_decay: Weight of what came before in a running average.
        full_examples: How many training examples, chosen at random, stand for full-batch.
        ekfac_full_examples: On how many of these EKFAC's full-batch magnitudes are measured.
        test_examples: How many test images are predicted.
        prior_precisions: The grid of δ, ascending.
        fisher: How the curvature's columns are found.
        params: Which parameters are Bayesian.
        eval_batch_size: Images a batch.
        seed: Seed of every choice.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If a number is out of range or does not divide another as it must.
    """

    problem: str = "allcnnc-cifar10-one-cycle"
    data: Path | None = None
    checkpoint: Path | None = None
    cache: Path | None = None
    output: Path = Path("results/debiasing_study")
    batch_size: int = 64
    draws: int = 8
    ekfac_draws: int = 3
    groups: int = 32
    folds: tuple[int, ...] = (2, 4, 8, 16, 32)
    further_batches: int = 3
    average_batch_size: int = 16
    average_decay: float = 0.9
    full_examples: int = 4000
    ekfac_full_examples: int = 1000
    test_examples: int = 100
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0)
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    params: Literal["all", "weights", "last_layer"] = "weights"
    eval_batch_size: int = 50
    seed: int = 0
    device: str = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "draws", "full_examples", "ekfac_full_examples", "test_examples"),
            *("further_batches", "eval_batch_size"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.ekfac_draws <= self.draws:
            raise ValueError(f"ekfac_draws is {self.ekfac_draws}; expected 0 … {self.draws}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")
        if self.groups < 4 or self.groups % 4 or 2 * self.batch_size % self.groups:
            raise ValueError(
                f"groups is {self.groups}; expected a multiple of 4 that divides 2 batch_size = "
                f"{2 * self.batch_size}"
            )
        wrong = [folds for folds in self.folds if folds < 2 or self.groups % folds]
        if wrong or min(USUAL_FOLDS, self.groups) not in self.folds:
            raise ValueError(
                f"folds is {self.folds}; expected divisors of groups = {self.groups} from 2 on, "
                f"{min(USUAL_FOLDS, self.groups)} among them"
            )
        size = self.average_batch_size
        if size < 1 or size % (2 * self.batch_size // self.groups) or self.batch_size % size:
            raise ValueError(
                f"average_batch_size is {size}; expected a divisor of batch_size = "
                f"{self.batch_size} that a group's {2 * self.batch_size // self.groups} examples "
                "divide"
            )
        if not 0 < self.average_decay < 1:
            raise ValueError(f"average_decay is {self.average_decay}; expected it in (0, 1)")
        grid = self.prior_precisions
        if not grid or list(grid) != sorted(set(grid)) or not 0 < grid[0] <= grid[-1] < math.inf:
            raise ValueError(f"prior_precisions is {grid}; expected positive numbers, ascending")

    @property
    def plan(self) -> Plan:
        """How a draw's examples are cut."""
        return Plan(
            batch_size=self.batch_size,
            groups=self.groups,
            folds=self.folds,
            further_batches=self.further_batches,
            average_batch_size=self.average_batch_size,
            average_decay=self.average_decay,
        )


def run(settings: DebiasingStudySettings, console: Console | None = None) -> StudyResult:
    """Fit, predict, print a table, write results and a picture.

    Args:
        settings: What to study.
        console: Where to print; the standard output if None.

    Returns:
        What was measured.

    Raises:
        ValueError: If data or checkpoint are missing or damaged, there is too little data, or the
            folder holds results of other settings.
        OSError: If the results cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    source = DataSource(root=settings.data, cache=settings.cache, progress=settings.progress)
    _claim(settings)
    model, data = load_problem(
        get_problem(settings.problem), source, settings.checkpoint, seed=settings.seed
    )
    rows = study(model.to(device_from(settings.device)), data.train, data.test, settings)
    return report(rows, settings.output, console)


def study(
    model: nn.Module, train: Images, test: Images, settings: DebiasingStudySettings
) -> list[Row]:
    """Measure every method in every draw; draws in the output folder are not made again.

    Args:
        model: The trained network, in evaluation mode.
        train: What it was trained on.
        test: Images to predict.
        settings: What to study.

    Returns:
        Rows with `method`, `draw` (None for full-batch), `prior_precision`, `nll` (nats, mean over
        test images) and `log_variance` (mean over test images and logits).

    Raises:
        ValueError: If there are too few images.
    """
    a_draw = (2 + settings.further_batches) * settings.batch_size
    needed = settings.full_examples + settings.draws * a_draw
    if needed > len(train) or settings.test_examples > len(test):
        raise ValueError(
            f"the study takes {needed} training and {settings.test_examples} test images; there "
            f"are {len(train)} and {len(test)}: lower draws, full_examples or test_examples"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(train), generator=generator)
    chosen = torch.randperm(len(test), generator=generator)[: settings.test_examples]
    names = select_parameters(model, settings.params)
    problem = Problem(
        model,
        likelihood_from("classification", None),
        curvature_blocks(model, names),
        choose_backend(model, "auto"),
        Fisher(settings.fisher, 1, settings.seed),
        model.get_parameter(names[0]).dtype,
        _MEMORY_BOUND,
    )
    runner = _Runner(problem, settings, train, order, test.batch(chosen))
    rows = runner.stored("full", runner.full_rows)
    for draw in range(settings.draws):
        rows += runner.stored(f"draw_{draw}", lambda draw=draw: runner.draw_rows(draw))
    return rows


def _claim(settings: DebiasingStudySettings) -> None:
    """Make the folder that of these settings.

    Raises:
        ValueError: If it holds results of others.
    """
    described = {k: v for k, v in asdict(settings).items() if k not in _PLACES}
    plain = json.loads(json.dumps(described, default=str))
    path = settings.output / "settings.json"
    if not path.exists():
        settings.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    differing = sorted(k for k in {**found, **plain} if found.get(k) != plain.get(k))
    if differing:
        raise ValueError(
            f"{settings.output} holds results of other settings ({', '.join(differing)} differ): "
            "choose another output, or go back to those to go on"
        )


class _Runner:
    """Fits and predicts for the study.

    Args:
        problem: The network and its blocks.
        settings: The settings.
        train: Training images.
        order: In which order these are used.
        test: Test images and labels.
    """

    def __init__(
        self,
        problem: Problem,
        settings: DebiasingStudySettings,
        train: Images,
        order: Tensor,
        test: tuple[Tensor, Tensor],
    ) -> None:
        self._problem = problem
        self._settings = settings
        self._train = train
        self._order = order
        self._test = test
        self._full: tuple[FactorSums, dict[Block, Eigenbasis]] | None = None

    def stored(self, name: str, compute: Callable[[], list[Row]]) -> list[Row]:
        """Rows of a part of the study: those of an earlier run where there are some."""
        path = self._settings.output / "parts" / f"{name}.csv"
        if not path.exists():
            write_csv(compute(), path)
        return read_csv(path)

    def full_rows(self) -> list[Row]:
        """What the full-batch posteriors predict."""
        _, bases = self.full
        table = {MINI: {b: basis.magnitudes for b, basis in bases.items()}}
        posteriors = {FULL: self._posterior(bases, table[MINI])}
        if self._settings.ekfac_draws:
            indices = self._order[: self._settings.ekfac_full_examples]
            indices = indices[: self._settings.full_examples]
            squares, _ = exact_sums(self._problem, bases, self._batches(indices, "EKFAC"), 0)
            exact = {block: total / len(indices) for block, total in squares.items()}
            posteriors[f"EKFAC, {FULL}"] = self._posterior(bases, exact)
        return self._measured(posteriors, None)

    def draw_rows(self, draw: int) -> list[Row]:
        """What every method's posterior predicts in a draw."""
        settings, plan = self._settings, self._settings.plan
        b = settings.batch_size
        a_draw = (2 + settings.further_batches) * b
        start = settings.full_examples + draw * a_draw
        indices = self._order[start : start + a_draw]
        hand, further = indices[: 2 * b], indices[2 * b :]
        groups = self._factor_parts([hand[k :: plan.groups] for k in range(plan.groups)], "groups")
        extra = self._factor_parts([*further.split(plan.average_batch_size)], "further")
        factors, full_bases = self.full
        bases: dict[str, dict[Block, Eigenbasis]] = {"full": full_bases}
        table: dict[str, dict[Block, Tensor]] = {name: {} for name in plan.group_methods}
        for block in tqdm(self._problem.blocks, desc="decompose", disable=not settings.progress):
            sides = []
            for side, values in enumerate((full_bases[block].along_G, full_bases[block].along_A)):
                of_side = Factors(
                    groups=torch.stack([sums[block][side] for sums in groups]),
                    further=torch.stack([sums[block][side] for sums in extra]),
                    full=factors[block][side],
                    full_values=values,
                    precision=self._problem.dtype,
                )
                sides.append(magnitudes_of(of_side, plan))
            (bases_G, along_G), (bases_A, along_A) = sides
            for name, U_G in bases_G.items():
                empty = U_G.new_empty(0)
                basis = Eigenbasis(U_G, bases_A[name], empty, empty)
                bases.setdefault(name, {})[block] = basis
            for name in table:
                table[name][block] = torch.outer(along_G[name], along_A[name])
        of_method = dict(plan.group_methods)
        if draw < settings.ekfac_draws:
            for name, (basis_name, exact) in self._ekfac(hand, groups, bases).items():
                of_method[name], table[name] = basis_name, exact
        del groups, extra
        posteriors = {
            name: self._posterior(bases[basis], table[name]) for name, basis in of_method.items()
        }
        return self._measured(posteriors, draw)

    @property
    def full(self) -> tuple[FactorSums, dict[Block, Eigenbasis]]:
        """Mean factors of the full-batch examples and their eigenbases, computed once."""
        if self._full is None:
            path = self._settings.output / "parts" / "full.safetensors"
            if not path.exists():
                indices = self._order[: self._settings.full_examples]
                sums, _ = factor_sums(self._problem, self._batches(indices, "full-batch"))
                tensors = {
                    f"{block.name}/{side}": factor / len(indices)
                    for block, of_block in sums.items()
                    for side, factor in zip("GA", of_block, strict=True)
                }
                write_tensors(path, tensors)
            device = self._problem.model.get_parameter(self._problem.blocks[0].parameters[0]).device
            found = {name: tensor.to(device) for name, tensor in read_tensors(path).items()}
            factors = {b: (found[f"{b.name}/G"], found[f"{b.name}/A"]) for b in self._problem.blocks}
            dtype = self._problem.dtype
            bases = {}
            for block, (G, A) in factors.items():
                basis = eigenbasis(G.double(), A.double())
                parts = (basis.U_G, basis.U_A, basis.along_G, basis.along_A)
                bases[block] = Eigenbasis(*(None if p is None else p.to(dtype) for p in parts))
            self._full = factors, bases
        return self._full

    def _ekfac(
        self, hand: Tensor, groups: list[FactorSums], bases: dict[str, dict[Block, Eigenbasis]]
    ) -> dict[str, tuple[str, dict[Block, Tensor]]]:
        """Exact curvature along K-FAC's directions: basis and magnitudes by method."""
        b, K = self._settings.batch_size, min(USUAL_FOLDS, self._settings.groups)
        found = {}
        for name, basis, indices in ((MINI, "all", hand), (split_name(b, b), "half", hand[1::2])):
            sums, _ = exact_sums(
                self._problem, bases[basis], self._batches(indices, f"EKFAC {name}"), 0
            )
            found[f"EKFAC, {name}"] = basis, {k: v / len(indices) for k, v in sums.items()}
        folds = [self._batch(hand[k::K]) for k in range(K)]
        of_folds: list[FactorSums] = [
            {
                block: (
                    torch.stack([sums[block][0] for sums in groups[k::K]]).sum(0),
                    torch.stack([sums[block][1] for sums in groups[k::K]]).sum(0),
                )
                for block in self._problem.blocks
            }
            for k in range(K)
        ]
        num_examples = len(hand)
        whole = {
            block: Eigenbasis(
                basis.U_G,
                basis.U_A,
                *(
                    ((U.T @ sum(sums[block][i] for sums in of_folds) @ U).diagonal() / num_examples)
                    for i, U in enumerate((basis.U_G, basis.U_A))
                    if U is not None
                ),
            )
            for block, basis in bases["all"].items()
        }
        starts = [k * len(y) for k, (_, y) in enumerate(folds)]
        exact = exact_crossfit(self._problem, folds, starts, of_folds, whole)
        found[f"EKFAC, {crossfit_name(K)}"] = "all", exact
        return found

    def _factor_parts(self, parts: list[Tensor], what: str) -> list[FactorSums]:
        """Each part's factors, summed over its examples."""
        bar = tqdm(parts, desc=f"factors of {what}", disable=not self._settings.progress)
        first, sums = 0, []
        for indices in bar:
            sums.append(factor_sums(self._problem, [self._batch(indices)], first)[0])
            first += len(indices)
        return sums

    def _batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        device = self._problem.model.get_parameter(self._problem.blocks[0].parameters[0]).device
        x, y = self._train.batch(indices)
        return x.to(device, self._problem.dtype), y.to(device)

    def _batches(self, indices: Tensor, what: str) -> Any:
        parts = indices.split(self._settings.eval_batch_size)
        bar = tqdm(parts, desc=what, unit="batch", disable=not self._settings.progress)
        return (self._batch(part) for part in bar)

    def _posterior(
        self, bases: Mapping[Block, Eigenbasis], table: Mapping[Block, Tensor]
    ) -> GaussianPosterior:
        blocks = {
            block.name: EigenKronecker(bases[block].U_G, bases[block].U_A, table[block])
            for block in self._problem.blocks
        }
        mean = torch.zeros(sum(block.size for block in self._problem.blocks))
        return GaussianPosterior(
            mean, BlockDiagonal(blocks), len(self._train), torch.tensor(1.0), None
        )

    def _measured(self, posteriors: Mapping[str, GaussianPosterior], draw: int | None) -> list[Row]:
        """Predict the test images with all posteriors in one pass."""
        grid = self._settings.prior_precisions
        images, labels = self._test
        blocks, dtype = self._problem.blocks, self._problem.dtype
        device = self._problem.model.get_parameter(blocks[0].parameters[0]).device
        deltas = torch.tensor(grid, dtype=dtype, device=device)
        deltas = deltas[None, :, None].expand(len(posteriors), -1, len(blocks))
        means, variances = [], []
        bar = tqdm(
            images.split(self._settings.eval_batch_size),
            desc="predict",
            disable=not self._settings.progress,
        )
        for x in bar:
            mean, variance = functional_moments(
                self._problem.model,
                blocks,
                list(posteriors.values()),
                x.to(device, dtype),
                deltas,
                Wanted(True, None, _MEMORY_BOUND),
            )
            means.append(mean.double().cpu())
            variances.append(variance.double().cpu())
        mean, variance = torch.cat(means), torch.cat(variances, dim=2)
        return [
            {
                "method": name,
                "draw": draw,
                "prior_precision": delta,
                **self._metrics(mean, of_delta, labels),
            }
            for name, of_method in zip(posteriors, variance, strict=True)
            for delta, of_delta in zip(grid, of_method, strict=True)
        ]

    def _metrics(
        self,
        mean: Float[Tensor, "n classes"],
        variance: Float[Tensor, "n classes"],
        labels: Tensor,
    ) -> dict[str, float]:
        probs = self._problem.likelihood.predictive(mean, variance).probs  # type: ignore[attr-defined]
        return {
            "nll": metrics.nll(probs, labels).item(),
            "log_variance": variance.log().mean().item(),
        }
