"""The prior, as a user gives it."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.system.checks import real

# One number, or one per block.
PriorPrecision = float | Tensor
# One number, or one per Bayesian parameter [D].
PriorMean = float | Tensor


def check_kind(value: Any) -> None:
    """Require something that may be a prior's mean.

    Raises:
        TypeError: Otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(
            "prior_mean must be a number or a tensor [D] in the order of param_names, got "
            f"{type(value).__name__}: of a state_dict join its entries, "
            "torch.cat([state[name].flatten() for name in la.param_names])."
        )


def prior_mean_from(
    value: PriorMean, model: nn.Module, names: list[str]
) -> Float[Tensor, ""] | Float[Tensor, " parameters"] | None:
    """The prior's mean, float64, on the model's device; None if it is zero.

    Args:
        value: One number, or a vector `[D]` in the model's order.
        model: The model.
        names: The Bayesian parameters.

    Raises:
        ValueError: If it is not finite, or of another shape.
    """
    parameters = [model.get_parameter(name) for name in names]
    mean = real(value, "prior_mean", parameters[0].device).detach().clone()
    size = sum(parameter.numel() for parameter in parameters)
    if mean.shape not in ((), (size,)):
        raise ValueError(
            f"prior_mean must be one number, or one for each of the {size} Bayesian parameters in "
            f"the order of param_names, got shape {tuple(mean.shape)}."
        )
    if not mean.isfinite().all():
        raise ValueError("prior_mean holds NaN or Inf: check where it comes from.")
    return mean if mean.any() else None
