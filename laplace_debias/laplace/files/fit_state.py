"""The states of a fit's passes in a folder, one sealed file a pass and process."""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.pass_state import Entry, PassState
from laplace_debias.laplace.files.layout import DamagedFileError, UnknownFormatError
from laplace_debias.laplace.files.plain_data import parsed_json
from laplace_debias.laplace.files.sealed import read_sealed, write_sealed
from laplace_debias.system.atomic import check_target, written_atomically
from laplace_debias.system.warn import warn

_FORMAT = "laplace-debias fit state 2"
# Of rank 0, which may be alone, without a rank.
_NAME = re.compile(r"pass-([1-9]\d*)(?:\.rank-([1-9]\d*))?\.safetensors")
_ALONG = re.compile(r"along-([1-9]\d*)\.safetensors")
_PARTIAL = re.compile(rf"\.({_NAME.pattern}|{_ALONG.pattern})\.[0-9a-f]{{16}}\.partial")


@dataclass(frozen=True)
class FitStates:
    """A folder in which a fit, or something else that passes over data, keeps its state.

    Attributes:
        folder: The folder, which need not be there.
        fit: What the fit is, as plain data: a state of another fit is refused.
        rank: Which process this is.
        num_ranks: How many there are.
        what: What messages call it.
    """

    folder: Path
    fit: Mapping[str, Any]
    rank: int = 0
    num_ranks: int = 1
    what: str = "fit"

    @property
    def place(self) -> str:
        """What messages call it."""
        return str(self.folder)

    def check(self) -> None:
        """Require that what is in the folder is of this fit; what is damaged there is removed.

        Each process looks at what falls to it.

        Raises:
            ValueError: If there is the state of another fit.
        """
        for path in self._own_files().values():
            self._read(path)

    def load(self, number: int) -> dict[int, PassState]:
        """As `Store.load`; without those that are damaged, of which a warning says.

        Raises:
            ValueError: If one is that of another fit.
        """
        found = {}
        for (of_pass, saver), path in self._own_files().items():
            if of_pass == number and (state := self._read(path)) is not None:
                found[saver] = state
        return found

    def save(self, number: int, state: PassState) -> None:
        """Write the state of a pass, in full or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        entries = [
            [entry.table, entry.key, entry.is_list, list(entry.value.shape), _dtype_name(entry)]
            for entry in state.entries
        ]
        described = {
            "num_batches": state.num_batches,
            # Integers beyond 2**53, and every bit of the sum, survive as texts.
            "along": str(state.along),
            "num_examples": state.num_examples,
            "nll": state.nll.hex(),
            "num_outputs": state.num_outputs,
            "entries": entries,
        }
        texts = {"format": _FORMAT, "fit": json.dumps(self.fit), "pass": json.dumps(described)}
        tensors = {str(index): _as_saved(entry.value) for index, entry in enumerate(state.entries)}
        tensors |= {"spans": _as_saved(state.spans), "marks": _as_saved(state.marks)}
        with written_atomically(self._path(number, self.rank)) as temporary:
            write_sealed(temporary, texts, tensors)

    def load_along(self, number: int) -> dict[str, Tensor] | None:
        """As `Store.load_along`; None also if it is damaged, of which a warning says.

        Raises:
            ValueError: If it is that of another fit.
        """
        found = self._sealed(self._path_along(number))
        if found is None:
            return None
        texts, tensors = found
        self._check_same(parsed_json(texts["fit"]))
        shapes = parsed_json(texts["shapes"])
        return {name: tensors[str(at)].view(shape) for at, (name, shape) in enumerate(shapes)}

    def save_along(self, number: int, directions: Mapping[str, Tensor]) -> None:
        """As `Store.save_along`, in full or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        shapes = [[name, list(of.shape)] for name, of in directions.items()]
        texts = {"format": _FORMAT, "fit": json.dumps(self.fit), "shapes": json.dumps(shapes)}
        tensors = {str(at): of.flatten() for at, of in enumerate(directions.values())}
        with written_atomically(self._path_along(number)) as temporary:
            write_sealed(temporary, texts, tensors)

    def forget(self, number: int, savers: Sequence[int]) -> None:
        """As `Store.forget`."""
        for saver in savers:
            self._path(number, saver).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the states, and the folder if nothing else is in it."""
        for path in (path for name in (_NAME, _ALONG, _PARTIAL) for path in self._files(name)):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int, saver: int) -> Path:
        of_saver = f".rank-{saver}" if saver else ""
        return self.folder / f"pass-{number}{of_saver}.safetensors"

    def _path_along(self, number: int) -> Path:
        return self.folder / f"along-{number}.safetensors"

    def _files(self, name: re.Pattern[str]) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if name.fullmatch(path.name))
        except (FileNotFoundError, NotADirectoryError):  # another process may have removed it
            return []

    def _own_files(self) -> dict[tuple[int, int], Path]:
        """The files that fall to this process, by their passes and who saved them."""
        found = {}
        for path in self._files(_NAME):
            match = _NAME.fullmatch(path.name)
            assert match is not None
            number, saver = int(match[1]), int(match[2] or 0)
            if saver % self.num_ranks == self.rank:
                found[number, saver] = path
        return found

    def _sealed(self, path: Path) -> tuple[dict[str, str], dict[str, Tensor]] | None:
        """The texts and tensors of a file; None if it is not there or damaged."""
        if not os.path.lexists(path):
            return None
        try:
            return read_sealed(path, {_FORMAT: True})
        except UnknownFormatError as error:
            raise ValueError(
                f"{path} is of the format {error.args[0]!r}, and no state of a {self.what}: give "
                "resume= a folder of its own."
            ) from error
        except DamagedFileError as error:
            path.unlink()
            warn(
                f"The state of the {self.what} in {path} is damaged ({error}), and was removed: "
                "this pass begins anew."
            )
            return None

    def _read(self, path: Path) -> PassState | None:
        found = self._sealed(path)
        if found is None:
            return None
        texts, tensors = found
        self._check_same(parsed_json(texts["fit"]))
        told = parsed_json(texts["pass"])
        entries = [
            Entry(table, key, is_list, _restored(tensors[str(index)], dtype).reshape(shape))
            for index, (table, key, is_list, shape, dtype) in enumerate(told["entries"])
        ]
        return PassState(
            told["num_batches"],
            _restored(tensors["spans"], "int64").view(-1, 2),
            _restored(tensors["marks"], "int64"),
            int(told["along"]),
            told["num_examples"],
            float.fromhex(told["nll"]),
            told["num_outputs"],
            entries,
        )

    def _check_same(self, other: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.fit))
        different = [
            f"{name} ({_shown(other.get(name), now.get(name))})"
            for name in dict.fromkeys([*other, *now])
            if other.get(name) != now.get(name)
        ]
        if different:
            raise ValueError(
                f"{self.folder} holds the state of another {self.what}, which differs in "
                f"{', '.join(different)}: give the model and the options of that {self.what}, or "
                "another folder."
            )


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Require that states can be written to a folder, before the work that goes into them.

    Raises:
        NotADirectoryError: If it is a file.
        OSError: As `check_target`.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"resume={str(folder)!r} is a file: name a folder.")
    check_target(path / "pass-1.safetensors", make_folders=True)
    return path


def _dtype_name(entry: Entry) -> str:
    return str(entry.value.dtype).partition(".")[2]


def _as_saved(value: Tensor) -> Tensor:
    """A tensor flat and in a dtype that sealed files have, without a loss."""
    value = value.detach().flatten()
    if value.is_floating_point():
        return value if value.dtype in (torch.float32, torch.float64) else value.float()
    return value.long().view(torch.float64)


def _restored(saved: Tensor, dtype: str) -> Tensor:
    """What `_as_saved` was given, flat."""
    wanted: torch.dtype = getattr(torch, dtype)
    return saved.to(wanted) if wanted.is_floating_point else saved.view(torch.int64).to(wanted)


def _shown(there: Any, now: Any) -> str:
    """What differs; of the numbers of many tensors the names alone."""
    if isinstance(there, dict) and isinstance(now, dict):
        names = [name for name in dict.fromkeys([*there, *now]) if there.get(name) != now.get(name)]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{_short(there)} there, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
