r"""The last layer's contribution to the moments of the outputs, without a backward pass.

If the outputs `[B, C]` of the network come from a linear layer with inputs φ, then φ determines the
Jacobian with respect to this layer's parameters (see `linear_head`). If no other parameter is
Bayesian, one forward pass without a graph yields everything that a prediction needs:

| function               | what it computes                                                 |
|------------------------|------------------------------------------------------------------|
| `last_layer_moments`   | moments of the outputs, for `linearised.moments`                 |
| `difference_variances` | variances of the differences of all pairs of outputs (if few)    |
| `factored_outputs`     | for draws and scores of many outputs: variances along directions |
| `recorded_inputs`      | for `tune`: inputs that suffice at any prior precision           |

If other parameters are Bayesian, too, `linearised` uses `LastLayer` to add the contribution of the
last layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Site
from laplace_debias.curvature.network.inputs import Inputs, Record, num_examples, take
from laplace_debias.laplace.functional.context import PredictionContext, prediction_context
from laplace_debias.laplace.functional.gaussian_outputs import CovarianceFactor, FactoredOutputs
from laplace_debias.laplace.functional.linear_head import HeadMomentKind, LinearHead
from laplace_debias.laplace.functional.request import CovarianceRequest, check_covariance
from laplace_debias.laplace.pairwise import pairs_of_outputs
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.prediction_cache import PreparedModel
from laplace_debias.operators import EigenKronecker

FEW_OUTPUTS = 32
"""The largest number of outputs with so few pairs that each direction's contribution to the moments
is kept.
"""


class LastLayer:
    """The Bayesian blocks of the linear layer that returns the network's outputs.

    Values that do not depend on the inputs are computed on first use and then kept.

    Args:
        heads: The blocks: the weight, the bias, or both.
        prior_precisions: δ at every grid point, for each block.
    """

    def __init__(
        self,
        heads: Sequence[LinearHead],
        prior_precisions: Sequence[Float[Tensor, " grid"]],
    ) -> None:
        self.heads = heads
        self._prior_precisions = prior_precisions
        self._num_points = len(prior_precisions[0])

    @classmethod
    def from_fit(cls, fitted: FittedPosterior) -> "LastLayer":
        """Read the blocks and δ of a fit in which only a linear layer is Bayesian."""
        posterior = fitted.posterior
        heads = [LinearHead.from_posterior(block, posterior) for block in fitted.parameters.blocks]
        return cls(_with_shared_directions(heads), list(posterior.deltas().unsqueeze(1)))

    @property
    def site(self) -> Site:
        """The site of the layer in the network."""
        return self.heads[0].block.site

    def moments(
        self,
        phi: Float[Tensor, "batch d"],
        chosen: Int[Tensor, "batch k"] | None,
        kind: HeadMomentKind,
    ) -> Float[Tensor, "grid batch columns *again"]:
        """Compute the moments of the outputs that are due to this layer, at every grid point.

        Args:
            phi: The layer's inputs.
            chosen: Indices of the outputs; None for all.
            kind: The moments to compute. Variances of differences are supported only for all
                outputs of a layer with at most `FEW_OUTPUTS` outputs, at a single grid point.
        """
        if self._num_points == 1:
            return self._moments_at_point(phi, chosen, kind).unsqueeze(0)
        diagonal = kind == "variances"
        num_outputs = self.heads[0].block.shape[0] if chosen is None else chosen.shape[1]
        columns = [num_outputs] if diagonal else [num_outputs, num_outputs]
        total = phi.new_zeros(self._num_points, len(phi), *columns)
        self.add(total, phi, chosen, diagonal)
        return total

    def _moments_at_point(
        self,
        phi: Float[Tensor, "batch d"],
        chosen: Int[Tensor, "batch k"] | None,
        kind: HeadMomentKind,
    ) -> Float[Tensor, "batch columns *again"]:
        """Compute the moments if there is only one prior precision."""
        moments = [head.moments(phi, chosen, kind) for head in self._head_moments]
        if len(moments) > 1:
            return sum(moments[1:], moments[0])
        # A copy is returned, because the moments of a bias are kept for later calls.
        return moments[0].expand(len(phi), *moments[0].shape[1:]).clone()

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        phi: Float[Tensor, "batch d"],
        chosen: Int[Tensor, "batch k"] | None,
        diagonal: bool,
    ) -> None:
        """Add the covariances of the outputs, or their variances, at every grid point.

        Args:
            into: The sums.
            phi: The layer's inputs.
            chosen: Indices of the outputs; None for all.
            diagonal: Whether to add variances instead of covariances.
        """
        if len(into) == 1:
            total = into[0]
            total += self._moments_at_point(phi, chosen, "variances" if diagonal else "covariance")
            return
        for index, head in enumerate(self.heads):
            squares = head.rotated_inputs(phi).square()
            # Prior precisions are processed one after the other, because the weights, or the
            # covariances, for all of them may not fit into memory.
            if diagonal:
                deltas = self._prior_precisions[index]
                eigen_variances = [squares @ head.variances(delta).mT for delta in deltas]
                into += head.covariance(torch.stack(eigen_variances), chosen, diagonal=True)
                continue
            for total, variances in zip(into, self._grid_variances[index], strict=True):
                total += head.covariance(squares @ variances.mT, chosen, diagonal=False)

    @cached_property
    def _head_moments(self) -> "list[_HeadMoments]":
        """The moments due to each block if there is only one prior precision."""
        pairs = zip(self.heads, self._prior_precisions, strict=True)
        return [_HeadMoments(head, deltas[0]) for head, deltas in pairs]

    @cached_property
    def _grid_variances(self) -> list[Float[Tensor, "grid rows columns"]]:
        """The posterior variances along each block's eigenvectors for every grid point."""
        pairs = zip(self.heads, self._prior_precisions, strict=True)
        return [head.variances(deltas) for head, deltas in pairs]


