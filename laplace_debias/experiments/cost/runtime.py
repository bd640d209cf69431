"""Run time and memory of fits: debiased K-FAC posteriors against the mini-batch's.

A debiased fit with two batches of half the mini-batch's size sees as many examples. It projects the
second factors block by block, so it holds the factors of two blocks at a time. The naive way holds
two entire K-FACs side by side and then projects one; it gives the same posterior and is measured
too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from laplace_debias.curvature.fits.directions import Eigenbasis
from laplace_debias.experiments.cost.resources import cost, machine_of
from laplace_debias.experiments.shared.checks import check_at_least, check_even_batch, check_folds
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.methods import CROSSFIT, DEBIASED, FULL, MINI
from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.setup import Trained, load_trained, plain_console
from laplace_debias.experiments.shared.store import Row, open_store
from laplace_debias.laplace import Laplace
from laplace_debias.operators import BlockDiagonal, EigenKronecker
from laplace_debias.report.costs import costs_figure
from laplace_debias.report.tables import print_table
from laplace_debias.system.device import device_from

NAME = "runtime"
NAIVE = "debiased, naive"

# Fits a posterior and gives its curvature.
Fit = Callable[[], BlockDiagonal]


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings(ExperimentSettings):
    """Which fits are timed.

    Attributes:
        batch_size: Examples of a mini-batch; debiased has two batches of half as many.
        folds: Folds of the cross-fitted posterior; 0 for none.
        repeats: How many times each fit is timed, in turn.
        full_examples: Training examples of a full-batch fit, in mini-batches; 0 for none.
        params: Which parameters are Bayesian.
        fisher: How the curvature is found.
    """

    output: Path = Path("results/runtime")
    batch_size: int = 128
    folds: int = 8
    repeats: int = 3
    full_examples: int = 0
    params: Literal["all", "weights", "last_layer"] = "weights"
    fisher: Literal["exact", "mc", "empirical"] = "mc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "repeats")
        check_even_batch(self.batch_size)
        check_folds(self.folds, self.batch_size)
        check_at_least(self, 0, "full_examples")


def run_runtime(settings: RuntimeSettings, console: Console | None = None) -> list[Row]:
    """Time every fit and measure its memory; write `results.csv`, `summary.csv` and the picture.

    Returns:
        A row per fit and repeat: `seconds`, and `peak` memory above what was held before (MB; None
        where it cannot be measured), the posterior it returns included.

    Raises:
        ValueError: If the run that is resumed was timed on another device or with another number of
            threads; else as `Experiment`.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning,
        Sections 4.2.3 and B.6.
    """
    console = console or plain_console()
    store = open_store(NAME, settings)
    machine = machine_of(device_from(settings.device))
    if not store.matches("machine", [machine]):
        raise ValueError(
            f"{store.folder} holds times of another machine or number of threads than "
            f"{machine['device']}, {machine['threads']} threads: resume there, or choose another "
            "--output"
        )
    trained = load_trained(settings, store, console)
    fits = timed_fits(trained, settings)
    rows: list[Row] = []
    is_warm = False
    for repeat in tqdm(range(settings.repeats), desc="repeats", disable=not settings.progress):

        def compute(repeat: int = repeat) -> list[Row]:
            nonlocal is_warm
            if not is_warm:
                # The first fit of a process also sets up threads and buffers.
                fits[MINI]()
                is_warm = True
            return [
                {"method": name, "repeat": repeat, **cost(fit, trained.device)}
                for name, fit in fits.items()
            ]

        rows += store.rows(f"repeat-{repeat}", compute)
    store.table(rows)
    table = summary(rows)
    store.table(table, "summary")
    (sizes,) = store.rows("sizes", lambda: [factor_sizes(fits[MINI]())])
    store.table([sizes], "sizes")
    where = f"{machine['device']}, {machine['threads']} threads"
    print_table(table, f"Fits of {trained.problem.name} on {where}", console=console)
    pictures = store.picture(costs_figure(rows, ("seconds", "peak")), NAME)
    for sentence in findings(table, sizes):
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return rows


def timed_fits(trained: Trained, settings: RuntimeSettings) -> dict[str, Fit]:
    """The fits that are timed, by name.

    Args:
        trained: The trained network and its data.
        settings: Batch size and so on.

    Raises:
        ValueError: If there are too few examples.
    """
    size, train = settings.batch_size, trained.data.train
    settings.check_counts(len(train), len(trained.data.test))
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(train), generator=generator)
    dtype = next(trained.model.parameters()).dtype

    def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = train.batch(indices)
        return x.to(dtype), y

    x, y = batch(order[:size])
    half = size // 2
    first, second = [(x[:half], y[:half])], [(x[half:], y[half:])]

    def fitted(*batches: Any, folds: int | None = None) -> BlockDiagonal:
        la = Laplace(trained.model, params=settings.params, fisher=settings.fisher)
        generator = torch.Generator().manual_seed(settings.seed)
        la.fit_batches(*batches, num_data=len(train), folds=folds, generator=generator)
        curvature = la.posterior.curvature
        assert isinstance(curvature, BlockDiagonal)
        return curvature

    fits: dict[str, Fit] = {
        MINI: lambda: fitted([(x, y)]),
        DEBIASED: lambda: fitted(first, second),
        NAIVE: lambda: naively_debiased(fitted(first), fitted(second)),
    }
    if settings.folds:
        fits[CROSSFIT] = lambda: fitted([(x, y)], folds=settings.folds)
    if settings.full_examples:
        parts = order[: settings.full_examples].split(size)
        fits[FULL] = lambda: fitted([batch(part) for part in parts])
    return fits


def naively_debiased(first: BlockDiagonal, second: BlockDiagonal) -> BlockDiagonal:
    r"""Eq. 9 from two entire K-FACs: the directions of one, the curvature of the other along them.

    $\mathrm{diag}(U^\top \tilde C U)$ for $\tilde C = \tilde U \tilde\Lambda \tilde U^\top$ is
    $W_G \tilde\Lambda W_A^\top$ with the overlaps $W = (U^\top \tilde U)^{\circ 2}$ (Eq. 6).

    Args:
        first: The curvature of the directions.
        second: The curvature that is measured along them.
    """
    blocks: dict[str, Any] = {}
    for name, block in first.blocks.items():
        other = second.blocks[name]
        assert isinstance(block, EigenKronecker)
        assert isinstance(other, EigenKronecker)
        magnitudes = _weigh(block.U_G, other.U_G, other.magnitudes)
        magnitudes = _weigh(block.U_A, other.U_A, magnitudes.T).T
        # The largest eigenvalues come first.
        own = block.magnitudes
        basis = Eigenbasis(block.U_G, block.U_A, own[:, 0], own[0] / own[0, 0])
        magnitudes = basis.pooled(magnitudes, magnitudes.dtype)
        blocks[name] = EigenKronecker(block.U_G, block.U_A, magnitudes)
    return BlockDiagonal(blocks)


def _weigh(U: Tensor | None, V: Tensor | None, magnitudes: Tensor) -> Tensor:
    if U is None or V is None:
        # Both are the coordinate axes.
        return magnitudes
    return (U.T @ V).square() @ magnitudes


def factor_sizes(curvature: BlockDiagonal) -> Row:
    """How many numbers K-FAC's factors hold: of all blocks, and of the largest one (Section B.6).

    Args:
        curvature: Of any K-FAC fit.
    """
    shapes = [block.magnitudes.shape for block in curvature.blocks.values()]
    sizes = [d_out**2 + d_in**2 for d_out, d_in in shapes]
    return {
        "parameters": sum(d_out * d_in for d_out, d_in in shapes),
        "all factors": sum(sizes),
        "largest block": max(sizes),
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Costs of each fit over its repeats.

    Args:
        rows: Rows with `method`, `seconds` and `peak`.

    Returns:
        A row per method: least, median and greatest seconds, median peak memory (MB), and both
        medians relative to the mini-batch's.
    """
    of = {
        name: [row for row in rows if row["method"] == name]
        for name in dict.fromkeys(row["method"] for row in rows)
    }
    table = []
    for name, found in of.items():
        seconds = [row["seconds"] for row in found]
        time_ratio = median(seconds) / median([row["seconds"] for row in of[MINI]])
        known = all(row["peak"] is not None for row in rows)
        peak = median([row["peak"] for row in found]) if known else None
        of_mini = median([row["peak"] for row in of[MINI]]) if known else None
        table.append(
            {
                "method": name,
                "least s": min(seconds),
                "median s": median(seconds),
                "greatest s": max(seconds),
                "time ratio": time_ratio,
                "peak MB": peak,
                "memory ratio": peak / of_mini if peak is not None and of_mini else None,
            }
        )
    return table


def findings(table: Sequence[Row], sizes: Row) -> list[str]:
    """Findings in sentences, made from the numbers.

    Args:
        table: Rows of `summary`.
        sizes: Of `factor_sizes`.
    """
    told = []
    for row in table:
        memory = "" if row["peak MB"] is None else f" and {row['peak MB']:.0f} MB"
        told.append(f"{row['method']} {row['median s']:.2f} s{memory}")
    return [
        f"A fit takes (median): {', '.join(told)}.",
        f"The factors of all blocks are {sizes['all factors']:,} numbers, "
        f"{sizes['all factors'] / sizes['parameters']:.1f} times the {sizes['parameters']:,} "
        f"parameters; those of the largest block {sizes['largest block']:,}.",
    ]


RUNTIME = Experiment(
    name=NAME,
    figure="Section B.6",
    help="Run time and memory of debiasing, block by block and in the naive way.",
    settings=RuntimeSettings,
    run=run_runtime,
)
