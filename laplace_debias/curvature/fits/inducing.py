"""Inducing inputs: kernels between their Jacobian rows, and directions in the rows' span."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.block_tensors import check_finite
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.dense import (
    DENSE_BLOCK,
    RowAccumulator,
    Rows,
    compute_on_first,
)
from laplace_debias.curvature.fits.directions import descending_eigenpairs
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.jacobians import Jacobians, dense_jacobians, rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import Uniforms
from laplace_debias.curvature.network.inputs import (
    Inputs,
    gather_batches,
    join,
    move,
    num_examples,
    take,
)
from laplace_debias.curvature.network.outputs import check_outputs, checked_memory_bound
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.operators import LinearOperator
from laplace_debias.operators.eigh import eigh

BlockRows = Mapping[Block, Float[Tensor, "rows d"]]
"""A mapping from each block to its columns of the Jacobian rows of several outputs, in float64."""
_DOUBLE_BYTES = 8


def block_rows(
    record: BlockRecord, jacobians: Jacobians = rotated_jacobians
) -> Float[Tensor, "examples columns d"]:
    """Compute the Jacobian rows of a block in double precision."""
    return torch.cat([rows.double() for _, rows in dense_jacobians(record, jacobians)])


class InducingInputs:
    """Inducing inputs Z `[M, ...]` of a network, and the rows of their Jacobian J_Z `[M·C, D]`.

    The rows are computed again for every product, as many at a time as fit into the memory bound.
    They are kept only if all rows fit. Several threads may use the same object.

    Args:
        network: The network, whose copies run the passes.
        blocks: The blocks of the network's Bayesian parameters, in the order of the columns.
        inputs: Z.
        memory_bound: The limit on the bytes of rows. None selects the default.
    """

    def __init__(
        self, network: nn.Module, blocks: Sequence[Block], inputs: Inputs, memory_bound: int | None
    ) -> None:
        self.network = network
        self.blocks = blocks
        self.inputs = inputs
        self.memory_bound = memory_bound
        self.num_parameters = sum(block.size for block in blocks)
        self._rows_in_memory: list[tuple[slice, BlockRows]] | None = None

    @property
    def parameter(self) -> Tensor:
        """A Bayesian parameter, which has the dtype and the device of the posterior."""
        return self.network.get_parameter(self.blocks[0].parameters[0])

    @cached_property
    def num_outputs(self) -> int:
        """C, the number of outputs of an input."""
        tap = Tap(shared_copy(self.network), self.blocks)
        return tap.forward(take(self.inputs, slice(0, 1)), graph=False).outputs.numel()

    @cached_property
    def _max_rows(self) -> int:
        """The maximum number of rows that are computed at a time."""
        row_bytes = _DOUBLE_BYTES * self.num_parameters
        bound = checked_memory_bound(
            self.memory_bound,
            row_bytes,
            "a row of the Jacobian at the inducing inputs",
            self.parameter.device,
        )
        # Use half of the bound, because a product also needs other rows of the same size.
        return max(1, bound // (2 * row_bytes))

    def rows_in_memory(self) -> list[tuple[slice, BlockRows]] | None:
        """Return the rows of all outputs part by part, with their indices; None if too large."""
        num_rows = num_examples(self.inputs) * self.num_outputs
        if self._rows_in_memory is None and num_rows <= self._max_rows:
            self._rows_in_memory = list(self.compute_rows(range(self.num_outputs)))
        return self._rows_in_memory

    def compute_rows(self, output_columns: range) -> Iterator[tuple[slice, BlockRows]]:
        """Compute the rows of some outputs part by part, with their indices.

        The index of the row of output c of input m is m times the number of these outputs, plus c.
        """
        size = num_examples(self.inputs)
        num_columns = len(output_columns)
        # If the rows of one input are too many, there is one input at a time, and its columns are
        # split. The rows of each part are therefore consecutive.
        inputs_at_once = max(1, self._max_rows // num_columns)
        columns_at_once = min(self._max_rows, num_columns)
        tap = Tap(shared_copy(self.network), self.blocks)
        for first_input in range(0, size, inputs_at_once):
            stop = min(first_input + inputs_at_once, size)
            forward_pass = tap.forward(take(self.inputs, slice(first_input, stop)))
            outputs = forward_pass.outputs
            check_outputs(outputs)
            for first_column in range(0, num_columns, columns_at_once):
                columns = output_columns[first_column : first_column + columns_at_once]
                is_last = first_column + len(columns) == num_columns
                units = _unit_cotangents(outputs, columns)
                records = forward_pass.backward(units, keep_graph=not is_last)
                rows = {record.block: block_rows(record).flatten(0, 1) for record in records}
                check_finite(rows)
                start = first_input * num_columns + first_column
                yield slice(start, start + len(outputs) * len(columns)), rows


def _unit_cotangents(
    outputs: Float[Tensor, "batch *outputs"], columns: range
) -> Float[Tensor, "columns batch *outputs"]:
    """Return a cotangent for each column, which is 1 at this output of every example."""
    units = outputs.new_zeros(len(columns), len(outputs), outputs[0].numel())
    units[torch.arange(len(columns)), :, torch.tensor(columns)] = 1
    return units.unflatten(2, outputs.shape[1:])


@dataclass(frozen=True, eq=False, repr=False)
class InducingRows:
    """Rows of the Jacobian J_Z at inducing inputs, of all outputs or of one output.

    Attributes:
        inducing: Z.
        output: The output whose rows these are, one row per input. None means the rows of all
            outputs, input by input.
    """

    inducing: InducingInputs
    output: int | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows, M·C for all outputs or M for one output."""
        num_inputs = num_examples(self.inducing.inputs)
        return num_inputs * self.inducing.num_outputs if self.output is None else num_inputs

    def parts(self) -> Iterator[tuple[slice, BlockRows]]:
        """Yield the rows part by part, with their indices."""
        output = self.output
        num_outputs = self.inducing.num_outputs
        rows_in_memory = self.inducing.rows_in_memory()
        if rows_in_memory is None:
            columns = range(num_outputs) if output is None else range(output, output + 1)
            yield from self.inducing.compute_rows(columns)
        elif output is None:
            yield from rows_in_memory
        else:
            yield from _rows_of_output(rows_in_memory, num_outputs, output)

    def kernel(self, rows: BlockRows) -> Float[Tensor, "rows inducing_rows"]:
        """Compute the products J J_Zᵀ with the rows of another Jacobian J."""
        first = next(iter(rows.values()))
        products = first.new_zeros(len(first), self.num_rows)
        for indices, inducing_rows in self.parts():
            for block, block_columns in inducing_rows.items():
                if block in rows:
                    products[:, indices] += rows[block] @ block_columns.T
        return products

    def own_kernel(self) -> Float[Tensor, "inducing_rows inducing_rows"]:
        """Compute J_Z J_Zᵀ."""
        return torch.cat([self.kernel(rows) for _, rows in self.parts()])


