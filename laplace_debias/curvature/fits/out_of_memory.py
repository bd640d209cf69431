"""What is raised for a chunk for which there is not enough memory, where no half of it is tried."""


def out_of_memory(chunk: int, columns: int, error: BaseException) -> RuntimeError:
    """What is raised where a smaller chunk cannot be tried, with the remedies.

    Args:
        chunk: Examples in the chunk.
        columns: Cotangents of each that went back at once.
        error: What torch raised.
    """
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return RuntimeError(
        f"Not enough memory for {chunk} example(s) with {columns} cotangent(s) of each "
        f"({reason}). Nothing was fitted. Pass a smaller memory_bound=, use "
        'fisher="mc", or fewer parameters (params="last_layer"); la.plan(loader) tells what a fit '
        "takes."
    )
