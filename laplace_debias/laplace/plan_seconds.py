"""Seconds of a fit, estimated from one batch and small eigendecompositions."""

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from laplace_debias.curvature.fits.costs import decomposed
from laplace_debias.curvature.fits.directions import eigh
from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.over_ranks import owners_of_blocks
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.rows import sweep_rows
from laplace_debias.curvature.fits.sums import factor_sums
from laplace_debias.curvature.fits.working import Working
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.network.inputs import num_examples
from laplace_debias.laplace.plan import Pass
from laplace_debias.laplace.planned import Planned
from laplace_debias.laplace.schemes import FOLDS
from laplace_debias.operators.eigh import may_be_low_rank
from laplace_debias.system.ranks import ALONE

# Eigendecompositions are timed at up to this size, and scaled by d³. Those of low rank are so much
# faster that what they need whatever their size would be scaled, too, at a smaller one.
_TIMED_SIZE = 1024
_TIMED_LOW_RANK = 2048
# Size of the matrix products whose rate is measured.
_PRODUCT = 512
# Runs that take fewer seconds together are repeated, three times at most.
_SHORT = 1.0


def timed_pass(planned: Planned, of: Pass, rotation_flops: int) -> Pass:
    """A pass with the seconds that its batches take, from one of them.

    Args:
        planned: What is to be fitted.
        of: The pass.
        rotation_flops: Operations of EKFAC's magnitudes for one example.
    """
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
            turned = rotation_flops * num_examples(planned.batch[0])
            seconds += turned / _flops_a_second(problem)
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
    x = torch.ones(_PRODUCT, _PRODUCT, dtype=problem.dtype, device=problem.device)
    x @ x
    _wait(problem)
    start = perf_counter()
    for _ in range(4):
        x @ x
    _wait(problem)
    return 4 * 2 * _PRODUCT**3 / (perf_counter() - start)


def eigh_seconds(planned: Planned, working: Working) -> float:
    """Seconds of the eigendecompositions of the rank with most to do.

    Small factors are timed at their own size: their time does not follow d³. A factor of few rows
    is decomposed through its range, and cross-fitting does that once.
    """
    problem, examples = planned.problem, planned.examples_read
    times = 1 + (planned.folds or FOLDS) if planned.mode == "crossfit" else 1
    owners = owners_of_blocks(problem)
    known: dict[tuple[int, int], float] = {}
    loads = [0.0] * problem.ranks.size
    for block in problem.blocks:
        for d, rows_of_one in zip(decomposed(block), _rows(block, working), strict=True):
            rows = 2 * d if examples is None else min(2 * d, examples * rows_of_one)
            is_low = may_be_low_rank(rows, d)
            timed = min(d, _TIMED_LOW_RANK if is_low else _TIMED_SIZE)
            key = timed, max(1, rows * timed // d)
            if key not in known:
                known[key] = _eigh_of(problem, *key)
            repeated = times if rows > d // 2 else 1
            loads[owners[block]] += repeated * block.num_groups * known[key] * (d / timed) ** 3
    return max(loads)


def _rows(block: Block, working: Working) -> list[int]:
    """Rows of one example that are behind each factor of a block that is decomposed."""
    positions = 1 if block.is_exact or block.sharing == "reduce" else working.positions[block]
    of_G = [] if block.has_diagonal_G else [working.columns * positions]
    return of_G if block.is_exact or block.has_diagonal_A else [*of_G, positions]


def _eigh_of(problem: Problem, size: int, num_rows: int) -> float:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, size, generator=generator, dtype=problem.factor_dtype)
    factor = (rows.T @ rows).to(problem.device)
    return _best_of(problem, lambda: eigh(factor))


def _wait(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
