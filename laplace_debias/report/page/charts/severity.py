"""Pictures of metrics against the severity of a shift."""

from laplace_debias.report.page.names import decimals, metric_name, number
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.page.run_folder import Run


def severity(run: Run, methods: dict[str, Look], metric: str) -> Picture | None:
    """A metric against the severity, with its intervals; severity 0 is the test set as it is.

    Args:
        run: The run.
        methods: Looks by key.
        metric: Name of the metric.
    """
    levels = {run.test: 0} | {data.name: data.severity or 0 for data in run.shifts}
    name = metric_name(metric)
    panel = Panel(f"severity-{metric}", 2.9)
    ax = panel.axes[0]
    ends = []
    shift = -0.06 * (len(methods) - 1) / 2
    for key, look in methods.items():
        rows = run.rows
        rows = rows[(rows["method"] == key) & (rows["metric"] == metric)]
        rows = rows[rows["set"].isin(list(levels))].dropna(subset=["value"])
        if len(rows) < 2:
            continue
        rows = rows.assign(level=rows["set"].map(levels)).sort_values("level")
        x = rows["level"].to_numpy(float) + shift
        value, low, high = (rows[end].to_numpy(float) for end in ("value", "low", "high"))
        shift += 0.06
        panel.of(key, ax.vlines(x, low, high, color=look.colour, lw=1.4, alpha=0.6))
        panel.of(key, *ax.plot(x, value, lw=1.5, markersize=4.5, **look.marked))
        texts = [
            f"{look.label}, severity {level}\n{name.label} {_interval(v, a, b)} {name.unit}"
            for level, v, a, b in zip(rows["level"], value, low, high, strict=True)
        ]
        panel.note(ax, key, x, value, texts)
        places = decimals(low[-1], high[-1], value[-1])
        ends.append(f"{look.label} from {number(value[0], places)} to {number(value[-1], places)}")
    if not ends:
        return None
    ax.set_xticks(sorted(levels.values()), ["none" if x == 0 else str(x) for x in levels.values()])
    ax.set(xlabel="Severity", ylabel=f"{name.label} ({name.unit})" if name.unit else name.label)
    better = f", {name.better} is better" if name.better in ("higher", "lower") else ""
    return panel.finish(
        f"{name.label}{better}", f"{name.label} against severity: {'; '.join(ends)}."
    )


def _interval(value: float, low: float, high: float) -> str:
    places = decimals(low, high, value)
    if not high >= low:
        return number(value, places)
    return f"{number(value, places)} ({number(low, places)} … {number(high, places)})"
