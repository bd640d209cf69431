"""Means of quadratic forms over probes, with standard errors that use all products."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.results import Estimate


class ValueAndError(NamedTuple):
    """An estimate in the dtype of its computation, often float64.

    Attributes:
        value: The estimate.
        standard_error: The standard error of the value.
        degrees_of_freedom: The degrees of freedom of the standard error.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    degrees_of_freedom: Float[Tensor, "*shape"]

    def to_estimate(self, num_matvecs: int, dtype: torch.dtype) -> Estimate:
        """Convert to the dtype of the operator, and add the number of products."""
        return Estimate(
            self.value.to(dtype),
            self.standard_error.to(dtype),
            num_matvecs,
            degrees_of_freedom=self.degrees_of_freedom.to(dtype),
        )


def mean_of(samples: Float[Tensor, "*shape count"]) -> ValueAndError:
    """Compute the mean over the last dimension, with its standard error.

    For a single sample, the standard error is infinite and the degrees of freedom are 0.
    """
    count = samples.shape[-1]
    mean = samples.mean(dim=-1)
    standard_error = torch.full_like(mean, torch.inf)
    if count > 1:
        standard_error = (samples.var(dim=-1) / count).sqrt()
    return ValueAndError(mean, standard_error, torch.full_like(mean, count - 1.0))


