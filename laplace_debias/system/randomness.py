"""Randomness of a loader, taken from a generator instead of torch's global one.

A `DataLoader` draws from torch's global generator on the CPU: a seed for its workers in every pass,
even without any; a seed for `shuffle=True`; and what its data set draws to augment.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from laplace_debias.system.checks import check_generator
from laplace_debias.system.threads import Lock

# Held while the global generator is exchanged: for the time of one batch's reading.
_GLOBAL = Lock()


def seeded(batches: Any, generator: torch.Generator | None) -> Any:
    """The same batches, whose order and augmentation are a function of a generator.

    The seed is drawn from the generator here, once for all passes; passes differ from each other,
    as those of a shuffling loader do. torch's global generator on the CPU is, whenever a batch is
    there, as if the loader had not been read. It is exchanged while the next batch is read: what
    another thread draws from it just then is not its own sequence. Untouched are `random`, NumPy's
    generators, and a generator that the loader has of its own.

    Args:
        batches: A loader, any iterable or an iterator. A list or a tuple draws nothing, and comes
            back as it is, as anything does that cannot be iterated over.
        generator: None leaves everything to torch's global generator.
    """
    check_generator(generator)
    if generator is None or isinstance(batches, (list, tuple)) or not isinstance(batches, Iterable):
        return batches
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    stream = _Stream.of(int(seed))
    return (
        _steps(batches, stream) if isinstance(batches, Iterator) else SeededBatches(batches, stream)
    )


def replayed(batches: Any, generator: torch.Generator | None) -> Callable[[], Any]:
    """A function that gives the same batches for every pass, in the order of the first.

    The first pass is that of `seeded`. The others draw what it drew, and leave torch's global
    generator alone. An iterator has one pass, and a loader that draws elsewhere (a generator of its
    own, NumPy) may differ from pass to pass.

    Args:
        batches: As `seeded` takes them.
        generator: As `seeded` takes it.
    """
    check_generator(generator)
    state = torch.get_rng_state() if generator is None else generator.get_state()
    begun = False

    def one_pass() -> Any:
        nonlocal begun
        is_first, begun = not begun, True
        if is_first:
            return seeded(batches, generator)
        if generator is not None:
            return seeded(batches, torch.Generator(generator.device).set_state(state))
        if isinstance(batches, (list, tuple)) or not isinstance(batches, Iterable):
            return batches
        return SeededBatches(batches, _Stream(state))

    return one_pass


class _Stream:
    """Random numbers that stand in for torch's global generator while it is entered."""

    def __init__(self, state: torch.Tensor) -> None:
        """Begin at a state of the global generator."""
        self._state = state

    @classmethod
    def of(cls, seed: int) -> "_Stream":
        """Begin at a seed."""
        return cls(torch.Generator().manual_seed(seed).get_state())

    def __enter__(self) -> None:
        _GLOBAL.__enter__()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        _GLOBAL.__exit__(*error)


class SeededBatches:
    """Batches that are read with a stream of their own in the global generator's place.

    Attributes:
        source: The batches.
    """

    def __init__(self, batches: Iterable[Any], stream: _Stream) -> None:
        self.source = self._batches = batches
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        with self._stream:
            iterator = iter(self._batches)
        return _steps(iterator, self._stream)


def _steps(iterator: Iterator[Any], stream: _Stream) -> Iterator[Any]:
    while True:
        with stream:
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
