"""Jacobian rows of all parameters together, and the eigenpairs of their products."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.accumulators import Accumulator
from laplace_debias.curvature.fits.block_tensors import check_finite
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.degenerate import average_degenerate, resolution
from laplace_debias.curvature.fits.directions import complete_eigenpairs, descending_eigenpairs
from laplace_debias.curvature.fits.gram_factor import add_gram, gram
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.jacobians import dense_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.linalg.eigen.eigsh import lanczos_eigenpairs
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import Status
from laplace_debias.operators import Dense, LinearOperator
from laplace_debias.system.ranks import Ranks

Rows = Float[Tensor, "rows parameters"]
Sums = TypeVar("Sums", bound=Tensor | list[Tensor])

DENSE_BLOCK = "parameters"
"""The name of the only block."""
# If there are several processes, the first process decomposes the block.
_ON_FIRST = {DENSE_BLOCK: 0}
KEPT_ROWS = 2**30
"""Jacobian rows for eigenvectors are kept up to this many bytes, and compressed beyond it."""

# Lanczos iterations are used if a matrix has at least `_LANCZOS_FROM` rows, and at most 1 /
# `_LANCZOS_SHARE` of its eigenpairs are needed. Otherwise, computing all eigenpairs is faster.
_LANCZOS_FROM = 768
_LANCZOS_SHARE = 16
# The tolerance of Lanczos iterations, in units of the dtype's rounding error.
_LANCZOS_ROUNDINGS = 10


class RowAccumulator(Accumulator, Generic[Sums]):
    """An accumulator that joins the blocks' Jacobian rows into rows over all parameters.

    With these rows, `Σ rowᵀ row = N·C`. The type of the sums depends on the subclass: a tensor, or
    a list of tensors that may be joined.
    """

    def __init__(self, context: FitContext, sums: Sums) -> None:
        super().__init__(context)
        self.num_parameters = sum(block.size for block in context.blocks)
        self.row_bytes = self.num_parameters * context.dtype.itemsize
        self._sums = {DENSE_BLOCK: sums}
        self._extremes: dict[Block, list[Tensor]] = {block: [] for block in context.blocks}
        self._parts: dict[Block, Tensor] = {}

    @property
    def sums(self) -> Sums:
        """The sum, or the list of tensors that are kept."""
        return self._sums[DENSE_BLOCK]

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The sums, and the extreme entries of each block's rows."""
        return {"rows": self._sums, "extremes": self._extremes}

    def measure(self, record: BlockRecord) -> Float[Tensor, "examples columns d"]:
        """Compute the Jacobian rows of a block."""
        return torch.cat([rows for _, rows in dense_jacobians(record)])

    def add(self, block: Block, measured: Float[Tensor, "examples columns d"]) -> None:
        """Store the rows of a block, and add the joined rows once all blocks have theirs."""
        blocks = self.context.blocks
        self._parts[block] = measured
        self._extremes[block].append(torch.stack(torch.aminmax(measured)))
        if len(self._parts) == len(blocks):
            rows = torch.cat([self._parts[b] for b in blocks], dim=2)
            self._parts.clear()
            self.add_rows(rows.flatten(0, 1).to(self.context.factor_dtype))

    def add_zero(self, block: Block, num_examples: int, num_columns: int) -> None:
        """Add rows of zeros for a block."""
        first_parameter = self.context.network.get_parameter(block.parameters[0])
        self.add(block, first_parameter.new_zeros(num_examples, num_columns, block.size))

    def drop_waiting(self) -> None:
        """Drop the rows of blocks that are not joined yet."""
        self._parts.clear()

    @abstractmethod
    def add_rows(self, rows: Rows) -> None:
        """Add rows of all parameters to the sums."""

    def reduce(self) -> None:
        """Check that the rows are finite."""
        check_finite({b: torch.cat(extremes) for b, extremes in self._extremes.items() if extremes})


