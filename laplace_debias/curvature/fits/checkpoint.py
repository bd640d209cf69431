"""The saved state of a fit's passes over data, with which the same call in another process goes on.

Once a minute, at the end of a batch, each process writes what the pass has summed and how many
batches are in it. The same fit reads that many batches again, since a loader's order and
augmentation are known in no other way, and computes with those that follow: its sums have the same
bits. It takes as many processes as before.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.curvature.network.shadow import sum_of_bits
from laplace_debias.system.files import (
    DamagedFileError,
    check_target,
    differences,
    read_sealed,
    write_sealed,
    written_atomically,
)
from laplace_debias.system.ranks import Ranks
from laplace_debias.system.shown import warn

EVERY = 60.0
"""Seconds after which a pass is saved again."""

# What a pass sums, by name: from a block, or a text, to a tensor that is added to, or to a list of
# tensors that are as good if they are joined along their first dimension.
State = Mapping[str, Any]
_IDENTITY = "fit.json"


class Checkpoint:
    """The passes of a fit, saved in a folder; the state of another `identity` is refused.

    The processes make it together, and each saves its own sums.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], device: torch.device, ranks: Ranks
    ) -> None:
        self._folder, self._device, self._ranks = check_folder(folder), device, ranks
        self._number, path = 0, folder / _IDENTITY
        if ranks.rank == 0:
            now = json.dumps(identity, default=str)
            there = path.read_text(encoding="utf-8") if path.exists() else now
            if different := differences(json.loads(there), json.loads(now)):
                raise ValueError(
                    f"{folder} holds the state of another fit: {different}. Give the model, the "
                    "data and the options of that fit, or another folder."
                )
            with written_atomically(path) as temporary:
                temporary.write_text(now, encoding="utf-8")
        ranks.exchange(None)

    def begin(self, sums: State, keys: Mapping[str, Any]) -> DataTotals:
        """Begin the next pass: put what was saved back into `sums`; `keys` are its keys by name."""
        self._number += 1
        self._path = self._folder / f"pass-{self._number}.rank-{self._ranks.rank}.safetensors"
        self._sums, self._last = sums, time.monotonic()
        self._read, self._digest = 0, hashlib.blake2b(digest_size=8)
        self._saved, self._mark, seen = 0, "", DataTotals()
        if self._path.exists():
            try:
                texts, tensors = read_sealed(self._path)
            except DamagedFileError as error:
                raise ValueError(
                    f"{self._path} is damaged ({error}): remove the folder, and fit anew."
                ) from error
            told = json.loads(texts["progress"])
            self._mark, self._saved = told.pop("mark"), told.pop("num_batches")
            seen = DataTotals(**told)
            for name, saved in tensors.items():
                table, _, of = name.partition("/")
                values, value = sums[table], saved.to(self._device)
                if of.startswith("/"):
                    # The list itself stays: the pass may hold it elsewhere, too.
                    values.setdefault(keys.get(of[1:], of[1:]), [])[:] = [value]
                else:
                    values[keys.get(of, of)] = value
        return seen

    def has(self, pair: tuple[Any, ...]) -> bool:
        """Whether the batch that was read next is in the sums already."""
        self._read += 1
        marks = [sum_of_bits(tensor) for tensor in (*tensors_of(pair[0]), *pair[1:])]
        self._digest.update(str(marks).encode())
        if self._read == self._saved and self._digest.hexdigest() != self._mark:
            self._refuse("others are in the sums")
        return self._read <= self._saved

    def done(self, seen: DataTotals, check: Callable[[], None]) -> None:
        """Tell that the batch is in the sums; they are not saved if `check` raises.

        A disk that is full does not end the fit.
        """
        if time.monotonic() - self._last < EVERY:
            return
        check()
        # The nll may be on a device.
        told = {**vars(seen), "nll": float(seen.nll), "num_batches": self._read}
        texts = {"progress": json.dumps({**told, "mark": self._digest.hexdigest()})}
        # By names: `table/block`, of what is joined `table//block`.
        tensors = {}
        for table, values in self._sums.items():
            for key, value in values.items():
                name = getattr(key, "name", key)
                if not isinstance(value, list):
                    tensors[f"{table}/{name}"] = value
                elif value:
                    tensors[f"{table}//{name}"] = torch.cat(value)
        try:
            with written_atomically(self._path) as temporary:
                write_sealed(temporary, texts, tensors)
        except OSError as error:
            # Days of work are not given up for it.
            warn(f"The state of the fit was not saved, and the fit goes on: {error}")
        self._last = time.monotonic()

    def end(self) -> None:
        """End the pass."""
        if self._read < self._saved:
            self._refuse(f"the data gave {self._read} batches, and {self._saved} are in the sums")

    def remove(self) -> None:
        """Remove the state of a fit that has ended, and the folder if nothing else is in it."""
        self._ranks.exchange(None)
        if self._ranks.rank == 0:
            for pattern in (_IDENTITY, "pass-*.safetensors", ".pass-*.partial", ".fit.*.partial"):
                for path in self._folder.glob(pattern):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def _refuse(self, how: str) -> None:
        raise ValueError(
            f"{self._folder} holds a fit of other batches (in pass {self._number} {how}): give the "
            "same data in the same order, which a loader that shuffles has by the fit's "
            "generator=, or another folder."
        )


def check_folder(folder: Path) -> Path:
    """Require that states can be written to a folder, before the work that goes into them."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"resume={str(folder)!r} is a file: name a folder.")
    check_target(folder / _IDENTITY, make_folders=True)
    return folder
