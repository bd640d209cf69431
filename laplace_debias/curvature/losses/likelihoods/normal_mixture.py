"""Mixtures of normals with quantiles."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

# Halvings of the bracket: what is left of it is below the rounding of float64.
_HALVINGS = 64


class NormalMixture(MixtureSameFamily):
    r"""The mixture of S normals of equal weight, with `icdf`.

    Args:
        means: One for each normal, `[S, *batch]`.
        deviations: Their standard deviations, of the same shape.
    """

    def __init__(
        self, means: Float[Tensor, "samples *batch"], deviations: Float[Tensor, "samples *batch"]
    ) -> None:
        means, deviations = means.movedim(0, -1), deviations.movedim(0, -1)
        self._normals = Normal(means, deviations)
        super().__init__(Categorical(logits=torch.zeros_like(means)), self._normals)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile: where the mean of the S distribution functions is `value`.

        By bisection in float64, between the least and the largest of the components' quantiles.

        Args:
            value: Probabilities between 0 and 1, broadcasting to the batch shape.

        Raises:
            ValueError: For a probability that is not above 0 and below 1.
        """
        value = torch.as_tensor(value)
        if not ((value > 0) & (value < 1)).all():
            raise ValueError(
                "Probabilities of quantiles must lie above 0 and below 1, got "
                f"{float(value.min()):g} … {float(value.max()):g}."
            )
        dtype = self._normals.loc.dtype
        means, deviations = self._normals.loc.double(), self._normals.scale.double()
        value = value.to(means)
        quantiles = means + deviations * torch.special.ndtri(value).unsqueeze(-1)
        low, high = quantiles.amin(-1), quantiles.amax(-1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle.unsqueeze(-1) - means) / deviations).mean(-1)
            is_low = below < value
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        return ((low + high) / 2).to(dtype)
