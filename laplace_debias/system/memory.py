"""Memory that has run out."""

import torch

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
