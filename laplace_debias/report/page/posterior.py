"""Picture of a posterior: the sweep of the prior precision."""

import numpy as np
from matplotlib.axes import Axes

from laplace_debias.metrics import METRICS
from laplace_debias.report.names import decimals, number, significant
from laplace_debias.report.page.panel import Look, Panel, Picture, log_axis
from laplace_debias.report.run_folder import Run
from laplace_debias.report.style import INK


def sweep(run: Run, look: Look) -> Picture | None:
    """A metric of the validation examples against the prior precision, one method."""
    search = run.json(f"sweeps/{look.key}.json")
    rows = [row for row in search.get("rows", []) if row["value"] is not None]
    rows.sort(key=lambda row: row["prior_precision"])
    if len(rows) < 2:
        return None
    known = METRICS.get(search["metric"])
    label, unit = (known.label, known.unit) if known else ("log marginal likelihood", "nats")
    names = ("prior_precision", "value", "low", "high")
    x, value, low, high = (np.array([row[name] for row in rows], float) for name in names)
    panel = Panel(f"sweep-{look.key}", 2.9)
    ax = panel.axes[0]
    flat, chosen, noise = (search.get(name) for name in ("flat", "chosen", "sigma"))
    remarks = []
    if flat:
        ax.axvspan(flat[0], flat[1], color=INK, alpha=0.09, lw=0)
        ends = f"{significant(flat[0], 2)} to {significant(flat[1], 2)}"
        remarks.append(f"within one standard error from {ends}")
    ax.fill_between(x, low, high, color=look.colour, alpha=0.22, lw=0)
    ax.plot(x, value, color=look.colour, marker=look.marker, markersize=3.2, lw=1.5)
    if isinstance(chosen, int | float):
        ax.axvline(chosen, color=INK, lw=1.2)
        remarks.insert(0, f"tuned: {significant(chosen)}")
    if isinstance(noise, int | float):
        remarks.append(f"noise {significant(noise)}")
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
    note = "; ".join(remarks)
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
