"""Metrics against prior precision and severity: one panel per metric, one line per method."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from laplace_debias.report.reliability import reliability_figure
from laplace_debias.report.style import (
    FONT_SIZE,
    INK,
    add_legend,
    check_suffix,
    log_ticks,
    method_colours,
    metric_label,
    new_panels,
    save,
    style_axes,
)
from laplace_debias.report.summary import Curve, Row, summarise

__all__ = [
    "prior_precision_figure",
    "prior_precision_grid",
    "reliability_figure",
    "severity_figure",
]

_PANEL_WIDTH, _PANEL_HEIGHT = 3.5, 3.3
_UNBOUNDED_METRICS = ("nll",)
_DODGE = 0.1
"""Distance of neighbouring methods with bars, as a fraction of that of neighbouring points."""


def prior_precision_figure(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    metrics: Sequence[str] = ("nll", "ece", "accuracy"),
) -> Figure:
    """Draws metrics against the prior precision, as Figure 6 of the paper does.

    A dot is the mean over draws of batches, a vertical bar reaches from the least to the greatest
    draw; methods with bars stand a little apart, so as not to hide each other. A method without
    prior precision is a dashed horizontal line, at the mean of its draws. The NLL has a
    logarithmic axis where it spans more than a decade.

    Args:
        rows: One row per method, prior precision and draw, with the keys `method`, `draw` (both
            anything), `prior_precision` (δ > 0, or None for a method without) and the metrics.
        path: Where to write the picture, PNG or PDF by its suffix.
        metrics: Which metrics, one panel each.

    Returns:
        The picture as it was written.

    Raises:
        ValueError: There are no rows or metrics, a row lacks a key or holds no finite number where
            one is due, a prior precision is not positive, or the suffix is unknown.

    Reference:
        Tatzel, Mucsányi, Hackel, Hennig. Debiasing mini-batch quadratics for applications in deep
        learning. ICLR, 2025, Figure 6.
    """
    check_suffix(path)
    curves = {metric: summarise(rows, "prior_precision", metric) for metric in metrics}
    for curve in (curve for by_method in curves.values() for curve in by_method.values()):
        if not curve.is_constant and min(curve.x) <= 0:
            raise ValueError(
                f"the prior precision {min(curve.x)} appears in `rows`; expected positive ones. "
                "Give a method without prior precision the value None."
            )
    return _draw(curves, path, "Prior precision δ", is_log=True)


def severity_figure(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    metrics: Sequence[str] = ("nll", "ece", "accuracy"),
) -> Figure:
    """Draws metrics against the severity of a corruption of the inputs.

    Dots, bars and axes are those of `prior_precision_figure`.

    Args:
        rows: One row per method, severity and draw, with the keys `method`, `draw` (both anything),
            `severity` (0 for clean inputs, usually up to 5) and the metrics.
        path: As for `prior_precision_figure`.
        metrics: Which metrics, one panel each.

    Returns:
        The picture as it was written.

    Raises:
        ValueError: As `prior_precision_figure`.
    """
    check_suffix(path)
    curves = {metric: summarise(rows, "severity", metric) for metric in metrics}
    return _draw(curves, path, "Severity of corruption", is_log=False)


def prior_precision_grid(
    parts: Mapping[str, Sequence[Row]],
    metrics: Sequence[str] = ("nll", "ece", "accuracy"),
) -> Figure:
    """Draws metrics against the prior precision on several data sets, as Figures 14 and 15 do.

    Dots, bars and axes are those of `prior_precision_figure`; a data set has a line of panels.

    Args:
        parts: By name of the data set, rows as `prior_precision_figure` takes them. A metric that
            is None in all rows of a data set has no panel there.
        metrics: Which metrics, a column of panels each.

    Returns:
        The picture.

    Raises:
        ValueError: As `prior_precision_figure`.
    """
    if not parts or not metrics:
        raise ValueError("`parts` or `metrics` is empty; expected at least one of each.")
    size = (_PANEL_WIDTH * len(metrics), _PANEL_HEIGHT * len(parts) * 0.8 + 0.5)
    figure, axes = new_panels(len(parts), len(metrics), size, sharex=True)
    legend: dict[str, Artist] = {}
    for line, (name, rows) in zip(axes, parts.items(), strict=True):
        for ax, metric in zip(line, metrics, strict=True):
            if all(row[metric] is None for row in rows):
                ax.set_axis_off()
                continue
            curves = summarise(rows, "prior_precision", metric)
            _draw_panel(ax, metric, curves, is_log=True)
            handles, labels = ax.get_legend_handles_labels()
            legend |= zip(labels, handles, strict=True)
        line[0].set_title(name, loc="left", fontsize=FONT_SIZE, color=INK)
    for ax in axes[-1]:
        ax.set_xlabel("Prior precision δ", fontsize=FONT_SIZE, color=INK)
    add_legend(figure, list(legend.values()), min(len(legend), 2 * len(metrics)))
    return figure


def _draw(
    curves: dict[str, dict[str, Curve]], path: str | os.PathLike[str], x_label: str, is_log: bool
) -> Figure:
    if not curves:
        raise ValueError("`metrics` is empty; expected at least one, for example 'nll'.")
    figure, (panels,) = new_panels(1, len(curves), (_PANEL_WIDTH * len(curves), _PANEL_HEIGHT))
    for ax, (metric, by_method) in zip(panels, curves.items(), strict=True):
        _draw_panel(ax, metric, by_method, is_log)
        ax.set_xlabel(x_label)
    handles, _ = panels[0].get_legend_handles_labels()
    add_legend(figure, handles, min(len(handles), 2 * len(panels)))
    save(figure, path)
    return figure


def _draw_panel(ax: Axes, metric: str, by_method: dict[str, Curve], is_log: bool) -> None:
    if is_log:
        ax.set_xscale("log")
    _draw_methods(ax, by_method, is_log)
    ax.set_ylabel(metric_label(metric))
    style_axes(ax)
    if metric in _UNBOUNDED_METRICS:
        _compress(ax, by_method)


def _draw_methods(ax: Axes, by_method: dict[str, Curve], is_log: bool) -> None:
    colours = method_colours(by_method)
    shifts = _dodge(by_method, is_log)
    for method, curve in by_method.items():
        if curve.is_constant:
            ax.axhline(
                curve.mean[0],
                linestyle=(0, (5, 2)),
                linewidth=1.6,
                zorder=1.8,
                color=colours[method],
                label=method,
            )
            continue
        shift = shifts.get(method, 0.0)
        x = np.asarray(curve.x)
        mean, low, high = map(np.asarray, (curve.mean, curve.low, curve.high))
        ax.errorbar(
            x * np.exp(shift) if is_log else x + shift,
            mean,
            yerr=(mean - low, high - mean),
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=1.6,
            elinewidth=1.4,
            zorder=2.2 if curve.has_spread else 2.1,
            color=colours[method],
            label=method,
        )


def _dodge(by_method: dict[str, Curve], is_log: bool) -> dict[str, float]:
    """Shift of each method with bars along x (its logarithm if `is_log`), symmetric about zero."""
    methods = [
        method for method, curve in by_method.items() if curve.has_spread and not curve.is_constant
    ]
    x = np.unique([x for curve in by_method.values() for x in curve.x])
    steps = np.diff(np.log(x) if is_log else x)
    step = _DODGE * min(steps, default=0.0)
    return {
        method: step * (position - (len(methods) - 1) / 2)
        for position, method in enumerate(methods)
    }


def _compress(ax: Axes, by_method: dict[str, Curve]) -> None:
    """Makes the y axis logarithmic where its values span more than a decade."""
    values = [bound for curve in by_method.values() for bound in (*curve.low, *curve.high)]
    if min(values) <= 0 or max(values) <= 10 * min(values):
        return
    ax.set_yscale("log")
    few_decades = max(values) < 1e3 * min(values)
    log_ticks(ax.yaxis, (1, 2, 5) if few_decades else (1,))
