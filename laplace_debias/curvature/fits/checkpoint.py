"""The saved state of a fit, from which the same call can continue in another process.

Once per minute, at the end of a batch, each process writes the sums of the pass and the number of
batches in them. When the fit is resumed, it reads that many batches again, because a loader's order
and augmentation cannot be known otherwise, and continues the sums with the following batches. The
sums are bit-identical to the sums of an uninterrupted fit. The number of processes must be the same
as before.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.system.files import (
    DamagedFileError,
    check_target,
    differences,
    read_sealed,
    write_sealed,
    written_atomically,
)
from laplace_debias.system.ranks import Ranks
from laplace_debias.system.shown import counted, warn

EVERY = 60.0
"""Shortest time between two saves of a pass, in seconds."""

_IDENTITY = "fit.json"
# The format of the files in the folder. Files without a format are from earlier versions, whose
# digest of the batches did not depend on the order of entries.
_FORMAT = 3
# The fits that have ended within `states_kept`. The value is None outside this context.
_ENDED: ContextVar[list["Checkpoint"] | None] = ContextVar("ended", default=None)


@runtime_checkable
class Resumable(Protocol):
    """Sums that can be saved and restored."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums by name."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums of a `state_dict`."""


@dataclass(frozen=True)
class PassState:
    """The state of a pass after a batch, as it is written to a file.

    Attributes:
        num_batches: The number of batches that are in the sums.
        digest: A digest of these batches.
        totals: The totals of these batches.
        sums: The sums by name.
    """

    num_batches: int
    digest: str
    totals: DataTotals
    sums: Mapping[str, Tensor]

    def write(self, path: Path) -> None:
        """Write the state to a file atomically."""
        # Totals may be tensors on an accelerator, so they are converted to numbers.
        totals = asdict(self.totals.as_numbers())
        progress = {**totals, "num_batches": self.num_batches, "mark": self.digest}
        with written_atomically(path) as temporary:
            write_sealed(temporary, {"progress": json.dumps(progress)}, self.sums)

    @classmethod
    def read(cls, path: Path) -> "PassState":
        """Read the state of a file.

        Raises:
            ValueError: If the file is damaged.
        """
        try:
            texts, sums = read_sealed(path)
        except DamagedFileError as error:
            raise ValueError(
                f"{path} is damaged ({error}). Delete the folder, and start the fit again."
            ) from error
        progress = json.loads(texts["progress"])
        digest = progress.pop("mark")
        num_batches = progress.pop("num_batches")
        return cls(num_batches, digest, DataTotals(**progress), sums)


class UnsavedPass:
    """A pass over data that is not saved.

    Attributes:
        totals: The totals of the batches that are in the sums.
    """

    def __init__(self) -> None:
        self.totals = DataTotals()

    def remaining(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all batches."""
        yield from batches

    def save(self, _: Callable[[], None]) -> None:
        """Save nothing."""

    def end(self) -> None:
        """End the pass."""


