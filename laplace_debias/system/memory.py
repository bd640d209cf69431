"""Memory: the sizes of slices on each kind of device, and errors of allocation."""

from collections import defaultdict

import torch

# Factors of the sizes of slices and of the default bound, by kind of device. Slices of a processor
# stay in its cache; on a GPU a call costs microseconds, however little it does.
ROOM = defaultdict(lambda: 16, cpu=1)

# Messages of torch's allocators and of NVIDIA's libraries. The CPU's raises a plain RuntimeError.
_MESSAGES = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    The model did not cause it. A handler that takes any exception for "the model cannot do this"
    must raise it again.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
