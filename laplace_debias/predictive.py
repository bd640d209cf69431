"""Predictives: from a Gaussian over parameters to a distribution over targets."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call, jvp, vmap

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.fit import check_outputs
from laplace_debias.curvature.kfac.magnitudes import rotated_jacobians
from laplace_debias.curvature.likelihood import Likelihood
from laplace_debias.curvature.shadow import shadow
from laplace_debias.curvature.tap import Tap
from laplace_debias.posterior import GaussianPosterior

# Weight samples that are pushed through the network at once.
_SAMPLES_AT_ONCE = 8


def functional_moments(
    model: nn.Module,
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    x: Tensor,
    prior_precisions: Float[Tensor, "grid blocks"],
    memory_bound: int,
) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "grid batch outputs outputs"]]:
    r"""Mean and covariance of the linearised network's outputs, exact.

    $\Sigma_f(x) = J(x) P^{-1} J(x)^\top$ without ever holding $J$ `[B, C, D]`: layer by layer,
    the rotated Jacobian $\hat J$ of a few examples is weighed by $1/(N\Lambda + \delta)$. One
    pass serves every prior precision, which enters the weights alone.

    Args:
        model: The trained network.
        blocks: The blocks of the posterior, in its order.
        posterior: The posterior.
        x: Inputs, `[B, ...]`.
        prior_precisions: One δ for each block, for every grid point, `[P, blocks]`.
        memory_bound: Bytes that one chunk's output gradients may take.

    Returns:
        The outputs at the mean, `[B, C]`, and the covariances, `[P, B, C, C]`.

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
        covariances.append(_covariance(network, tap, outputs, blocks, posterior, prior_precisions))
        means.append(outputs.detach())
        start += len(part)
    return torch.cat(means), torch.cat(covariances, dim=1)


def _covariance(
    network: nn.Module,
    tap: Tap,
    outputs: Float[Tensor, "batch outputs"],
    blocks: Sequence[Block],
    posterior: GaussianPosterior,
    prior_precisions: Float[Tensor, "grid blocks"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    batch, num_outputs = outputs.shape
    columns = torch.eye(num_outputs, dtype=outputs.dtype, device=outputs.device)
    columns = columns.unsqueeze(1).expand(-1, batch, -1)
    total = outputs.new_zeros(len(prior_precisions), batch, num_outputs, num_outputs)
    for path, uses in tap.backward(outputs, columns):
        layer = network.get_submodule(path)
        for index, block in enumerate(blocks):
            if block.layer != path:
                continue
            operator = posterior.curvature.blocks[block.name]
            curvature = posterior.num_data * operator.magnitudes.flatten()
            for part, J in rotated_jacobians(layer, block, uses, operator.U_G, operator.U_A):
                rows = J.flatten(2)  # [b, C, d_out·d_in]
                for point, delta in enumerate(prior_precisions[:, index]):
                    total[point, part] += (rows / (curvature + delta)) @ rows.mT
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
    return torch.cat(results)


def predict_from_moments(
    likelihood: Likelihood,
    mean: Float[Tensor, "batch outputs"],
    covariance: Float[Tensor, "batch outputs outputs"],
    samples: int | None,
    generator: torch.Generator | None,
) -> Distribution:
    """The linearised predictive: closed form, or averaged over draws of the outputs.

    Args:
        likelihood: What the outputs mean.
        mean: `[B, C]`.
        covariance: `[B, C, C]`.
        samples: Draws of the outputs; None for the likelihood's closed form.
        generator: For the draws.
    """
    if samples is None:
        return likelihood.predictive(mean, covariance)
    return likelihood.mixture(sample_outputs(mean, covariance, samples, generator))
