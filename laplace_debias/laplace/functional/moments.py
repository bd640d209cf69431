"""Mean and covariance of the linearised network's outputs, exact, without a Jacobian."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block, Site
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.laplace.functional.blocks import BlockMoments
from laplace_debias.laplace.functional.dense import DenseMoments
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.system.memory import MEMORY_BOUND, MOST_GRANTED, granted

# A chunk's output gradients take this share of the memory bound, beside the forward pass. The
# Jacobians that are made of them come in slices.
SHARE = 4


@dataclass(frozen=True)
class OutputRequest:
    """The part of the outputs' covariance that is asked for.

    Attributes:
        diagonal: The variances alone.
        outputs: Which outputs, one choice for every example, `[B, k]`; None for all.
        differences: Whether a covariance will do that has those of all differences of outputs, as
            a softmax takes them: one output fewer is pushed back.
        memory_bound: Bytes that output gradients, or one block's Jacobian, may take at a time;
            None as `granted` takes it.
    """

    diagonal: bool
    outputs: Int[Tensor, "batch k"] | None
    memory_bound: int | None
    differences: bool = False


def functional_moments(
    network: nn.Module,
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    x: Inputs,
    prior_precisions: Float[Tensor, "grid blocks"],
    request: OutputRequest,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    r"""Mean and covariance of the linearised network's outputs, exact.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ without ever holding $J$ `[B, C, D]`: layer by layer,
    the rotated Jacobian $\hat J$ of a few examples is weighed by $1/(N\Lambda + \delta)$. One
    rotation serves every prior precision, which enters the weights alone. Of a linear layer that
    gives the outputs themselves, $J = I \otimes \phi^\top$ with its input φ,
    nothing but $U_A^\top\phi$ is computed.

    Args:
        network: A `shadow` of the trained network.
        blocks: The posterior's blocks, in its order; those of the parameters also where it has a
            single one of all parameters.
        posterior: The posterior.
        x: Inputs, `[B, ...]`.
        prior_precisions: δ of every block at every grid point, `[P, blocks]`.
        request: Covariance or variances, of which outputs.

    Returns:
        The outputs at the mean, `[B, ..., C]` (of those asked for `[B, k]`). And the covariances
        `[P, B, M, M]` for M outputs per example, or their diagonals, `[P, B, ..., C]`.

    Raises:
        ValueError: If the outputs are not finite or have no batch dimension, or if what is
            requested does not fit into the memory bound.
    """
    tap = Tap(network, blocks)
    is_dense = DENSE_BLOCK in posterior.curvature.blocks
    accumulator = DenseMoments if is_dense else BlockMoments
    moments = accumulator(blocks, posterior, prior_precisions, request.diagonal)
    means, covariances = [], []
    start, chunk = 0, 1  # The first example shows how much memory one takes.
    while start < num_examples(x):
        part = slice(start, start + chunk)
        outputs = tap.forward(take(x, part))
        check_outputs(outputs, num_examples(x) if chunk == 1 else None)
        chosen = None if request.outputs is None else request.outputs[part]
        check_size(outputs, chosen, request)
        num_columns = outputs[0].numel() if chosen is None else chosen.shape[1]
        last = tap.last_layer(outputs)
        size = [num_columns] if request.diagonal else [num_columns] * 2
        total = outputs.new_zeros(len(prior_precisions), len(outputs), *size)
        num_columns -= request.differences and num_columns > 1
        num_added, at_once = 0, num_columns
        if last is not None:
            layer = network.get_submodule(last.layer)
            num_added = moments.add_last_layer(total, layer, last, outputs, chosen)
        gradients = tap.output_bytes()
        bound = request.memory_bound or MEMORY_BOUND
        if num_added < len(blocks):
            at_once, bound = columns_at_once(request, num_columns, gradients, blocks, outputs)
        chunk = max(1, bound // (SHARE * gradients * at_once))
        flat = outputs.detach().flatten(1)
        means.append(flat if chosen is None else flat.gather(1, chosen))
        skipped = Site((last.layer,)) if last is not None and num_added else None
        for begin in range(0, num_columns, at_once):
            some = slice(begin, min(begin + at_once, num_columns))
            more = some.stop < num_columns
            columns = unit_columns(outputs, chosen, some)
            if request.differences:
                columns = columns - unit_columns(outputs, chosen, slice(-1, None))
            moments.begin(total[:, :, some] if request.diagonal else total[:, :, some, some])
            for site, uses in tap.backward(outputs, columns, again=more, without=skipped):
                for index, block in enumerate(blocks):
                    if block.site == site:
                        moments.add(index, tap.layers[site], uses)
            moments.end()
        covariances.append(total)
        start += len(flat)
    shape = outputs.shape[1:] if request.outputs is None else None
    return finished(means, covariances, prior_precisions, shape, request.diagonal)


def finished(
    means: Sequence[Float[Tensor, "_ m"]],
    covariances: Sequence[Tensor],
    prior_precisions: Float[Tensor, "grid blocks"],
    shape: torch.Size | None,
    diagonal: bool,
) -> tuple[Float[Tensor, "batch *outputs"], Float[Tensor, "grid batch *covariance"]]:
    """Join what chunks of examples gave, as `functional_moments` returns it.

    Args:
        means: Of each chunk `[b, M]`.
        covariances: Of each `[P, b, M, M]`, or its diagonal.
        prior_precisions: For the message of what is not finite.
        shape: That of an example's outputs; None for some that were chosen.
        diagonal: Whether there are variances alone.
    """
    mean, covariance = torch.cat(list(means)), torch.cat(list(covariances), dim=1)
    check_covariance(covariance, prior_precisions)
    if shape is not None:
        mean = mean.unflatten(1, shape)
    if diagonal:
        return mean, covariance.reshape(len(covariance), *mean.shape)
    return mean, (covariance + covariance.mT) / 2


def check_size(
    outputs: Float[Tensor, "batch *outputs"],
    chosen: Int[Tensor, "batch k"] | None,
    request: OutputRequest,
    free_positions: int = 0,
) -> None:
    """Require what is asked for to be of a size that can be computed.

    Args:
        outputs: The network's.
        chosen: Which of them; None for all.
        request: What is asked for.
        free_positions: How many positions take no backward pass for each output.

    Raises:
        ValueError: If an example's covariance does not fit into memory, or if it has so many
            positions and outputs at each that differentiating them all takes hours.
    """
    size = outputs[0].numel() if chosen is None else chosen.shape[1]
    needed = size**2 * outputs.element_size()
    if needed <= MOST_GRANTED:
        return
    shape = tuple(outputs.shape[1:])
    if outputs.ndim > 2 and outputs.shape[1] > free_positions and chosen is None:
        raise ValueError(
            f"The model has {size} outputs an example, of shape {shape}, and each would be "
            "differentiated by itself: ask for some positions (positions=-1 is the last token) or "
            "for some outputs (functional(x, positions=-1, outputs=k) for the k largest). Where an "
            "embedding shares the head's weight, leave that weight out of params."
        )
    if not request.diagonal:
        raise ValueError(
            f"The covariance of {size} outputs takes {needed} bytes an example: ask for variances "
            "(diagonal=True) or for some outputs (outputs=k for the k largest)."
        )


def check_covariance(covariance: Tensor, prior_precisions: Tensor) -> None:
    """Require finite covariances.

    Raises:
        ValueError: Otherwise: the posterior is in range, but its products with the Jacobian of
            these inputs are not.
    """
    if not torch.stack(torch.aminmax(covariance)).isfinite().all():
        raise ValueError(
            f"The covariance of the outputs overflows {covariance.dtype}: the squared Jacobian of "
            f"these inputs over the prior precision (from {float(prior_precisions.min()):.3g}) is "
            "too large. Rescale the inputs, use a larger prior precision, or convert the model to "
            "a wider dtype."
        )


def unit_columns(
    outputs: Float[Tensor, "batch *outputs"],
    chosen: Int[Tensor, "batch k"] | None,
    some: slice = slice(None),
) -> Float[Tensor, "columns batch *outputs"]:
    """Unit cotangents, one for each of some of the outputs that are asked for."""
    batch, size = len(outputs), outputs[0].numel()
    if chosen is None:
        of_outputs = torch.arange(size, device=outputs.device)[some].unsqueeze(1)
        units = outputs.new_zeros(len(of_outputs), size).scatter_(1, of_outputs, 1.0)
        columns = units.unsqueeze(1).expand(-1, batch, -1)
    else:
        at = chosen.T[some].unsqueeze(2)
        columns = outputs.new_zeros(len(at), batch, size).scatter_(2, at, 1.0)
    return columns.unflatten(2, outputs.shape[1:])


def columns_at_once(
    request: OutputRequest,
    num_columns: int,
    gradients: int,
    blocks: Sequence[Block],
    like: Tensor,
    remedy: str = "",
) -> tuple[int, int]:
    """How many outputs are differentiated together, and the bytes for it.

    Args:
        request: What is asked for.
        num_columns: How many outputs.
        gradients: Bytes of the output gradients of one of them.
        blocks: The blocks that are differentiated.
        like: Has the outputs' dtype.
        remedy: What to do where there is no room.

    Raises:
        ValueError: If the memory bound does not allow one, or not those that must be together.
    """
    each = bytes_of_a_column(gradients, blocks, like)
    remedy = (
        remedy
        if remedy or request.diagonal
        else ", ask for variances (diagonal=True) or for some outputs"
    )
    bound = granted(
        request.memory_bound,
        (1 if request.diagonal else num_columns) * each,
        "an example's output gradients and Jacobians",
        remedy,
    )
    return min(num_columns, bound // each), bound


def bytes_of_a_column(gradients: int, blocks: Sequence[Block], like: Tensor) -> int:
    """Bytes that one output of one example takes: its output gradients, or a block's Jacobian."""
    # Of a table only the rows that are looked up have a Jacobian.
    sizes = [block.size for block in blocks if block.role != "table"]
    return max(gradients, max(sizes, default=0) * like.element_size())
