"""Exact moments of the linearised network, computed without whole Jacobians in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.chosen_positions import LinearCalls, Positions
from laplace_debias.curvature.network.inputs import Inputs, Record, num_examples, take, tensors_of
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.accumulator import CovarianceAccumulator
from laplace_debias.laplace.functional.blocks import BlockwiseAccumulator
from laplace_debias.laplace.functional.context import (
    OutputChoice,
    PredictionContext,
    prediction_context,
)
from laplace_debias.laplace.functional.dense import dense_accumulator
from laplace_debias.laplace.functional.last_layer import last_layer_moments
from laplace_debias.laplace.functional.linear_head import HeadOutputs, LinearHead
from laplace_debias.laplace.functional.request import (
    ChunkSize,
    CovarianceRequest,
    bytes_per_column,
    check_covariance,
    unit_columns,
)
from laplace_debias.laplace.links import SecondMoments
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.posterior import GaussianPosterior


def moments(
    fitted: FittedPosterior,
    x: Inputs | Record,
    prior_precisions: Float[Tensor, " grid"] | Float[Tensor, "grid blocks"] | None = None,
    kind: SecondMoments = "covariance",
    outputs: OutputChoice | None = None,
    positions: Positions | None = None,
    may_overflow: bool = False,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    r"""Compute the exact mean and covariances of the linearised network's outputs.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ is computed without storing $J$ `[B, C, D]`: layer by
    layer, the rotated Jacobian $\hat J$ of a few examples is weighted by $1/(N\Lambda + \delta)$. A
    single rotation serves all prior precisions, because they affect only the weights. For a linear
    layer that returns the network's outputs, $J = I \otimes \phi^\top$ with the layer's input φ, so
    only $U_A^\top\phi$ is computed.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        prior_precisions: δ at every grid point, one number or one per block; None for the prior
            precision of the fit.
        kind: The part of the covariance to compute.
        outputs: The requested outputs; None for all.
        positions: The requested positions; None for all.
        may_overflow: Whether covariances may contain infinities, as at the smallest prior
            precisions of a search. If false, infinities raise an error.

    Returns:
        The outputs at the mean, `[B, ..., C]` (`[B, k]` if outputs are requested), and the
        covariances `[P, B, M, M]` for M outputs per example, or only the variances,
        `[P, B, ..., C]`.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if the requested
            covariance does not fit into the memory bound.
    """
    posterior = fitted.posterior
    if kind == "differences" and fitted.config.structure.has_independent_outputs:
        # Each output has its own posterior, so the variance of a difference between two outputs
        # cannot be computed from a single one.
        kind = "covariance"
    restricts_head = partial(acts_through_head, fitted.parameters.blocks, posterior)
    with prediction_context(fitted, x, positions, restricts_head) as context:
        indices = None if outputs is None else context.output_indices(outputs)
        request = CovarianceRequest(kind, indices, fitted.config.memory_bound)
        deltas = None
        if prior_precisions is not None:
            deltas = _deltas_per_block(fitted, prior_precisions)
        moments = last_layer_moments(fitted, context, request, deltas)
        if moments is None:
            accumulator = _accumulator(fitted, context, request, deltas)
            moments = _moments_in_chunks(context, accumulator, request)
    mean, covariances = moments
    if kind == "covariance":
        _symmetrise(covariances)
    if not may_overflow:
        check_covariance(covariances, posterior.prior_precision if deltas is None else deltas)
    num_outputs = None if indices is None else indices.shape[1]
    if request.diagonal:
        covariances = context.by_position(covariances, num_outputs)
    return context.by_position(mean, num_outputs), covariances


def _deltas_per_block(
    fitted: FittedPosterior,
    prior_precisions: Float[Tensor, " grid"] | Float[Tensor, "grid blocks"],
) -> Float[Tensor, "grid blocks"]:
    """Return δ of every block at every grid point."""
    deltas = prior_precisions.reshape(len(prior_precisions), -1).to(fitted.posterior.mean)
    return deltas.expand(-1, len(fitted.parameters.block_names))


def _accumulator(
    fitted: FittedPosterior,
    context: PredictionContext,
    request: CovarianceRequest,
    deltas: Float[Tensor, "grid blocks"] | None,
) -> CovarianceAccumulator:
    """Create the sums over blocks at every grid point; `deltas=None` means the δ of the fit.

    At the δ of the fit, their weights are kept between predictions.
    """
    posterior = fitted.posterior

    def new_accumulator() -> CovarianceAccumulator:
        grid = deltas
        if grid is None:
            grid = _deltas_per_block(fitted, posterior.prior_precision.unsqueeze(0))
        new = accumulator_class(posterior)
        return new(fitted.parameters.blocks, posterior, grid, request.diagonal)

    if deltas is not None or context.prepared is None:
        return new_accumulator()
    return context.prepared.compute_once(posterior, request.diagonal, new_accumulator)


def accumulator_class(posterior: GaussianPosterior) -> type[CovarianceAccumulator]:
    """Return the accumulator class for a posterior."""
    return dense_accumulator(posterior) or BlockwiseAccumulator


def acts_through_head(blocks: Sequence[Block], posterior: GaussianPosterior, head: str) -> bool:
    """Whether all parameters are part of a head, or affect the outputs only through its input.

    A weight that the head shares with an embedding satisfies both conditions.
    """
    # A module whose calls are replayed may contain the head, so its path is compared with the
    # head's.
    paths: list[str] = []
    for block in blocks:
        if block.rule.is_generic:
            paths += block.calls or (block.layer,)
    is_behind = any(not path or path == head or head.startswith(f"{path}.") for path in paths)
    return accumulator_class(posterior) is BlockwiseAccumulator and not is_behind


def _moments_in_chunks(
    context: PredictionContext,
    accumulator: CovarianceAccumulator,
    request: CovarianceRequest,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """Compute the moments of as many examples at a time as fit into the memory bound."""
    # The accumulator has the blocks of the layers, even if the posterior has only one dense block.
    tap = context.tap(accumulator.blocks)
    method: _OutputDifferentiation | _HeadDifferentiation
    if context.head is None:
        method = _OutputDifferentiation(accumulator, request)
    else:
        assert isinstance(accumulator, BlockwiseAccumulator)
        method = _HeadDifferentiation(tap, accumulator, request, context.head)
    means = []
    covariances = []
    for chunk in _forward_in_chunks(context, tap, method, request):
        means.append(chunk.mean)
        covariances.append(method.covariance(chunk))
    # `cat` also makes a copy, which is needed because a model may overwrite its outputs in the next
    # pass.
    mean = torch.cat(means)
    covariance = covariances[0]
    if len(covariances) > 1:
        covariance = torch.cat(covariances, dim=1)
    del covariances
    if request.diagonal:
        covariance = covariance.reshape(len(covariance), *mean.shape)
    return mean, covariance


def _symmetrise(covariances: Float[Tensor, "grid batch columns columns"]) -> None:
    """Replace covariances by their symmetric parts.

    One prior precision is processed at a time, because a copy of all covariances may not fit into
    memory.
    """
    for covariance in covariances.unbind():
        covariance += covariance.mT.clone()
        covariance /= 2


@dataclass(frozen=True)
class _Chunk:
    """A chunk of examples whose outputs are differentiated together.

    Attributes:
        forward_pass: The forward pass of these examples, with all outputs of the network.
        indices: Indices of the requested outputs among all outputs of an example; None for all.
        model_indices: Indices of the requested outputs among all outputs of the model.
        columns_at_once: The number of requested outputs of an example that are differentiated
            together.
    """

    forward_pass: ForwardPass
    indices: Int[Tensor, "batch k"] | None
    model_indices: Int[Tensor, "#batch k"]
    columns_at_once: int

    @property
    def mean(self) -> Float[Tensor, "batch *outputs"]:
        """The requested outputs."""
        mean = self.forward_pass.outputs.detach()
        return mean if self.indices is None else mean.flatten(1).gather(1, self.indices)

    def column_slices(self, num_columns: int) -> Iterator[slice]:
        """Yield the columns that are differentiated together, one slice after the other."""
        for begin in range(0, num_columns, self.columns_at_once):
            yield slice(begin, min(begin + self.columns_at_once, num_columns))


def _forward_in_chunks(
    context: PredictionContext,
    tap: Tap,
    method: "_OutputDifferentiation | _HeadDifferentiation",
    request: CovarianceRequest,
) -> Iterator[_Chunk]:
    """Run the network on one chunk of examples after another.

    When an input shape first occurs, a pass over one example determines the chunk size for it.
    """
    x = context.x
    batch = num_examples(x)
    num_outputs = None if request.outputs is None else request.outputs.shape[1]
    shapes = [(tensor.shape[1:], tensor.dtype) for tensor in tensors_of(x)]
    key = (request.kind, num_outputs, *shapes)
    size = None if context.prepared is None else context.prepared.sizes.get(key)
    start = 0
    if size is None:
        examples = slice(0, 1)
        forward_pass = tap.forward(take(x, examples))
        check_outputs(forward_pass.outputs)
        size = method.chunk_size(forward_pass)
        if context.prepared is not None:
            context.prepared.keep_size(key, size)
        if min(batch, size.examples) == 1:
            # The first chunk is only this example, so its forward pass is not repeated.
            yield _chunk(context, request, forward_pass, examples, size)
            start = 1
    for begin in range(start, batch, size.examples):
        examples = slice(begin, begin + size.examples)
        chunk = x if size.examples >= batch else take(x, examples)
        forward_pass = tap.forward(chunk)
        check_outputs(forward_pass.outputs)
        yield _chunk(context, request, forward_pass, examples, size)


def _chunk(
    context: PredictionContext,
    request: CovarianceRequest,
    forward_pass: ForwardPass,
    examples: slice,
    size: ChunkSize,
) -> _Chunk:
    """Build a chunk from the forward pass of its examples."""
    indices = None if request.outputs is None else request.outputs[examples]
    model_indices = context.model_indices(forward_pass.outputs, indices, examples)
    return _Chunk(forward_pass, indices, model_indices, size.columns)


class _OutputDifferentiation:
    """Differentiation of the outputs themselves.

    Args:
        accumulator: The sums over blocks.
        request: The requested covariances.
    """

    def __init__(self, accumulator: CovarianceAccumulator, request: CovarianceRequest) -> None:
        self._accumulator = accumulator
        self._request = request

    def chunk_size(self, forward_pass: ForwardPass) -> ChunkSize:
        """Choose the chunk size by the memory that differentiation needs."""
        request = self._request
        outputs = forward_pass.outputs
        num_outputs = outputs.numel() if request.outputs is None else request.outputs.shape[1]
        request.check_size(num_outputs, outputs, free_positions=0)
        blocks = self._accumulator.blocks
        gradient_bytes = forward_pass.output_bytes
        num_columns = request.num_columns(num_outputs)
        row_bytes = self._accumulator.kept_row_bytes
        if row_bytes:
            return request.kept_rows(num_columns, gradient_bytes + row_bytes, outputs.device)
        return request.chunk_size(
            num_columns=num_columns,
            gradient_bytes=gradient_bytes,
            num_blocks=len(blocks),
            bytes_per_column=bytes_per_column(gradient_bytes, blocks, outputs.element_size()),
            device=outputs.device,
        )

    def covariance(self, chunk: _Chunk) -> Float[Tensor, "grid batch *covariance"]:
        """Compute covariances from output gradients, except for a last layer, which needs none."""
        request = self._request
        accumulator = self._accumulator
        forward_pass = chunk.forward_pass
        outputs = forward_pass.outputs
        indices = chunk.indices
        num_outputs = outputs[0].numel() if indices is None else indices.shape[1]
        total = request.zeros(outputs, num_outputs, len(accumulator.prior_precisions))
        last_site = None
        layer_and_inputs = accumulator.last_layer(forward_pass)
        if layer_and_inputs is not None:
            last_layer, phi = layer_and_inputs
            last_layer.add(total, phi, indices, request.diagonal)
            last_site = last_layer.site
        num_columns = request.num_columns(num_outputs)
        for columns in chunk.column_slices(num_columns):
            vectors = unit_columns(outputs, indices, columns)
            if request.kind == "differences":
                # The differences between each output and the last one are differentiated.
                vectors = vectors - unit_columns(outputs, indices, slice(-1, None))
            into = total[:, :, columns] if request.diagonal else total[:, :, columns, columns]
            keep_graph = columns.stop < num_columns
            records = forward_pass.backward(vectors, keep_graph, last_site)
            accumulator.add(into, records, chunk.model_indices[:, columns])
        return total


class _HeadDifferentiation:
    r"""Differentiation of the inputs h `[B, p, d]` of the linear layer that returns the outputs.

    With $f_{tc} = w_c^\top h_t + b_c$, parameters below the head affect the outputs only through h.
    Therefore, the vectors that are pulled back have the size of h instead of T·C: for each of the k
    outputs, it is the row $w_c$ at position t. If there are more than $p \cdot d$ outputs, the
    covariance $\Sigma_h$ is computed first, and then $w_c^\top \Sigma_h w_{c'}$.

    Args:
        tap: The network.
        accumulator: The sums over blocks.
        request: The requested covariances.
        head: The path of the head.
    """

    def __init__(
        self,
        tap: Tap,
        accumulator: BlockwiseAccumulator,
        request: CovarianceRequest,
        head: str,
    ) -> None:
        self._accumulator = accumulator
        self._request = request
        self._calls = LinearCalls(tap.network, head)
        self._weight = tap.network.get_submodule(head).get_parameter("weight").detach()
        self._head_indices = [
            index for index, block in enumerate(accumulator.blocks) if block.layer == head
        ]

    def chunk_size(self, forward_pass: ForwardPass) -> ChunkSize:
        """Choose the chunk size; only Bayesian layers below the head need differentiation."""
        request = self._request
        outputs = forward_pass.outputs
        first = None if request.outputs is None else request.outputs[:1]
        head_outputs = self._head_outputs(first)
        request.check_size(head_outputs.num_outputs, outputs, free_positions=1)
        blocks = self._accumulator.blocks
        gradient_bytes = forward_pass.output_bytes
        column_bytes = None
        if self._calls.x.requires_grad:
            below = [block for index, block in enumerate(blocks) if index not in self._head_indices]
            column_bytes = bytes_per_column(gradient_bytes, below, outputs.element_size())
        return self._input_request(head_outputs).chunk_size(
            num_columns=head_outputs.num_columns,
            gradient_bytes=gradient_bytes,
            num_blocks=len(blocks),
            bytes_per_column=column_bytes,
            device=outputs.device,
            remedy=", or request fewer outputs",
        )

    def covariance(self, chunk: _Chunk) -> Float[Tensor, "grid batch *covariance"]:
        """Compute covariances from gradients of h, except for the head itself, which needs none."""
        accumulator = self._accumulator
        request = self._request
        head_outputs = self._head_outputs(chunk.indices)
        num_points = len(accumulator.prior_precisions)
        total = request.zeros(chunk.forward_pass.outputs, head_outputs.num_outputs, num_points)
        if self._calls.x.requires_grad:
            self._add_below(total, head_outputs, chunk)
        chunk.forward_pass.release()
        for index in self._head_indices:
            head = LinearHead.from_posterior(accumulator.blocks[index], accumulator.posterior)
            deltas = accumulator.prior_precisions[:, index]
            total += head.covariance_between_positions(head_outputs, deltas, request.diagonal)
        return total

    def _add_below(
        self,
        total: Float[Tensor, "grid batch *covariance"],
        head_outputs: HeadOutputs,
        chunk: _Chunk,
    ) -> None:
        """Add the covariances due to the parameters below the head."""
        accumulator = self._accumulator
        request = self._input_request(head_outputs)
        accumulator_below = BlockwiseAccumulator(
            accumulator.blocks,
            accumulator.posterior,
            accumulator.prior_precisions,
            request.diagonal,
        )
        head_site = None
        if self._head_indices:
            head_site = accumulator.blocks[self._head_indices[0]].site
        num_columns = head_outputs.num_columns
        for columns in chunk.column_slices(num_columns):
            covariances = request.zeros(head_outputs.h, columns.stop - columns.start, len(total))
            vectors = head_outputs.input_gradients(columns)
            keep_graph = columns.stop < num_columns
            records = chunk.forward_pass.backward(vectors, keep_graph, head_site, self._calls.x)
            accumulator_below.add(covariances, records, None)
            if request.diagonal:
                total[..., columns] += covariances
            else:
                # All columns are differentiated together, so the whole matrix is added at once.
                total += head_outputs.covariance(covariances, self._request.diagonal)

    def _head_outputs(self, indices: Int[Tensor, "batch k"] | None) -> HeadOutputs:
        return HeadOutputs.from_indices(self._weight, self._calls.x, indices)

    def _input_request(self, head_outputs: HeadOutputs) -> CovarianceRequest:
        """Return the request for the covariance at h: all of Σ_h, or only the needed part."""
        if head_outputs.exceeds_inputs:
            return replace(self._request, kind="covariance")
        return self._request