class _HeadMoments:
    """The moments of the outputs that are due to one block, at one prior precision.

    Args:
        head: The block.
        prior_precision: δ.
    """

    def __init__(self, head: LinearHead, prior_precision: Float[Tensor, ""]) -> None:
        self._head = head
        self._variances = head.variances(prior_precision)
        self._num_outputs = len(head.magnitudes if head.U_G is None else head.U_G)
        self._direction_moments: dict[HeadMomentKind, Tensor] = {}
        # The moments of all outputs due to a bias are the same for all examples, so they are kept.
        self._bias_moments: dict[HeadMomentKind, Tensor] = {}

    def moments(
        self,
        phi: Float[Tensor, "batch d"],
        chosen: Int[Tensor, "batch k"] | None,
        kind: HeadMomentKind,
    ) -> Float[Tensor, "examples columns *again"]:
        """Compute the moments, `[B, ...]`, or `[1, ...]` if they are the same for all examples."""
        is_same_for_all = self._head.block.is_vector and chosen is None
        if is_same_for_all:
            if kind in self._bias_moments:
                return self._bias_moments[kind]
            phi = phi[:1]
        eigen_variances = self._head.eigen_variances(phi, self._variances)
        if chosen is not None or self._num_outputs > FEW_OUTPUTS:
            moments = self._head.covariance(eigen_variances, chosen, kind == "variances")
        else:
            if kind not in self._direction_moments:
                self._direction_moments[kind] = self._head.moments_of_directions(kind)
            moments = eigen_variances @ self._direction_moments[kind]
            if kind != "variances":
                moments = moments.view(-1, self._num_outputs, self._num_outputs)
        if is_same_for_all:
            self._bias_moments[kind] = moments
        return moments


@dataclass(frozen=True)
class LastLayerInputs:
    """The outputs of a Bayesian last layer, and everything that determines their covariance.

    From these values, the covariance at any prior precision is computed without another pass
    through the network.

    Attributes:
        mean: The outputs, `[B, C]`.
        heads: The last layer's blocks.
        squares: The squared inputs along the input directions of each block, `[B, columns]`.
    """

    mean: Float[Tensor, "batch classes"]
    heads: Sequence[LinearHead]
    squares: Sequence[Float[Tensor, "batch _"]]

    @classmethod
    def concatenate(cls, batches: Sequence["LastLayerInputs"]) -> "LastLayerInputs":
        """Join the examples of several batches."""
        squares = zip(*(batch.squares for batch in batches), strict=True)
        return cls(
            mean=torch.cat([batch.mean for batch in batches]),
            heads=batches[0].heads,
            squares=[torch.cat(block_squares) for block_squares in squares],
        )

    def take(self, examples: slice) -> "LastLayerInputs":
        """Return the selected examples."""
        squares = [block_squares[examples] for block_squares in self.squares]
        return LastLayerInputs(self.mean[examples], self.heads, squares)

    def eigen_variances(
        self, prior_precisions: Float[Tensor, " blocks"]
    ) -> list[Float[Tensor, "batch _"]]:
        """Compute the variances of the outputs along each of the `distinct_directions`.

        Args:
            prior_precisions: δ of each block.

        Raises:
            ValueError: If the variances are not finite.
        """
        totals: dict[int, Tensor] = {}
        for head, squares, delta in zip(self.heads, self.squares, prior_precisions, strict=True):
            variances = squares @ head.variances(delta).mT
            key = id(head.U_G)
            if key in totals:
                variances = totals[key] + variances
            totals[key] = variances
        for total in totals.values():
            check_covariance(total, prior_precisions)
        return list(totals.values())

    def outputs(self, eigen_variances: Sequence[Float[Tensor, "batch _"]]) -> FactoredOutputs:
        """Return the outputs with the factors of their covariance."""
        factors = []
        directions = distinct_directions(self.heads)
        for U_G, variances in zip(directions, eigen_variances, strict=True):
            factors.append(CovarianceFactor(U_G, variances))
        return FactoredOutputs(self.mean, factors)


