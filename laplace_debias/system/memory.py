"""Memory: how much is worth a call, and what says that it has run out."""

from collections import defaultdict

import torch

# How many times as large slices and the default bound are, by kind of device. Those of a processor
# stay in its cache; on a GPU a call costs microseconds, however little it does.
ROOM = defaultdict(lambda: 16, cpu=1)

# What torch's allocators (that of the CPU raises no error of its own kind) and NVIDIA's libraries
# say.
_SAID = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Such an error tells nothing of the model: a handler that takes any exception for "the model
    cannot do this" must let it through.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
