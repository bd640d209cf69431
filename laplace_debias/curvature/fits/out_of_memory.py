"""A chunk for which there is not enough memory: half of it is tried."""

import torch

# What torch's allocator on the CPU says, which raises no error of its own kind.
_OF_CPU = ("not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _OF_CPU)


def out_of_memory(chunk: int, columns: int, error: BaseException) -> RuntimeError:
    """What is raised where a smaller chunk cannot be tried, with the remedies.

    Args:
        chunk: Examples in the chunk.
        columns: Cotangents of each that went back at once.
        error: What torch raised.
    """
    return RuntimeError(
        f"Not enough memory for {chunk} example(s) with {columns} cotangent(s) of each "
        f"({str(error).splitlines()[0]}). Nothing was fitted. Pass a smaller memory_bound=, use "
        'fisher="mc", or fewer parameters (params="last_layer"); la.plan(loader) tells what a fit '
        "takes."
    )
