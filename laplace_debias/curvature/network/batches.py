"""Data: batches of inputs and targets, from anything that can be iterated over."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.curvature.network.inputs import move
from laplace_debias.curvature.network.reader import USE_A_HOOK, BatchReader
from laplace_debias.system.checks import check_generator
from laplace_debias.system.ranks import current
from laplace_debias.system.threads import Randomness

# Batches as `BatchReader` reads them: pairs (inputs, targets), or mappings and dataclasses.
Batches = Iterable[Any]
# The same, checked, and on the model's device or on their way there; in a fit a third entry may be
# the weights of the examples, `[B]`.
Pairs = Iterable[tuple[Any, ...]]
# From the number of a batch of this process, and how many examples it has read before, to the place
# of the batch's first example among those of all processes.
Place = Callable[[int, int], int]


class Placed:
    """Pairs of one process, which know where their examples are among those of all.

    Args:
        pairs: Pairs `(x, y)`.
        place: See `Place`; by default the examples are all there are.

    Attributes:
        are_folds: Whether the pairs were cut from a list, and are not the user's batches.
    """

    def __init__(self, pairs: Pairs, place: Place = lambda _, seen: seen) -> None:
        self._pairs, self.place = pairs, place
        self.are_folds = isinstance(pairs, list)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pairs)


class Stream(Placed):
    """A user's batches, read as checked pairs `(x, y)`: re-iterable if their source is.

    The first pair can be looked at without being lost: the next pass goes on with the iterator that
    gave it, so that a loader which shuffles is not begun twice. With a generator a pass's order and
    augmentation are a function of it; passes differ from each other, as those of a shuffling loader
    do, and torch's global generator is as if nothing had been read.

    Args:
        source: The user's batches.
        read: What makes pairs of them.
        dtypes: The dtypes of the model's parameters, one of which floating-point inputs must have.
        generator: What the source's randomness is seeded by, here and once for all passes; None
            leaves it to torch's global generator. A list or a tuple draws nothing.
        device: Where inputs are moved, the model's device; None to leave them where they are.
        of_targets: Likewise for targets.
        progress: What a progress bar of each pass is called; None for no bar.
        counts_any: If given, whether any of some targets counts: some of each pass must.
        what: What errors call the batches.
        weighs: Whether a batch may be a triple, whose third entry are the examples' weights.
    """

    def __init__(
        self,
        source: Batches,
        read: BatchReader,
        dtypes: Collection[torch.dtype],
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        of_targets: torch.device | None = None,
        progress: str | None = None,
        counts_any: Callable[[Tensor], bool] | None = None,
        what: str = "data",
        weighs: bool = False,
    ) -> None:
        check_generator(generator)
        super().__init__(())
        self.source, self.read, self.dtypes = source, read, dtypes
        self.device, self.of_targets = device, of_targets
        self.progress, self.counts_any, self.what = progress, counts_any, what
        self.weighs = weighs
        self._first: list[tuple[Any, ...]] = []
        self._begun: Iterator[tuple[Any, ...]] | None = None
        is_drawn = generator is not None and not isinstance(source, (list, tuple))
        self._randomness = Randomness(generator) if generator and is_drawn else nullcontext()

    @property
    def first(self) -> list[tuple[Any, ...]]:
        """The first pair, in a list of it alone; an empty one if there is none."""
        if self._begun is None and not self._first:
            self._begun = self._checked()
            self._first = list(islice(self._begun, 1))
        return self._first

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """A pass.

        Raises:
            ValueError: At the end if no target counts; as `_checked`.
        """
        begun, self._begun = self._begun, None
        number, counts = 0, False
        for pair in self._checked() if begun is None else chain(self._first, begun):
            number += 1
            counts = counts or (self.counts_any is not None and self.counts_any(pair[1]))
            yield pair
        if self.counts_any is None:
            return
        of_ranks = current().exchange([number, counts])
        if any(some for some, _ in of_ranks) and not any(counted for _, counted in of_ranks):
            raise ValueError(
                f"Every target of the {self.what} is ignored. They have no curvature: pass batches "
                "in which at least one target counts."
            )

    def raw(self) -> Iterator[Any]:
        """A pass over what the source yields."""
        source = self.source
        if self.progress is not None:
            source = tqdm(source, desc=self.progress, unit="batch", leave=False)
        with self._randomness:
            steps = iter(source)
        while True:
            with self._randomness:
                try:
                    batch = next(steps)
                except StopIteration:
                    return
            yield batch

    def pair(self, batch: Any, name: str = "A batch") -> tuple[Any, ...]:
        """A batch as inputs and targets, and weights if it has some; as `BatchReader`."""
        is_weighed = self.weighs and isinstance(batch, (tuple, list)) and len(batch) == 3
        if not is_weighed or self.read.has_hook:
            return self.read(batch, name)
        return *self.read(batch[:2], name), checked_weights(batch[2], len(batch[1]), name)

    def _checked(self) -> Iterator[tuple[Any, ...]]:
        """The pairs of a pass."""
        for number, batch in enumerate(self.raw(), start=1):
            x, y, *weights = self.pair(batch, f"Batch {number}")
            x = move(x, self.device, self.dtypes)
            y = y if self.of_targets is None else y.to(self.of_targets, non_blocking=True)
            yield x, y, *weights


def checked_weights(weights: Any, size: int, name: str) -> Tensor:
    """Weights of a batch's examples, `[B]`.

    Raises:
        TypeError: If they are no floating-point tensor.
        ValueError: If one is negative or not finite, or there are more or fewer than examples.
    """
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise TypeError(
            "A third entry of a batch is the weights of its examples, a tensor of floating-point "
            f"numbers; got {getattr(weights, 'dtype', type(weights).__name__)}. To leave it out, "
            f"{USE_A_HOOK}."
        )
    if weights.shape != (size,):
        raise ValueError(
            f"{name} holds {size} examples, but weights of shape {tuple(weights.shape)}."
        )
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError(f"The weights of examples must be finite and not negative: {name} is not.")
    return weights


def weight_of(pair: tuple[Any, ...]) -> float:
    """The sum of a pair's weights; without weights each example counts once."""
    return float(pair[2].double().sum()) if len(pair) > 2 else len(pair[1])
