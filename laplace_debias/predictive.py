"""Predictives: from a Gaussian over parameters to a distribution over targets."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.fit import check_outputs
from laplace_debias.curvature.kfac.layers import Uses
from laplace_debias.curvature.kfac.magnitudes import rotated_jacobians
from laplace_debias.curvature.shadow import shadow
from laplace_debias.curvature.tap import Tap
from laplace_debias.posterior import GaussianPosterior

# From so many prior precisions on, products of pairs of outputs are formed once for all of them.
_PAIRS_FROM = 3
# Numbers that a slice of weighed products holds.
_SLICE = 2**19
# Weight samples that are pushed through the network at once.
_SAMPLES_AT_ONCE = 8


def functional_moments(
    model: nn.Module,
    blocks: Sequence[Block],
    posteriors: Sequence[GaussianPosterior],
    x: Tensor,
    prior_precisions: Float[Tensor, "posteriors grid blocks"],
    memory_bound: int,
    diagonal: bool = False,
) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "posteriors grid batch outputs *outputs"]]:
    r"""Mean and covariance of the linearised network's outputs, exact.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ without ever holding $J$ `[B, C, D]`: layer by layer,
    the rotated Jacobian $\hat J$ of a few examples is weighed by $1/(N\Lambda + \delta)$. One
    rotation serves every prior precision, which enters the weights alone, and one backward pass
    every posterior.

    Args:
        model: The trained network.
        blocks: The blocks of the posteriors, in their order.
        posteriors: Posteriors of the model over the same blocks.
        x: Inputs, `[B, ...]`.
        prior_precisions: δ of every block at every grid point, `[posteriors, P, blocks]`.
        memory_bound: Bytes that one chunk's output gradients may take.
        diagonal: Compute the variances alone, which is much less work.

    Returns:
        The outputs at the mean, `[B, C]`, and the covariances, `[posteriors, P, B, C, C]`, or their
        diagonals `[posteriors, P, B, C]`.

    Raises:
        ValueError: If the outputs are not `[B, C]` or not finite.
    """
    network = shadow(model)
    tap = Tap(network, list(dict.fromkeys(block.layer for block in blocks)))
    means, covariances = [], []
    start, chunk = 0, 1  # The first example shows how much memory one takes.
    while start < len(x):
        part = x[start : start + chunk]
        outputs = tap.forward(part)
        check_outputs(outputs)
        if start == 0:
            chunk = max(1, memory_bound // (tap.output_bytes() * outputs.shape[-1]))
        columns = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        columns = columns.unsqueeze(1).expand(-1, len(part), -1)
        size = outputs.shape[1:] if diagonal else 2 * outputs.shape[1:]
        total = outputs.new_zeros(*prior_precisions.shape[:2], len(part), *size)
        for path, uses in tap.backward(outputs, columns):
            of_layer = [(i, block) for i, block in enumerate(blocks) if block.layer == path]
            layer = network.get_submodule(path)
            _add_layer(total, layer, of_layer, uses, posteriors, prior_precisions, diagonal)
        covariances.append(total)
        means.append(outputs.detach())
        start += len(part)
    covariance = torch.cat(covariances, dim=2)
    return torch.cat(means), covariance if diagonal else (covariance + covariance.mT) / 2


def _add_layer(
    total: Float[Tensor, "posteriors grid batch outputs *outputs"],
    layer: nn.Module,
    blocks: Sequence[tuple[int, Block]],
    uses: Uses,
    posteriors: Sequence[GaussianPosterior],
    prior_precisions: Float[Tensor, "posteriors grid blocks"],
    diagonal: bool,
) -> None:
    """Add what one layer's blocks (with their positions) give to the functional covariances."""
    weigh = _weighted_squares if diagonal else _weighted_gram
    for index, block in blocks:
        for covariances, posterior, grid in zip(total, posteriors, prior_precisions, strict=True):
            operator = posterior.curvature.blocks[block.name]
            curvature = posterior.num_data * operator.magnitudes.flatten()
            deltas = grid[:, index]
            for part, J in rotated_jacobians(layer, block, uses, operator.U_G, operator.U_A):
                covariances[:, part] += weigh(J.flatten(2), curvature, deltas)


