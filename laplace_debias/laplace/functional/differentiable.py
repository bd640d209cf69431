"""Moments of the linearised outputs as differentiable functions of the inputs."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vmap

from laplace_debias.curvature.network.calling import call, differentiable
from laplace_debias.curvature.network.inputs import Inputs, Record, tensors_of, with_tensors
from laplace_debias.laplace.functional.context import prediction_context
from laplace_debias.laplace.functional.request import check_covariance
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.system.memory import is_out_of_memory


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

        def outputs_for_example(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
            rows = [tensor.unsqueeze(0) for tensor in tensors]
            return call(network, with_tensors(context.x, rows), parameters).squeeze(0)

        with differentiable(network):
            mean = call(network, context.x, trained)
            if mean.ndim != 2:
                raise NotImplementedError(
                    "`differentiable=True` supports only outputs [B, C], but the outputs have "
                    f"shape {tuple(mean.shape)}. Remove `differentiable=`."
                )
            tensors = tuple(tensors_of(context.x))
            in_dims = (None, *[0] * len(tensors))
            jacobian = jacrev(outputs_for_example)
            try:
                jacobians = vmap(jacobian, in_dims)(trained, *tensors)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                # Some layers, such as an LSTM, cannot be vectorised over the examples, so the
                # Jacobians are computed one by one.
                by_example = [jacobian(trained, *rows) for rows in zip(*tensors, strict=True)]
                jacobians = {name: torch.stack([J[name] for J in by_example]) for name in trained}
    # A parameter may be a single number without dimensions, so its Jacobian is `[B, C]`.
    by_parameter = [jacobians[name].reshape(*mean.shape, trained[name].numel()) for name in trained]
    J = torch.cat(by_parameter, dim=2)
    if fitted.config.structure.has_independent_outputs:
        covariance = _independent_covariance(fitted.posterior, J, joint)
    else:
        rows = J.flatten(0, 1)
        products = (fitted.posterior.covariance @ rows.T).T.view_as(J)
        if joint:
            products = products.flatten(0, 1)
            covariance = rows @ products.mT
        else:
            covariance = J @ products.mT
        covariance = (covariance + covariance.mT) / 2
        if joint:
            covariance = covariance.unflatten(1, mean.shape).unflatten(0, mean.shape)
    check_covariance(covariance.detach(), fitted.posterior.deltas()[:1])
    return mean, covariance


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
