"""The prior, as a user gives it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.network.precision import wide
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.posterior import check_prior_precision
from laplace_debias.system.checks import real

# One number, or one per block.
PriorPrecision = float | Tensor
# One number, one per Bayesian parameter [D], or tensors by the parameters' names.
PriorMean = float | Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Prior:
    """The settings that need no refit: the prior, the temperature of the likelihood, the link.

    Attributes:
        precision: δ, one number or one per block, float64.
        temperature: T.
        given_mean: The mean as the user gave it.
        mean: The same for the Bayesian parameters, as `prior_mean_from` gives it; None if it is
            zero, or as long as they are not known.
        link: What logits become probabilities by; None for the default.

    Raises:
        TypeError: As `check_kind`.
    """

    precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    temperature: float
    given_mean: PriorMean
    mean: Float[Tensor, ""] | Float[Tensor, " parameters"] | None = None
    link: Link | None = None

    def __post_init__(self) -> None:
        check_kind(self.given_mean)

    def of(self, model: nn.Module, parameters: BayesianParameters) -> "Prior":
        """The same for Bayesian parameters.

        Args:
            model: The model, without wrappers.
            parameters: Its Bayesian parameters.

        Raises:
            TypeError: As `prior_mean_from`.
            ValueError: If the prior's precision or mean does not fit them.
        """
        dtype = model.get_parameter(parameters.names[0]).dtype
        check_prior_precision(self.precision, len(parameters.block_names), wide(dtype))
        return replace(self, mean=prior_mean_from(self.given_mean, model, parameters.names))


def prior_precision_from(
    value: PriorPrecision, first: Tensor, num_blocks: int | None
) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
    """The prior precision, float64, on the model's device.

    Args:
        value: One number, or one per block.
        first: The first Bayesian parameter.
        num_blocks: How many blocks there are; None if the fit that finds them checks their number.

    Raises:
        ValueError: As `check_prior_precision`.
    """
    precision = real(value, "prior_precision", first.device).detach().clone()
    check_prior_precision(
        precision, precision.numel() if num_blocks is None else num_blocks, wide(first.dtype)
    )
    return precision


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


def _named(value: Mapping[str, Any], name: str, parameter: Tensor) -> Tensor:
    found = value.get(name)
    if found is None:
        raise ValueError(
            f"prior_mean lacks {name}: give a tensor for every Bayesian parameter (param_names), "
            "zeros for a new layer, say."
        )
    if hasattr(found, "full_tensor"):
        raise ValueError(
            f"prior_mean has {name} split over processes: give whole tensors "
            "(found.full_tensor()), taken before the fine-tuning."
        )
    if not isinstance(found, Tensor) or found.shape != parameter.shape:
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"prior_mean has {came} for {name}: expected the parameter's shape "
            f"{tuple(parameter.shape)}."
        )
    return found.detach().double().to(parameter.device).flatten()
