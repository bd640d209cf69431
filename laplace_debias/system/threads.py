"""Locks, and torch's global generator, which threads of a process share.

Nothing here is needed where each call works on tensors and copies of its own. It is needed for what
torch keeps once for all threads: the level of forward-mode differentiation, and the generator on
the CPU. A `DataLoader` draws from that: a seed
for its workers in every pass, even without any; a seed for `shuffle=True`; and what its data set
draws to augment.
"""

import threading
from typing import Any

import torch


class Lock:
    """A re-entrant lock that can be copied with its owner; a copy is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


FORWARD_MODE = threading.RLock()
"""Lock for computing or recording forward-mode derivatives (`torch.func.jvp`).

torch has one level of forward-mode differentiation for the whole process. The first thread that
leaves this level discards the tangents of all other threads, without an error.
"""

GLOBAL_GENERATOR = threading.RLock()
"""Lock that is held while torch's global generator has another state.

This is the time in which a batch is read, or in which an estimator of scikit-learn trains.
"""


class Randomness:
    """A context in which random numbers replace torch's global generator.

    The global generator is afterwards as if nothing had been drawn. Another thread that draws from
    it meanwhile does not get its own sequence. `random` and NumPy's generators are not changed.
    """

    def __init__(self, generator: torch.Generator) -> None:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        self._state = torch.Generator().manual_seed(int(seed)).get_state()

    def __enter__(self) -> None:
        GLOBAL_GENERATOR.acquire()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        GLOBAL_GENERATOR.release()
