"""A fit's passes over data, which can go on where they were broken off.

What a pass has summed is saved every so often, with the number of batches that are in it. A later
fit of the same kind reads those batches again, since a loader's order and augmentation are known in
no other way, holds them against the saved mark, and computes with the rest alone: the sums are bit
for bit those of a fit that was never broken off.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.pass_state import (
    MIX,
    Held,
    PassState,
    Store,
    entries_of,
    mark_of_batch,
    put_back,
)
from laplace_debias.curvature.network.inputs import Inputs

EVERY = 60.0
"""Seconds after which a pass is saved again."""
# Saving takes at most one part in so many of the time.
_SHARE = 20
_END = object()


class Pass:
    """One pass over data, of which nothing is saved.

    Attributes:
        num_examples: What was seen before it begins, as `Seen` has it; so are the next two.
        nll: The summed loss.
        num_outputs: How many numbers the network gave.
    """

    num_examples: int = 0
    nll: float = 0.0
    num_outputs: int = 0

    def __enter__(self) -> "Pass":
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """End."""

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """The batches of a source."""
        return iter(source)

    def skips(self, x: Inputs, y: Tensor) -> bool:
        """Whether the batch that was read is in the sums already."""
        return False

    def done(self, num_examples: int, nll: Tensor | float, num_outputs: int) -> None:
        """Tell that the batch that was read is in the sums, and what was seen so far."""


class Passes:
    """The passes of a fit of which nothing is saved."""

    def begin(self, held: Held | None, keys: Mapping[str, Any], check: Callable[[], None]) -> Pass:
        """The next pass.

        Args:
            held: Where it keeps its sums; None if it cannot be gone on with.
            keys: The keys of `held` by their names.
            check: Raises if a batch so far was a wrong one: such sums are not saved.
        """
        return Pass()


class SavedPasses(Passes):
    """The passes of a fit that are saved as they go.

    Args:
        store: Where.
        device: Where the sums are.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._begun = 0

    def begin(self, held: Held | None, keys: Mapping[str, Any], check: Callable[[], None]) -> Pass:
        """As `Passes.begin`.

        Raises:
            ValueError: In the pass, if its data is not what it was.
        """
        if held is None:
            return Pass()
        self._begun += 1
        state = self._store.load(self._begun)
        if state is not None:
            put_back(state.entries, held, keys, self._device)
        return _SavedPass(self._store, self._begun, state, held, check)


class _SavedPass(Pass):
    def __init__(
        self,
        store: Store,
        number: int,
        begun: PassState | None,
        held: Held,
        check: Callable[[], None],
    ) -> None:
        self._store, self._number, self._begun = store, number, begun
        self._held, self._check = held, check
        if begun is not None:
            self.num_examples = begun.num_examples
            self.nll = begun.nll
            self.num_outputs = begun.num_outputs
        self._seen: tuple[int, Tensor | float, int] = (0, 0.0, 0)
        # How many batches were read, are in the sums, and are in the saved ones.
        self._num_read = 0
        self._num_done = self._num_saved = 0 if begun is None else begun.num_batches
        self._first_mark = self._mark = torch.zeros((), dtype=torch.int64)
        self._wait, self._last = EVERY, time.monotonic()
        self._interrupted = self._is_between = False
        self._process = os.getpid()
        self._handler: Any = None

    def __enter__(self) -> Pass:
        # A handler of the user's own stays, and other threads may set none.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: at once while a batch is read or for the second time, else after the batch."""
        is_worker = os.getpid() != self._process  # of a loader, which was forked
        if is_worker or self._is_between or self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(source)
        while True:
            try:
                self._is_between = True
                batch = next(iterator, _END)
                self._is_between = False
            except KeyboardInterrupt:
                self._is_between = False
                self._stop()
            except Exception:
                # What was summed is right, whatever happened to the loader.
                self._is_between = False
                self._save_news()
                raise
            if batch is _END:
                break
            yield batch
        if self._begun is not None and self._num_read < self._begun.num_batches:
            self._refuse(f"it ends after {self._num_read} batches")
        if self._interrupted:
            self._stop()
        # A pass that was saved is long: what comes after it should not have to wait for it again.
        if self._num_saved:
            self._save_news()

    def skips(self, x: Inputs, y: Tensor) -> bool:
        mark = mark_of_batch(x, y)
        self._num_read += 1
        if self._num_read == 1:
            self._first_mark = self._mark = mark
        else:
            self._mark = self._mark * MIX + mark
        begun = self._begun
        if begun is None or self._num_read > begun.num_batches:
            return False
        if self._num_read == 1 and int(mark) != begun.first_mark:
            self._refuse("its first batch differs")
        if self._num_read == begun.num_batches and int(self._mark) != begun.mark:
            self._refuse(f"its first {self._num_read} batches are not those that were read then")
        if self._interrupted:
            self._stop()
        return True

    def done(self, num_examples: int, nll: Tensor | float, num_outputs: int) -> None:
        self._num_done = self._num_read
        self._seen = num_examples, nll, num_outputs
        if self._interrupted:
            self._stop()
        if time.monotonic() - self._last >= self._wait:
            self._save_news()

    def _stop(self) -> None:
        self._save_news()
        raise KeyboardInterrupt(
            f"Stopped. {self._num_saved} batches of pass {self._number} over the data are saved in "
            f"{self._store.place}: the same call, with the same data and generator, goes on from "
            "there."
        ) from None

    def _save_news(self) -> None:
        """Save what was summed since the last time, if anything."""
        if self._num_done == self._num_saved:
            return
        self._check()
        begin = time.monotonic()
        num_examples, nll, num_outputs = self._seen
        state = PassState(
            self._num_done,
            int(self._first_mark),
            int(self._mark),
            num_examples,
            float(nll),
            num_outputs,
            entries_of(self._held),
        )
        try:
            self._store.save(self._number, state)
        except OSError as error:
            # Days of work are not given up for a disk that is full.
            warnings.warn(
                f"The state of the fit was not saved, and the fit goes on: {error}", stacklevel=2
            )
        else:
            self._num_saved = self._num_done
        self._last = time.monotonic()
        self._wait = EVERY and max(EVERY, _SHARE * (self._last - begin))

    def _refuse(self, how: str) -> None:
        raise ValueError(
            f"{self._store.place} holds a fit of other data: in pass {self._number}, {how}. Give "
            "the same data in the same order, with a generator in the state that it had when the "
            "fit was begun, or another folder."
        )


NOT_SAVED = Passes()
"""The passes of a fit that nobody goes on with."""
