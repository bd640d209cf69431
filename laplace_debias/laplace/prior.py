"""The mean of the prior, as a user gives it."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.network.split_model import is_shard

# One number, one per Bayesian parameter [D], or tensors by the parameters' names.
PriorMean = float | Tensor | Mapping[str, Tensor]


def check_kind(value: Any) -> None:
    """Require something that may be a prior's mean.

    Raises:
        TypeError: Otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor, Mapping)):
        raise TypeError(
            "prior_mean must be a number, a tensor or a mapping from the parameters' names to "
            f"tensors, such as a state_dict; got {type(value).__name__}."
        )


def prior_mean_from(
    value: PriorMean, model: nn.Module, names: list[str]
) -> Float[Tensor, ""] | Float[Tensor, " parameters"] | None:
    """The prior's mean, float64, on the model's device; None if it is zero.

    Args:
        value: One number, a vector `[D]` in the model's order, or a mapping that has every Bayesian
            parameter by its name; others in it, as in a checkpoint, are not looked at.
        model: The model.
        names: The Bayesian parameters.

    Raises:
        TypeError: As `check_kind`.
        ValueError: If it is not finite, of another shape, or lacks a parameter.
    """
    check_kind(value)
    parameters = [model.get_parameter(name) for name in names]
    if isinstance(value, Mapping):
        value = torch.cat([_named(value, n, p) for n, p in zip(names, parameters, strict=True)])
    mean = torch.as_tensor(value, dtype=torch.float64, device=parameters[0].device).detach().clone()
    size = sum(parameter.numel() for parameter in parameters)
    if mean.shape not in ((), (size,)):
        raise ValueError(
            f"prior_mean must be one number, or one for each of the {size} Bayesian parameters in "
            f"the order of param_names, got shape {tuple(mean.shape)}."
        )
    if not mean.isfinite().all():
        raise ValueError("prior_mean holds NaN or Inf: check where it comes from.")
    return mean if mean.any() else None


def _named(value: Mapping[str, Any], name: str, parameter: Tensor) -> Tensor:
    found = value.get(name)
    if found is None:
        raise ValueError(
            f"prior_mean lacks {name}: give a tensor for every Bayesian parameter (param_names), "
            "zeros for a new layer, say."
        )
    if isinstance(found, Tensor) and is_shard(found):
        raise ValueError(
            f"prior_mean has {name} split over processes: give whole tensors, "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), taken before the fine-tuning."
        )
    if not isinstance(found, Tensor) or found.shape != parameter.shape:
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"prior_mean has {came} for {name}: expected the parameter's shape "
            f"{tuple(parameter.shape)}."
        )
    return found.detach().double().to(parameter.device).flatten()
