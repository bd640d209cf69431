"""Long tables of results summarised over draws."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Row = Mapping[str, object]


@dataclass(frozen=True)
class Curve:
    """One metric of one method along x, over its draws at each x.

    Attributes:
        x: Ascending; empty for a method that does not depend on x.
        mean: Mean over the draws, one per value of x, or a single one.
        low: Least draw.
        high: Greatest draw.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def is_constant(self) -> bool:
        """Whether the method does not depend on x."""
        return not self.x

    @property
    def has_spread(self) -> bool:
        """Whether the draws differ anywhere."""
        return self.low != self.high


def summarise(rows: Sequence[Row], x_key: str, metric: str) -> dict[str, Curve]:
    """Mean, least and greatest draw of a metric, by method and x.

    Args:
        rows: One row per method, x and draw, with the keys `method`, `draw`, `x_key` and `metric`.
            None at `x_key` means that the method does not depend on it.
        x_key: Name of the column with x.
        metric: Name of the column with the metric.

    Returns:
        A curve per method, in order of appearance.

    Raises:
        ValueError: There are no rows, a row lacks a key or holds no finite number where one is due,
            a draw appears twice, or a method has x in some rows and None in others.
    """
    if not rows:
        raise ValueError("there are no rows; expected at least one. Did the run give results?")
    grouped: dict[str, dict[float | None, dict[object, float]]] = {}
    for row in rows:
        missing = [key for key in ("method", "draw", x_key, metric) if key not in row]
        if missing:
            raise ValueError(
                f"a row has the keys {list(row)} and lacks {missing}. Add them to every row, or "
                "leave the metric out."
            )
        x = None if row[x_key] is None else _number(row[x_key], x_key)
        draws = grouped.setdefault(str(row["method"]), {}).setdefault(x, {})
        if row["draw"] in draws:
            raise ValueError(
                f"draw {row['draw']!r} of {row['method']!r} at {x_key} = {row[x_key]} appears "
                "twice; expected one row per draw. Number the draws."
            )
        draws[row["draw"]] = _number(row[metric], metric)
    return {method: _curve(method, x_key, by_x) for method, by_x in grouped.items()}


def _curve(method: str, x_key: str, by_x: dict[float | None, dict[object, float]]) -> Curve:
    if len(by_x) > 1 and None in by_x:
        raise ValueError(
            f"{method!r} has rows with and without {x_key}; expected one or the other. "
            "Give them two names."
        )
    x = sorted(position for position in by_x if position is not None)
    draws = [list(by_x[position].values()) for position in x] or [list(by_x[None].values())]
    return Curve(
        x=tuple(x),
        mean=tuple(map(_mean, draws)),
        low=tuple(min(values) for values in draws),
        high=tuple(max(values) for values in draws),
    )


def _mean(values: Sequence[float]) -> float:
    # Rounded, the mean of equal numbers may be another.
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _number(value: object, key: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(
            f"a row has {key} = {value!r}; expected a finite number. Leave out rows without one."
        )
    return float(value)
