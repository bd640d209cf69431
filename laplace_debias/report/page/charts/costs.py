"""Pictures of what the methods cost: time and memory."""

from collections.abc import Callable

from laplace_debias.report.page.names import duration, size
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.page.run_folder import Method
from laplace_debias.report.style import INK


def seconds(methods: tuple[Method, ...], looks: dict[str, Look]) -> Picture | None:
    """Time of each method, all stages together; the stages are told when one looks closer."""
    rows = [(method, sum(method.seconds.values())) for method in methods if method.seconds]
    texts = [
        "\n".join([method.label, *(f"{s} {duration(v)}" for s, v in method.seconds.items())])
        for method, _ in rows
    ]
    return _bars("time", "Time", rows, texts, duration, looks)


def memory(methods: tuple[Method, ...], looks: dict[str, Look]) -> Picture | None:
    """Bytes that each method keeps besides the network."""
    rows = [(m, float(m.num_bytes)) for m in methods if m.num_bytes is not None]
    texts = [f"{method.label}\n{size(value)}" for method, value in rows]
    return _bars("memory", "Memory", rows, texts, size, looks)


def _bars(
    name: str,
    title: str,
    rows: list[tuple[Method, float]],
    texts: list[str],
    tell: Callable[[float], str],
    looks: dict[str, Look],
) -> Picture | None:
    most = max((value for _, value in rows), default=0)
    if most <= 0:
        return None
    panel = Panel(name, 0.15 + 0.45 * len(rows))
    ax = panel.axes[0]
    for place, (method, value) in enumerate(rows):
        bar = ax.barh(place, value, height=0.3, color=looks[method.key].colour)
        label = ax.text(0, place - 0.21, method.label, va="bottom", fontsize=9, color=INK)
        size = ax.text(
            most, place - 0.21, tell(value), va="bottom", ha="right", fontsize=9, color=INK
        )
        panel.of(method.key, *bar, label, size)
        panel.note(ax, method.key, [value], [place], [texts[place]])
    ax.set(xlim=(0, most), ylim=(len(rows) - 0.7, -0.8), xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(visible=False)
    told = "; ".join(f"{method.label} {tell(value)}" for method, value in rows)
    return panel.finish(title, f"{title} by method: {told}.")