def last_layer_moments(
    fitted: FittedPosterior,
    context: PredictionContext,
    request: CovarianceRequest,
    prior_precisions: Float[Tensor, "grid blocks"] | None = None,
) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "grid batch outputs *again"]] | None:
    """Compute the requested moments of the outputs if only the last layer is Bayesian.

    If the layer has many outputs, the examples pass through the network in chunks whose covariances
    fit into the memory bound.

    Args:
        fitted: The fit.
        context: The network and its inputs.
        request: The requested moments.
        prior_precisions: δ of every block at every grid point; None for δ of the fit.

    Returns:
        The requested outputs, and their moments at every grid point; or None if other parameters
        are Bayesian, or if further operations follow the layer.

    Raises:
        ValueError: If the outputs are not finite, or if an example's covariance does not fit into
            memory.
    """
    num_classes = _num_classes(fitted)
    prepared = context.prepared
    if num_classes is None or prepared is None:
        return None
    layer = _last_layer(fitted, prepared)
    if prior_precisions is not None:
        layer = LastLayer(layer.heads, prior_precisions.unbind(1))
    # The covariances of few outputs need little memory, so all examples form one chunk.
    chunks = [(context.x, request.outputs)]
    if num_classes > FEW_OUTPUTS:
        chunks = _chunks(fitted, context.x, request, num_classes)
    means = []
    moments = []
    for x, chosen in chunks:
        recorded = prepared.forward_of_last_layer(x)
        if recorded is None:
            return None
        outputs, phi = recorded
        mean = outputs if chosen is None else outputs.gather(1, chosen)
        request.check_size(mean.shape[1], mean, free_positions=0)
        means.append(mean)
        moments.append(layer.moments(phi, chosen, request.kind))
    if len(means) == 1:
        return means[0], moments[0]
    return torch.cat(means), torch.cat(moments, dim=1)


def difference_variances(
    fitted: FittedPosterior, x: Inputs | Record
) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes classes"]] | None:
    """Compute the outputs, and the variances of the differences of all pairs of outputs.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.

    Returns:
        The outputs and the variances, or None if there are more than `FEW_OUTPUTS` outputs or
        parameters outside the last layer are Bayesian.

    Raises:
        ValueError: If the outputs, or the variances, are not finite.
    """
    num_classes = _num_classes(fitted)
    if num_classes is None or num_classes > FEW_OUTPUTS:
        return None
    request = CovarianceRequest("difference variances", None, fitted.config.memory_bound)
    with prediction_context(fitted, x) as context:
        moments = last_layer_moments(fitted, context, request)
    if moments is None:
        return None
    outputs, variances = moments
    check_covariance(variances, fitted.posterior.prior_precision)
    return outputs, variances[0]


def factored_outputs(
    fitted: FittedPosterior, x: Inputs | Record, min_outputs: int
) -> FactoredOutputs | None:
    """Compute the outputs and the factors of their covariance if only the last layer is Bayesian.

    No C × C matrix is computed for an example.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        min_outputs: The smallest supported number of outputs.

    Returns:
        The outputs; or None if there are fewer outputs, or if other parameters are Bayesian.

    Raises:
        ValueError: If the outputs, or their variances, are not finite.
    """
    inputs = recorded_inputs(fitted, x, min_outputs)
    if inputs is None:
        return None
    return inputs.outputs(inputs.eigen_variances(fitted.posterior.deltas()))


