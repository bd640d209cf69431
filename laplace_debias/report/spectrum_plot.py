"""Spectral densities: how many eigenvalues lie where, on a linear or a logarithmic axis."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from laplace_debias.linalg.results import SpectralDensity
from laplace_debias.report.style import FONT_SIZE, INK, OKABE_ITO, style_axes

_COLOUR = OKABE_ITO["blue"]
_DECADES = 6
"""Decades of density shown below its peak."""

_BAND = 2
"""Standard errors on either side of the density that are shaded."""


def plot_spectral_density(density: SpectralDensity, ax: Axes) -> None:
    """Draws a spectral density: a line, with a band of two standard errors.

    The density has a logarithmic axis over the six decades below its peak: in the spectra of
    networks nearly all eigenvalues lie next to zero, and those that matter are few. On the
    logarithmic scale of eigenvalues, the fractions that it cannot show as they are (zero, negative)
    stand in the picture.
    """
    grid, values, error = (
        part.detach().to("cpu", torch.float64).numpy()
        for part in (density.grid, density.density, density.standard_error)
    )
    floor = values.max() * 10.0**-_DECADES
    ax.set(xscale=density.scale, yscale="log")
    if np.isfinite(error).all():
        ax.fill_between(
            grid,
            np.maximum(values - _BAND * error, floor / 10),
            np.maximum(values + _BAND * error, floor / 10),
            color=_COLOUR,
            alpha=0.25,
            linewidth=0,
        )
    ax.plot(grid, np.maximum(values, floor / 10), color=_COLOUR)
    ax.set_ylim(floor, 3 * values.max())
    ax.yaxis.set_major_locator(LogLocator(numticks=_DECADES + 2))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="Eigenvalue λ", ylabel="Density")
    style_axes(ax)
    if density.scale == "log":
        ax.set(xlabel="Eigenvalue |λ|", ylabel="Density per decade")
        left_out = (
            f"|λ| ≤ {density.floor:.1g}: {density.null_fraction:.1%};  "
            f"λ < 0: {density.negative_fraction:.1%}"
        )
        ax.set_title(left_out, fontsize=FONT_SIZE - 1, color=INK, loc="left")
