"""Means of samples, their standard errors, and how well these are known."""

import torch
from jaxtyping import Float
from torch import Tensor


def mean_of(
    samples: Float[Tensor, "*shape count"], covariance: Tensor | float = 0.0
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The mean over the last dimension, its standard error, and the degrees of freedom of that.

    One sample: an infinite error, 0 degrees.

    Args:
        samples: `[*shape, count]`.
        covariance: Of two samples, where they depend on each other.
    """
    count, mean = samples.shape[-1], samples.mean(dim=-1)
    degrees = torch.full_like(mean, count - 1.0)
    if count == 1:
        return mean, torch.full_like(mean, torch.inf), degrees
    return mean, (samples.var(dim=-1) / count + covariance).sqrt(), degrees


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
