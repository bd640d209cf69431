"""Pictures of the posteriors: the sweep of the prior precision, and their spectra."""

import numpy as np
from matplotlib.axes import Axes

from laplace_debias.metrics import METRICS
from laplace_debias.report.names import decimals, number, significant
from laplace_debias.report.page.panel import Look, Panel, Picture, log_axis
from laplace_debias.report.run_folder import Run
from laplace_debias.report.style import INK

MOST_BLOCKS = 24
"""How many blocks a spectrum shows, those with the most parameters."""

_QUARTILES = (25, 50, 75)


def sweep(run: Run, look: Look) -> Picture | None:
    """A metric of the validation examples against the prior precision, one method."""
    found = run.json(f"sweeps/{look.key}.json")
    rows = [row for row in found.get("rows", []) if row["value"] is not None]
    rows.sort(key=lambda row: row["prior_precision"])
    if len(rows) < 2:
        return None
    known = METRICS.get(found["metric"])
    label, unit = (known.label, known.unit) if known else ("log marginal likelihood", "nats")
    names = ("prior_precision", "value", "low", "high")
    x, value, low, high = (np.array([row[name] for row in rows], float) for name in names)
    panel = Panel(f"sweep-{look.key}", 2.9)
    ax = panel.axes[0]
    flat, chosen, noise = (found.get(name) for name in ("flat", "chosen", "sigma"))
    told = []
    if flat:
        ax.axvspan(flat[0], flat[1], color=INK, alpha=0.09, lw=0)
        low_end, high_end = (significant(end, 2) for end in flat)
        told.append(f"within one standard error from {low_end} to {high_end}")
    ax.fill_between(x, low, high, color=look.colour, alpha=0.22, lw=0)
    ax.plot(x, value, color=look.colour, marker=look.marker, markersize=3.2, lw=1.5)
    if isinstance(chosen, int | float):
        ax.axvline(chosen, color=INK, lw=1.2)
        told.insert(0, f"tuned: {significant(chosen)}")
    if isinstance(noise, int | float):
        told.append(f"noise {significant(noise)}")
    log_axis(ax.xaxis, x[0], x[-1])
    ax.set(xlim=(x[0], x[-1]), xlabel="Prior precision")
    named = f"{label} ({unit})" if unit else label
    ax.set_ylabel(f"Validation {named}" if known else named)
    _leave_out_what_hides_the_best(ax, value, known.better if known else "higher")
    texts = [
        f"prior precision {significant(p)}\n{label} {number(v, decimals(a, b, v))} {unit}"
        for p, v, a, b in zip(x, value, low, high, strict=True)
    ]
    panel.note(ax, look.key, x, value, texts)
    note = "; ".join(told)
    alt = f"{label} against prior precision of {look.label}; {note}."
    return panel.finish(look.label, alt, method=look.key, note=note)


def _leave_out_what_hides_the_best(ax: Axes, value: np.ndarray, better: str | None) -> None:
    """Limits that show the valley where some values are many times the best."""
    finite = value[np.isfinite(value)]
    if better != "lower" or len(finite) < 4:
        return
    best, middle = finite.min(), np.median(finite)
    top = best + 2.5 * max(middle - best, 0.02 * abs(best))
    if finite.max() > top:
        ax.set_ylim(best - 0.08 * (top - best), top)


def spectrum(run: Run, look: Look, prior_precision: float | None) -> Picture | None:
    """Magnitudes of the posterior by block with the prior precision, and the prior's share.

    Args:
        run: The run.
        look: The method.
        prior_precision: The tuned one, marked; None if there is not one for all blocks.
    """
    every = run.json(f"spectra/{look.key}.json").get("blocks")
    if not every:
        return None
    most = sorted(every, key=lambda block: -block["num_parameters"])[:MOST_BLOCKS]
    blocks = [block for block in every if any(block is shown for shown in most)]
    magnitudes = np.array([block["quantiles"] for block in blocks], float)
    shares = np.array([block["prior_share"] for block in blocks], float)
    positive = magnitudes[magnitudes > 0]
    top = max(positive.max() if positive.size else 1.0, prior_precision or 0)
    floor = max(positive.min() if positive.size else 1.0, top * 1e-9)
    floor = min(floor, prior_precision or floor)
    shown = magnitudes.clip(min=floor)
    panel = Panel(f"spectrum-{look.key}", 0.95 + 0.235 * len(blocks))
    ax = panel.axes[0]
    y = np.arange(len(blocks))
    ax.hlines(y, shown[:, 0], shown[:, -1], color=look.colour, lw=1, alpha=0.55)
    low, middle, high = (shown[:, quarter] for quarter in _QUARTILES)
    ax.hlines(y, low, high, color=look.colour, lw=6)
    ax.plot(middle, y, linestyle="none", marker="|", markersize=9, color=INK)
    if prior_precision:
        ax.axvline(prior_precision, color=INK, lw=1.2, linestyle=(0, (4, 3)))
    log_axis(ax.xaxis, floor, top)
    ax.set(xlim=(floor / 1.5, top * 1.5), xlabel="Precision from the data, N·Λ")
    ax.set_ylim(len(blocks) - 0.4, -0.6)
    ax.set_yticks(y, [_short(block["name"]) for block in blocks], fontsize=8)
    ax.grid(visible=False, axis="y")
    share_axis = ax.twinx()
    share_axis.set_ylim(ax.get_ylim())
    share_axis.set_yticks(y, [f"{100 * share:.0f} %" for share in shares], fontsize=8)
    share_axis.tick_params(length=0, labelcolor=INK)
    share_axis.spines[:].set_visible(False)
    texts = [
        f"{block['name']}\n{block['num_parameters']:,} parameters\n"
        f"quartiles {', '.join(significant(m[quarter], 2) for quarter in _QUARTILES)}\n"
        f"prior's share {100 * share:.1f} %"
        for block, m, share in zip(blocks, magnitudes, shares, strict=True)
    ]
    panel.note(ax, look.key, middle, y, texts)
    left_out = len(every) - len(blocks)
    note = f"the {len(blocks)} largest of {len(every)} blocks" if left_out else ""
    told = ", ".join(f"{block['name']} {100 * block['prior_share']:.0f} %" for block in blocks)
    alt = f"Spectrum of {look.label}; the prior's share by block: {told}."
    return panel.finish(look.label, alt, method=look.key, note=note)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"
