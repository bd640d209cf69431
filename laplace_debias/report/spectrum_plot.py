"""Figures of spectra and spectral densities."""

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from laplace_debias.linalg.results import EigenPairs, Estimate, SpectralDensity
from laplace_debias.report.style import FONT_SIZE, INK, OKABE_ITO, style_axes

_COLOUR = OKABE_ITO["blue"]
_DECADES = 6
"""Decades of density shown below its peak."""

_BAND = 2
"""Half-width, in standard errors, of the shaded band around the density."""


def plot_spectral_density(density: SpectralDensity, ax: Axes) -> None:
    """Draw a spectral density with a band of two standard errors.

    Nearly all eigenvalues of a network are close to zero, and the few others matter. Therefore, the
    axis of the density is logarithmic, and covers the six decades below the peak. A logarithmic
    scale of the eigenvalues cannot show zero and negative ones, so their fractions are written in
    the picture.
    """
    grid, values, error = (
        values.detach().to("cpu", torch.float64).numpy()
        for values in (density.grid, density.density, density.standard_error)
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


def spectrum_figure(
    eigenpairs: EigenPairs, trace: Estimate, density: SpectralDensity | None, matrix: str
) -> Figure:
    """Draw the leading eigenvalues one by one, and the density of the other eigenvalues.

    Args:
        eigenpairs: The leading eigenpairs of a matrix.
        trace: The trace of the whole matrix.
        density: The density of the other eigenvalues, on a logarithmic scale; None to leave it out.
        matrix: The name of the matrix.
    """
    figure = Figure(figsize=(9.6, 3.8), layout="constrained", facecolor="white")
    num_panels = 1 if density is None else 2
    axes = figure.subplots(1, num_panels, squeeze=False)[0]
    values = eigenpairs.values.cpu()
    _plot_eigenvalues(values, trace, matrix, axes[0])
    if density is None:
        return figure
    by_value = axes[1]
    plot_spectral_density(density, by_value)
    # Mark the eigenvalues that were removed before the density was estimated.
    marks = values[values > 0]
    by_value.plot(
        marks,
        torch.full_like(marks, by_value.get_ylim()[0] * 1.5),
        "|",
        color=OKABE_ITO["vermillion"],
        markersize=9,
        label=f"leading {len(values)}, one by one",
    )
    by_value.plot([], [], color=_COLOUR, label="density of the others")
    by_value.legend(frameon=False, fontsize=8)
    return figure


def _plot_eigenvalues(values: Float[Tensor, " k"], trace: Estimate, matrix: str, ax: Axes) -> None:
    """Plot the leading eigenvalues against their rank; the title compares them with the trace."""
    ax.plot(range(1, len(values) + 1), values, "o", markersize=3.5, color=_COLOUR)
    if bool((values > 0).all()):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("Rank")
    ax.set_ylabel("Eigenvalue")
    total = float(trace.value)
    error = float(trace.standard_error)
    trace_text = f"{total:.4g} ± {error:.2g}" if error else f"{total:.4g}"
    ax.set_title(
        f"trace of the {matrix}: {trace_text}, of which the leading {len(values)} "
        f"are {float(values.sum()) / total:.0%}",
        fontsize=9,
        loc="left",
    )
    style_axes(ax)
