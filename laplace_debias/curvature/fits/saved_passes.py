"""A fit's passes over data that are saved as they go, and gone on with where they were broken off.

What a pass has summed is saved every so often, with the places and marks of the examples that are
in it. A later fit of the same kind reads those again, since a loader's order and augmentation are
known in no other way, holds them against the saved marks, and computes with the rest alone. Read in
the same batches, the sums are bit for bit those of a fit that was never broken off.

Each of several processes saves its own sums, whenever it likes: which examples are in which file is
known, so any number of processes can go on with them. With another number the sums are added in
another order. What is measured along directions is not gone on with along other ones: the state has
a mark of these, too. From three processes on, whose sums another number of them would round in
another way, the directions themselves are saved.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from laplace_debias.curvature.fits.examples_done import (
    ExamplesDone,
    chosen,
    joined_spans,
    runs_of,
)
from laplace_debias.curvature.fits.pass_state import (
    PassState,
    Store,
    entries_of,
    mark_of_all,
    marks_of_examples,
    put_back,
)
from laplace_debias.curvature.fits.passes import Pass, Passes, Sums
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.system.ranks import ALONE, Ranks
from laplace_debias.system.warn import warn

EVERY = 60.0
"""Seconds after which a pass is saved again."""
# Saving takes at most one part in so many of the time.
_SHARE = 20
_END = object()


class SavedPasses(Passes):
    """The passes of a fit that are saved as they go.

    Args:
        store: Where.
        device: Where the sums are.
        ranks: The processes that share the data.
        what: What messages call what is saved.
    """

    def __init__(
        self, store: Store, device: torch.device, ranks: Ranks = ALONE, what: str = "fit"
    ) -> None:
        self._store, self._device = store, device
        self._ranks, self._what = ranks, what
        self._begun = 0

    def along(self, directions: dict[str, Tensor]) -> dict[str, Tensor]:
        """As `Passes.along`; of several processes rank 0 keeps them."""
        number = self._begun + 1
        saved = self._store.load_along(number) if self._ranks.rank == 0 else None
        is_there = saved is not None and saved.keys() == directions.keys()
        if self._ranks.exchange(is_there)[0]:
            parts = {name: (of.to(self._device),) for name, of in (saved or {}).items()}
            shared = self._ranks.share(parts, dict.fromkeys(directions, 0))
            return {name: of for name, (of,) in shared.items() if of is not None}
        # Two numbers have the same sum in any order.
        if self._ranks.size > 2 and self._ranks.rank == 0:
            try:
                self._store.save_along(number, directions)
            except OSError as error:
                warn(
                    f"The directions of the {self._what} were not saved, and the {self._what} goes "
                    f"on: {error}"
                )
        return directions

    def begin(self, sums: Sums | None) -> Pass:
        """As `Passes.begin`.

        Raises:
            ValueError: In the pass, if its data is not what it was.
        """
        if sums is None:
            return Pass()
        self._begun += 1
        number, mark = self._begun, mark_of_all(sums.along)
        found = self._store.load(number)
        fitting = {saver: state for saver, state in found.items() if state.along == mark}
        if len(fitting) < len(found):
            warn(
                f"What was saved of pass {number} of the {self._what} in {self._store.place} was "
                "measured along other directions (another number of processes or threads rounds "
                "them otherwise): this pass begins anew."
            )
        taken, done = chosen(self._ranks, fitting, self._device)
        states = [fitting[saver] for saver in taken]
        entries = [entry for state in states for entry in state.entries]
        put_back(entries, sums.held, sums.keys, self._device)
        before = PassState(
            sum(state.num_batches for state in states),
            joined_spans([state.spans for state in states]),
            torch.cat([torch.zeros(0, dtype=torch.int64), *(state.marks for state in states)]),
            mark,
            sum(state.num_examples for state in states),
            sum((state.nll for state in states), 0.0),
            sum(state.num_outputs for state in states),
            [],
        )
        others = [saver for saver in found if saver != self._ranks.rank]
        return _SavedPass(self._store, self._ranks, self._what, number, before, done, others, sums)


class _SavedPass(Pass):
    """A pass that is saved as it goes.

    Args:
        store: Where.
        ranks: The processes.
        what: What messages call what is saved.
        number: The pass's.
        before: What this process goes on with, without its entries.
        done: The examples in what all processes go on with.
        others: Savers of states that fell to this process: they go once it has saved its own.
        sums: As `Passes.begin` takes it.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        what: str,
        number: int,
        before: PassState,
        done: ExamplesDone,
        others: list[int],
        sums: Sums,
    ) -> None:
        self._store, self._ranks, self._what = store, ranks, what
        self._number, self._sums = number, sums
        self._examples_done, self._others, self._along = done, others, before.along
        self.num_examples, self.nll = before.num_examples, before.nll
        self.num_outputs = before.num_outputs
        self._seen: tuple[int, Tensor | float, int] = (0, 0.0, 0)
        self._spans, self._marks = [before.spans], [before.marks]
        # How many batches were read, are in the sums, and are in the saved ones.
        self._num_read = 0
        self._num_done = self._num_saved = before.num_batches
        # How many examples came that are in the sums already.
        self._num_met = 0
        # Of the batch that is being computed with; None in between.
        self._under_way: tuple[Tensor, Tensor] | None = None
        self._wait, self._last = EVERY, time.monotonic()
        self._interrupted = self._is_between = self._is_refused = False
        self._process = os.getpid()
        self._handler: Any = None

    def __enter__(self) -> Pass:
        # A handler of the user's own stays, and other threads may set none.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            # Another process may have failed; what this one has summed is right.
            if error[0] is not None and self._under_way is None and not self._is_refused:
                with contextlib.suppress(Exception):
                    self._save_news()
        finally:
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
        if len(self._examples_done):
            missing = len(self._examples_done) - sum(self._ranks.exchange(self._num_met))
            if missing:
                self._refuse(
                    f"it ends after {self._num_read} batches, without {missing} of the examples "
                    "that are in the sums"
                )
        if self._interrupted:
            self._stop()
        # A pass that was saved is long: what comes after it should not have to wait for it again.
        if self._num_saved:
            self._save_news()

    def left(self, x: Inputs, y: Tensor, place: int) -> list[slice]:
        marks = marks_of_examples(x, y)
        self._num_read += 1
        runs = super().left(x, y, place)
        if len(self._examples_done):
            marks = marks.cpu()
            among = self._examples_done.among(place, marks)
            if among is None:
                which = "first batch" if self._num_read == 1 else f"batch {self._num_read}"
                self._refuse(f"its {which} differs")
            self._num_met += int(among.sum())
            runs = runs_of(~among)
        if not runs:
            if self._interrupted:
                self._stop()
            return runs
        spans = torch.tensor([[place + run.start, run.stop - run.start] for run in runs])
        self._under_way = spans, torch.cat([marks[run] for run in runs])
        return runs

    def done(self, num_examples: int, nll: Tensor | float, num_outputs: int) -> None:
        assert self._under_way is not None
        spans, marks = self._under_way
        self._spans.append(spans)
        self._marks.append(marks)
        self._num_done += 1
        self._seen = num_examples, nll, num_outputs
        self._under_way = None
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
        self._sums.check()
        begin = time.monotonic()
        num_examples, nll, num_outputs = self._seen
        self._spans = [joined_spans(self._spans)]
        self._marks = [torch.cat([marks.cpu() for marks in self._marks])]
        state = PassState(
            self._num_done,
            self._spans[0],
            self._marks[0],
            self._along,
            num_examples,
            float(nll),
            num_outputs,
            entries_of(self._sums.held),
        )
        try:
            self._store.save(self._number, state)
            self._store.forget(self._number, self._others)
        except OSError as error:
            # Days of work are not given up for a disk that is full.
            warn(
                f"The state of the {self._what} was not saved, and the {self._what} goes on: "
                f"{error}"
            )
        else:
            self._num_saved, self._others = self._num_done, []
        self._last = time.monotonic()
        self._wait = EVERY and max(EVERY, _SHARE * (self._last - begin))

    def _refuse(self, how: str) -> NoReturn:
        self._is_refused = True
        raise ValueError(
            f"{self._store.place} holds a {self._what} of other data: in pass {self._number}, "
            f"{how}. Give the same data in the same order, with a generator in the state that it "
            "had when it was begun, or another folder."
        )