def _rows_of_output(
    rows_in_memory: Iterable[tuple[slice, BlockRows]], num_outputs: int, output: int
) -> Iterator[tuple[slice, BlockRows]]:
    """Yield the rows of one output and the indices of their inputs.

    The rows of all outputs are sorted by input, so every `num_outputs`-th row is of this output.
    """
    for indices, rows in rows_in_memory:
        first = (output - indices.start) % num_outputs
        start = (indices.start + first) // num_outputs
        output_rows = {block: values[first::num_outputs] for block, values in rows.items()}
        num_inputs = len(range(indices.start + first, indices.stop, num_outputs))
        if num_inputs:
            yield slice(start, start + num_inputs), output_rows


@dataclass(eq=False, repr=False)
class InducingDirections(LinearOperator):
    r"""Directions $U = J_Z^\top W$ `[D, k]` in the span of the Jacobian at inducing inputs.

    Only Z and W are kept.

    Args:
        inducing_rows: The rows of J_Z that span the directions.
        coefficients: W, in double precision.
    """

    inducing_rows: InducingRows
    coefficients: Float[Tensor, "inducing_rows k"]

    @property
    def inducing(self) -> InducingInputs:
        """Z."""
        return self.inducing_rows.inducing

    @property
    def shape(self) -> tuple[int, int]:
        """D and k."""
        return self.inducing.num_parameters, self.coefficients.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the Bayesian parameters."""
        return self.inducing.parameter.dtype

    @property
    def device(self) -> torch.device:
        """The device of the Bayesian parameters."""
        return self.inducing.parameter.device

    @property
    def T(self) -> "CoordinatesAlong":  # noqa: N802
        """The map from a vector to its coordinates along the directions."""
        return CoordinatesAlong(self)

    def coordinates(self, rows: BlockRows) -> Float[Tensor, "rows k"]:
        """Compute J U in double precision for rows of a Jacobian J."""
        return self.inducing_rows.kernel(rows) @ self.coefficients

    def _matmat(self, matrix: Tensor) -> Tensor:
        weights = self.coefficients @ matrix.double()
        sums = {
            block: weights.new_zeros(block.size, matrix.shape[1]) for block in self.inducing.blocks
        }
        for indices, rows in self.inducing_rows.parts():
            for block, block_columns in rows.items():
                sums[block] = sums[block] + block_columns.T @ weights[indices]
        return torch.cat(list(sums.values())).to(matrix)


@dataclass(eq=False, repr=False)
class CoordinatesAlong(LinearOperator):
    """The adjoint `[k, D]` of directions.

    Args:
        directions: The directions `[D, k]`.
    """

    directions: InducingDirections

    @property
    def shape(self) -> tuple[int, int]:
        """The number of directions k and the number of parameters D."""
        return self.directions.shape[1], self.directions.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the directions."""
        return self.directions.dtype

    @property
    def device(self) -> torch.device:
        """The device of the directions."""
        return self.directions.device

    @property
    def T(self) -> InducingDirections:  # noqa: N802
        """The directions."""
        return self.directions

    def _matmat(self, matrix: Tensor) -> Tensor:
        blocks = self.directions.inducing.blocks
        rows = _by_block(matrix.T, blocks)
        return self.directions.coordinates(rows).T.to(matrix)


