"""Curvature of all parameters together: dense (`full`) and its leading part (`lowrank`).

Directions are the eigenvectors of the whole matrix, magnitudes the curvature along them on the same
or on other data: the two-batch idea as for a block, without the Kronecker structure.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.directions import eigh, pooled, resolution
from laplace_debias.curvature.fits.sums import check_finite_sums
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LowRankPlusDiagonal,
)

Rows = Float[Tensor, "rows parameters"]


def sweep_rows(
    problem: FitContext,
    batches: Pairs,
    consume: Callable[[Rows], object],
    first: int = 0,
    sums: dict[str, Any] | None = None,
) -> DataTotals:
    """One pass over data that hands over Jacobian rows, `[b·K, D]`, with `Σ rowᵀ row = N·C`.

    `consume` keeps what it sums in `sums`; without these nothing of the pass is saved.
    """
    extremes: dict[Block, list[Tensor]] = {block: [] for block in problem.blocks}
    parts: dict[Block, Tensor] = {}

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Float[Tensor, "examples columns d"]:
        found = []
        for _, J, columns in rotated_jacobians(layer, block, uses, None, None):
            if columns is not None:
                J = J.new_zeros(*J.shape[:3], block.shape[1]).index_add_(3, columns, J)
            found.append(J.flatten(2))
        return torch.cat(found)

    def collect(block: Block, part: Tensor) -> None:
        parts[block] = part
        extremes[block].append(torch.stack(torch.aminmax(part)))
        if len(parts) == len(problem.blocks):
            rows = torch.cat([parts[b] for b in problem.blocks], dim=2)
            parts.clear()
            consume(rows.flatten(0, 1).to(problem.factor_dtype))

    row_bytes = sum(block.size for block in problem.blocks) * problem.dtype.itemsize
    kept = None if sums is None else {"rows": sums, "extremes": extremes}
    sweep = Sweep(problem, collect, measure, sums=kept, row_bytes=row_bytes)
    seen = sweep.over(batches, first)
    check_finite_sums({block: torch.cat(of) for block, of in extremes.items() if of})
    return seen


# The one block's name.
DENSE_BLOCK = "parameters"
# Of several processes the first one decomposes it.
_ON_FIRST = {DENSE_BLOCK: 0}
KEPT_ROWS = 2**30
"""Bytes of Jacobian rows that are kept to find eigenvectors; more are compressed."""


def fit_full(problem: FitContext, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
    """The whole curvature `[D, D]`: directions from some data, magnitudes from these or others."""
    size = sum(block.size for block in problem.blocks)
    sums = {DENSE_BLOCK: torch.zeros(size, size, dtype=problem.factor_dtype, device=problem.device)}
    seen = sweep_rows(
        problem, directions, lambda rows: sums[DENSE_BLOCK].addmm_(rows.T, rows), sums=sums
    )
    owned = problem.ranks.sum_to_owners({DENSE_BLOCK: _finite(sums.pop(DENSE_BLOCK))}, _ON_FIRST)
    found = {}
    if owned:
        found[DENSE_BLOCK] = eigh(owned.pop(DENSE_BLOCK).div_(seen.weight), "the curvature")
    along, U = problem.ranks.share(found, _ON_FIRST)[DENSE_BLOCK]
    return _along(problem, along, U, seen, magnitudes, None)  # type: ignore[arg-type]


def fit_low_rank(
    problem: FitContext, directions: Pairs, magnitudes: Pairs | None, rank: int
) -> CurvatureFit:
    """The leading eigenvectors of the curvature, and the curvature along them.

    In all other directions the posterior is the prior. Jacobian rows of up to 1 GiB are kept, and
    the eigenvectors are exact; more are compressed to their `4 rank` leading directions on the way.
    There are no more directions than Jacobian rows.
    """
    kept: list[Rows] = []
    size = sum(block.size for block in problem.blocks)
    most = max(8 * rank, KEPT_ROWS // (size * problem.factor_dtype.itemsize * problem.ranks.size))

    def keep(rows: Rows) -> None:
        kept.append(rows)
        if sum(map(len, kept)) > most:
            values, U = _leading(torch.cat(kept), 4 * rank, problem.dtype)
            kept[:] = [(U * values.sqrt()).T]

    seen = sweep_rows(problem, directions, keep, sums={DENSE_BLOCK: kept})
    along, U = _on_first(
        problem,
        [_joined(problem, kept, size)],
        lambda rows: _leading(rows[0], rank, problem.dtype),
    )
    return _along(problem, along / seen.weight, U, seen, magnitudes, rank)


def fit_crossfit_dense(
    problem: FitContext, data: Pairs, num_folds: int, rank: int | None
) -> CurvatureFit:
    """Directions from all examples at hand, magnitudes out of fold; see `fit_crossfit`.

    Jacobian rows are kept. Without a rank all directions are, too (`full`).
    """
    folds = split_folds(problem.ranks, data, num_folds)
    size = sum(block.size for block in problem.blocks)
    rows: list[Rows] = []
    seen = DataTotals()
    for fold in folds:
        of_fold: list[Rows] = []
        sums = {DENSE_BLOCK: of_fold}
        seen = seen + sweep_rows(problem, fold, of_fold.append, 0, sums)
        rows.append(_joined(problem, of_fold, size))

    def crossfitted(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        values, U = _leading(torch.cat(rows), rank, problem.dtype)
        total = torch.zeros_like(values)
        for index, fold_rows in enumerate(rows):
            others = torch.cat([*rows[:index], *rows[index + 1 :]])
            of_others, basis = _leading(others, rank, problem.dtype)
            measured = (fold_rows.to(basis) @ basis).square().sum(0)
            measured = pooled(measured, of_others, problem.dtype)
            # Fewer rows span fewer directions: what is left out has no curvature to measure.
            total[: len(measured)] += measured[: len(total)]
        return pooled(total / seen.weight, values, problem.dtype), U

    along, U = _on_first(problem, rows, crossfitted)
    return _along(problem, along, U, seen, None, rank)


def _on_first(
    problem: FitContext,
    rows: list[Tensor],
    decomposed: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Eigenpairs of the rows of all processes: decomposed by the first of them, for all."""
    of_all = [problem.ranks.on_all([some]) or [some] for some in rows]
    is_first = problem.ranks.rank == 0
    found = {DENSE_BLOCK: decomposed([some for (some,) in of_all])} if is_first else {}
    return problem.ranks.share(found, _ON_FIRST)[DENSE_BLOCK]  # type: ignore[return-value]


