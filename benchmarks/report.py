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
        top = _find(rows, self.contender)
        if top is None:
            return []
        if self.over is None:
            return list(getattr(top, self.quantity))
        bottom = _find(rows, self.over)
        return [] if bottom is None else ratios(top, bottom)

    def measured(self, rows: Sequence[Row]) -> float | None:
        """Return the median over rounds; None if a contender did not run."""
        rounds = self.rounds(rows)
        return statistics.median(rounds) if rounds else None

    def describe(self, rows: Sequence[Row]) -> str:
        """Describe the subject of the goal in words."""
        names = []
        for name in (self.contender, self.over):
            row = None if name is None else _find(rows, name)
            is_general = row is not None and name == FASTEST_PEER
            names.append(f"{name} ({row.contender})" if is_general and row else name)
        return f"{names[0]} / {names[1]}" if self.over else f"{names[0]}, added memory in MB"

    def is_met(self, value: float) -> bool:
        """Whether a measured number is within the bounds."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def bounds(self) -> str:
        """Describe the bounds in words."""
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"


def ratio(top: Row, bottom: Row) -> float | None:
    """Return the median over rounds of the ratio of times; None if there is no round."""
    rounds = ratios(top, bottom)
    return statistics.median(rounds) if rounds else None


def ratios(top: Row, bottom: Row) -> list[float]:
    """Return the ratio of times within every round in which both took part."""
    return [a / b for a, b in zip(top.seconds, bottom.seconds, strict=False)]


def _find(rows: Sequence[Row], name: str) -> Row | None:
    if name == FASTEST_PEER:
        peers = [row for row in rows if row.is_peer and row.seconds]
        return min(peers, key=lambda row: statistics.median(row.seconds), default=None)
    return next((row for row in rows if row.contender == name and row.seconds), None)


def comparison_table(rows: Sequence[Row], unit: str, references: Sequence[str]) -> str:
    """Tabulate the median time, ratios to the references, and peak memory of every contender."""
    table = []
    for row in rows:
        line: dict[str, object] = {"contender": row.contender}
        line[unit] = _number(statistics.median(row.seconds)) if row.seconds else None
        for name in references:
            reference = _find(rows, name)
            value = None if reference is None else ratio(row, reference)
            line[f"÷ {name}"] = None if value is None else f"{value:.2f}"
        line["added memory, MB"] = (
            f"{statistics.median(row.megabytes):.0f}" if row.megabytes else None
        )
        line["note"] = row.note or None
        table.append(line)
    if not any(line["note"] for line in table):
        for line in table:
            del line["note"]
    return markdown_table(table)


def goals_table(results: Sequence[tuple[str, Sequence[Goal], Sequence[Row]]]) -> str | None:
    """Tabulate every goal with the measured number; None if there are no goals.

    Args:
        results: The title, the goals and the rows of every comparison.
    """
    table = []
    for title, goals, rows in results:
        for goal in goals:
            value = goal.measured(rows)
            rounds = goal.rounds(rows)
            spread = f"{_number(min(rounds))} – {_number(max(rounds))}" if len(rounds) > 1 else None
            table.append(
                {
                    "comparison": title,
                    "ratio": goal.describe(rows),
                    "measured": None if value is None else _number(value),
                    "rounds": spread,
                    "goal": goal.bounds(),
                    "met": None if value is None else "yes" if goal.is_met(value) else "no",
                }
            )
    return markdown_table(table) if table else None


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format a table in GitHub's Markdown, with a dash for None."""
    header = list(dict.fromkeys(column for row in rows for column in row))
    lines = [header, *([str(row.get(name) or "–") for name in header] for row in rows)]
    lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, [f":{'-' * (width - 1)}" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _number(value: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    magnitude = abs(value)
    digits = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{digits}f}" if magnitude >= 0.01 or value == 0 else f"{value:.5f}"
