"""How far a fit to some of the data is from the fit to all of it."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitReport:
    """How far a fit of `mode="auto"` is from the one of all the data.

    An error is that of standard deviations of outputs, relative, as the root mean square over
    inputs that had no part in the fit: what they differ by from fold to fold, and by magnitudes in
    fold and out of fold (see the page on the method, also for how often the true one is smaller).

    Attributes:
        num_examples: How many examples were drawn, and went backward.
        num_read: How many were read, and went forward.
        seconds: How long it took.
        ended_by: `"tolerance"`, `"seconds"`, `"examples"`, `"interrupt"`; `"the end of the data"`,
            within a budget or of an iterator; or `"data"`: all of it was fitted.
        rounds: Examples and error after each round.
        curve: The errors if the fit's prior precision is multiplied by 1, 10, … 10⁴.
        of_blocks: The part of the error that each block brings, at the fit's prior precision.
        left: What `Auto(after=)` goes on with, of the size of four fits' factors; None where the
            tolerance was reached or all data was fitted.
    """

    num_examples: int
    num_read: int
    seconds: float
    ended_by: str
    rounds: tuple[tuple[int, float], ...]
    curve: dict[float, float]
    of_blocks: dict[str, float]
    left: Any = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> float:
        """The largest error of the curve: that of whatever prior precision is tuned."""
        return max(self.curve.values())

    @property
    def error_of_twice(self) -> float:
        """The error to expect of twice as many examples: it falls with the root of their number."""
        return self.error / math.sqrt(2)

    def __str__(self) -> str:
        if self.ended_by == "data":
            return f"All {self.num_examples:,} examples were fitted."
        factors = ", ".join(f"{error:.1%} at {factor:g}" for factor, error in self.curve.items())
        return (
            f"{self.num_examples:,} examples, drawn from {self.num_read:,}, in "
            f"{self.seconds:.3g} s, ended by {self.ended_by}. "
            f"Standard deviations of the outputs are within {self.error:.1%} of those of a fit of "
            f"all the data; of twice the examples, within some {self.error_of_twice:.1%}. By "
            f"multiples of the prior precision: {factors}. The largest part is that of "
            f"{max(self.of_blocks, key=self.of_blocks.__getitem__)}."
        )