class MomentMatrix(RowAccumulator[Tensor | list[Tensor]]):
    """An accumulator of `rowsᵀ rows`, `[D, D]`, which `reduce` sums on the first process.

    In a single process, the rows are kept instead of the matrix while there are few, because
    decomposing few rows is faster.
    """

    def __init__(self, context: FitContext) -> None:
        super().__init__(context, [])

    def add_rows(self, rows: Rows) -> None:
        """Add the products of rows, or keep the rows while they are few."""
        if isinstance(self.sums, Tensor):
            add_gram(self.sums, rows)
            return
        self.sums.append(rows)
        if not are_few(sum(map(len, self.sums)), self.num_parameters):
            self._multiply_out()

    def _multiply_out(self) -> Float[Tensor, "D D"]:
        """Return the matrix; if rows were kept instead, replace the rows by the matrix."""
        if isinstance(self.sums, Tensor):
            return self.sums
        matrix = torch.zeros(
            self.num_parameters,
            self.num_parameters,
            dtype=self.context.factor_dtype,
            device=self.context.device,
        )
        if self.sums:
            # Join the rows before multiplying. A resumed fit has the same rows in different pieces,
            # and adding their products piece by piece would round differently.
            add_gram(matrix, torch.cat(self.sums))
        self._sums[DENSE_BLOCK] = matrix
        return matrix

    def reduce(self) -> None:
        """Check that the matrix is finite, and sum all processes' matrices on the first process."""
        super().reduce()
        if self.context.ranks.size > 1 or isinstance(self.sums, Tensor):
            matrix = _finite(self._multiply_out())
            self._sums = self.context.ranks.sum_to_owners({DENSE_BLOCK: matrix}, _ON_FIRST)

    def scale_and_add(self, scale: float, weight: float, operator: LinearOperator) -> None:
        """Multiply the sum by a number, and add the weighted matrix of an operator."""
        if self._sums:
            matrix = self._multiply_out()
            matrix.mul_(scale).add_(operator.to_dense().to(matrix), alpha=weight)

    def decompose(self, weight: float) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
        """Compute the eigenpairs of the mean over all processes, overwriting the sum."""

        def decompose_sums() -> tuple[Tensor, Tensor]:
            sums = self._sums.pop(DENSE_BLOCK)
            if isinstance(sums, Tensor):
                return descending_eigenpairs(sums.div_(weight), "the curvature")  # type: ignore[return-value]
            eigenvalues, U = all_pairs(torch.cat(sums))
            return eigenvalues / weight, U

        return compute_on_first(self.context.ranks, decompose_sums)  # type: ignore[return-value]


class KeptRows(RowAccumulator[list[Tensor]]):
    """An accumulator that keeps all rows of this process."""

    def __init__(self, context: FitContext) -> None:
        super().__init__(context, [])

    def add_rows(self, rows: Rows) -> None:
        """Keep rows."""
        self.sums.append(rows)

    def take_rows(self) -> Rows:
        """Return all rows (possibly none), and stop keeping them."""
        rows = self.sums
        if not rows:
            return torch.zeros(
                0,
                self.num_parameters,
                dtype=self.context.factor_dtype,
                device=self.context.device,
            )
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        rows.clear()
        return joined


