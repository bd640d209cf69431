"""The Gaussian prior over the Bayesian parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.information import Information
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.system.checks import real

# One number, or one per block.
PriorPrecision = float | Tensor
# One number, or one per Bayesian parameter [D].
PriorMean = float | Tensor


@dataclass(frozen=True, eq=False)
class Prior:
    """The prior N(μ, P₀⁻¹), where P₀ is diag(δ) plus the information of any earlier data.

    Attributes:
        precision: δ, one number or one per block, in units of 1/parameter², in float64.
        mean: μ, one number or one per Bayesian parameter, in float64; None for zero.
        information: The information of earlier data at temperature 1, which is added to diag(δ);
            None if there is no earlier data.
    """

    precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    mean: Float[Tensor, ""] | Float[Tensor, " parameters"] | None = None
    information: Information | None = None

    @classmethod
    def checked(cls, precision: Any, mean: Any, device: torch.device) -> "Prior":
        """Check a user's numbers, and build a prior from them."""
        return cls(prior_precision_from(precision, device), prior_mean_from(mean, device))

    def with_precision(self, precision: float | Sequence[float] | Tensor) -> "Prior":
        """Return the prior with another δ, one number or one per block."""
        device = self.precision.device
        return replace(
            self, precision=torch.as_tensor(precision, dtype=torch.float64, device=device)
        )

    def for_parameters(self, parameters: ParameterBlocks) -> "Prior":
        """Return the prior in its simplest form, after checking that it matches the parameters.

        Raises:
            ValueError: If the prior precision does not have one value or one per block, or the mean
                does not have one value or one per parameter.
        """
        num_blocks = len(parameters.block_names)
        precision = self.precision
        if precision.shape == (1,) and num_blocks == 1:
            precision = precision[0]
        check_prior_precision(precision, num_blocks)
        mean = self.mean
        if mean is not None and mean.shape not in ((), (parameters.size,)):
            raise ValueError(
                f"`prior_mean` has shape {tuple(mean.shape)}. Pass one number, or one for "
                f"each of the {parameters.size} Bayesian parameters in the order of "
                "`param_names`."
            )
        if mean is not None and not mean.any():
            mean = None
        return replace(self, precision=precision, mean=mean)

    def to(self, device: torch.device) -> "Prior":
        """Move the prior to a device."""
        mean = None if self.mean is None else self.mean.to(device)
        information = self.information
        if information is not None:
            information = information.to(device)
        return Prior(self.precision.to(device), mean, information)


def check_prior_precision(prior_precision: Tensor, num_blocks: int) -> list[float]:
    """Require one positive finite number, or one per block, and return them as a list."""
    if prior_precision.shape not in ((), (num_blocks,)):
        raise ValueError(
            f"The prior precision has shape {tuple(prior_precision.shape)}. Pass one number, or "
            f"one for each of the {num_blocks} blocks."
        )
    values: list[float] = prior_precision.detach().double().reshape(-1).tolist()
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(
                "The prior precision must be positive and finite, got "
                f"{prior_precision.tolist()}. For an almost flat prior, pass a small number, "
                "such as 1e-6."
            )
    return values


def prior_precision_from(value: Any, device: torch.device) -> Tensor:
    """Check a prior precision, one number or several, and convert it to float64."""
    precision = real(value, "prior_precision", device).detach().clone()
    # Any number of entries is accepted, because the number of blocks may not be known yet.
    check_prior_precision(precision, precision.numel())
    return precision


def prior_mean_from(value: Any, device: torch.device) -> Tensor:
    """Check a prior mean, one finite number or several, and convert it to float64."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(
            f"`prior_mean` is a {type(value).__name__}. Pass a number, or a tensor [D] in the "
            "order of `param_names`. To join the entries of a state_dict, use "
            "torch.cat([state[name].flatten() for name in la.param_names])."
        )
    mean = real(value, "prior_mean", device).detach().clone()
    if not mean.isfinite().all():
        raise ValueError("`prior_mean` contains NaN or Inf. Check how it was computed.")
    return mean
