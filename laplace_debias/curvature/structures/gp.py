"""The posterior in function space: the curvature on the span of the Jacobian at inducing inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import split_folds
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.degenerate import average_degenerate
from laplace_debias.curvature.fits.dense import DENSE_BLOCK, compute_on_first, crossfit_rows
from laplace_debias.curvature.fits.inducing import (
    InducingDirections,
    InducingInputs,
    InducingRows,
    ProjectedCurvature,
    ProjectedMoments,
    all_inputs,
    draw_inputs,
    independent_rows,
    leading_examples,
    root_rows,
    rotate_to_eigenvectors,
)
from laplace_debias.curvature.fits.information import ExampleCounts, Information
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.network.inputs import (
    Inputs,
    digest_of_examples,
    move,
    num_examples,
    take,
)
from laplace_debias.curvature.network.outputs import PASS_BYTES
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
from laplace_debias.system.checks import check_is, whole
from laplace_debias.system.files import STORED_DTYPES
from laplace_debias.system.memory import ROOM

_DOUBLE_BYTES = 8
# The number of examples among which each inducing input is chosen.
_CANDIDATES = 4
# A function that fits one output, or all outputs together, given the context of the fit and the
# Jacobian rows at the inducing inputs.
FitOutput = Callable[[FitContext, InducingRows], tuple[LowRankPlusDiagonal, DataTotals]]


@dataclass(frozen=True)
class GpCurvature(DenseCurvature):
    r"""The curvature on the span of the Jacobian $J_Z$ at inducing inputs.

    With K = J δ⁻¹ Jᵀ, the neural tangent kernel, the covariance of the outputs is

    $$K_{xx} - K_{xZ}\big[K_{ZZ}^{-1} - (K_{ZZ} + \textstyle\sum_n K_{Zn}\Lambda_n K_{nZ})^{-1}\big]
    K_{Zx}$$

    where the sum is over all examples n of the data (deterministic training conditional). That is,
    the full curvature is projected onto the span. In addition, all directions outside the span have
    the same curvature, the mean over these directions, so that the trace equals the trace of the
    full curvature. The evidence is then a lower bound on the evidence of the full posterior. If all
    examples are inducing, the two are equal.

    Attributes:
        inducing: The inducing inputs, or the number of examples to choose as inducing inputs; None
            makes all examples inducing. For a number, four times as many examples are drawn, and
            the inducing inputs are chosen among them such that little of the other examples'
            Jacobian rows lies outside the span.
        independent_outputs: Whether each output has a separate Gaussian process, whose kernel uses
            only the rows of this output. The off-diagonal entries of the loss Hessians are then
            ignored, and the data are read once per output.
    """

    name = "gp"
    takes_inducing = True
    reads_data_twice = True
    reads_directions_twice = True
    less_memory = "fewer inducing inputs (inducing=)"
    inducing: int | Tensor | None = field(default=None, compare=False)
    independent_outputs: bool = False

    def __post_init__(self) -> None:
        check_is(self.independent_outputs, "independent_outputs", bool)
        if isinstance(self.inducing, Tensor):
            # Copy the tensor, because the posterior keeps it and the user may change it later.
            object.__setattr__(self, "inducing", self.inducing.detach().clone())
        elif self.inducing is not None:
            whole(self.inducing, "inducing")

    @property
    def draws_examples(self) -> bool:
        """Whether the inducing inputs are drawn from the examples."""
        return isinstance(self.inducing, int)

    @property
    def inducing_mark(self) -> int | str | None:
        """The number of inducing inputs, or a digest of the inputs that the user passed."""
        if isinstance(self.inducing, Tensor):
            return digest_of_examples(self.inducing, self.inducing)
        return self.inducing

    @property
    def has_independent_outputs(self) -> bool:
        """Whether each output has a separate posterior over all parameters."""
        return self.independent_outputs

    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set, and measure magnitudes on another or on the same."""
        inducing = self._inducing_inputs(context, self._inputs(context, directions))

        def fit_output(
            context: FitContext, rows: InducingRows
        ) -> tuple[LowRankPlusDiagonal, DataTotals]:
            """Fit the posterior of one output, or of all outputs together."""
            basis = _basis(context, rows)
            accumulator = ProjectedMoments(context, basis)
            totals = accumulate(accumulator, directions)
            projected = ProjectedCurvature.mean([accumulator], totals.weight)
            values, U = rotate_to_eigenvectors(context, basis, projected.moments)
            if magnitudes is not None:
                accumulator = ProjectedMoments(context, U)
                measured_totals = accumulate(accumulator, magnitudes, totals.num_examples)
                projected = ProjectedCurvature.mean([accumulator], measured_totals.weight)
                measured = projected.moments.diagonal()
                values = average_degenerate(measured, values, context.dtype)
                totals = totals + measured_totals
            return _assemble(context, projected, values, U), totals

        return self._fit_all(context, inducing, fit_output)

    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds.

        The inducing inputs are chosen from all folds.
        """
        folds = split_folds(context.ranks, data, num_folds)
        inputs = self._inputs(context, chain.from_iterable(folds))
        inducing = self._inducing_inputs(context, inputs)

        def fit_output(
            context: FitContext, rows: InducingRows
        ) -> tuple[LowRankPlusDiagonal, DataTotals]:
            """Fit the posterior of one output, or of all outputs together."""
            basis = _basis(context, rows)
            sums_by_fold = []
            totals = DataTotals()
            for fold in folds:
                accumulator = ProjectedMoments(context, basis)
                totals = totals + accumulate(accumulator, fold)
                sums_by_fold.append(accumulator)
            projected = ProjectedCurvature.mean(sums_by_fold, totals.weight)
            # The rows R of each fold are replaced by fewer rows with the same RᵀR, and therefore
            # the same eigenvectors.
            roots = [root_rows(accumulator.sums) for accumulator in sums_by_fold]
            values, Q = crossfit_rows(roots, totals.weight, None, context.dtype)
            U = replace(basis, coefficients=basis.coefficients @ Q)
            return _assemble(context, projected, values, U), totals

        return self._fit_all(context, inducing, fit_output)

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the curvature of new data along the directions, whose inducing inputs do not change.

        The result equals a fit to all data with these inducing inputs.
        """
        first = next(iter(information.curvature.blocks.values()))
        assert isinstance(first, LowRankPlusDiagonal)
        assert isinstance(first.U, InducingDirections)
        inducing = self._inducing_inputs(context, first.U.inducing.inputs)

        def fit_output(
            context: FitContext, rows: InducingRows
        ) -> tuple[LowRankPlusDiagonal, DataTotals]:
            """Fit the posterior of one output, or of all outputs together."""
            earlier = information.curvature.blocks[_block_name(rows.output)]
            assert isinstance(earlier, LowRankPlusDiagonal)
            assert isinstance(earlier.U, InducingDirections)
            U = replace(earlier.U, inducing_rows=rows)
            accumulator = ProjectedMoments(context, U)
            totals = accumulate(accumulator, data)
            counts = ExampleCounts.for_update(information, num_data, totals)
            earlier_projected = _projected(earlier)
            projected = ProjectedCurvature(
                moments=counts.mean(earlier_projected.moments, accumulator.sums),
                trace=counts.mean(earlier_projected.trace, accumulator.trace),
            )
            values, U = rotate_to_eigenvectors(context, U, projected.moments)
            return _assemble(context, projected, values, U), totals

        return self._fit_all(context, inducing, fit_output)

    def _fit_all(
        self, context: FitContext, inducing: InducingInputs, fit_output: FitOutput
    ) -> CurvatureFit:
        """Fit the block of all outputs together, or one block for each output."""
        if not self.independent_outputs:
            block, totals = fit_output(context, InducingRows(inducing))
            return CurvatureFit(BlockDiagonal({_block_name(None): block}), totals)
        blocks = {}
        num_outputs = inducing.num_outputs
        for output in range(num_outputs):
            output_context = context.for_output(output, num_outputs)
            block, totals = fit_output(output_context, InducingRows(inducing, output))
            blocks[_block_name(output)] = block
        return CurvatureFit(BlockDiagonal(blocks), totals)

    def _inducing_inputs(self, context: FitContext, inputs: Inputs) -> InducingInputs:
        network = shared_copy(context.network)
        return InducingInputs(network, context.blocks, inputs, context.memory_bound)

    def _inputs(self, context: FitContext, data: Iterable[Batch]) -> Inputs:
        """Return the inducing inputs: all, the user's tensor, or inputs chosen from candidates."""
        if self.inducing is None:
            return all_inputs(context, data)
        if isinstance(self.inducing, Tensor):
            return move(self.inducing, context.device, None)
        num_candidates = self._num_candidates(context)
        candidates = draw_inputs(
            context, data, num_required=self.inducing, num_drawn=num_candidates
        )
        if num_examples(candidates) == self.inducing:
            return candidates
        return take(candidates, self._choose_inputs(context, candidates))

    def _num_candidates(self, context: FitContext) -> int:
        """Return the largest number of examples among which inducing inputs are chosen."""
        if not isinstance(self.inducing, int):
            return 0
        num_candidates = _CANDIDATES * self.inducing
        if context.num_examples is not None:
            num_candidates = min(num_candidates, context.num_examples)
        return num_candidates

    def _choose_inputs(self, context: FitContext, candidates: Inputs) -> Int[Tensor, " M"]:
        """Choose candidates whose span contains most of the other candidates' Jacobian rows."""
        size = self.inducing
        assert isinstance(size, int)

        def choose() -> tuple[Tensor]:
            kernel = InducingRows(self._inducing_inputs(context, candidates)).own_kernel()
            num_outputs = len(kernel) // num_examples(candidates)
            return (leading_examples(kernel, size, num_outputs),)

        (indices,) = compute_on_first(context.ranks, choose)
        return indices

    def check(self, context: FitContext) -> None:
        """Require inducing inputs of the data's shape and dtype, and at most one per example."""
        example = context.example
        if not isinstance(example, Tensor):
            raise TypeError(
                '`curvature="gp"` stores inducing inputs. They must be a tensor, but the '
                f"model's inputs are a {type(example).__name__}. Use "
                '`curvature="lowrank"`.'
            )
        if example.dtype not in STORED_DTYPES:
            raise TypeError(
                f"The inputs are {example.dtype}, which a file of the posterior cannot store. "
                "Convert them, for example to torch.float32."
            )
        if isinstance(self.inducing, Tensor):
            shape = tuple(self.inducing.shape)
            if shape[1:] != tuple(example.shape[1:]) or not self.inducing.numel():
                expected = ", ".join(["M", *map(str, example.shape[1:])])
                raise ValueError(
                    f"`inducing` has shape {shape}. Pass inputs of the same shape as the data, "
                    f"[{expected}]."
                )
            if self.inducing.dtype != example.dtype:
                raise TypeError(
                    f"`inducing` is {self.inducing.dtype}, but the inputs of the data are "
                    f"{example.dtype}. Convert `inducing`."
                )
            return
        num_read = context.num_examples
        if self.inducing is not None and num_read is not None and self.inducing > num_read:
            raise ValueError(
                f"`inducing={self.inducing}` is more than the number of examples in the data, "
                f"{num_read}. Pass a smaller number, or None to use all examples."
            )

    def _num_rows(self, context: FitContext) -> int | None:
        """M·C, the number of rows of the Jacobian at the inducing inputs, or None if unknown."""
        num_inputs = len(self.inducing) if isinstance(self.inducing, Tensor) else self.inducing
        if num_inputs is None:
            num_inputs = context.num_examples
        return None if num_inputs is None else num_inputs * _num_outputs(context)

    def posterior_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> int:
        """Count the bytes of coefficients, magnitudes and inputs; 0 if N is unknown."""
        size = self._num_rows(context)
        if size is None:
            return 0
        assert isinstance(context.example, Tensor)
        input_bytes = context.example.nbytes * size // _num_outputs(context)
        num_blocks = _num_outputs(context) if self.independent_outputs else 1
        rows_per_block = size // num_blocks
        num_directions = min(rows_per_block, num_parameters(context))
        direction_bytes = _DOUBLE_BYTES * rows_per_block + context.dtype.itemsize
        return num_blocks * num_directions * direction_bytes + input_bytes

    def least_bytes(self, context: FitContext) -> int:
        """Count the bytes of the posterior, and of the kernel while it is decomposed."""
        return self.posterior_bytes(context) + self._decomposition_bytes(context)

    def _decomposition_bytes(self, context: FitContext) -> int:
        size = self._num_rows(context) or 0
        if self.independent_outputs:
            size //= _num_outputs(context)
        num_candidates = self._num_candidates(context) * _num_outputs(context)
        return _DOUBLE_BYTES * max(EIGH_MATRICES * size**2, num_candidates**2 + size**2)

    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Count the bytes of the kernel's decomposition, and of the passes over the data."""
        num_rows = self._num_rows(context) or 0
        bound = context.memory_bound or PASS_BYTES * ROOM[context.device.type]
        row_bytes = min(_DOUBLE_BYTES * num_rows * num_parameters(context), bound // 2)
        return {
            "kernel": row_bytes + self._decomposition_bytes(context),
            "curvature": row_bytes + self.posterior_bytes(context) + workload.working_bytes,
        }

    def tensors(self, block: CurvatureBlock) -> dict[str, Tensor]:
        """Return the inducing inputs, the coefficients and the magnitudes that a file stores."""
        assert isinstance(block, LowRankPlusDiagonal)
        assert isinstance(block.U, InducingDirections)
        tensors = {
            "coefficients": block.U.coefficients,
            "magnitudes": block.magnitudes,
            "remainder": block.diagonal,
        }
        # All outputs have the same inducing inputs, so only the first output's block saves them.
        if block.U.inducing_rows.output in (None, 0):
            inputs = block.U.inducing.inputs
            assert isinstance(inputs, Tensor)
            tensors["inputs"] = inputs
        return tensors

    def restore_all(
        self,
        tensors: Sequence[Mapping[str, Tensor]],
        names: Sequence[str],
        network: nn.Module,
        blocks: Sequence[Block],
        memory_bound: int | None,
    ) -> dict[str, CurvatureBlock]:
        """Return the block of all outputs, or one block per independent output, by name.

        The network's Jacobian at the inducing inputs spans the directions.
        """
        inducing = InducingInputs(network, blocks, tensors[0]["inputs"], memory_bound)
        outputs: list[int | None] = [None]
        if self.independent_outputs:
            outputs = list(range(len(tensors)))
        restored: dict[str, CurvatureBlock] = {}
        for output, block_tensors in zip(outputs, tensors, strict=True):
            rows = InducingRows(inducing, output)
            U = InducingDirections(rows, block_tensors["coefficients"])
            restored[_block_name(output)] = LowRankPlusDiagonal(
                U, block_tensors["magnitudes"], block_tensors["remainder"]
            )
        return restored


def _num_outputs(context: FitContext) -> int:
    """Return C, which is known from the first batch of a fit."""
    assert context.num_outputs is not None
    return context.num_outputs


def _block_name(output: int | None) -> str:
    """Return the name of an output's block, or of the block of all outputs."""
    return DENSE_BLOCK if output is None else f"output {output}"


def _basis(context: FitContext, rows: InducingRows) -> InducingDirections:
    """Compute an orthonormal basis of the span."""

    def compute_coefficients() -> tuple[Tensor]:
        return (independent_rows(rows.own_kernel(), context.dtype),)

    (coefficients,) = compute_on_first(context.ranks, compute_coefficients)
    return InducingDirections(rows, coefficients)


def _projected(curvature: LowRankPlusDiagonal) -> ProjectedCurvature:
    """Return a fitted curvature along its own directions, and its trace.

    The diagonal is the curvature along each of the remaining directions.
    """
    remainder = curvature.diagonal.double()
    eigenvalues = curvature.magnitudes.double() + remainder
    num_remaining = curvature.shape[0] - len(eigenvalues)
    trace = eigenvalues.sum() + num_remaining * remainder
    return ProjectedCurvature(moments=eigenvalues.diag(), trace=trace)


def _assemble(
    context: FitContext,
    projected: ProjectedCurvature,
    values: Float[Tensor, " k"],
    U: InducingDirections,
) -> LowRankPlusDiagonal:
    """Build the operator, whose diagonal is the mean curvature outside the directions."""
    values = values.clamp_min(0)
    remainder = projected.remainder(values, U.shape[0])
    magnitudes = (values - remainder).to(context.dtype)
    return LowRankPlusDiagonal(U, magnitudes, remainder.to(context.dtype))