class LeadingRows(KeptRows):
    """An accumulator that compresses rows to their leading directions if there are too many."""

    def __init__(self, context: FitContext, rank: int) -> None:
        super().__init__(context)
        row_bytes = self.num_parameters * context.factor_dtype.itemsize
        self._rank = rank
        self._max_rows = max(8 * rank, KEPT_ROWS // (row_bytes * context.ranks.size))

    def add_rows(self, rows: Rows) -> None:
        """Keep rows, and compress all of them if there are too many."""
        self.sums.append(rows)
        if sum(map(len, self.sums)) > self._max_rows:
            values, U = leading_pairs(torch.cat(self.sums), 4 * self._rank, self.context.dtype)
            self.sums[:] = [(U * values.sqrt()).T]


class SquaresAlong(RowAccumulator[Tensor]):
    """An accumulator of the squared coordinates of rows along directions."""

    def __init__(self, context: FitContext, U: Float[Tensor, "parameters k"]) -> None:
        super().__init__(context, U.new_zeros(U.shape[1]))
        self._U = U

    def add_rows(self, rows: Rows) -> None:
        """Add the squares of coordinates."""
        self.sums.add_((rows @ self._U.to(rows)).square().sum(0))

    def reduce(self) -> None:
        """Check that the rows are finite, and add the squares of all processes."""
        super().reduce()
        self.context.ranks.sum([self.sums])


class CountedRows(RowAccumulator[list[Tensor]]):
    """An accumulator that counts the bytes of all rows without storing the rows."""

    def __init__(self, context: FitContext) -> None:
        super().__init__(context, [])
        self.num_bytes = 0

    def add_rows(self, rows: Rows) -> None:
        """Count the bytes of rows."""
        self.num_bytes += rows.nbytes


def crossfit_folds(
    context: FitContext, folds: Sequence[Iterable[Batch]], rank: int | None
) -> tuple[Float[Tensor, " k"], Float[Tensor, "parameters k"], DataTotals]:
    """Read the rows of all folds, and return their magnitudes and directions, and the totals."""
    rows_by_fold: list[Rows] = []
    totals = DataTotals()
    for fold in folds:
        accumulator = KeptRows(context)
        totals = totals + accumulate(accumulator, fold)
        rows_by_fold.append(accumulator.take_rows())
    values, U = decompose_on_first(
        context,
        rows_by_fold,
        lambda rows: crossfit_rows(rows, totals.weight, rank, context.dtype),
    )
    return values, U, totals


def decompose_on_first(
    context: FitContext,
    rows: Sequence[Tensor],
    decompose: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Decompose the rows of all processes on the first process, and share the eigenpairs."""
    rows_of_all = [context.ranks.on_all([tensor]) or [tensor] for tensor in rows]
    return compute_on_first(  # type: ignore[return-value]
        context.ranks, lambda: decompose([tensor for (tensor,) in rows_of_all])
    )


def compute_on_first(ranks: Ranks, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Compute tensors on the first process only, and return them on all processes."""
    owned = {}
    if ranks.rank == 0:
        owned[DENSE_BLOCK] = compute()
    return ranks.share(owned, _ON_FIRST)[DENSE_BLOCK]  # type: ignore[return-value]


def crossfit_rows(
    rows_by_fold: list[Tensor], weight: float, rank: int | None, dtype: torch.dtype
) -> tuple[Float[Tensor, " k"], Float[Tensor, "parameters k"]]:
    """Measure the curvature of each fold along the directions of the other folds.

    For each fold, the directions are in descending order of the other folds' eigenvalues. The
    magnitudes with the same index are summed over the folds and divided by the total weight. The
    directions that are returned are computed from all rows together. Magnitudes of directions whose
    eigenvalues nearly coincide are averaged.

    Args:
        rows_by_fold: The Jacobian rows of each fold.
        weight: The sum of all examples' weights.
        rank: The number of directions. None keeps all directions.
        dtype: The dtype in which the rows were computed. Its rounding determines which eigenvalues
            coincide.
    """
    eigenvalues, U = leading_pairs(torch.cat(rows_by_fold), rank, dtype)
    total = torch.zeros_like(eigenvalues)
    for index, fold_rows in enumerate(rows_by_fold):
        other_rows = torch.cat([*rows_by_fold[:index], *rows_by_fold[index + 1 :]])
        other_eigenvalues, basis = leading_pairs(other_rows, rank, dtype)
        measured = (fold_rows.to(basis) @ basis).square().sum(0)
        measured = average_degenerate(measured, other_eigenvalues, dtype)
        # If the rows of the other folds span fewer directions, the curvature along the missing
        # directions counts as zero.
        total[: len(measured)] += measured[: len(total)]
    return average_degenerate(total / weight, eigenvalues, dtype), U


def leading_pairs(
    rows: Rows, rank: int | None, dtype: torch.dtype
) -> tuple[Float[Tensor, " k"], Float[Tensor, "parameters k"]]:
    """Compute the leading eigenpairs of `rowsᵀ rows`, or all eigenpairs if `rank` is None.

    The pairs come from the smaller of `rowsᵀ rows` and `rows rowsᵀ`. `dtype` is the dtype in which
    the rows were computed. Pairs that rounding in `dtype` leaves undetermined are left out.
    """
    if rank is None:
        return all_pairs(rows)
    is_tall = rows.shape[0] > rows.shape[1]
    products = gram(rows) if is_tall else gram(rows.mT)
    description = "the curvature" if is_tall else "the products of Jacobian rows"
    values, vectors = _largest_pairs(_finite(products), rank, description)
    # If all rows are zero, as for a saturated network, there are no directions, and the posterior
    # equals the prior.
    k = min(rank, int((values > values[:1] * resolution(dtype)).sum()))
    if is_tall:
        return values[:k], vectors[:, :k]
    U, _ = torch.linalg.qr(rows.T @ (vectors[:, :k] / values[:k].sqrt()))
    return values[:k], U


def all_pairs(rows: Rows) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Compute all eigenpairs of `rowsᵀ rows`, including the null space."""
    num_rows, num_parameters = rows.shape
    if not are_few(num_rows, num_parameters):
        return descending_eigenpairs(gram(rows), "the curvature")  # type: ignore[return-value]
    _finite_squares(rows.square().sum(0))
    return complete_eigenpairs(rows.mT, "the curvature")


def are_few(num_rows: int, num_parameters: int) -> bool:
    """Whether decomposing rows is faster than decomposing their `[D, D]` products."""
    return 3 * num_rows <= 2 * num_parameters


def _largest_pairs(
    matrix: Float[Tensor, "n n"], k: int, description: str
) -> tuple[Float[Tensor, " values"], Float[Tensor, "n values"]]:
    """Compute at least the k largest eigenpairs of a matrix in descending order of the eigenvalues.

    If few eigenpairs of a large matrix are needed, a Lanczos iteration computes them to the
    accuracy of the dtype. Once it has converged, the iteration checks for further copies of
    repeated eigenvalues that it may have missed. If the iteration does not converge fast enough to
    save time, the whole matrix is decomposed.
    """
    size = len(matrix)
    if size >= _LANCZOS_FROM and _LANCZOS_SHARE * k <= size:
        with Products(Dense(matrix)) as products:
            pairs = lanczos_eigenpairs(
                products,
                k,
                "largest",
                tol=_LANCZOS_ROUNDINGS * torch.finfo(matrix.dtype).eps,
                max_matvecs=size // 2,
                generator=torch.Generator(matrix.device).manual_seed(0),
            )
        if pairs.status is Status.CONVERGED:
            return pairs.values, pairs.vectors
    values, vectors = descending_eigenpairs(matrix, description)
    assert vectors is not None
    return values, vectors


def _finite(products: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return products of Jacobian rows, and require that none overflows."""
    # Only the squares are checked, because no product is larger than the largest square.
    _finite_squares(products.diagonal())
    return products


def _finite_squares(squares: Float[Tensor, " n"]) -> None:
    """Require that no sum of squares of Jacobian rows overflows."""
    if not squares.isfinite().all():
        raise ValueError(
            f"The curvature of {DENSE_BLOCK} contains NaN or Inf, because squares of the "
            f"network's derivatives overflow {squares.dtype}. Rescale the inputs, the targets "
            "and `sigma`, or use `factor_dtype=torch.float64`."
        )
