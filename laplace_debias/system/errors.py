"""Exceptions that several packages raise or handle."""

from collections.abc import Iterator
from contextlib import contextmanager


class RankError(RuntimeError):
    """Raised on a rank because another rank has failed or disappeared.

    It also stands in for an error whose type this rank cannot reconstruct.
    """


@contextmanager
def collective_errors() -> Iterator[None]:
    """Replace errors of torch's collective operations by a `RankError` that explains them."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"The processes cannot reach each other ({error}), because one of them was killed, "
            "has failed or is in a different call. Find the first error in their logs, and start "
            "all of them again."
        ) from error