class SavedPass:
    """A pass over data that is saved in a file and can be continued from this file.

    Args:
        sums: The sums of the pass, which are restored from the file.
        path: The file, which need not exist.
        number: The number of the pass in the fit, counted from 1.

    Attributes:
        totals: The totals of the batches that are in the sums.
    """

    def __init__(self, sums: Resumable, path: Path, number: int) -> None:
        self._sums = sums
        self._path = path
        self._number = number
        self._last_saved = time.monotonic()
        self._num_read = 0
        self._digest = hashlib.blake2b(digest_size=8)
        state = PassState(0, "", DataTotals(), {})
        if path.exists():
            state = PassState.read(path)
            sums.load_state_dict(state.sums)
        self._num_saved = state.num_batches
        self._saved_digest = state.digest
        self.totals = state.totals

    def remaining(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Read all batches, and yield only the batches that are not in the sums yet.

        Raises:
            ValueError: If the batches that are read differ from the batches in the sums.
        """
        for batch in batches:
            self._num_read += 1
            self._digest.update(batch.mark.encode())
            is_last_saved = self._num_read == self._num_saved
            if is_last_saved and self._digest.hexdigest() != self._saved_digest:
                self._raise_different_batches("the saved sums contain different batches")
            if self._num_read > self._num_saved:
                yield batch

    def save(self, check: Callable[[], None]) -> None:
        """Save the sums of all batches that were read, at most once per minute.

        If `check` raises, nothing is saved. If the disk is full, a warning is given and the fit
        continues.
        """
        if time.monotonic() - self._last_saved < EVERY:
            return
        check()
        sums = self._sums.state_dict()
        state = PassState(self._num_read, self._digest.hexdigest(), self.totals, sums)
        try:
            state.write(self._path)
        except OSError as error:
            # The fit may have taken days, so a full disk does not end it.
            warn(
                f"The state of the fit was not saved ({error}). The fit continues, but cannot be "
                "resumed from this point."
            )
        self._last_saved = time.monotonic()

    def end(self) -> None:
        """End the pass.

        Raises:
            ValueError: If the data has fewer batches than the sums.
        """
        if self._num_read < self._num_saved:
            self._raise_different_batches(
                f"the data has {counted(self._num_read, 'batch', 'batches')}, but the saved sums "
                f"contain {self._num_saved}"
            )

    def _raise_different_batches(self, difference: str) -> None:
        """Raise the error for data whose batches differ from the batches of the saved fit."""
        raise ValueError(
            f"{self._path.parent} contains the state of an earlier fit, which read "
            f"different batches (in pass {self._number} over the data, {difference}). "
            "Use the same data in the same order, or choose a different folder. If "
            "the loader shuffles, call the fit with `generator=` to get the same "
            "order."
        )


class Checkpoint:
    """The passes of a fit, saved in a folder.

    All processes must construct the object together. Each process saves its own sums.

    Args:
        folder: The folder, which is created if it does not exist.
        identity: The options on which the sums of the fit depend. They are compared with the
            options in the folder.
        ranks: The processes that share the data.

    Raises:
        ValueError: If the folder contains the state of a fit with a different identity, or from
            another version of the package.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], ranks: Ranks) -> None:
        self._folder = check_folder(folder)
        self._ranks = ranks
        self._number = 0
        path = folder / _IDENTITY
        if ranks.rank == 0:
            new_identity = json.dumps({"format": _FORMAT, **identity}, default=str)
            saved = json.loads(new_identity)
            if path.exists():
                saved = _read_identity(path)
            if saved.get("format") != _FORMAT:
                raise ValueError(
                    f"{folder} contains the state of a fit by another version of laplace-debias, "
                    "from which this version cannot continue. Delete the folder, and start the "
                    "fit again."
                )
            different = differences(saved, json.loads(new_identity))
            if different:
                raise ValueError(
                    f"{folder} contains the state of a different fit: {different}. Use the "
                    "model, the data and the options of that fit, or pass a different folder."
                )
            with written_atomically(path) as temporary:
                temporary.write_text(new_identity, encoding="utf-8")
        ranks.exchange(None)

    def begin(self, sums: Resumable) -> SavedPass:
        """Begin the next pass, and restore its saved sums."""
        self._number += 1
        path = self._folder / f"pass-{self._number}.rank-{self._ranks.rank}.safetensors"
        return SavedPass(sums, path, self._number)

    def end(self) -> None:
        """End the fit, and remove its state; within `states_kept`, the state is removed later."""
        ended = _ENDED.get()
        if ended is None:
            self.remove()
        else:
            ended.append(self)

    def remove(self) -> None:
        """Remove the state of a fit that has ended, and its folder if the folder is then empty."""
        self._ranks.exchange(None)
        if self._ranks.rank == 0:
            # The identity is removed last: without it, a different fit would continue from these
            # passes.
            for pattern in ("pass-*.safetensors", ".pass-*.partial", ".fit.*.partial", _IDENTITY):
                for path in self._folder.glob(pattern):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()


@contextlib.contextmanager
def states_kept() -> Iterator[None]:
    """Keep the states of fits within the context, and remove those of ended fits at its end.

    If an error ends the context, for example because a posterior cannot be saved, all states are
    kept.
    """
    ended: list[Checkpoint] = []
    token = _ENDED.set(ended)
    try:
        yield
    finally:
        _ENDED.reset(token)
    for checkpoint in ended:
        checkpoint.remove()


def _read_identity(path: Path) -> dict[str, Any]:
    """Read the options of the fit whose state is in a folder.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(identity, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}). Delete the folder, and start the fit again."
        ) from error
    return identity


def check_folder(folder: Path) -> Path:
    """Require, before any computation, that states can be written to a folder."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"`resume={str(folder)!r}` is a file. Pass the path of a folder.")
    check_target(folder / _IDENTITY, make_folders=True)
    return folder
