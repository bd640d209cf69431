"""The page's pictures from top to bottom: sections with what they mean."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from laplace_debias.metrics import METRICS
from laplace_debias.report.names import decimals, known_first, number
from laplace_debias.report.page import calibration, ood, posterior
from laplace_debias.report.page.panel import Look, Panel, Picture
from laplace_debias.report.run_folder import Run

_BY_SEVERITY = ("accuracy", "nll", "overconfidence", "brier", "rmse", "scaled_error", "crps")
_MOST_METRICS = 4


@dataclass(frozen=True)
class Section:
    """A part of the page: the title asks a question, the lead says why it matters.

    `reads` says how the pictures are read.
    """

    key: str
    title: str
    lead: str
    reads: str
    pictures: tuple[Picture, ...]


def sections(run: Run, looks: dict[str, Look]) -> list[Section]:
    """The sections for which the run has something to show."""
    judged = _regression(run, looks) if run.is_regression else _classification(run, looks)
    parts = [_ood(run, looks), _severity(run, looks), _tuning(run, looks)]
    return [part for part in [*judged, *parts] if part.pictures]


_FIRST = ("severity-overconfidence", "severity-scaled_error", "coverage", "reliability-test-")


def first_picture(shown: Sequence[Section]) -> Picture | None:
    """The picture that shows the verdict: confidence by severity, or on the test set."""
    pictures = [picture for part in shown for picture in part.pictures]
    for name in _FIRST:
        for picture in pictures:
            if picture.name.startswith(name):
                alt = f"In short: {picture.alt}"
                return replace(picture, name=f"first-{picture.name}", alt=alt)
    return None


def _classification(run: Run, looks: dict[str, Look]) -> list[Section]:
    kept = [calibration.risk_coverage(run, looks, run.test.name, "Test set")]
    kept += [
        calibration.risk_coverage(run, looks, data.name, f"Severity {data.severity}")
        for data in run.shifts[-1:]
    ]
    return [
        _section(
            "calibration",
            "Are the probabilities right?",
            "Of the examples that a method is 80 % sure of, 80 % should be right.",
            "On the dashed line, confidence is accuracy; below it, the method is over-confident. "
            "The band is the 95 % interval of the accuracy in each of 15 equal bins, hollow points "
            "are of fewer than 10 examples; the bars count them, on a logarithmic axis.",
            [calibration.reliability(run, look, run.test.name) for look in looks.values()],
        ),
        _section(
            "selective",
            "Does doubt find the mistakes?",
            "If the least certain examples go to a person, how many mistakes remain?",
            "Keep only the most confident examples, from right to left: the faster the curve "
            "falls, the better confidence finds the mistakes. Lower is better.",
            kept,
        ),
    ]


def _regression(run: Run, looks: dict[str, Look]) -> list[Section]:
    return [
        _section(
            "calibration",
            "Do the intervals contain as many targets as they should?",
            "",
            "Coverage: above the dashed line, intervals contain more targets than "
            "they promise. Residuals, in groups by predicted standard deviation: above the "
            "line, errors are larger than predicted; points far apart from left to right "
            "separate easy from hard examples.",
            [calibration.coverage(run, looks), calibration.residuals(run, looks)],
        ),
    ]


def _ood(run: Run, looks: dict[str, Look]) -> Section:
    return _section(
        "ood",
        "Does it notice what it does not know?",
        "",
        "Uncertainty of the test set (line) and of another set (filled), heights as square roots: "
        "the less they overlap, the better.",
        [ood.score_histograms(run, looks, data.name) for data in run.ood],
    )


def _severity(run: Run, looks: dict[str, Look]) -> Section:
    names = {data.name for data in run.shifts}
    metrics = known_first(run.rows[run.rows["set"].isin(names)]["metric"])
    chosen = [name for name in _BY_SEVERITY if name in metrics]
    return _section(
        "shift",
        "What remains when the data get worse?",
        "The test examples, corrupted more and more.",
        "From left to right the corruption grows. Bars are 95 % intervals; methods are drawn side "
        "by side.",
        [severity(run, looks, name) for name in chosen[:_MOST_METRICS]],
    )


def _tuning(run: Run, looks: dict[str, Look]) -> Section:
    return _section(
        "tuning",
        "How was the prior precision chosen?",
        "On validation examples, which the network was not trained on.",
        "The line marks the tuned value, the grey range all values within one standard "
        "error of the best: a wide range means that the choice hardly matters.",
        [posterior.sweep(run, look) for look in looks.values()],
    )


def _section(
    key: str, title: str, lead: str, reads: str, pictures: Iterable[Picture | None]
) -> Section:
    """A section, without the pictures that there are none of."""
    drawn = tuple(picture for picture in pictures if picture is not None)
    return Section(key, title, lead, reads, drawn)


def severity(run: Run, methods: dict[str, Look], metric: str) -> Picture | None:
    """A metric against the severity, with its intervals; severity 0 is the test set as it is."""
    levels = {run.test.name: 0} | {data.name: data.severity or 0 for data in run.shifts}
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
    if not ends:
        return None
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
