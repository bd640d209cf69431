"""Tables of measurements, and of the goals that they meet or miss."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timing import Row

# In a `Goal`, this name stands for the peer with the smallest median.
FASTEST_PEER = "fastest peer"


@dataclass(frozen=True)
class Goal:
    """A goal of a comparison: bounds on a ratio of two contenders, or on one contender's number.

    Attributes:
        contender: The numerator of the ratio, or the contender of the absolute number.
        over: The denominator of the ratio; None for an absolute number.
        at_most: The upper bound; None if there is none.
        at_least: The lower bound; None if there is none.
        quantity: `"seconds"` or `"megabytes"`.
    """

    contender: str
    over: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    quantity: str = "seconds"

    def rounds(self, rows: Sequence[Row]) -> list[float]:
        """Return the number of the goal for every round; empty if a contender did not run."""
        numerator = _find(rows, self.contender)
        if numerator is None:
            return []
        if self.over is None:
            return list(getattr(numerator, self.quantity))
        denominator = _find(rows, self.over)
        if denominator is None:
            return []
        return ratios(numerator, denominator)

    def measured(self, rows: Sequence[Row]) -> float | None:
        """Return the median over rounds; None if a contender did not run."""
        return _median(self.rounds(rows))

    def describe(self, rows: Sequence[Row]) -> str:
        """Describe the number of the goal in words."""
        numerator = _describe_contender(rows, self.contender)
        if self.over is None:
            return f"{numerator}, added memory in MB"
        return f"{numerator} / {_describe_contender(rows, self.over)}"

    def is_met(self, value: float) -> bool:
        """Whether a measured number is within the bounds."""
        if self.at_most is not None and not value <= self.at_most:
            return False
        return self.at_least is None or value >= self.at_least

    def bounds(self) -> str:
        """Describe the bounds in words."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}"


def ratio(numerator: Row, denominator: Row) -> float | None:
    """Return the median over rounds of the ratio of times; None if there is no round."""
    return _median(ratios(numerator, denominator))


def ratios(numerator: Row, denominator: Row) -> list[float]:
    """Return the ratio of times within every round in which both took part."""
    rounds = zip(numerator.seconds, denominator.seconds, strict=False)
    return [numerator_time / denominator_time for numerator_time, denominator_time in rounds]


def _median(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return statistics.median(values)


def _describe_contender(rows: Sequence[Row], name: str) -> str:
    """Return a contender's name; for `FASTEST_PEER`, with the name of this peer."""
    row = _find(rows, name)
    if row is None or name != FASTEST_PEER:
        return name
    return f"{name} ({row.contender})"


def _find(rows: Sequence[Row], name: str) -> Row | None:
    """Return the row of a contender, or of the fastest peer; None if it did not run."""
    if name == FASTEST_PEER:
        peers = [row for row in rows if row.is_peer and row.seconds]
        return min(peers, key=lambda row: statistics.median(row.seconds), default=None)
    return next((row for row in rows if row.contender == name and row.seconds), None)


def comparison_table(rows: Sequence[Row], unit: str, references: Sequence[str]) -> str:
    """Tabulate the median time, ratios to the references, and peak memory of every contender."""
    table = []
    for row in rows:
        line: dict[str, object] = {"contender": row.contender}
        line[unit] = None
        if row.seconds:
            line[unit] = _number(statistics.median(row.seconds))
        for name in references:
            reference = _find(rows, name)
            value = None if reference is None else ratio(row, reference)
            line[f"÷ {name}"] = None if value is None else f"{value:.2f}"
        line["added memory, MB"] = None
        if row.megabytes:
            line["added memory, MB"] = f"{statistics.median(row.megabytes):.0f}"
        if any(any_row.note for any_row in rows):
            line["note"] = row.note
        table.append(line)
    return markdown_table(table)


def goals_table(results: Sequence[tuple[str, Sequence[Goal], Sequence[Row]]]) -> str | None:
    """Tabulate every goal with the measured number; None if there are no goals.

    Args:
        results: The title, the goals and the rows of every comparison.
    """
    table = []
    for title, goals, rows in results:
        for goal in goals:
            line: dict[str, object] = {"comparison": title, "ratio": goal.describe(rows)}
            value = goal.measured(rows)
            rounds = goal.rounds(rows)
            line["measured"] = None if value is None else _number(value)
            line["rounds"] = None
            if len(rounds) > 1:
                line["rounds"] = f"{_number(min(rounds))} – {_number(max(rounds))}"
            line["goal"] = goal.bounds()
            line["met"] = None
            if value is not None:
                line["met"] = "yes" if goal.is_met(value) else "no"
            table.append(line)
    if not table:
        return None
    return markdown_table(table)


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format a table in GitHub's Markdown, with a dash for None and for an empty text."""
    header = list(dict.fromkeys(column for row in rows for column in row))
    lines = [header, *([str(row.get(name) or "–") for name in header] for row in rows)]
    lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, [f":{'-' * (width - 1)}" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _number(value: float) -> str:
    """Format a number with about three significant digits, without an exponent."""
    if 0 < abs(value) < 0.01:
        return f"{value:.5f}"
    decimals = 3
    for bound in (1, 10, 100):
        if abs(value) >= bound:
            decimals -= 1
    return f"{value:.{decimals}f}"
