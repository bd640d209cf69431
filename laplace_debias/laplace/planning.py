"""How a plan is made: shapes by formula, a chunk by running two examples, time by one batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.costs import (
    BlockCosts,
    costs_of,
    decomposed,
    message_bytes,
    network_flops,
    posterior_numbers,
)
from laplace_debias.curvature.fits.directions import eigh
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.over_ranks import owners_of_blocks
from laplace_debias.curvature.fits.peak import stages
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.rows import sweep_rows
from laplace_debias.curvature.fits.sums import factor_sums
from laplace_debias.curvature.fits.working import Working, working_memory
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.last_layer import last_layer_parameters
from laplace_debias.laplace.plan import Pass, Plan, refusal
from laplace_debias.laplace.schemes import FOLDS, OF_FIRST_BATCHES
from laplace_debias.laplace.settings import FitSettings
from laplace_debias.system.available import available_memory
from laplace_debias.system.ranks import ALONE

# Eigendecompositions are timed at up to this size, and scaled by d³.
_TIMED_SIZE = 512
# Runs that take fewer seconds together are repeated, three times at most.
_SHORT = 1.0


@dataclass(frozen=True)
class Planned:
    """What is to be fitted.

    Attributes:
        model: The user's model, unwrapped.
        problem: The network and its blocks.
        settings: The choices of `Laplace`.
        mode: As `Laplace.fit` takes it.
        folds: Of `"crossfit"`.
        batch: The first batch, `(x, y)`.
        num_batches: Batches that a full fit reads on this process; None if not known.
        num_examples: Examples that it reads on all processes; None if not known.
    """

    model: nn.Module
    problem: Problem
    settings: FitSettings
    mode: str
    folds: int | None
    batch: tuple[Inputs, Tensor]
    num_batches: int | None
    num_examples: int | None

    @property
    def batches_read(self) -> int | None:
        """Batches of one pass."""
        first = OF_FIRST_BATCHES.get(self.mode)
        return self.num_batches if first is None else 1

    @property
    def examples_read(self) -> int | None:
        """Examples of one pass."""
        if self.mode not in OF_FIRST_BATCHES:
            return self.num_examples
        return num_examples(self.batch[0]) * self.problem.ranks.size

    def workings(self) -> tuple[Working, Working]:
        """Working memory of a pass for factors or rows, and of one for exact curvature."""
        x, y = self.batch
        if self.mode == "crossfit":
            # A pass goes through one fold.
            x = take(x, slice(0, -(-num_examples(x) // (self.folds or FOLDS))))
        kind, problem = self.settings.kind, self.problem
        exact = working_memory(problem, x, y, additive=False, extra_bytes=_row_bytes(problem, kind))
        if kind.name not in ("kfac", "ekfac"):
            return exact, exact
        return working_memory(problem, x, y, additive=True), exact

    def stages(self, workings: tuple[Working, Working]) -> dict[str, int]:
        """Bytes at most in each stage."""
        kind, examples = self.settings.kind, self.examples_read
        if examples is None and self.batches_read is not None:
            # As many as there can be, where only the number of batches is known.
            examples = self.batches_read * num_examples(self.batch[0])
        return stages(
            *(self.problem, kind.name, self.mode, *workings),
            *(examples, self.batches_read, self.folds or FOLDS, kind.num_directions),
        )

    def of_group(self, blocks: Sequence[Block]) -> "Planned":
        """The same of some of the blocks."""
        return replace(self, problem=self.problem.of_group(blocks))

    def alternatives(self) -> dict[str, int]:
        """Other choices, and the bytes at most of a fit with each."""
        found = {}
        for name, other in self._others():
            try:
                found[name] = max(other.stages(other.workings()).values())
            except ValueError:  # One example alone takes more than the chunk's bound.
                continue
        return found

    def _others(self) -> list[tuple[str, "Planned"]]:
        settings, problem = self.settings, self.problem
        others = []
        cotangents = replace(problem.cotangents, fisher=FisherType("mc"))
        if problem.cotangents.fisher.kind == "exact":
            sampled = replace(problem, cotangents=cotangents)
            others.append(('fisher="mc"', replace(self, problem=sampled)))
        for kind in (CurvatureKind("diag"), CurvatureKind("lowrank")):
            if kind.name != settings.kind.name:
                chosen = replace(settings, kind=kind)
                others.append((f'curvature="{kind.name}"', replace(self, settings=chosen)))
        for name, blocks in fewer_blocks(self.model, problem.blocks, self.batch[0]):
            others.append((name, replace(self, problem=replace(problem, blocks=blocks))))
        return others


def plan_of(planned: Planned, timed: bool, available: int | None) -> Plan:
    """The plan of a fit.

    Args:
        planned: What is to be fitted.
        timed: Whether a batch and an eigendecomposition are timed.
        available: Bytes that it may take; None for those that the device has.
    """
    problem, kind, mode = planned.problem, planned.settings.kind, planned.mode
    workings = planned.workings()
    working = max(workings, key=lambda of: of.chunk)
    blocks = _costs(planned, workings[0])
    available = available_memory(problem.device) if available is None else available
    of_stages = planned.stages(workings)
    folds = planned.folds or FOLDS
    messages = {}
    if problem.ranks.size > 1 and not kind.is_dense:
        dtype = problem.factor_dtype
        messages = message_bytes(problem.blocks, kind.name, mode, folds, dtype)
    passes = passes_of(planned, workings[0], timed)
    eigh_flops = sum(block.eigh_flops for block in blocks)
    eigh_seconds = 0.0 if eigh_flops == 0 and not kind.is_dense else None
    if timed and eigh_flops:
        eigh_seconds = _eigh_seconds(problem, folds + 1 if mode == "crossfit" else 1)
    too_much = available is not None and max(of_stages.values()) > available
    size = sum(block.size for block in problem.blocks)
    return Plan(
        *(kind.name, mode, size, blocks, working, of_stages),
        posterior_bytes(problem, kind),
        *(passes, eigh_flops, eigh_seconds, problem.ranks.size, messages, available),
        planned.alternatives() if too_much else {},
    )


def posterior_bytes(problem: Problem, kind: CurvatureKind) -> int:
    """Bytes of a fitted posterior: its curvature and its mean."""
    of_curvature = posterior_numbers(problem.blocks, kind.name, kind.num_directions)
    return problem.dtype.itemsize * (of_curvature + sum(block.size for block in problem.blocks))


def is_too_large(problem: Problem, kind: CurvatureKind) -> bool:
    """Whether a posterior takes more than the memory that is left."""
    available = available_memory(problem.device)
    return available is not None and posterior_bytes(problem, kind) > available


def too_large(
    model: nn.Module, problem: Problem, kind: CurvatureKind, x: Inputs | None
) -> ValueError:
    """What is raised for a posterior that is too large: it names those that fit, with their bytes.

    Args:
        model: The user's model, unwrapped.
        problem: The network and its blocks.
        kind: The curvature.
        x: Inputs of the first batch; None where this process has none.
    """
    available = available_memory(problem.device) or 0
    found = {}
    for other in (CurvatureKind("diag"), CurvatureKind("lowrank")):
        if other.name != kind.name:
            found[f'curvature="{other.name}"'] = posterior_bytes(problem, other)
    for name, blocks in fewer_blocks(model, problem.blocks, x):
        found[name] = posterior_bytes(replace(problem, blocks=blocks), kind)
    what = f"The posterior of curvature={kind.name!r} takes"
    needed = posterior_bytes(problem, kind)
    return ValueError(f"{refusal(what, needed, available, found)} Nothing was fitted.")


def fewer_blocks(
    model: nn.Module, blocks: Sequence[Block], x: Inputs | None
) -> list[tuple[str, list[Block]]]:
    """Smaller choices of parameters, as `params=`, with their blocks."""
    found = []
    weights = [block for block in blocks if block.role in ("weight", "table")]
    if 0 < len(weights) < len(blocks):
        found.append(('params="weights"', weights))
    try:
        last = set(last_layer_parameters(model, x))
    except (ValueError, NotImplementedError):  # A model without one last layer.
        last = set()
    of_last = [block for block in blocks if last.issuperset(block.parameters)]
    if 0 < len(of_last) < len(blocks):
        found.append(('params="last_layer"', of_last))
    return found


def _row_bytes(problem: Problem, kind: CurvatureKind) -> int:
    if not kind.is_dense:
        return 0
    return sum(block.size for block in problem.blocks) * problem.dtype.itemsize


def _costs(planned: Planned, working: Working) -> tuple[BlockCosts, ...]:
    problem, kind = planned.problem, planned.settings.kind
    if kind.is_dense:
        return ()
    owners = owners_of_blocks(problem)
    return tuple(
        costs_of(
            *(block, kind.name, working.positions[block], working.columns),
            *(problem.factor_dtype, problem.dtype, owners[block]),
        )
        for block in problem.blocks
    )


def passes_of(planned: Planned, working: Working, timed: bool) -> tuple[Pass, ...]:
    """The passes over data of a curvature and a mode.

    Args:
        planned: What is to be fitted.
        working: A chunk of a pass for factors or rows.
        timed: Whether a batch is timed.
    """
    passes = _passes(planned, working)
    return tuple(_timed(planned, of) for of in passes) if timed else passes


def _passes(planned: Planned, working: Working) -> tuple[Pass, ...]:
    kind, mode = planned.settings.kind, planned.mode
    costs = _costs(planned, working)
    of_network = {b: network_flops(b, positions) for b, positions in working.positions.items()}
    # Cotangents go back to the first layer that is measured.
    reached = list(of_network)[list(of_network).index(planned.problem.blocks[0]) :]
    back = working.columns * sum(of_network[block] for block in reached)
    through = sum(of_network.values()) + back
    size = sum(block.size for block in planned.problem.blocks)
    read = planned.batches_read, planned.examples_read
    of_factors = Pass("factors", *read, through + sum(b.factor_flops for b in costs))
    of_table = Pass("magnitudes", *read, through + sum(b.rotation_flops for b in costs))
    if kind.name == "diag":
        return (of_table,)
    if kind.name == "kfac":
        measured = replace(of_factors, what="magnitudes")
        return (of_factors, measured) if mode == "debiased" else (of_factors,)
    if kind.name == "ekfac":
        return (of_factors, of_table)
    of_rows = through + 2 * working.columns * size * (size if kind.name == "full" else 0)
    rows = Pass("Jacobian rows", *read, of_rows)
    return (rows, replace(rows, what="magnitudes")) if mode == "debiased" else (rows,)


def _timed(planned: Planned, of: Pass) -> Pass:
    """A pass with the seconds that its batches take, from one of them."""
    if of.num_batches is None:
        return of
    problem, data = replace(planned.problem, ranks=ALONE), [planned.batch]
    kind = planned.settings.kind
    if kind.is_dense:
        seconds = _best_of(problem, lambda: sweep_rows(problem, data, lambda rows: None))
    elif of.what == "factors" or kind.name == "kfac":
        seconds = _best_of(problem, lambda: factor_sums(problem, data))
    else:
        seconds = _best_of(problem, lambda: CurvatureKind("diag").fit(problem, data, None))
        if kind.name == "ekfac":
            # What rotations take on top, at the rate of matrix products here.
            turned = sum(b.rotation_flops for b in _costs(planned, planned.workings()[1]))
            seconds += turned * num_examples(planned.batch[0]) / _flops_a_second(problem)
    return replace(of, seconds=seconds * of.num_batches)


def _best_of(problem: Problem, run: Callable[[], object]) -> float:
    """Seconds of a run; of a short one again, as the first one of a process is slower."""
    found = [math.inf]
    while len(found) < 4 and sum(found[1:]) < _SHORT:
        start = perf_counter()
        run()
        _wait(problem)
        found.append(perf_counter() - start)
    return min(found)


def _flops_a_second(problem: Problem) -> float:
    """Operations a second of a matrix product in the model's dtype."""
    x = torch.randn(_TIMED_SIZE, _TIMED_SIZE, dtype=problem.dtype, device=problem.device)
    x @ x
    _wait(problem)
    start = perf_counter()
    for _ in range(4):
        x @ x
    _wait(problem)
    return 4 * 2 * _TIMED_SIZE**3 / (perf_counter() - start)


def _eigh_seconds(problem: Problem, times: int) -> float:
    """Seconds of the eigendecompositions of the rank with most to do.

    Small factors are timed at their own size: their time does not follow d³.
    """
    owners = owners_of_blocks(problem)
    of_size: dict[int, float] = {}
    loads = [0.0] * problem.ranks.size
    for block in problem.blocks:
        for d in decomposed(block):
            timed = min(d, _TIMED_SIZE)
            if timed not in of_size:
                of_size[timed] = _eigh_of(problem, timed)
            seconds = of_size[timed] * (d / timed) ** 3
            loads[owners[block]] += times * block.num_groups * seconds
    return max(loads)


def _eigh_of(problem: Problem, size: int) -> float:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * size, size, generator=generator, dtype=problem.factor_dtype)
    factor = (rows.T @ rows).to(problem.device)
    return _best_of(problem, lambda: eigh(factor))


def _wait(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
