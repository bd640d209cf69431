"""The spectral density of a symmetric operator, smoothed, on a linear or a logarithmic scale."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimate import mean_of
from laplace_debias.linalg.products import check_at_least, check_choice
from laplace_debias.linalg.quadrature import Quadrature, lanczos_quadrature
from laplace_debias.operators.base import LinearOperator

SCALES = ("linear", "log")
_RELATIVE_WIDTH = 0.01
"""Standard deviation of the smoothing unless told otherwise, relative to the spectrum's width."""

_MARGIN = 6
"""Standard deviations by which the grid reaches beyond the nodes."""


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""A smoothed spectral density, and the quadrature that it was made of.

    Args:
        grid: Where the density is given, ascending eigenvalues λ, `[points]`; on a logarithmic
            scale evenly spaced in log₁₀ |λ|.
        density: Fraction of the eigenvalues per unit of λ, or on a logarithmic scale per decade,
            `[points]`. Its integral over λ, or log₁₀ |λ|, is 1 − `null_fraction`.
        standard_error: That of the density, `[points]`; infinite from a single probe.
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
    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    scale: str
    width: float
    null_fraction: float
    negative_fraction: float
    floor: float
    num_matvecs: int


def spectral_density(
    A: LinearOperator,
    num_points: int = 1024,
    *,
    scale: str = "linear",
    num_probes: int = 10,
    num_steps: int = 80,
    width: float | None = None,
    floor: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> SpectralDensity:
    r"""The density of a symmetric operator's eigenvalues, by stochastic Lanczos quadrature.

    $\phi(\lambda) = \frac1n \sum_i \mathcal N(\lambda; \lambda_i, \sigma^2)$, with the sum over
    eigenvalues replaced by a quadrature's nodes and weights, one rule a probe. On the logarithmic
    scale the same in $\log_{10}|\lambda|$, so that a spectrum over many decades is resolved in each
    of them; eigenvalues with $|\lambda|$ ≤ `floor` have no place there and are reported as
    `null_fraction`, negative ones are folded on their absolute values and reported as
    `negative_fraction`. A quadrature sees eigenvalues next to zero only as sharply as its steps
    allow, so that zeros come up as a peak at that resolution: a `floor` above it counts them.

    Args:
        A: Symmetric operator `[n, n]`. Asymmetry is noticed.
        num_points: Points of the grid.
        scale: `"linear"` or `"log"`.
        num_probes: Probes; the standard error falls as the root of their number.
        num_steps: Lanczos steps, and products, a probe: how fine the spectrum is resolved.
        width: σ, in λ or in decades; default 1 % of what the nodes span.
        floor: For the logarithmic scale, the |λ| that count as zero; default ten times the rounding
            of the largest node.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        Grid and density, their errors, and the nodes and weights. From all eigenvalues where they
        have a closed form (no products) or `num_probes * num_steps` is at least n (n products) and
        n at most 16,384.

    Raises:
        ValueError: The operator is not square or not symmetric, a product not finite, a name
            unknown, a number too small, `width` finer than the grid, all nodes below `floor`, or
            the generator on another device.

    Reference:
        Lin, Saad, Yang. Approximating spectral densities of large matrices. SIAM Review, 2016.
        Papyan. The full spectrum of deepnet Hessians at scale. 2018 (logarithmic scale).
    """
    check_choice(scale, SCALES, "scale")
    check_at_least(num_points, 2, "num_points", "two ends")
    if width is not None and not width > 0:
        raise ValueError(f"`width` is {width}; expected a positive standard deviation.")
    if floor is not None and scale == "linear":
        raise ValueError("`floor` is for scale='log'; expected None on a linear scale.")
    if floor is not None and not floor >= 0:
        raise ValueError(f"`floor` is {floor}; expected 0 or more.")
    rule = lanczos_quadrature(
        A, num_probes, num_steps, generator=generator, progress=progress, label="spectral density"
    )
    largest = float(_counting(rule.nodes.abs(), rule).max())
    if floor is None:
        floor = 10 * torch.finfo(A.dtype).eps * largest
    null = rule.nodes.abs() <= floor
    null_fraction = float((rule.weights * null).sum(dim=1).mean())
    negative_fraction = float((rule.weights * (rule.nodes < -floor)).sum(dim=1).mean())
    places, weights = rule.nodes, rule.weights
    if scale == "log":
        if not (~null & (weights > 0)).any():
            raise ValueError(
                f"all eigenvalues lie within ±{floor:.4g}; expected some above. Lower `floor`, or "
                "use scale='linear'."
            )
        weights = weights * ~null
        places = torch.where(null, torch.ones_like(places), places).abs().log10()
    grid, width = _grid(places, weights, num_points, width)
    samples = _smoothed(grid, places, weights, width)
    density, standard_error = mean_of(samples.T)
    return SpectralDensity(
        grid=grid if scale == "linear" else 10**grid,
        density=density,
        standard_error=torch.zeros_like(density) if rule.is_exact else standard_error,
        nodes=rule.nodes,
        weights=rule.weights,
        scale=scale,
        width=width,
        null_fraction=null_fraction if scale == "log" else 0.0,
        negative_fraction=negative_fraction,
        floor=floor,
        num_matvecs=rule.num_matvecs,
    )


def _counting(values: Tensor, rule: Quadrature) -> Tensor:
    return values[rule.weights > 0]


def _grid(
    places: Tensor, weights: Tensor, num_points: int, width: float | None
) -> tuple[Tensor, float]:
    # Weights of rounding size belong to no eigenvalue that the grid should reach for.
    counting = places[weights > torch.finfo(weights.dtype).eps]
    low, high = float(counting.min()), float(counting.max())
    if width is None:
        # A spectrum without extent still needs a width.
        extent = high - low if high - low > 1e-6 * max(abs(low), abs(high)) else 0.0
        width = _RELATIVE_WIDTH * (extent or max(abs(low), abs(high)) or 1.0)
    low, high = low - _MARGIN * width, high + _MARGIN * width
    spacing = (high - low) / (num_points - 1)
    if spacing > width:
        needed = math.ceil((high - low) / width) + 1
        raise ValueError(
            f"`width` is {width:.4g} and the grid of {num_points} points has a spacing of "
            f"{spacing:.4g}; expected at most the width. Set `num_points` to {needed} or more, or "
            "raise `width`."
        )
    grid = torch.linspace(low, high, num_points, dtype=places.dtype, device=places.device)
    return grid, width


def _smoothed(grid: Tensor, places: Tensor, weights: Tensor, width: float) -> Tensor:
    """One density a probe, `[probes, points]`."""
    densities = []
    for centres, masses in zip(places, weights, strict=True):
        total = torch.zeros_like(grid)
        counts = masses != 0  # of an exact rule on the logarithmic scale most may be zeros
        centres, masses = centres[counts], masses[counts]
        # In parts: an exact rule has as many nodes as the operator columns.
        for some, of_them in zip(centres.split(4096), masses.split(4096), strict=True):
            total = total + torch.exp(-0.5 * ((grid[:, None] - some) / width) ** 2) @ of_them
        densities.append(total / (width * math.sqrt(2 * math.pi)))
    return torch.stack(densities)
