"""Means of samples, their standard errors, and how well these are known."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST_DEGREES = 2.0
"""Of a variance whose own spread is estimated from few samples: fewer would be noise."""


def mean_of(
    samples: Float[Tensor, "*shape count"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The mean over the last dimension, its standard error, and the degrees of freedom of that.

    These are one less than the number of samples, or fewer where the samples' tails are heavy:
    the jackknife tells the spread of the variance. One sample: an infinite error, 0 degrees.
    """
    count, mean = samples.shape[-1], samples.mean(dim=-1)
    if count == 1:
        return mean, torch.full_like(mean, math.inf), torch.zeros_like(mean)
    variance, left_out = variance_and_left_out(samples)
    degrees = jackknifed_degrees_of_freedom(variance, left_out).clamp(max=count - 1)
    return mean, (variance / count).sqrt(), degrees


def variance_and_left_out(
    samples: Float[Tensor, "*shape count"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape count"]]:
    """The variance of samples, and what it is without each of them in turn (0 for less than 3)."""
    count = samples.shape[-1]
    squares = (samples - samples.mean(dim=-1, keepdim=True)) ** 2
    total = squares.sum(dim=-1)
    if count < 3:
        return total / (count - 1), torch.zeros_like(squares)
    rest = total[..., None] - squares * (count / (count - 1))
    return total / (count - 1), rest.clamp(min=0) / (count - 2)


def jackknifed_degrees_of_freedom(
    variance: Float[Tensor, "*shape"], left_out: Float[Tensor, "*shape count"]
) -> Float[Tensor, "*shape"]:
    r"""Satterthwaite's degrees of freedom of a variance, $2 v^2 / \mathrm{var}(v)$, at least 2.

    The variance of v is the jackknife's. From fewer than four samples it is not defined, and the
    degrees of freedom are one less than their number.

    Args:
        variance: The estimate v.
        left_out: The same estimate without each sample in turn.

    Reference:
        Efron. The jackknife, the bootstrap and other resampling plans. 1982.
    """
    count = left_out.shape[-1]
    if count < 4:
        return torch.full_like(variance, float(count - 1))
    deviations = left_out - left_out.mean(dim=-1, keepdim=True)
    spread = (deviations**2).sum(dim=-1) * ((count - 1) / count)
    degrees = 2 * variance**2 / spread
    # Samples that are all alike have no variance, whose spread is then no matter.
    known = (spread > 0) & degrees.isfinite()
    return torch.where(known, degrees, torch.full_like(degrees, count - 1.0)).clamp(
        min=_LEAST_DEGREES
    )


class RunningMoments:
    """The mean and the squared deviations of columns that come part by part (Welford, 1962).

    Attributes: `count`, `mean` `[n]`, `deviations` `[n]`, the sums of squares about the mean.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros(())
        self.deviations: Tensor = torch.zeros(())

    def add(self, samples: Float[Tensor, "n k"]) -> None:
        """Takes further columns."""
        before, size = self.count, samples.shape[1]
        if size == 0:
            return
        mean = samples.mean(dim=1)
        deviations = ((samples - mean[:, None]) ** 2).sum(dim=1)
        self.count = before + size
        if before == 0:
            self.mean, self.deviations = mean, deviations
            return
        step = mean - self.mean
        self.mean = self.mean + step * (size / self.count)
        self.deviations = self.deviations + deviations + step**2 * (before * size / self.count)
