"""Randomness of a loader, taken from a generator instead of torch's global one.

A `DataLoader` draws from torch's global generator on the CPU: a seed for its workers in every pass,
even without any; a seed for `shuffle=True`; and what its data set draws to augment.
"""

from collections.abc import Iterable, Iterator
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
    stream = _Stream(int(seed))
    return (
        _steps(batches, stream) if isinstance(batches, Iterator) else SeededBatches(batches, stream)
    )


class _Stream:
    """Random numbers that stand in for torch's global generator while it is entered."""

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

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
