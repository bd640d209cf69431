"""Spectral densities: how many eigenvalues lie where, on a linear or a logarithmic axis."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from laplace_debias.linalg.results import SpectralDensity
from laplace_debias.report.style import (
    FONT_SIZE,
    INK,
    OKABE_ITO,
    method_colours,
    style_axes,
)

_COLOUR = OKABE_ITO["blue"]
_DECADES = 6
"""Decades of density shown below its peak."""

_BAND = 2
"""Standard errors on either side of the density that are shaded."""


def plot_spectral_density(
    densities: SpectralDensity | Mapping[str, SpectralDensity], ax: Axes
) -> None:
    """Draws spectral densities: a line each, with a band of two standard errors.

    The density has a logarithmic axis over the six decades below its peak: in the spectra of
    networks nearly all eigenvalues lie next to zero, and those that matter are few. On the
    logarithmic scale of eigenvalues, the fractions that it cannot show as they are (zero, negative)
    stand in the picture.
    """
    named = {"": densities} if isinstance(densities, SpectralDensity) else densities
    scales = {density.scale for density in named.values()}
    if len(scales) != 1:
        raise ValueError(
            f"the densities have the scales {sorted(scales)}; expected one. Draw densities of two "
            "scales in pictures of their own."
        )
    (scale,) = scales
    peak = max(float(density.density.max()) for density in named.values())
    floor = peak * 10.0**-_DECADES
    ax.set(xscale=scale, yscale="log")
    colours = method_colours(named) if len(named) > 1 else dict.fromkeys(named, _COLOUR)
    for name, density in named.items():
        grid, values, error = (
            values.detach().to("cpu", torch.float64).numpy()
            for values in (density.grid, density.density, density.standard_error)
        )
        if np.isfinite(error).all():
            ax.fill_between(
                grid,
                np.maximum(values - _BAND * error, floor / 10),
                np.maximum(values + _BAND * error, floor / 10),
                color=colours[name],
                alpha=0.25,
                linewidth=0,
            )
        ax.plot(grid, np.maximum(values, floor / 10), color=colours[name], label=name)
    ax.set_ylim(floor, 3 * peak)
    ax.yaxis.set_major_locator(LogLocator(numticks=_DECADES + 2))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="Eigenvalue λ", ylabel="Density")
    style_axes(ax)
    if scale == "log":
        ax.set(xlabel="Eigenvalue |λ|", ylabel="Density per decade")
        notes = [
            (f"{name}: " if name else "")
            + f"|λ| ≤ {density.floor:.1g}: {density.null_fraction:.1%};  "
            + f"λ < 0: {density.negative_fraction:.1%}"
            for name, density in named.items()
        ]
        ax.set_title("\n".join(notes), fontsize=FONT_SIZE - 1, color=INK, loc="left")
    if any(named):
        ax.legend(frameon=False, fontsize=FONT_SIZE - 1, labelcolor=INK)