class ProjectedMoments(RowAccumulator[Tensor]):
    """Sums `Uᵀ rowsᵀ rows U`, `[k, k]`, over all processes after `reduce`."""

    def __init__(self, context: FitContext, directions: InducingDirections) -> None:
        size = directions.shape[1]
        matrix = directions.coefficients.new_zeros(size, size)
        super().__init__(context, matrix)
        self._directions = directions
        self._traces = {DENSE_BLOCK: matrix.new_zeros(())}

    @property
    def tables(self) -> Mapping[str, MutableMapping[Any, Any]]:
        """The sums of the rows, and the trace of the rows' products."""
        return {**super().tables, "traces": self._traces}

    @property
    def trace(self) -> Float[Tensor, ""]:
        """The trace of `rowsᵀ rows`, including the part outside the directions' span."""
        return self._traces[DENSE_BLOCK]

    def add_rows(self, rows: Rows) -> None:
        """Add the products of the rows' coordinates."""
        coordinates = self._directions.coordinates(_by_block(rows, self.context.blocks))
        self.sums.addmm_(coordinates.T, coordinates)
        self.trace.add_(rows.double().square().sum())

    def reduce(self) -> None:
        """Check that the rows are finite, and add the products of all processes."""
        super().reduce()
        self.context.ranks.sum([self.sums, self.trace])


