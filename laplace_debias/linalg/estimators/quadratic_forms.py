"""The mean of probes' quadratic forms, with an error that uses all of the products."""

import torch
from jaxtyping import Float
from torch import Tensor


def mean_of(
    samples: Float[Tensor, "*shape count"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The mean over the last dimension, its standard error, and the degrees of freedom of that.

    One sample: an infinite error, 0 degrees.
    """
    count, mean = samples.shape[-1], samples.mean(dim=-1)
    degrees = torch.full_like(mean, count - 1.0)
    if count == 1:
        return mean, torch.full_like(mean, torch.inf), degrees
    return mean, (samples.var(dim=-1) / count).sqrt(), degrees


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
        mean = samples.mean(dim=1)
        deviations = ((samples - mean[:, None]) ** 2).sum(dim=1)
        self.count = before + size
        step = mean - self.mean
        self.mean = self.mean + step * (size / self.count)
        self.deviations = self.deviations + deviations + step**2 * (before * size / self.count)


_KEPT = 16
"""Probes whose products are kept for the degrees of freedom: 120 pairs."""

_KEPT_ELEMENTS = 2**26
"""Entries of the products kept at most: 256 MiB in float32, and the probes as much."""

_LEAST_KEPT = 4


class QuadraticForms:
    r"""$\omega^\top B\, \omega$ over probes of ±1: mean, standard error, degrees of freedom.

    For a symmetric matrix the vectors $B\omega$ tell the variance of a form far better than the
    forms themselves, of which there are few. With $y = (B - \mathrm{diag}\,B)\,\omega$,
    $\mathrm{var}(\omega^\top B \omega) = 2\,\mathbb{E}\|y\|^2$: the sample variances of the n
    entries of $\omega \odot B\omega$ add up.

    $\|y\|^2$ is a weighted sum of χ² variables. By Satterthwaite the mean of m has $m\,
    \mathrm{tr}(C)^2 / \mathrm{tr}(C^2)$ degrees of freedom, C the covariance of y: m where one
    eigenvalue is all, many times m where many matter. $\mathrm{tr}(C^2)$ is the mean square of the
    products $y_i^\top y_j$ of different probes. Of a matrix that is not symmetric the forms' own
    sample variance is taken.

    Reference:
        Box. Some theorems on quadratic forms applied in the study of analysis of variance problems.
        Annals of Mathematical Statistics, 1954.
    """

    def __init__(self, is_symmetric: bool) -> None:
        self._is_symmetric = is_symmetric
        self._samples: list[Tensor] = []
        self._entries = RunningMoments()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._num_kept = 0

    def add(self, probes: Float[Tensor, "n k"], images: Float[Tensor, "n k"]) -> None:
        """Takes further probes, as columns, and B times them."""
        entries = probes * images
        self._samples.append(entries.sum(dim=0))
        if not self._is_symmetric:
            return
        self._entries.add(entries)
        more = min(_KEPT, _KEPT_ELEMENTS // len(probes)) - self._num_kept
        if more > 0:
            self._kept.append((probes[:, :more].clone(), images[:, :more].clone()))
            self._num_kept += self._kept[-1][0].shape[1]

    def mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, its standard error and the degrees of freedom of that.

        One probe: an infinite error, 0 degrees.
        """
        samples = torch.cat(self._samples)
        count = len(samples)
        if not self._is_symmetric or count == 1:
            return mean_of(samples)
        # The first and the last factor: of a form, of the mean of them.
        variance = 2 * self._entries.deviations.sum() / (count - 1) / count
        mean = samples.mean()
        return mean, variance.sqrt(), (count - 1) * self._effective_number(mean)

    def _effective_number(self, mean: Tensor) -> Tensor:
        """tr(C)²/tr(C²), between 1 and n; 1, which is safe, where too little could be kept."""
        one = torch.ones_like(mean)
        if self._num_kept < _LEAST_KEPT:
            return one
        probes, images = (torch.cat(parts, dim=1) for parts in zip(*self._kept, strict=True))
        images = images - probes * self._entries.mean[:, None]
        gram = images.T @ images
        own = gram.diagonal()
        pairs = len(own) * (len(own) - 1)
        mixed = ((gram**2).sum() - (own**2).sum()) / pairs
        number = own.mean() ** 2 / mixed
        return torch.where(number.isfinite(), number, one).clamp(min=1, max=len(probes))
