"""The posterior in function space: the curvature on the span of the Jacobian at inducing inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.data_pass import DataPass
from laplace_debias.curvature.fits.dense import DENSE_BLOCK, crossfit_rows
from laplace_debias.curvature.fits.directions import average_degenerate
from laplace_debias.curvature.fits.inducing import (
    InducingDirections,
    InducingInputs,
    ProjectedCurvature,
    ProjectedMoments,
    all_inputs,
    drawn_inputs,
    independent_rows,
    joined_folds,
    leading_examples,
    root_rows,
    rotate_to_eigenvectors,
)
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.network.batches import FitData
from laplace_debias.curvature.network.inputs import Inputs, mark_of, move, num_examples, take
from laplace_debias.curvature.network.outputs import MEMORY_BOUND
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.structures.base import (
    EIGH_MATRICES,
    NO_ROWS,
    CurvatureBlock,
    NumRows,
    Workload,
)
from laplace_debias.curvature.structures.dense import DenseCurvature, num_parameters
from laplace_debias.operators import BlockDiagonal, LowRankPlusDiagonal
from laplace_debias.system.checks import whole
from laplace_debias.system.memory import ROOM

_DOUBLE_BYTES = 8
# Examples among which one inducing input is chosen.
_CANDIDATES = 4


@dataclass(frozen=True)
class GpCurvature(DenseCurvature):
    r"""The curvature on the span of the Jacobian $J_Z$ at inducing inputs, held by these inputs.

    With K = J δ⁻¹ Jᵀ, the neural tangent kernel, the covariance of the outputs is

    $$K_{xx} - K_{xZ}\big[K_{ZZ}^{-1} - (K_{ZZ} + \textstyle\sum_n K_{Zn}\Lambda_n K_{nZ})^{-1}\big]
    K_{Zx}$$

    with all examples n of the data in the sum (deterministic training conditional): the full
    curvature is projected onto the span. In addition, all directions outside of the span have the
    same curvature, their mean, so that the trace is that of the full curvature. The evidence is
    then a lower bound of the full posterior's. If all examples are inducing, both are the same.

    Attributes:
        inducing: How many of the data's examples are inducing, or their inputs; None for all. A
            number of examples is chosen among four times as many that are drawn, so that the span
            leaves little of the others' Jacobian rows.
    """

    name = "gp"
    takes_inducing = True
    reads_data_twice = True
    reads_directions_twice = True
    less_memory = "fewer inducing inputs (inducing=)"
    inducing: int | Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.inducing is not None and not isinstance(self.inducing, Tensor):
            whole(self.inducing, "inducing")

    @property
    def draws_examples(self) -> bool:
        """Whether the inducing inputs are some of the examples."""
        return isinstance(self.inducing, int)

    @property
    def num_inducing(self) -> int | None:
        """The number of inducing inputs; None for all examples."""
        return len(self.inducing) if isinstance(self.inducing, Tensor) else self.inducing

    @property
    def inducing_mark(self) -> int | str | None:
        """The number of inducing inputs, or a text that changes with them."""
        if isinstance(self.inducing, Tensor):
            return mark_of(self.inducing, self.inducing)
        return self.inducing

    def fit(
        self, context: FitContext, directions: FitData, magnitudes: FitData | None = None
    ) -> CurvatureFit:
        """Fit directions to some data, and measure magnitudes on other data or the same."""
        basis = self._basis(context, directions)
        accumulator = ProjectedMoments(context, basis)
        totals = DataPass(accumulator).run(directions)
        projected = ProjectedCurvature.mean([accumulator], totals.weight)
        values, U = rotate_to_eigenvectors(context, basis, projected.moments)
        if magnitudes is not None:
            accumulator = ProjectedMoments(context, U)
            measured_totals = DataPass(accumulator).run(magnitudes, totals.num_examples)
            projected = ProjectedCurvature.mean([accumulator], measured_totals.weight)
            measured = projected.moments.diagonal()
            values = average_degenerate(measured, values, context.dtype)
            totals = totals + measured_totals
        return _assemble(context, projected, values, U=U, totals=totals)

    def crossfit(self, context: FitContext, data: FitData, num_folds: int) -> CurvatureFit:
        """Fit directions to all data at hand, and measure magnitudes on held-out folds.

        The inducing inputs are those of all folds.
        """
        folds = split_folds(context.ranks, data, num_folds)
        basis = self._basis(context, joined_folds(folds))
        sums_by_fold = []
        totals = DataTotals()
        for fold in folds:
            accumulator = ProjectedMoments(context, basis)
            totals = totals + DataPass(accumulator).run(fold)
            sums_by_fold.append(accumulator)
        projected = ProjectedCurvature.mean(sums_by_fold, totals.weight)
        # Any rows with these products have the same eigenvectors.
        rows = [root_rows(accumulator.sums) for accumulator in sums_by_fold]
        values, Q = crossfit_rows(rows, totals.weight, None, context.dtype)
        U = InducingDirections(basis.inducing, basis.coefficients @ Q)
        return _assemble(context, projected, values, U=U, totals=totals)

    def update(
        self,
        context: FitContext,
        information: Information,
        data: FitData,
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the curvature of new data along the directions, whose inducing inputs stay.

        The result is that of a fit to all data with these inducing inputs.
        """
        earlier = information.curvature.blocks[DENSE_BLOCK]
        assert isinstance(earlier, LowRankPlusDiagonal)
        assert isinstance(earlier.U, InducingDirections)
        inducing = self._inducing_inputs(context, earlier.U.inducing.inputs)
        U = InducingDirections(inducing, earlier.U.coefficients)
        accumulator = ProjectedMoments(context, U)
        totals = DataPass(accumulator).run(data)
        counts = ExampleCounts.for_update(information, num_data, totals)
        remainder = earlier.diagonal.double()
        earlier_values = earlier.magnitudes.double() + remainder
        num_remaining = earlier.shape[0] - len(earlier_values)
        earlier_trace = earlier_values.sum() + num_remaining * remainder
        projected = ProjectedCurvature(
            moments=counts.mean(earlier_values.diag(), accumulator.sums),
            trace=counts.mean(earlier_trace, accumulator.trace),
        )
        values, U = rotate_to_eigenvectors(context, U, projected.moments)
        return _assemble(context, projected, values, U=U, totals=totals)

    def _basis(self, context: FitContext, data: FitData) -> InducingDirections:
        """Compute an orthonormal basis of the span."""
        inducing = self._inducing_inputs(context, self._inputs(context, data))
        pairs = {}
        if context.ranks.rank == 0:
            pairs[DENSE_BLOCK] = (independent_rows(inducing.own_kernel(), context.dtype),)
        (coefficients,) = context.ranks.share(pairs, {DENSE_BLOCK: 0})[DENSE_BLOCK]
        assert coefficients is not None
        return InducingDirections(inducing, coefficients)

    def _inducing_inputs(self, context: FitContext, inputs: Inputs) -> InducingInputs:
        network = shared_copy(context.network)
        return InducingInputs(network, context.blocks, inputs, context.memory_bound)

    def _inputs(self, context: FitContext, data: FitData) -> Inputs:
        if self.inducing is None:
            return all_inputs(context, data)
        if isinstance(self.inducing, Tensor):
            return move(self.inducing, context.device, None)
        num_candidates = self._num_candidates(context)
        candidates = drawn_inputs(context, data, self.inducing, num_candidates)
        if num_examples(candidates) == self.inducing:
            return candidates
        return take(candidates, self._chosen(context, candidates))

    def _num_candidates(self, context: FitContext) -> int:
        """Count the examples that inducing inputs are chosen among, at most."""
        if not isinstance(self.inducing, int):
            return 0
        num_candidates = _CANDIDATES * self.inducing
        return (
            num_candidates
            if context.num_examples is None
            else min(num_candidates, context.num_examples)
        )

    def _chosen(self, context: FitContext, candidates: Inputs) -> Int[Tensor, " M"]:
        """Choose the examples among candidates that leave the least of the others' rows."""
        assert isinstance(self.inducing, int)
        pairs = {}
        if context.ranks.rank == 0:
            kernel = self._inducing_inputs(context, candidates).own_kernel()
            num_outputs = len(kernel) // num_examples(candidates)
            pairs[DENSE_BLOCK] = (leading_examples(kernel, self.inducing, num_outputs),)
        (indices,) = context.ranks.share(pairs, {DENSE_BLOCK: 0})[DENSE_BLOCK]
        assert indices is not None
        return indices

    def check(self, context: FitContext) -> None:
        """Require inducing inputs like those of the data, and no more than there are examples."""
        example = context.example
        if not isinstance(example, Tensor):
            raise TypeError(
                f'curvature="gp" keeps inducing inputs, which must be a tensor, but the inputs are '
                f'a {type(example).__name__}. Use curvature="lowrank".'
            )
        if isinstance(self.inducing, Tensor):
            shape = tuple(self.inducing.shape)
            if shape[1:] != tuple(example.shape[1:]) or not self.inducing.numel():
                expected = ", ".join(["M", *map(str, example.shape[1:])])
                raise ValueError(
                    f"inducing has shape {shape}. Pass inputs like those of the data, [{expected}]."
                )
            if self.inducing.dtype != example.dtype:
                raise TypeError(
                    f"inducing is {self.inducing.dtype}, the inputs of the data {example.dtype}. "
                    "Convert inducing."
                )
            return
        num_read = context.num_examples
        if self.inducing is not None and num_read is not None and self.inducing > num_read:
            raise ValueError(
                f"inducing={self.inducing} is more than the {num_read} examples of the data. "
                "Pass a smaller number, or None for all of them."
            )

    def _num_rows(self, context: FitContext) -> int | None:
        """M·C, the rows of the Jacobian at the inducing inputs; None if it is unknown."""
        num_inputs = self.num_inducing
        if num_inputs is None:
            num_inputs = context.num_examples
        return None if num_inputs is None else num_inputs * context.num_outputs

    def posterior_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> int:
        """Count the bytes of coefficients, magnitudes and inputs; 0 if N is unknown."""
        size = self._num_rows(context)
        if size is None:
            return 0
        assert isinstance(context.example, Tensor)
        input_bytes = context.example.nbytes * size // context.num_outputs
        num_directions = min(size, num_parameters(context))
        direction_bytes = _DOUBLE_BYTES * size + context.dtype.itemsize
        return num_directions * direction_bytes + input_bytes

    def least_bytes(self, context: FitContext) -> int:
        """Count the bytes of the posterior, and of the kernel while it is decomposed."""
        return self.posterior_bytes(context) + self._decomposition_bytes(context)

    def _decomposition_bytes(self, context: FitContext) -> int:
        size = self._num_rows(context) or 0
        num_candidates = self._num_candidates(context) * context.num_outputs
        return _DOUBLE_BYTES * max(EIGH_MATRICES * size**2, num_candidates**2 + size**2)

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the kernel's decomposition, and of the passes over the data."""
        num_rows = self._num_rows(context) or 0
        bound = context.memory_bound or MEMORY_BOUND * ROOM[context.device.type]
        row_bytes = min(_DOUBLE_BYTES * num_rows * num_parameters(context), bound // 2)
        return {
            "kernel": row_bytes + self._decomposition_bytes(context),
            "curvature": row_bytes + self.posterior_bytes(context) + workload.working_bytes,
        }

    def tensors(self, block: CurvatureBlock) -> dict[str, Tensor]:
        """Return the inducing inputs, the coefficients and the magnitudes in a file."""
        assert isinstance(block, LowRankPlusDiagonal)
        assert isinstance(block.U, InducingDirections)
        inputs = block.U.inducing.inputs
        assert isinstance(inputs, Tensor)
        return {
            "inputs": inputs,
            "coefficients": block.U.coefficients,
            "magnitudes": block.magnitudes,
            "remainder": block.diagonal,
        }

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        network: nn.Module,
        blocks: Sequence[Block],
        memory_bound: int | None,
    ) -> CurvatureBlock:
        """Return the block of its `tensors`, whose directions the network's Jacobian spans."""
        inducing = InducingInputs(network, blocks, tensors["inputs"], memory_bound)
        U = InducingDirections(inducing, tensors["coefficients"])
        return LowRankPlusDiagonal(U, tensors["magnitudes"], tensors["remainder"])


def _assemble(
    context: FitContext,
    projected: ProjectedCurvature,
    values: Float[Tensor, " k"],
    *,
    U: InducingDirections,
    totals: DataTotals,
) -> CurvatureFit:
    values = values.clamp_min(0)
    remainder = projected.remainder(values, U.shape[0])
    magnitudes = (values - remainder).to(context.dtype)
    block = LowRankPlusDiagonal(U, magnitudes, remainder.to(context.dtype))
    return CurvatureFit(BlockDiagonal({DENSE_BLOCK: block}), totals)