@dataclass(frozen=True)
class ProjectedCurvature:
    """The mean curvature of some data along directions, and outside their span.

    Attributes:
        moments: Uᵀ C U.
        trace: The trace of C.
    """

    moments: Float[Tensor, "k k"]
    trace: Float[Tensor, ""]

    @classmethod
    def mean(
        cls, accumulators: "Sequence[ProjectedMoments]", weight: float
    ) -> "ProjectedCurvature":
        """Divide the sums over all data by their total weight."""
        moments = torch.stack([accumulator.sums for accumulator in accumulators]).sum(0)
        trace = torch.stack([accumulator.trace for accumulator in accumulators]).sum()
        return cls(moments / weight, trace / weight)

    def remainder(self, values: Float[Tensor, " k"], size: int) -> Float[Tensor, ""]:
        """Compute the mean curvature along the remaining D - k directions from the trace."""
        num_remaining = size - len(values)
        if num_remaining == 0:
            return torch.zeros_like(self.trace)
        return ((self.trace - values.sum()) / num_remaining).clamp_min(0)


def _by_block(rows: Rows, blocks: Sequence[Block]) -> dict[Block, Tensor]:
    columns = rows.double().split([block.size for block in blocks], dim=1)
    return dict(zip(blocks, columns, strict=True))


def independent_rows(
    kernel: Float[Tensor, "rows rows"], dtype: torch.dtype
) -> Float[Tensor, "rows k"]:
    r"""Compute W such that the columns of $J_Z^\top W$ are an orthonormal basis of the rows' span.

    Args:
        kernel: J_Z J_Zᵀ, in double precision.
        dtype: The dtype in which the rows were computed. Directions below its rounding error are
            left out.
    """
    values, vectors = descending_eigenpairs(kernel, "the kernel at the inducing inputs")
    assert vectors is not None
    rounding = len(values) * torch.finfo(values.dtype).eps
    # Singular values of the rows are the square roots of these eigenvalues.
    resolution = max(rounding, (8 * torch.finfo(dtype).eps) ** 2)
    k = int((values > values[:1] * resolution).sum())
    return vectors[:, :k] / values[:k].sqrt()


def rotate_to_eigenvectors(
    context: FitContext, basis: InducingDirections, moments: Float[Tensor, "k k"]
) -> tuple[Float[Tensor, " r"], InducingDirections]:
    """Return the eigenvalues of the projected curvature, and its eigenvectors."""

    def decompose() -> tuple[Tensor, Tensor]:
        values, Q = descending_eigenpairs(moments, "the curvature along the inducing directions")
        assert Q is not None
        return values, basis.coefficients @ Q

    eigenvalues, coefficients = compute_on_first(context.ranks, decompose)
    return eigenvalues, replace(basis, coefficients=coefficients)


