"""The mean of probes' quadratic forms, with an error that uses all of the products."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimators.moments import (
    RunningMoments,
    jackknifed_degrees_of_freedom,
    mean_of,
)

_KEPT = 16
"""Probes whose products are kept for the degrees of freedom: 120 pairs."""

_KEPT_ELEMENTS = 2**26
"""Entries of the products kept at most: 256 MiB in float32, and the probes as much."""

_LEAST_KEPT = 4

_KEPT_OF_LENGTHS, _LEAST_KEPT_OF_LENGTHS = 64, 12


class QuadraticForms:
    r"""$\omega^\top B\, \omega$ over probes, for a trace: mean, standard error, degrees of freedom.

    For a symmetric matrix the vectors $B\omega$ tell the variance of a form far better than the
    forms themselves, of which there are few. With $y$ the part of $B\omega$ that makes a form vary,
    $\mathrm{var}(\omega^\top B \omega) = 2\,\mathbb{E}\|y\|^2$:

    - Gaussian: $y = B\omega$;
    - Rademacher: $y = (B - \mathrm{diag}\,B)\,\omega$, so that n entries of $\omega \odot B\omega$
      have their sample variances added up;
    - spherical: $y = B\omega - \omega\,(\omega^\top B\omega) / n$.

    $\|y\|^2$ is a weighted sum of χ² variables. By Satterthwaite the mean of m has $m\,
    \mathrm{tr}(C)^2 / \mathrm{tr}(C^2)$ degrees of freedom, C the covariance of y: m where one
    eigenvalue is all, many times m where many matter. $\mathrm{tr}(C^2)$ is the mean square of the
    products $y_i^\top y_j$ of different probes. Of a matrix that is not symmetric the forms' own
    sample variance is taken.

    Args:
        distribution: Of the probes, a key of `probes.DISTRIBUTIONS`.
        is_symmetric: Whether B is symmetric.

    Reference:
        Box. Some theorems on quadratic forms applied in the study of analysis of variance problems.
        Annals of Mathematical Statistics, 1954.
    """

    def __init__(self, distribution: str, is_symmetric: bool) -> None:
        self._distribution, self._is_symmetric = distribution, is_symmetric
        self._samples: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._entries = RunningMoments()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._num_kept = self._length = 0

    def add(self, probes: Float[Tensor, "n k"], images: Float[Tensor, "n k"]) -> None:
        """Takes further probes, as columns, and B times them."""
        self._length, entries = len(probes), probes * images
        self._samples.append(entries.sum(dim=0))
        if not self._is_symmetric:
            return
        if self._distribution == "rademacher":
            self._entries.add(entries)
        else:
            self._squares.append((images**2).sum(dim=0))
        more = min(_KEPT, _KEPT_ELEMENTS // len(probes)) - self._num_kept
        if more > 0:
            self._kept.append((probes[:, :more].clone(), images[:, :more].clone()))
            self._num_kept += self._kept[-1][0].shape[1]

    def mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, its standard error and the degrees of freedom of that.

        One probe: an infinite error, 0 degrees.
        """
        samples = torch.cat(self._samples)
        count, mean = len(samples), samples.mean()
        if not self._is_symmetric or count == 1:
            return mean_of(samples)
        if self._distribution == "rademacher":
            # The first and the last factor: of a form, of the mean of them.
            variance = 2 * self._entries.deviations.sum() / (count - 1) / count
            degrees = count - 1
        else:
            squares = torch.cat(self._squares)
            if self._distribution == "spherical":
                squares = (squares - samples**2 / self._length).clamp(min=0)
            variance, degrees = 2 * squares.mean() / count, count
        return mean, variance.sqrt(), degrees * self._effective_number(mean)

    def _effective_number(self, mean: Tensor) -> Tensor:
        """tr(C)²/tr(C²), between 1 and n; 1, which is safe, where too little could be kept."""
        one = torch.ones_like(mean)
        if self._num_kept < _LEAST_KEPT:
            return one
        probes, images = (torch.cat(parts, dim=1) for parts in zip(*self._kept, strict=True))
        if self._distribution == "rademacher":
            images = images - probes * self._entries.mean[:, None]
        elif self._distribution == "spherical":
            images = images - probes * (mean / len(probes))
        gram = images.T @ images
        own = gram.diagonal()
        pairs = len(own) * (len(own) - 1)
        mixed = ((gram**2).sum() - (own**2).sum()) / pairs
        number = own.mean() ** 2 / mixed
        return torch.where(number.isfinite(), number, one).clamp(min=1, max=len(probes))


class SquaredLengths:
    r"""$\|A\omega\|^2$ over probes, for a squared norm: mean, standard error, degrees of freedom.

    With Gaussian probes the variance is $2\,\mathrm{tr}((A^\top A)^2)$, the mean of $2(y_i^\top
    y_j)^2$ over pairs of the vectors $y = A\omega$; with spherical ones the same of $A^\top A$ less
    the mean of its eigenvalues. Degrees of freedom are the jackknife's. With Rademacher probes the
    diagonal of $A^\top A$ drops out, which is not known: the sample variance is taken.

    Args:
        distribution: Of the probes, a key of `probes.DISTRIBUTIONS`.
    """

    def __init__(self, distribution: str) -> None:
        self._distribution = distribution
        self._samples: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._num_kept = 0

    def add(self, probes: Float[Tensor, "n k"], images: Float[Tensor, "m k"]) -> None:
        """Takes further probes, as columns, and A times them."""
        self._samples.append((images**2).sum(dim=0))
        longest = max(len(probes), len(images))
        more = min(_KEPT_OF_LENGTHS, _KEPT_ELEMENTS // longest) - self._num_kept
        if more > 0 and self._distribution != "rademacher":
            self._kept.append((probes[:, :more].clone(), images[:, :more].clone()))
            self._num_kept += self._kept[-1][0].shape[1]

    def mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, its standard error and the degrees of freedom of that.

        One probe: an infinite error, 0 degrees.
        """
        samples = torch.cat(self._samples)
        if self._num_kept < min(len(samples), _LEAST_KEPT_OF_LENGTHS) or len(samples) < 4:
            return mean_of(samples)
        mean = samples.mean()
        probes, images = (torch.cat(parts, dim=1) for parts in zip(*self._kept, strict=True))
        products = images.T @ images
        if self._distribution == "spherical":
            products = products - (mean / len(probes)) * (probes.T @ probes)
        squares = (products**2).fill_diagonal_(0)
        count = len(squares)
        total, rows = squares.sum(), squares.sum(dim=1)
        mean_square = total / (count * (count - 1))
        without = (total - 2 * rows) / ((count - 1) * (count - 2))
        degrees = jackknifed_degrees_of_freedom(mean_square, without)
        return mean, (2 * mean_square / len(samples)).sqrt(), degrees
