"""Reports, which are tables of metrics with intervals, and the paired comparison of two reports."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.intervals import Interval
from laplace_debias.metrics.statistics import Statistic
from laplace_debias.system.checks import check_extra
from laplace_debias.system.shown import aligned, html_table

if TYPE_CHECKING:
    from pandas import DataFrame


class Report(dict[str, Interval]):
    """A mapping from names to metrics, each with its confidence interval.

    A report also stores the contribution of each example, which `compare` needs. A plain `dict` or
    JSON copy contains only the numbers.

    Attributes:
        level: Nominal coverage of the intervals.
    """

    def __init__(
        self,
        intervals: Mapping[str, Interval],
        level: float = 0.95,
        statistics: Mapping[str, Statistic] | None = None,
        targets: Tensor | None = None,
    ) -> None:
        super().__init__(intervals)
        self.level = level
        self._statistics = dict(statistics or {})
        self._targets = targets

    def to_frame(self) -> "DataFrame":
        """Convert to a pandas table with the columns `value`, `low` and `high`.

        Raises:
            ImportError: If pandas is not installed.
        """
        check_extra("cli", "pandas")
        from pandas import DataFrame, Index

        return DataFrame(
            [(metric.value, metric.low, metric.high) for metric in self.values()],
            index=Index(list(self), name="metric"),
            columns=["value", "low", "high"],
            dtype=float,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per metric, in a list that can be converted to JSON."""
        return [
            {
                "metric": name,
                "value": metric.value,
                "low": metric.low if metric.is_known else None,
                "high": metric.high if metric.is_known else None,
            }
            for name, metric in self.items()
        ]

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the cells of the table: the header, and a line for each metric."""
        # Without any known interval, the last two columns would be empty.
        num_columns = 4 if any(metric.is_known for metric in self.values()) else 2
        lines: list[tuple[str, ...]] = [("metric", "value", "low", "high")[:num_columns]]
        for name, metric in self.items():
            numbers = (metric.value, metric.low, metric.high)
            texts = ("–" if math.isnan(number) else f"{number:z.4f}" for number in numbers)
            lines.append((name, *texts)[:num_columns])
        return lines

    def _repr_html_(self) -> str:
        header, *lines = self._lines()
        return html_table(lines, header)

    def __repr__(self) -> str:
        return aligned(self._lines()) if self else "Report({})"


def report_of(
    statistics: Mapping[str, Statistic],
    targets: Tensor | None,
    level: float = 0.95,
    intervals: bool = True,
) -> Report:
    """Build a report from statistics, with or without intervals."""
    check_level(level)
    values = {
        name: statistic.interval(level) if intervals else Interval(statistic.value)
        for name, statistic in statistics.items()
    }
    return Report(values, level, statistics, targets)


def compare(a: Report, b: Report) -> Report:
    """Compare two methods by the paired differences a − b between the metrics of their reports.

    Both methods predict the same easy and hard examples, so their difference is known more
    precisely than either metric: its interval can exclude 0 even if the intervals of the two
    metrics overlap. If a metric has an ideal value (0 for `overconfidence` and `bias`, 1 for
    `scaled_error`), the difference is that of the distances from this value.

    Args:
        a: The report of one method.
        b: The report of another method on the same examples in the same order.

    Raises:
        TypeError: If an argument is not a report.
        ValueError: If the reports are on different examples or have different levels, or if they
            have no metric in common.

    Example:
        >>> import torch
        >>> from laplace_debias.metrics import evaluate
        >>> labels = torch.arange(200) % 2
        >>> sure = torch.full((200,), 0.9).where(labels == 1, 0.1)
        >>> difference = compare(evaluate(sure, labels), evaluate(0.5 + 0 * sure, labels))
        >>> round(difference["brier"], 2), difference["brier"].high < 0
        (-0.48, True)
    """
    for name, report in (("a", a), ("b", b)):
        if not isinstance(report, Report):
            raise TypeError(f"`{name}` is a {type(report).__name__}. Pass results of `evaluate`.")
    _check_same_examples(a, b)
    statistics = a._statistics
    references = b._statistics
    common = [name for name in statistics if name in references]
    if not common:
        raise ValueError(
            f"`a` has the metrics {list(statistics)}, but `b` has {list(references)}, "
            "so they have no metric in common. Compare predictive distributions for "
            "the same task."
        )
    differences = {}
    for name in common:
        sizes = statistics[name].sizes
        reference_sizes = references[name].sizes
        if sizes != reference_sizes:
            raise ValueError(
                f"`{name}` is computed on {sizes} examples in `a`, but on {reference_sizes} in "
                "`b`. Evaluate both on the same loaders."
            )
        differences[name] = statistics[name].difference(references[name], a.level)
    return Report(differences, a.level)


def _check_same_examples(a: Report, b: Report) -> None:
    """Check that two reports have the same level and, if both store them, the same targets."""
    if a.level != b.level:
        raise ValueError(
            f"`a` has the level {a.level}, but `b` has {b.level}. Evaluate both with the same "
            "level."
        )
    if a._targets is not None and b._targets is not None:
        if a._targets.shape != b._targets.shape:
            raise ValueError(
                f"`a` has targets of shape {list(a._targets.shape)}, but `b` has targets "
                f"of shape {list(b._targets.shape)}. Evaluate both on the same loader."
            )
        different = int((a._targets != b._targets.to(a._targets.device)).sum())
        if different:
            raise ValueError(
                f"`a` and `b` differ in {different} of {a._targets.numel()} targets. "
                "Evaluate both on the same loader, without shuffling."
            )