def leading_examples(
    kernel: Float[Tensor, "rows rows"], size: int, num_outputs: int
) -> Int[Tensor, " size"]:
    r"""Choose examples one at a time, each with the largest residual of the kernel.

    The residual of an example is the trace of the part of its Jacobian rows that is outside the
    span of the examples chosen before. This is a block-wise pivoted Cholesky decomposition: with
    the columns C of the examples chosen so far, the residual kernel is $R = K - C C^\top$. An
    example with the rows e, where $R_{ee} = V\,\mathrm{diag}(\lambda)\,V^\top$, adds the columns
    $R_{:e} V\,\mathrm{diag}(\lambda)^{-1/2}$.

    Args:
        kernel: The kernel between the rows of all examples.
        size: The number of examples to choose.
        num_outputs: C, the number of rows of each example.
    """
    residuals = kernel.diagonal().clone()
    rounding = residuals.max() * len(kernel) * torch.finfo(kernel.dtype).eps
    columns = kernel.new_zeros(len(kernel), 0)
    is_available = torch.ones(len(kernel) // num_outputs, dtype=torch.bool, device=kernel.device)
    chosen = []
    for _ in range(size):
        traces = residuals.view(-1, num_outputs).sum(1).where(is_available, -torch.inf)
        example = int(traces.argmax())
        chosen.append(example)
        is_available[example] = False
        rows = slice(example * num_outputs, (example + 1) * num_outputs)
        residual_columns = kernel[:, rows] - columns @ columns[rows].T
        values, vectors = eigh(residual_columns[rows], "the kernel of an example")
        is_resolved = values > rounding
        inverse_root = vectors[:, is_resolved] / values[is_resolved].sqrt()
        new_columns = residual_columns @ inverse_root
        residuals -= new_columns.square().sum(1)
        columns = torch.cat([columns, new_columns], dim=1)
    return torch.tensor(chosen, device=kernel.device)


def root_rows(moments: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """Compute rows such that `rowsᵀ rows` equals the given moments."""
    values, Q = descending_eigenpairs(moments, "the curvature along the inducing directions")
    assert Q is not None
    return (Q * values.clamp_min(0).sqrt()).T


def all_inputs(context: FitContext, data: Iterable[Batch]) -> Inputs:
    """Join the inputs of all examples of all processes, except examples with weight zero."""
    batches = []
    for batch in data:
        is_weighted = _is_weighted(batch)
        if is_weighted.any():
            x = move(batch.inputs, context.device, None)
            batches.append(take(x, is_weighted.to(context.device)))
    return _join_batches(gather_batches(context.ranks, batches, context.device))


def _is_weighted(batch: Batch) -> Bool[Tensor, " examples"]:
    """Whether each example has a weight that is not zero."""
    if batch.weights is None:
        return torch.ones(batch.num_examples, dtype=torch.bool)
    return batch.weights > 0


def draw_inputs(
    context: FitContext, data: Iterable[Batch], *, num_required: int, num_drawn: int
) -> Inputs:
    """Draw inputs of the data without replacement, each with the same probability.

    The draw depends only on the indices of the examples in the data. Examples with weight zero are
    never drawn.

    Args:
        context: The processes that share the data.
        data: The data.
        num_required: The number of examples that the data must have, from `inducing=`.
        num_drawn: The number of examples to draw. If there are fewer examples, all are drawn.

    Raises:
        ValueError: If there are fewer examples than required.
    """
    # The examples with the smallest random keys are drawn, so a single pass is enough. The examples
    # drawn so far are kept as one batch.
    keys = torch.zeros(0, dtype=torch.float64)
    drawn: list[Inputs] = []
    for batch in data:
        is_weighted = _is_weighted(batch)
        if not is_weighted.any():
            continue
        keys = torch.cat([keys, _random_keys(batch)[is_weighted.cpu()]])
        x = take(move(batch.inputs, context.device, None), is_weighted.to(context.device))
        candidates = _join_batches([*drawn, x])
        order = keys.argsort()[:num_drawn]
        keys = keys[order]
        drawn = [take(candidates, order.to(context.device))]
    ranks = context.ranks
    num_available = sum(ranks.exchange(len(keys)))
    if num_available < num_required:
        raise ValueError(
            f"`inducing={num_required}` is more than the number of examples in the data, "
            f"{num_available}. Pass a smaller number, or None to use all examples."
        )
    all_keys = torch.cat(ranks.exchange(keys))
    candidates = _join_batches(gather_batches(ranks, drawn, context.device))
    return take(candidates, all_keys.argsort()[:num_drawn].to(context.device))


def _random_keys(batch: Batch) -> Float[Tensor, " examples"]:
    """Draw a number for each example, which depends only on the index of the example."""
    uniforms = Uniforms(seed=0, sample=0, first_index=batch.first_index)
    return uniforms(torch.zeros(batch.num_examples))


def _join_batches(batches: Sequence[Inputs]) -> Inputs:
    """Join inputs into one batch; they must have the same shape."""
    try:
        return join(batches)
    except RuntimeError as error:
        raise ValueError(
            '`curvature="gp"` stores its inducing inputs in one tensor, but the inputs of the '
            f"batches have different shapes ({error}). Pad them to the same shape."
        ) from error
