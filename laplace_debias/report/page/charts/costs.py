"""Pictures of what the methods cost: time and memory."""

from collections.abc import Callable

import numpy as np

from laplace_debias.report.page.names import duration, size
from laplace_debias.report.page.panel import Look, Panel, Picture, log_axis
from laplace_debias.report.page.run_folder import Method
from laplace_debias.report.style import INK


def seconds(methods: tuple[Method, ...], looks: dict[str, Look]) -> Picture | None:
    """Time of each method, all stages together; the stages are told when one looks closer."""
    rows = [(method, sum(method.seconds.values())) for method in methods if method.seconds]
    texts = [
        "\n".join([method.label, *(f"{s} {duration(v)}" for s, v in method.seconds.items())])
        for method, _ in rows
    ]
    return _bars("time", "Time", "Seconds", rows, texts, duration, looks)


def memory(methods: tuple[Method, ...], looks: dict[str, Look]) -> Picture | None:
    """Bytes that each method keeps besides the network."""
    rows = [(m, float(m.num_bytes)) for m in methods if m.num_bytes is not None]
    texts = [f"{method.label}\n{size(value)}" for method, value in rows]
    return _bars("memory", "Memory", "Bytes", rows, texts, size, looks)


def _bars(
    name: str,
    title: str,
    axis: str,
    rows: list[tuple[Method, float]],
    texts: list[str],
    tell: Callable[[float], str],
    looks: dict[str, Look],
) -> Picture | None:
    positive = [value for _, value in rows if value > 0]
    if not positive:
        return None
    panel = Panel(name, 0.75 + 0.42 * len(rows))
    ax = panel.axes[0]
    low, high = min(positive) / 3, max(positive)
    y = np.arange(len(rows))
    for place, (method, value) in zip(y, rows, strict=True):
        width = max(value, low) - low
        bar = ax.barh(place, width, left=low, height=0.34, color=looks[method.key].colour)
        label = ax.text(
            low, place - 0.24, f" {method.label}  {tell(value)}", va="bottom", fontsize=9, color=INK
        )
        panel.of(method.key, *bar, label)
        panel.note(ax, method.key, [max(value, low)], [place], [texts[place]])
    ax.set(ylim=(len(rows) - 0.6, -0.85), yticks=[], xlabel=axis)
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False, axis="y")
    log_axis(ax.xaxis, low, high)
    ax.set_xlim(low, high * 1.3)
    told = "; ".join(f"{method.label} {tell(value)}" for method, value in rows)
    return panel.finish(title, f"{title} by method: {told}.")