def _weighted_squares(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs"]:
    r"""`Σ_i Ĵ_ci² / (curvature_i + δ_p)` for every δ, `[P, B, C]`."""
    squares = rows.flatten(0, 1)
    width = max(1, _SLICE // len(squares))
    sums = rows.new_zeros(len(squares), len(deltas))
    for part, c in zip(squares.split(width, 1), curvature.split(width), strict=True):
        sums.addmm_(part.square(), (c[:, None] + deltas).reciprocal())
    return sums.T.unflatten(1, rows.shape[:2])


def _weighted_gram(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    r"""`Σ_i Ĵ_ci Ĵ_ki / (curvature_i + δ_p)` for every δ, `[P, B, C, C]`.

    For a few δ each is a product of its own. For many, the products `Ĵ_ci Ĵ_ki` of each pair of
    outputs are formed once, and a single matrix product weighs them for the whole grid. Columns are
    taken in slices that stay in the processor's cache.
    """
    batch, num_outputs = rows.shape[:2]
    pairs = num_outputs * (num_outputs + 1) // 2
    as_pairs = len(deltas) > _PAIRS_FROM
    width = max(1, _SLICE // (batch * (pairs if as_pairs else num_outputs)))
    if not as_pairs:
        total = rows.new_zeros(len(deltas), batch, num_outputs, num_outputs)
        for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
            for point, delta in enumerate(deltas):
                total[point] += (part / (c + delta)) @ part.mT
        return total
    sums = rows.new_zeros(batch * pairs, len(deltas))
    for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
        products = part.new_empty(batch, pairs, part.shape[2])
        first = 0
        for output in range(num_outputs):
            last = first + num_outputs - output
            torch.mul(part[:, output, None], part[:, output:], out=products[:, first:last])
            first = last
        sums.addmm_(products.flatten(0, 1), (c[:, None] + deltas).reciprocal())
    upper = torch.triu_indices(num_outputs, num_outputs, device=rows.device)
    total = rows.new_empty(len(deltas), batch, num_outputs, num_outputs)
    by_pair = sums.unflatten(0, (batch, pairs)).permute(2, 0, 1)
    total[:, :, upper[0], upper[1]] = by_pair
    total[:, :, upper[1], upper[0]] = by_pair
    return total


def map_outputs(model: nn.Module, x: Tensor) -> Float[Tensor, "batch outputs"]:
    """The trained network's outputs, `[B, C]`."""
    with torch.no_grad():
        outputs = shadow(model)(x)
    check_outputs(outputs)
    return outputs


def sample_outputs(
    mean: Float[Tensor, "batch outputs"],
    covariance: Float[Tensor, "batch outputs outputs"],
    num_samples: int,
    generator: torch.Generator | None,
) -> Float[Tensor, "samples batch outputs"]:
    """Draw outputs from their Gaussian, `[S, B, C]`; singular covariances are fine."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn(
        num_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device
    )
    return mean + torch.einsum("bij,sbj->sbi", root, noise)


def linearised_outputs(
    model: nn.Module,
    names: Sequence[str],
    x: Tensor,
    parameters: Float[Tensor, "samples parameters"],
) -> Float[Tensor, "samples batch outputs"]:
    r"""$f_{lin}(x, \theta_s) = f(x, \theta^*) + J(x)(\theta_s - \theta^*)$ (Eq. 18), `[S, B, C]`.

    By Jacobian-vector products, vectorised over the samples in chunks.

    Args:
        model: The trained network at θ*.
        names: The Bayesian parameters, in the order of the samples' columns.
        x: Inputs, `[B, ...]`.
        parameters: Samples θ_s, `[S, D]`.
    """
    network = shadow(model)
    at = {name: network.get_parameter(name).detach() for name in names}

    def outputs_of(values: dict[str, Tensor]) -> Tensor:
        return functional_call(network, values, (x,))

    def linearised(sample: dict[str, Tensor]) -> Tensor:
        tangents = {name: sample[name] - at[name] for name in names}
        outputs, product = jvp(outputs_of, (at,), (tangents,))  # type: ignore[misc]
        return outputs + product

    return _over_samples(linearised, at, parameters)


def sampled_outputs(
    model: nn.Module,
    names: Sequence[str],
    x: Tensor,
    parameters: Float[Tensor, "samples parameters"],
) -> Float[Tensor, "samples batch outputs"]:
    """The network itself at sampled parameters, f(x, θ_s), `[S, B, C]`; arguments as above."""
    network = shadow(model)
    at = {name: network.get_parameter(name).detach() for name in names}
    return _over_samples(lambda values: functional_call(network, values, (x,)), at, parameters)


def _over_samples(
    function: Callable[[dict[str, Tensor]], Tensor], at: dict[str, Tensor], parameters: Tensor
) -> Tensor:
    sizes = [value.numel() for value in at.values()]
    results = []
    for rows in parameters.split(_SAMPLES_AT_ONCE):
        columns = rows.split(sizes, dim=1)
        samples = {
            name: part.reshape(-1, *value.shape)
            for (name, value), part in zip(at.items(), columns, strict=True)
        }
        with torch.no_grad():
            results.append(vmap(function)(samples))
    outputs = torch.cat(results)
    check_outputs(outputs.flatten(0, 1))
    return outputs
