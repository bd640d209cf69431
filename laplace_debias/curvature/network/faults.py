"""Faults in the numbers of a batch, asked without waiting for the device.

Whether labels are in range and outputs finite is known once the device has computed it. Asked batch
by batch, the host would wait for every one. So a pass over data collects the answers where they
are, and reads them together: at its end, in a long pass also on the way. Nothing is made of the
data before that. On the CPU an answer is there at once, and read at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# Answers that are kept before they are read: a pass over wrong data ends early, and an answer takes
# half a kilobyte of the device's memory.
_MOST_KEPT = 1024
_CURRENT: ContextVar["Faults | None"] = ContextVar("faults", default=None)


class Faults:
    """The answers of one pass over data, and the errors that they stand for.

    Example:
        >>> faults = Faults()
        >>> for number, batch in enumerate([torch.zeros(2), torch.ones(2)], start=1):
        ...     with faults.of_batch(number):
        ...         require((batch < 2).all(), lambda: ValueError("too large"))
        >>> faults.read()
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Callable[[], Exception], int | None]] = []

    @contextmanager
    def of_batch(self, number: int | None) -> Iterator[None]:
        """Takes what is required within as a batch's: answers are kept, or read if on the CPU.

        Args:
            number: Which one errors name, from 1; None for none.

        Raises:
            ValueError: Or what else was required, if something within fails, and an earlier answer
                may be why.
        """
        token = _CURRENT.set(self)
        self._number = number
        try:
            yield
        except Exception as error:
            self._read(error)
            raise
        finally:
            _CURRENT.reset(token)
        if len(self._kept) > _MOST_KEPT:
            self.read()

    def add(self, is_right: Tensor, error: Callable[[], Exception]) -> None:
        """As `require`."""
        if is_read_at_once(is_right):
            if not is_right:
                raise _of_batch(error(), self._number)
            return
        self._kept.append((is_right, error, self._number))

    def read(self) -> None:
        """Read the answers. The host waits for the device.

        Raises:
            ValueError: Or what else was required: the first of the errors.
        """
        self._read(None)

    def _read(self, cause: Exception | None) -> None:
        kept, self._kept = self._kept, []
        if not kept:
            return
        for is_right, (_, error, number) in zip(
            torch.stack([answer for answer, *_ in kept]).tolist(), kept, strict=True
        ):
            if not is_right:
                raise _of_batch(error(), number) from cause


def require(is_right: Tensor, error: Callable[[], Exception]) -> None:
    """Require something of a batch's numbers: now, or as `Faults` has it within a pass.

    Args:
        is_right: Whether it is so, a bool, 0-d.
        error: Makes the error. It is kept: let it refer to few numbers, not to the batch.

    Raises:
        ValueError: Or what else `error` makes.
    """
    faults = _CURRENT.get()
    if faults is not None:
        faults.add(is_right, error)
    elif not is_right:
        raise error()


def is_pending() -> bool:
    """Whether what was required may turn out to be wrong later: work must not fail before."""
    return _CURRENT.get() is not None


def is_read_at_once(answer: Tensor) -> bool:
    """Whether nobody waits for an answer: it lies on the CPU."""
    return answer.device.type == "cpu"


def _of_batch(error: Exception, number: int | None) -> Exception:
    if number is None:
        return error
    return type(error)(f"{error} (Batch {number} of the pass over the data.)")
