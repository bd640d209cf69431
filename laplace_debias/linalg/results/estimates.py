"""Estimates with standard errors and intervals."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value that is known up to a standard error.

    `float(estimate)` is the value of a scalar estimate, `estimate.interval(0.95)` an interval for
    the quantity.

    Args:
        value: The estimate.
        standard_error: Its standard error, of the same shape: 0 if the value is exact, infinite
            if it rests on a single sample, which does not show its own spread.
        num_matvecs: How many products with the operator (or its adjoint) it took.
        converged: False if a tolerance was asked for and missed.
        degrees_of_freedom: How well the standard error itself is known, of the value's shape or
            one number for all: its square has the relative variance of a χ² variable with so many
            degrees of freedom, 2/ν. Infinite for an exact value, 0 for a single sample.
    """

    value: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]
    num_matvecs: int
    converged: bool = True
    degrees_of_freedom: Float[Tensor, "*shape"] | float = math.inf

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        r"""A confidence interval, value ± quantile · standard error, by Student's t.

        Entry by entry, not jointly. An exact value gives the point; a single sample gives
        (−∞, ∞), because its spread is unknown.

        Args:
            level: Probability with which the interval covers what is estimated.

        Returns:
            The lower and the upper end, each of the value's shape.

        Raises:
            ValueError: `level` is not between 0 and 1.

        Reference:
            Student. The probable error of a mean. 1908. Satterthwaite. An approximate distribution
            of estimates of variance components. 1946.

        Example:
            >>> import torch
            >>> from laplace_debias.linalg import Estimate
            >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
            >>> [f"{float(end):.2f}" for end in Estimate(two, one, 4, True, 3.0).interval()]
            ['-1.18', '5.18']
        """
        margin = half_width(self.standard_error, self.degrees_of_freedom, level)
        return self.value - margin, self.value + margin

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def exact(cls, value: Float[Tensor, "*shape"], num_matvecs: int = 0) -> "Estimate":
        """A value without error."""
        return cls(value, torch.zeros_like(value), num_matvecs)


def half_width(
    standard_error: Float[Tensor, "*shape"],
    degrees_of_freedom: Float[Tensor, "*shape"] | float,
    level: float,
) -> Float[Tensor, "*shape"]:
    """Half of the length of Student's interval; infinite or 0 where the standard error is.

    Raises:
        ValueError: `level` is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(
            f"`level` is {level}; expected a probability between 0 and 1, such as 0.95."
        )
    # Slow to import, and estimates do without.
    from scipy.stats import t as student

    known = torch.as_tensor(degrees_of_freedom, dtype=torch.float64).cpu().numpy()
    quantile = torch.as_tensor(student.ppf((1 + level) / 2, known)).to(standard_error)
    settled = (standard_error == 0) | standard_error.isinf()
    return torch.where(settled, standard_error, quantile * standard_error)


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""A smoothed spectral density, and the quadrature that it was made of.

    Args:
        grid: Where the density is given, ascending eigenvalues λ, `[points]`; on a logarithmic
            scale evenly spaced in log₁₀ |λ|.
        density: Fraction of the eigenvalues per unit of λ, or on a logarithmic scale per decade,
            `[points]`. Its integral over λ, or log₁₀ |λ|, is 1 − `null_fraction`.
        standard_error: That of the density, `[points]`; it joins, in squares, that of the mean over
            probes and `quadrature_error`. Infinite from a single probe.
        quadrature_error: How far the density of Lanczos' few nodes is from that of all eigenvalues,
            both smoothed by `width`, `[points]`; an estimate, 0 if all are known.
        degrees_of_freedom: How well the standard error is known, as in `Estimate`, `[points]`.
        nodes: Ritz values, `[probes, steps]`.
        weights: Their weights, `[probes, steps]`, that sum to 1 for each probe.
        scale: `"linear"` or `"log"`.
        width: Standard deviation of the Gaussian that smoothes, in λ or in decades.
        null_fraction: On a logarithmic scale, the fraction of eigenvalues with |λ| ≤ `floor`, which
            the density leaves out; 0 on a linear one.
        negative_fraction: Fraction of eigenvalues below −`floor`, which a logarithmic scale shows
            by their absolute values.
        floor: What counts as zero.
        num_matvecs: How many products it took.
    """

    grid: Float[Tensor, " points"]
    density: Float[Tensor, " points"]
    standard_error: Float[Tensor, " points"]
    quadrature_error: Float[Tensor, " points"]
    degrees_of_freedom: Float[Tensor, " points"]
    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    scale: str
    width: float
    null_fraction: float
    negative_fraction: float
    floor: float
    num_matvecs: int

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
        """Where the smoothed density lies, point by point, as `Estimate.interval` has it.

        Args:
            level: Probability with which an interval covers.

        Returns:
            The lower and the upper ends, `[points]`; a density is not below 0.

        Raises:
            ValueError: `level` is not between 0 and 1.
        """
        margin = half_width(self.standard_error, self.degrees_of_freedom, level)
        return (self.density - margin).clamp(min=0), self.density + margin
