"""The estimated error of a fit to part of the data, compared with a fit to all data."""

import math
from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a fit with `mode="auto"` ended."""

    TOLERANCE = "tolerance"
    SECONDS = "seconds"
    EXAMPLES = "examples"
    INTERRUPT = "interrupt"
    END_OF_DATA = "the end of the data"
    """The data ended before the fit used all of the data, or N examples."""
    ALL_DATA = "data"

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class FitReport:
    """The estimated error of a fit with `mode="auto"`.

    The error is the relative error of the outputs' standard deviations compared with a fit to all
    data, as a root mean square over inputs that were not used for the fit. It is estimated from the
    differences between folds, and from the differences between magnitudes measured within a fold
    and on held-out folds. The documentation of the method describes the estimate and states how
    often the true error is smaller.

    Attributes:
        num_examples: The number of examples that were drawn for the backward pass.
        num_read: The number of examples that were read for the forward pass.
        seconds: The duration of the fit, in seconds.
        ended_by: `"tolerance"`, `"seconds"`, `"examples"` or `"interrupt"`; `"data"` if the fit
            used all of the data; or `"the end of the data"` if the data ended first, because there
            is a budget, the data is an iterator, or it has fewer than N examples.
        rounds: The number of drawn examples and the estimated error after each round.
        curve: The error if the prior precision of the fit is multiplied by 1, 10, … 10⁴; NaN if the
            data ended before the first round was complete.
        error_by_block: The contribution of each block to the error, at the fit's prior precision.
        continuation: The state from which `Auto(after=)` continues, which needs as much memory as
            the factors of four fits. None if the tolerance was reached or the fit used all data.
    """

    num_examples: int
    num_read: int
    seconds: float
    ended_by: StopReason
    rounds: tuple[tuple[int, float], ...]
    curve: dict[float, float]
    error_by_block: dict[str, float]
    continuation: object | None = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> float:
        """The largest error of the curve, which also holds for a tuned prior precision."""
        return max(self.curve.values())

    @property
    def error_with_twice_the_examples(self) -> float:
        """The expected error of a fit to twice as many examples.

        The error is inversely proportional to the square root of the number of examples.
        """
        return self.error / math.sqrt(2)

    def __str__(self) -> str:
        if self.ended_by is StopReason.ALL_DATA:
            return f"The fit used all {self.num_examples:,} examples."
        if math.isnan(self.error):
            return (
                f"The fit used all {self.num_examples:,} examples of the data, which are fewer "
                "than the number of training examples. The error of the standard deviations of "
                "the outputs is unknown."
            )
        curve = ", ".join(f"{error:.1%} at {factor:g}" for factor, error in self.curve.items())
        largest_block = max(self.error_by_block, key=self.error_by_block.__getitem__)
        return (
            f"The fit read {self.num_read:,} examples and used {self.num_examples:,} of them. It "
            f"took {self.seconds:.3g} s (ended by {self.ended_by}). The standard deviations of the "
            f"outputs are within {self.error:.1%} of those of a fit to all the data. With twice "
            f"the examples, they would be within about {self.error_with_twice_the_examples:.1%}. "
            f"At multiples of the prior precision, the error is {curve}. The block that "
            f"contributes most to the error is {largest_block}."
        )