def recorded_inputs(
    fitted: FittedPosterior, x: Inputs | Record, min_outputs: int = 1
) -> LastLayerInputs | None:
    """Run the network and record the last layer's inputs if only that layer is Bayesian.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        min_outputs: The smallest supported number of outputs.

    Returns:
        The outputs and the layer's inputs; or None if there are fewer outputs, or if other
        parameters are Bayesian.

    Raises:
        ValueError: If the outputs are not finite.
    """
    num_classes = _num_classes(fitted)
    if num_classes is None or num_classes < min_outputs:
        return None
    with prediction_context(fitted, x) as context:
        assert context.prepared is not None
        recorded = context.prepared.forward_of_last_layer(context.x)
        if recorded is None:
            return None
        heads = _last_layer(fitted, context.prepared).heads
    outputs, phi = recorded
    squares = [head.rotated_inputs(phi).square() for head in heads]
    return LastLayerInputs(outputs, heads, squares)


def distinct_directions(
    heads: Sequence[LinearHead],
) -> list[Float[Tensor, "classes rows"] | None]:
    """Return the distinct output directions of blocks, where None means the coordinate axes."""
    directions = {id(head.U_G): head.U_G for head in heads}
    return list(directions.values())


def squared_differences(heads: Sequence[LinearHead]) -> Float[Tensor, "rows pairs"]:
    r"""Compute the squared differences between outputs along the directions of U_G.

    The variance of the difference of the outputs k and i is $\sum_r (U_{kr} - U_{ir})^2 v_r$ for
    the variances $v_r$ along the directions.

    Returns:
        One row per direction in `distinct_directions`, and one column per pair in
        `pairs_of_outputs`.
    """
    magnitudes = heads[0].magnitudes
    directions = []
    for U_G in distinct_directions(heads):
        if U_G is None:
            U_G = torch.eye(len(magnitudes)).to(magnitudes)
        directions.append(U_G)
    U = torch.cat(directions, 1).mT
    first, second = pairs_of_outputs(U.shape[1], U.device)
    return (U[:, first] - U[:, second]).square_()


def _num_classes(fitted: FittedPosterior) -> int | None:
    """Return the number of outputs of the linear layer that contains all Bayesian parameters.

    The result is None if other parameters are Bayesian.
    """
    if not fitted.parameters.is_linear_layer:
        return None
    block = fitted.parameters.blocks[0]
    # A posterior such as `"full"` has a single block of all parameters instead of layer blocks.
    if not isinstance(fitted.posterior.curvature.blocks.get(block.name), EigenKronecker):
        return None
    return block.shape[0]


def _chunks(
    fitted: FittedPosterior, x: Inputs, request: CovarianceRequest, num_classes: int
) -> list[tuple[Inputs, Int[Tensor, "part k"] | None]]:
    """Split the inputs and requested outputs into chunks whose moments fit into memory."""
    mean = fitted.posterior.mean
    chosen = request.outputs
    num_outputs = num_classes if chosen is None else chosen.shape[1]
    size = request.chunk_size(
        # Variances need no square matrix per example, so one column per example is enough.
        num_columns=1 if request.diagonal else request.num_columns(num_outputs),
        gradient_bytes=num_classes * mean.element_size(),
        num_blocks=len(fitted.parameters.blocks),
        bytes_per_column=None,
        device=mean.device,
    )
    batch = num_examples(x)
    if size.examples >= batch:
        return [(x, chosen)]
    chunks = []
    for begin in range(0, batch, size.examples):
        examples = slice(begin, begin + size.examples)
        chunks.append((take(x, examples), None if chosen is None else chosen[examples]))
    return chunks


def _last_layer(fitted: FittedPosterior, prepared: PreparedModel) -> LastLayer:
    """Return the only Bayesian layer, at the prior precision of the fit."""
    return prepared.compute_once(
        fitted.posterior, "last layer", partial(LastLayer.from_fit, fitted)
    )


def _with_shared_directions(heads: Sequence[LinearHead]) -> list[LinearHead]:
    """Make blocks with equal output directions share one tensor.

    If a layer is called once per example, its bias has the same output directions as its weight.
    """
    shared: list[LinearHead] = []
    for head in heads:
        for earlier in shared:
            U_G = earlier.U_G
            if U_G is not None and head.U_G is not None and torch.equal(U_G, head.U_G):
                head = replace(head, U_G=U_G)
        shared.append(head)
    return shared