def _joined(problem: FitContext, rows: list[Tensor], size: int) -> Rows:
    """The rows of one process, which may have none; the list is emptied."""
    if rows:
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        rows.clear()
        return joined
    return torch.zeros(0, size, dtype=problem.factor_dtype, device=problem.device)


def _along(
    problem: FitContext,
    along: Float[Tensor, " k"],
    U: Float[Tensor, "parameters k"],
    seen: DataTotals,
    magnitudes: Pairs | None,
    rank: int | None,
) -> CurvatureFit:
    """The curvature of directions, along which other data may be measured; thin with a rank."""
    if magnitudes is not None:
        sums = {DENSE_BLOCK: U.new_zeros(U.shape[1])}

        def measure(rows: Rows) -> None:
            sums[DENSE_BLOCK].add_((rows @ U.to(rows)).square().sum(0))

        measured = sweep_rows(problem, magnitudes, measure, seen.num_examples, sums)
        problem.ranks.sum([sums[DENSE_BLOCK]])
        along = pooled(sums[DENSE_BLOCK] / measured.weight, along, problem.dtype)
        seen = seen + measured
    if rank is None:
        full = EigenKronecker(U, None, along.unsqueeze(1)).to(problem.dtype)
        return CurvatureFit(BlockDiagonal({DENSE_BLOCK: full}), seen)
    U, along = U.to(problem.dtype), along.to(problem.dtype).clamp_min(0)
    return CurvatureFit(BlockDiagonal({DENSE_BLOCK: LowRankPlusDiagonal(U, along, 0.0)}), seen)


def _leading(
    rows: Rows, rank: int | None, precision: torch.dtype
) -> tuple[Float[Tensor, " k"], Float[Tensor, "parameters k"]]:
    """Leading eigenpairs of `rowsᵀ rows`, through the smaller of its two products; all for None.

    Pairs that rounding in `precision`, in which the rows were computed, does not determine are left
    out.
    """
    if rank is None:
        return eigh(rows.T @ rows, "the curvature")  # type: ignore[return-value]
    is_tall = rows.shape[0] > rows.shape[1]
    products = rows.T @ rows if is_tall else rows @ rows.T
    what = "the curvature" if is_tall else "the products of Jacobian rows"
    values, vectors = eigh(_finite(products), what)
    assert vectors is not None
    # Rows that are all zero, as a saturated network has them, give no direction: the posterior is
    # the prior.
    k = min(rank, int((values > values[:1] * resolution(precision)).sum()))
    if is_tall:
        return values[:k], vectors[:, :k]
    U, _ = torch.linalg.qr(rows.T @ (vectors[:, :k] / values[:k].sqrt()))
    return values[:k], U


def _finite(products: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Products of Jacobian rows, none of which overflows."""
    # No product is larger than the largest square.
    if not products.diagonal().isfinite().all():
        raise ValueError(
            f"The curvature of {DENSE_BLOCK} holds NaN or Inf: squares of the network's "
            f"derivatives overflow {products.dtype}. Rescale the inputs, the targets and their "
            "sigma, or use factor_dtype=torch.float64."
        )
    return products
