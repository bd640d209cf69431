"""Randomness of a loader, taken from a generator instead of torch's global one.

A `DataLoader` draws from torch's global generator on the CPU: a seed for its workers in every pass,
even without any; a seed for `shuffle=True`; and what its data set draws to augment.
"""

import torch

from laplace_debias.system.threads import Lock

# Held while the global generator is exchanged: for the time of one batch's reading.
_GLOBAL = Lock()


class Randomness:
    """Random numbers that stand in for torch's global generator on the CPU while it is entered.

    The global generator is afterwards as if nothing had been drawn. What another thread draws from
    it meanwhile is not its own sequence. Untouched are `random` and NumPy's generators.

    Args:
        generator: Source of the seed, drawn once.
    """

    def __init__(self, generator: torch.Generator) -> None:
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        self._state = torch.Generator().manual_seed(int(seed)).get_state()

    def __enter__(self) -> None:
        _GLOBAL.__enter__()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        _GLOBAL.__exit__(*error)
