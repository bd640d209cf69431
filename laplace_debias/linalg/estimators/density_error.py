"""How far a smoothed density of a few nodes is from that of all eigenvalues."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimators.quadrature import Quadrature
from laplace_debias.system.warn import warn

Placed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_TOLERATED = 0.1
"""Integral of the quadrature's error above which there is a warning; that of a density is 1."""


def moments(
    grid: Float[Tensor, " points"],
    places: Float[Tensor, "probes nodes"],
    weights: Float[Tensor, "probes nodes"],
    width: float,
    powers: int = 1,
) -> Float[Tensor, "powers points"]:
    """Means over probes and nodes of the powers of the normal density around each grid point."""
    sums = grid.new_zeros(powers, len(grid))
    for centres, masses in zip(places, weights, strict=True):
        counts = masses != 0  # of an exact rule on the logarithmic scale most may be zeros
        centres, masses = centres[counts], masses[counts]
        # In parts: an exact rule has as many nodes as the operator columns.
        for some, of_them in zip(centres.split(4096), masses.split(4096), strict=True):
            values = torch.exp(-0.5 * ((grid[:, None] - some) / width) ** 2)
            for power in range(powers):
                sums[power] += values ** (power + 1) @ of_them
    scale = width * math.sqrt(2 * math.pi)
    exponents = torch.arange(1, powers + 1, dtype=grid.dtype, device=grid.device)
    return sums / len(places) / scale ** exponents[:, None]


def spread_of_probes(
    powers: Float[Tensor, "4 points"], num_probes: int, size: int
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    r"""The variance of the mean over probes and its degrees of freedom, at every point.

    A probe's value is $\omega^\top g\,\omega / n$, of variance $2\,\mathrm{tr}(g - \bar g)^2 / n^2$
    and with $\mathrm{tr}((g - \bar g)^2)^2 / \mathrm{tr}(g - \bar g)^4$ degrees of freedom; the
    rule gives the traces.

    Args:
        powers: The means of $g, g^2, g^3, g^4$ over eigenvalues.
        num_probes: Probes.
        size: n.
    """
    one, two, three, four = powers
    second = (two - one**2).clamp(min=0)
    fourth = four - 4 * one * three + 6 * one**2 * two - 3 * one**4
    variance = 2 / (size + 2) * second / num_probes
    if num_probes == 1:
        return torch.full_like(variance, math.inf), torch.zeros_like(variance)
    number = size * second**2 / fourth
    number = torch.where(number.isfinite(), number, torch.ones_like(number))
    return variance, num_probes * number.clamp(min=1, max=size)


def quadrature_error(
    rule: Quadrature,
    placed: Placed,
    grid: Float[Tensor, " points"],
    density: Float[Tensor, " points"],
    width: float,
) -> Float[Tensor, " points"]:
    """An estimate of the error of having few nodes; warns where it is large.

    The change to a rule about as good as twice the steps, and of that from half of the steps: next
    to zero, where a logarithmic scale looks, they converge slowly. Its root mean square over as
    much of the grid as lies between nodes, or its value at the point if that is more.

    Warns:
        RuntimeWarning: The integral of the error exceeds 0.1.
    """
    steps = rule.nodes.shape[1]
    better, half = (
        moments(grid, *placed(*rule.averaged(number)), width)[0]
        for number in (steps, max(2, steps // 2))
    )
    squares = (density - better) ** 2 + (better - half) ** 2
    # As far as nodes lie apart, were they spread evenly.
    reach = len(grid) // steps // 2
    sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    here = torch.arange(len(grid), device=grid.device)
    start, end = (here - reach).clamp(min=0), (here + reach + 1).clamp(max=len(grid))
    local = (sums[end] - sums[start]).clamp(min=0) / (end - start)
    error = torch.maximum(local, squares).sqrt()
    total = float(error.sum() * (grid[1] - grid[0]))
    if total > _TOLERATED:
        warn(
            f"`width` is {width:.3g}, finer than {steps} steps resolve: the density is off by "
            f"about {min(total, 2):.0%} of its integral, as its standard error says. Raise `width` "
            "or `num_steps`.",
            RuntimeWarning,
        )
    return error
