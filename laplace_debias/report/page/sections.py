"""The pictures of the page, by section."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from laplace_debias.metrics import METRICS
from laplace_debias.report.names import decimals, known_first, number
from laplace_debias.report.page import calibration, ood, posterior
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.run_folder import Run

_BY_SEVERITY = ("accuracy", "nll", "overconfidence", "brier", "rmse", "scaled_error", "crps")
_MOST_METRICS = 4
_FIRST = ("severity-overconfidence", "severity-scaled_error", "coverage", "reliability-test-")


def drawn(run: Run, looks: dict[str, Look]) -> dict[str, list[Picture]]:
    """The pictures that the run has something to show in, by the ids of the page's sections."""
    test, shifts = run.test["name"], run.sets("shift")
    found: dict[str, Iterable[Picture | None]] = {}
    if run.is_regression:
        found["calibration"] = calibration.coverage(run, looks), calibration.residuals(run, looks)
    else:
        kept = {"Test set": test}
        kept |= {f"Severity {data['severity']}": data["name"] for data in shifts[-1:]}
        found["calibration"] = [calibration.reliability(run, look, test) for look in looks.values()]
        found["selective"] = [
            calibration.risk_coverage(run, looks, data, title) for title, data in kept.items()
        ]
    found["ood"] = [ood.score_histograms(run, looks, data["name"]) for data in run.sets("ood")]
    is_shifted = run.rows["set"].isin([data["name"] for data in shifts])
    metrics = known_first(run.rows[is_shifted]["metric"])
    metrics = [name for name in _BY_SEVERITY if name in metrics][:_MOST_METRICS]
    found["shift"] = [severity(run, looks, name) for name in metrics]
    found["tuning"] = [posterior.sweep(run, look) for look in looks.values()]
    return {key: [one for one in some if one is not None] for key, some in found.items()}


def first_picture(pictures: Sequence[Picture]) -> Picture | None:
    """The picture that shows the verdict: confidence by severity, or on the test set."""
    shown = [(name, one) for name in _FIRST for one in pictures if one.name.startswith(name)]
    if not shown:
        return None
    picture = shown[0][1]
    alt = f"In short: {picture.alt}"
    return replace(picture, name=f"first-{picture.name}", alt=alt)


def severity(run: Run, methods: dict[str, Look], metric: str) -> Picture | None:
    """A metric against the severity, with its intervals; severity 0 is the test set as it is."""
    levels = {data["name"]: data["severity"] for data in run.sets("shift")}
    levels = {run.test["name"]: 0} | levels
    name = METRICS[metric]
    panel = Panel(f"severity-{metric}", 2.9)
    ax = panel.axes[0]
    ends = []
    shift = -0.06 * (len(methods) - 1) / 2
    for key, look in methods.items():
        rows = run.rows.assign(level=run.rows["set"].map(levels))
        rows = rows[(rows["method"] == key) & (rows["metric"] == metric)]
        rows = rows.dropna(subset=["value", "level"]).sort_values("level")
        if len(rows) < 2:
            continue
        x = rows["level"].to_numpy(float) + shift
        value, low, high = (rows[end].to_numpy(float) for end in ("value", "low", "high"))
        shift += 0.06
        panel.of(key, ax.vlines(x, low, high, color=look.colour, lw=1.4, alpha=0.6))
        panel.of(key, *ax.plot(x, value, lw=1.5, markersize=4.5, **look.marked))
        texts = [
            f"{look.label}, severity {level:.0f}\n{name.label} {_interval(v, a, b)} {name.unit}"
            for level, v, a, b in zip(rows["level"], value, low, high, strict=True)
        ]
        panel.note(ax, key, x, value, texts)
        places = decimals(low[-1], high[-1], value[-1])
        ends.append(f"{look.label} from {number(value[0], places)} to {number(value[-1], places)}")
    ax.set_xticks(sorted(levels.values()), ["none" if x == 0 else str(x) for x in levels.values()])
    ax.set(xlabel="Severity", ylabel=f"{name.label} ({name.unit})" if name.unit else name.label)
    better = f", {name.better} is better" if name.better in ("higher", "lower") else ""
    alt = f"{name.label} against severity: {'; '.join(ends)}."
    return panel.finish(f"{name.label}{better}", alt)


def _interval(value: float, low: float, high: float) -> str:
    places = decimals(low, high, value)
    if not high >= low:
        return number(value, places)
    return f"{number(value, places)} ({number(low, places)} … {number(high, places)})"
