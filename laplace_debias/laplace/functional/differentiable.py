"""Moments of the linearised outputs as differentiable functions of the inputs."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jacrev, vmap

from laplace_debias.curvature.network.calling import call, differentiable
from laplace_debias.curvature.network.inputs import Inputs, Record, tensors_of, with_tensors
from laplace_debias.laplace.functional.context import prediction_context
from laplace_debias.laplace.functional.request import check_covariance
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.system.memory import suppress_unsupported


def differentiable_moments(
    fitted: FittedPosterior, x: Inputs | Record, joint: bool = False
) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "batch *covariance"]]:
    r"""Compute mean and covariance of the outputs, differentiable in the inputs.

    The Jacobians `[B, C, D]` are kept in memory, so use this function only for a few inputs, for
    example to optimise an input.

    Args:
        fitted: The fit.
        x: Inputs, `[B, ...]`.
        joint: Whether to include covariances between inputs, as `[B, C, B, C]` instead of
            `[B, C, C]`.

    Raises:
        NotImplementedError: If outputs have positions, or if the model is sharded.
    """
    with prediction_context(fitted, x, keeps_graph=True) as context, torch.enable_grad():
        network = context.network
        trained = {name: network.get_parameter(name).detach() for name in fitted.parameters.names}
        with differentiable(network):
            mean = call(network, context.x, trained)
            if mean.ndim != 2:
                raise NotImplementedError(
                    "`differentiable=True` supports only outputs [B, C], but the outputs have "
                    f"shape {tuple(mean.shape)}. Remove `differentiable=`."
                )
            jacobians = _jacobians(network, context.x, trained)
    # A parameter may be a single number without dimensions, so its Jacobian is `[B, C]`.
    by_parameter = [jacobians[name].reshape(*mean.shape, trained[name].numel()) for name in trained]
    J = torch.cat(by_parameter, dim=2)
    if fitted.config.structure.has_independent_outputs:
        covariance = _independent_covariance(fitted.posterior, J, joint)
    else:
        covariance = _shared_covariance(fitted.posterior, J, joint)
    check_covariance(covariance.detach(), fitted.posterior.deltas()[:1])
    return mean, covariance


def _jacobians(
    network: nn.Module, x: Inputs, trained: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, "batch outputs *shape"]]:
    """Compute the Jacobian of each example's outputs with respect to each parameter."""

    def outputs_for_example(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        rows = [tensor.unsqueeze(0) for tensor in tensors]
        return call(network, with_tensors(x, rows), parameters).squeeze(0)

    jacobian = jacrev(outputs_for_example)
    tensors = tuple(tensors_of(x))
    in_dims = (None, *[0] * len(tensors))
    with suppress_unsupported(RuntimeError):
        return vmap(jacobian, in_dims)(trained, *tensors)
    # Some layers, such as an LSTM, cannot be vectorised over the examples, so the Jacobians are
    # computed one by one.
    by_example = [jacobian(trained, *rows) for rows in zip(*tensors, strict=True)]
    return {name: torch.stack([J[name] for J in by_example]) for name in trained}


def _shared_covariance(
    posterior: GaussianPosterior, J: Float[Tensor, "batch outputs parameters"], joint: bool
) -> Float[Tensor, "batch *covariance"]:
    """Compute the covariance of outputs under one posterior over the parameters."""
    rows = J.flatten(0, 1)
    products = (posterior.covariance @ rows.T).T
    if not joint:
        covariance = J @ products.view_as(J).mT
        return (covariance + covariance.mT) / 2
    covariance = rows @ products.mT
    covariance = (covariance + covariance.mT) / 2
    return covariance.unflatten(1, J.shape[:2]).unflatten(0, J.shape[:2])


def _independent_covariance(
    posterior: GaussianPosterior, J: Float[Tensor, "batch outputs parameters"], joint: bool
) -> Float[Tensor, "batch *covariance"]:
    """Compute the covariance of outputs that have separate posteriors."""
    blocks = []
    for rows, covariance in zip(J.unbind(1), posterior.covariances_by_output, strict=True):
        products = (covariance @ rows.T).T
        output_covariance = rows @ products.T if joint else (rows * products).sum(1)
        blocks.append(output_covariance)
    by_output = torch.stack(blocks, dim=-1).diag_embed()
    return by_output.movedim(2, 1) if joint else by_output
