"""A fit's passes over data, of which nothing is saved; `saved_passes` has those that are."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace_debias.curvature.fits.pass_state import Held
from laplace_debias.curvature.network.inputs import Inputs


class Pass:
    """One pass over data, of which nothing is saved.

    Attributes:
        num_examples: What was seen before it begins, as `Seen` has it; so are the next two.
        nll: The summed loss.
        num_outputs: How many numbers the network gave.
    """

    num_examples: int = 0
    nll: float = 0.0
    num_outputs: int = 0

    def __enter__(self) -> "Pass":
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """End."""

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """The batches of a source."""
        return iter(source)

    def left(self, x: Inputs, y: Tensor, place: int) -> list[slice]:
        """Which neighbouring examples of the batch that was read are not in the sums already.

        Args:
            x: Its inputs.
            y: Its targets.
            place: That of its first example among all examples of the pass.
        """
        return [slice(0, len(y))] if len(y) else []

    def done(self, num_examples: int, nll: Tensor | float, num_outputs: int) -> None:
        """Tell that the batch that was read is in the sums, and what was seen so far."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What a pass sums, so that it can be saved and gone on with.

    Attributes:
        held: Where it keeps its sums.
        keys: The keys of `held` by their names.
        check: Raises if a batch so far was a wrong one: such sums are not saved.
        along: What is measured along: sums along other directions are no part of these.
    """

    held: Held
    keys: Mapping[str, Any]
    check: Callable[[], None]
    along: Sequence[Tensor | None] = ()


class Passes:
    """The passes of a fit of which nothing is saved."""

    def along(self, directions: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the next pass measures along.

        Args:
            directions: What was found for that, by name, on all processes.

        Returns:
            The same; of a pass that is gone on with what it was begun with, where that is there.
        """
        return directions

    def begin(self, sums: Sums | None) -> Pass:
        """The next pass.

        Args:
            sums: What it sums; None if it cannot be gone on with.
        """
        return Pass()


NOT_SAVED = Passes()
"""The passes of a fit that nobody goes on with."""