def at_least_rounding(
    standard_error: Float[Tensor, "*shape"], magnitude: Float[Tensor, "*shape"], dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Raise a standard error to at least eight rounding errors of `magnitude`, the sum `Σ|terms|`.

    The dtype is that of the terms.

    If every probe has the same value, an estimate is exact except for rounding errors, which the
    spread of the values does not show. (Examples are the diagonal of a diagonal matrix, and the
    trace of a matrix whose range is contained in the sketch.)
    """
    rounding = 8 * torch.finfo(dtype).eps * magnitude
    return torch.maximum(standard_error, rounding)


class RunningMoments:
    """The mean and the squared deviations of columns that are added in chunks (Welford, 1962).

    The attributes are `count`, `mean` `[n]`, and `deviations` `[n]`, the sums of squared deviations
    from the mean. Both are in float64, because squares underflow or overflow in single precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros(())
        self.deviations: Tensor = torch.zeros(())

    def add(self, samples: Float[Tensor, "n k"]) -> None:
        """Add more columns."""
        size = samples.shape[1]
        mean = samples.mean(dim=1, dtype=torch.float64)
        deviations = ((samples - mean[:, None]) ** 2).sum(dim=1)
        last_count = self.count
        self.count = last_count + size
        step = mean - self.mean
        self.mean = self.mean + step * (size / self.count)
        self.deviations = self.deviations + deviations + step**2 * (last_count * size / self.count)


_MAX_PROBES = 16
"""Number of probes that are kept with their products. Their 120 pairs are enough to estimate the
degrees of freedom."""

_MAX_ELEMENTS = 2**26
"""Largest number of product entries that are kept: 256 MiB in float32, and as much for the
probes."""

_MIN_PROBES = 4

_MAX_IMAGES = 32
"""Number of probes whose images are kept. Their 496 pairs are enough to estimate the variance of
squared norms."""


class QuadraticForms:
    r"""The mean of $\omega^\top B\, \omega$ over probes of ±1, with its standard error.

    For a symmetric matrix, the vectors $B\omega$ determine the variance of a form far more
    precisely than the few forms themselves. With $y = (B - \mathrm{diag}\,B)\,\omega$, the variance
    is $\mathrm{var}(\omega^\top B \omega) = 2\,\mathbb{E}\|y\|^2$, and $\mathbb{E}\|y\|^2$ is the
    sum of the variances of the n entries of $\omega \odot B\omega$.

    $\|y\|^2$ is a weighted sum of χ² variables. According to Satterthwaite, the mean over m probes
    has $m\, \mathrm{tr}(C)^2 / \mathrm{tr}(C^2)$ degrees of freedom, where C is the covariance of
    y. This is m if C has a single dominant eigenvalue, and many times m if many eigenvalues matter.
    $\mathrm{tr}(C^2)$ is the mean square of the products $y_i^\top y_j$ of different probes. For a
    matrix that is not symmetric, the sample variance of the forms is used.

    The computation is in float64, because the squares of forms can underflow or overflow in single
    precision.

    Args:
        is_symmetric: Whether B is symmetric.
        dtype: The dtype of the products with B, which determines their rounding errors.

    Reference:
        Box. Some theorems on quadratic forms applied in the study of analysis of variance problems.
        Annals of Mathematical Statistics, 1954.
    """

    def __init__(self, is_symmetric: bool, dtype: torch.dtype) -> None:
        self._is_symmetric = is_symmetric
        self._dtype = dtype
        self._samples: list[Tensor] = []
        self._entries = RunningMoments()
        self._magnitudes: list[Tensor] = []
        self._probes: list[Tensor] = []
        self._images: list[Tensor] = []
        self._num_probes = 0

    def add(self, probes: Float[Tensor, "n k"], images: Float[Tensor, "n k"]) -> None:
        """Add the columns of `probes`, and the products of B with these columns."""
        entries = probes * images
        self._samples.append(entries.sum(dim=0, dtype=torch.float64))
        magnitudes = torch.linalg.vector_norm(entries, ord=1, dim=0, dtype=torch.float64)
        self._magnitudes.append(magnitudes)
        if not self._is_symmetric:
            return
        self._entries.add(entries)
        capacity = min(_MAX_PROBES, _MAX_ELEMENTS // len(probes)) - self._num_probes
        if capacity > 0:
            self._probes.append(probes[:, :capacity].clone())
            self._images.append(images[:, :capacity].clone())
            self._num_probes += self._probes[-1].shape[1]

    def mean(self) -> ValueAndError:
        """Compute the mean with its standard error.

        For a single probe, the standard error is infinite and the degrees of freedom are 0.
        """
        samples = torch.cat(self._samples)
        count = len(samples)
        mean, standard_error, degrees = mean_of(samples)
        if self._is_symmetric and count > 1:
            variance_of_form = 2 * self._entries.deviations.sum() / (count - 1)
            standard_error = (variance_of_form / count).sqrt()
            degrees = (count - 1) * self._effective_number(mean)
        magnitude = torch.cat(self._magnitudes).mean()
        standard_error = at_least_rounding(standard_error, magnitude, self._dtype)
        return ValueAndError(mean, standard_error, degrees)

    def _effective_number(self, mean: Tensor) -> Tensor:
        """Estimate tr(C)²/tr(C²), which is at least 1; return 1 if too few probes were kept."""
        lowest = torch.ones_like(mean)
        if self._num_probes < _MIN_PROBES:
            return lowest
        probes = torch.cat(self._probes, dim=1)
        images = torch.cat(self._images, dim=1).double()
        images = images - probes * self._entries.mean[:, None]
        gram = images.T @ images
        squares = gram.diagonal()
        num_pairs = len(squares) * (len(squares) - 1)
        mixed = ((gram**2).sum() - (squares**2).sum()) / num_pairs
        number = squares.mean() ** 2 / mixed
        return torch.where(number.isfinite(), number, lowest).clamp(min=1, max=len(probes))


class SquaredNorms:
    r"""The mean of $\|A\omega\|^2$ over spherical probes, with its standard error.

    The computation is in float64, because the squares of squared norms can underflow or overflow in
    single precision.

    With $M = A^\top A$ `[n, n]`, the variance of a squared norm is
    $\tfrac{2n}{n+2}\,(\mathrm{tr}(M^2) - \mathrm{tr}(M)^2/n)$. The products
    $(\omega_i^\top M \omega_j)^2$ of different probes have the mean $\mathrm{tr}(M^2)$. Because
    there are many pairs of probes, these products reveal a large eigenvalue that the few squared
    norms may miss. The larger of this variance and the sample variance is used. If the eigenvalues
    are similar, $\mathrm{tr}(M^2) < 2\,\mathrm{tr}(M)^2/n$, the variance from the pairs is a small
    difference of noisy numbers, so it is not used.
    """

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._samples: list[Tensor] = []
        self._images: list[Tensor] = []
        self._num_images = 0

    def add(self, images: Float[Tensor, "rows k"]) -> None:
        """Add columns, which are the images A ω of further probes."""
        norms = torch.linalg.vector_norm(images, dim=0, dtype=torch.float64)
        self._samples.append(norms.square())
        capacity = min(_MAX_IMAGES, _MAX_ELEMENTS // len(images)) - self._num_images
        if capacity > 0:
            self._images.append(images[:, :capacity].clone())
            self._num_images += self._images[-1].shape[1]

    def mean(self) -> ValueAndError:
        """Compute the mean with its standard error.

        For a single probe, the standard error is infinite and the degrees of freedom are 0.
        """
        samples = torch.cat(self._samples)
        count = len(samples)
        mean, standard_error, degrees = mean_of(samples)
        if self._num_images >= _MIN_PROBES:
            variance = self._variance_by_pairs(samples)
            standard_error = torch.maximum(standard_error, (variance / count).sqrt())
        return ValueAndError(mean, standard_error, degrees)

    def _variance_by_pairs(self, samples: Float[Tensor, " count"]) -> Float[Tensor, ""]:
        """Compute the variance of a squared norm; 0 if the eigenvalues of M are similar."""
        images = torch.cat(self._images, dim=1).double()
        gram = (images.T @ images).fill_diagonal_(0)
        trace_of_square = gram.square().sum() / (len(gram) * (len(gram) - 1))
        # This estimate is unbiased, because it contains only products of different probes.
        count = len(samples)
        squared_trace = (samples.sum() ** 2 - (samples**2).sum()) / (count * (count - 1))
        n = self._num_columns
        variance = 2 * n / (n + 2) * (trace_of_square - squared_trace / n)
        return torch.where(trace_of_square > 2 * squared_trace / n, variance, 0)
