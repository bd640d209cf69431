"""Samples of the outputs: of their Gaussian, and of the network at sampled parameters."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp, vmap

from laplace_debias.curvature.network.inputs import Inputs, call_with
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.operators.eigh import eigh
from laplace_debias.system.threads import FORWARD_MODE

# Weight samples that are pushed through the network at once.
SAMPLES_AT_ONCE = 8


def sample_outputs(
    mean: Float[Tensor, "batch outputs"],
    covariance: Float[Tensor, "batch outputs outputs"],
    num_samples: int,
    generator: torch.Generator | None,
) -> Float[Tensor, "samples batch *outputs"]:
    """Draw outputs from their Gaussian, `[S, B, C]`; singular covariances are fine."""
    values, vectors = eigh(covariance, "the functional covariance")
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn(
        num_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device
    )
    return mean + torch.einsum("bij,sbj->sbi", root, noise)


def outputs_of_samples(
    network: nn.Module,
    names: Sequence[str],
    x: Inputs,
    parameters: Float[Tensor, "samples parameters"],
    linear: bool,
) -> Float[Tensor, "samples batch *outputs"]:
    r"""Outputs at sampled parameters, `[S, B, C]`: of the network itself, or linearised.

    $f_{lin}(x, \theta_s) = f(x, \theta^*) + J(x)(\theta_s - \theta^*)$ (Eq. 18), by Jacobian-vector
    products, vectorised over the samples in chunks.
    """
    at = {name: network.get_parameter(name).detach() for name in names}

    def outputs_of(values: dict[str, Tensor]) -> Tensor:
        return call_with(network, values, x)

    def linearised(sample: dict[str, Tensor]) -> Tensor:
        tangents = {name: sample[name] - at[name] for name in names}
        outputs, product = jvp(outputs_of, (at,), (tangents,))  # type: ignore[misc]
        return outputs + product

    sizes, results = [value.numel() for value in at.values()], []
    # One thread at a time. Reverse mode twice would need no lock, but for a convolutional network
    # it takes twice as long on a CPU, and it holds the activations of a batch twice over.
    lock: AbstractContextManager = FORWARD_MODE if linear else nullcontext()
    for rows in parameters.split(SAMPLES_AT_ONCE):
        columns = rows.split(sizes, dim=1)
        samples = {
            name: part.reshape(-1, *value.shape)
            for (name, value), part in zip(at.items(), columns, strict=True)
        }
        # For some of the samples only, so that other threads take turns.
        with torch.no_grad(), lock:
            results.append(vmap(linearised if linear else outputs_of)(samples))
    outputs = torch.cat(results)
    check_outputs(outputs.flatten(0, 1))
    return outputs
