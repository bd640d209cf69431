"""What the page shows, from top to bottom: sections of pictures with what they mean."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laplace_debias.report.page.charts import (
    classification,
    costs,
    ood,
    posterior,
    regression,
    severity,
)
from laplace_debias.report.page.names import known_first
from laplace_debias.report.page.panel import Look, Picture
from laplace_debias.report.page.run_folder import Run

_BY_SEVERITY = ("accuracy", "nll", "smooth_ece", "ece", "brier", "rmse", "crps", "coverage")
_MOST_METRICS = 4


@dataclass(frozen=True)
class Group:
    """Pictures that are read in the same way.

    Attributes:
        title: May be empty.
        reads: One line that says how to read them.
        pictures: At least one.
    """

    title: str
    reads: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: Its place in the page.
        title: The question that it answers.
        lead: A sentence on why it matters, may be empty.
        groups: At least one.
    """

    key: str
    title: str
    lead: str
    groups: tuple[Group, ...]


def sections(run: Run, looks: dict[str, Look]) -> list[Section]:
    """The sections for which the run has something to show.

    Args:
        run: The run.
        looks: Looks of its methods by key.
    """
    judged = _regression(run, looks) if run.is_regression else _classification(run, looks)
    found = [*judged, _ood(run, looks), _severity(run, looks), *_posterior(run, looks)]
    return [part for part in [*found, _costs(run, looks)] if part.groups]


def _classification(run: Run, looks: dict[str, Look]) -> list[Section]:
    hardest = run.shifts[-1:]
    pictures = [classification.reliability(run, look, run.test) for look in looks.values()]
    groups = [
        _group(
            "",
            "On the dashed line, confidence is accuracy; below it, the method is over-confident. "
            "The band is the 95 % interval of the accuracy in each of 15 equal bins, hollow points "
            "are of fewer than 10 examples; the bars count them, on a logarithmic axis.",
            pictures,
        )
    ]
    kept = [classification.risk_coverage(run, looks, run.test, "Test set")]
    kept += [
        classification.risk_coverage(run, looks, data.name, f"Severity {data.severity}")
        for data in hardest
    ]
    risk = _group(
        "",
        "Keep only the most confident examples, from right to left: the faster the curve falls, "
        "the better confidence finds the mistakes. Lower is better.",
        kept,
    )
    return [
        _section(
            "calibration",
            "Are the probabilities right?",
            "Of the examples that a method is 80 % sure of, 80 % should be right.",
            groups,
        ),
        _section(
            "selective",
            "Does doubt find the mistakes?",
            "If the least certain examples go to a person, how many mistakes remain?",
            [risk],
        ),
    ]


def _regression(run: Run, looks: dict[str, Look]) -> list[Section]:
    return [
        _section(
            "calibration",
            "Are the predicted distributions right?",
            "Of all targets, 10 % should lie below the predicted 10 % quantile, and so on.",
            [
                _group(
                    "",
                    "On the dashed line, quantiles are right; the grey band is where a calibrated "
                    "method lies in 95 % of test sets. An S-shape says too wide or too narrow.",
                    [regression.quantiles(run, look) for look in looks.values()],
                )
            ],
        ),
        _section(
            "intervals",
            "Do the intervals hold what they promise?",
            "",
            [
                _group(
                    "",
                    "Coverage: above the dashed line, intervals hold more targets than they "
                    "promise. Residuals, in groups by predicted standard deviation: above the "
                    "line, errors are larger than predicted; points far apart from left to right "
                    "tell easy from hard examples.",
                    [regression.coverage(run, looks), regression.residuals(run, looks)],
                ),
            ],
        ),
    ]


def _ood(run: Run, looks: dict[str, Look]) -> Section:
    kinds = {"near": "Near", "far": "Far"}
    groups = []
    for data in run.ood:
        kind = kinds.get(data.kind or "", "")
        pair = [
            ood.score_histograms(run, looks, data.name, "Uncertainty"),
            ood.roc(run, looks, data.name, "ROC"),
        ]
        groups.append(
            _group(
                f"{kind}: {data.name}" if kind else data.name,
                "Uncertainty of the test set (line) and of this set (filled), heights as square "
                "roots: the less they overlap, the better. ROC: how many strange examples are "
                "found at how many false alarms; up and to the left is better.",
                pair,
            )
        )
    for data in run.shifts[-1:]:
        groups.append(
            _group(
                f"Not out-of-distribution: the test set at severity {data.severity}",
                "The same test examples, corrupted (filled): still of the known classes, so that "
                "nothing is to be detected. Uncertainty should grow as accuracy falls.",
                [ood.score_histograms(run, looks, data.name, "Uncertainty")],
            )
        )
    return _section(
        "ood",
        "Does it notice what it does not know?" if run.ood else "Does doubt grow with the shift?",
        "Near sets look like the training data but are of other classes; far sets do not look "
        "like it."
        if run.ood
        else "",
        groups,
    )


def _severity(run: Run, looks: dict[str, Look]) -> Section:
    names = {data.name for data in run.shifts}
    metrics = known_first(run.rows[run.rows["set"].isin(names)]["metric"])
    chosen = [name for name in _BY_SEVERITY if name in metrics]
    if "smooth_ece" in chosen and "ece" in chosen:
        chosen.remove("ece")
    pictures = [severity.severity(run, looks, name) for name in chosen[:_MOST_METRICS]]
    return _section(
        "shift",
        "What remains when the data get worse?",
        "The test examples, corrupted more and more.",
        [
            _group(
                "",
                "From left to right the corruption grows. Bars are 95 % intervals; methods stand "
                "beside each other so that they can be told apart.",
                pictures,
            )
        ],
    )


def _posterior(run: Run, looks: dict[str, Look]) -> list[Section]:
    precisions = {method.key: method.prior_precision for method in run.methods}
    return [
        _section(
            "tuning",
            "How was the prior precision chosen?",
            "On validation examples, which the network was not trained on.",
            [
                _group(
                    "",
                    "The line marks the tuned value, the grey range all values within one standard "
                    "error of the best: a wide range says that the choice hardly matters.",
                    [posterior.sweep(run, look) for look in looks.values()],
                )
            ],
        ),
        _section(
            "spectrum",
            "What did the posterior learn, and where?",
            "Where the data say little, the prior decides.",
            [
                _group(
                    "",
                    "One row a block of parameters: thick, the middle half of the directions; "
                    "thin, all of them; the tick is the median. Left of the dashed line, the prior "
                    "precision, the prior weighs more. On the right, the prior's mean share.",
                    [posterior.spectrum(run, look, precisions[key]) for key, look in looks.items()],
                )
            ],
        ),
    ]


def _costs(run: Run, looks: dict[str, Look]) -> Section:
    pictures = [costs.seconds(run.methods, looks), costs.memory(run.methods, looks)]
    return _section(
        "cost",
        "What does it cost?",
        "",
        [
            _group(
                "",
                "Shorter is cheaper. Time is that of this run: fitting, tuning and all "
                "predictions. Memory is what a method keeps besides the network.",
                pictures,
            )
        ],
    )


def _group(title: str, reads: str, pictures: Iterable[Picture | None]) -> Group:
    return Group(title, reads, tuple(picture for picture in pictures if picture is not None))


def _section(key: str, title: str, lead: str, groups: Sequence[Group]) -> Section:
    return Section(key, title, lead, tuple(group for group in groups if group.pictures))
