"""The states of a fit's passes in a folder, one sealed file a pass."""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laplace_debias.curvature.fits.pass_state import Entry, PassState
from laplace_debias.laplace.files.plain_data import parsed_json
from laplace_debias.laplace.files.sealed import (
    DamagedFileError,
    UnknownFormatError,
    read_sealed,
    write_sealed,
)
from laplace_debias.system.atomic import check_target, written_atomically

_FORMAT = "laplace-debias fit state 1"
_NAME = re.compile(r"pass-[1-9]\d*\.safetensors")
_PARTIAL = re.compile(r"\.pass-[1-9]\d*\.safetensors\.[0-9a-f]{16}\.partial")


@dataclass(frozen=True)
class FitStates:
    """A folder in which a fit keeps its state.

    Attributes:
        folder: The folder, which need not be there.
        fit: What the fit is, as plain data: a state of another fit is refused.
    """

    folder: Path
    fit: Mapping[str, Any]

    @property
    def place(self) -> str:
        """What messages call it."""
        return str(self.folder)

    def check(self) -> None:
        """Require that what is in the folder is of this fit; what is damaged there is removed.

        Raises:
            ValueError: If there is the state of another fit.
        """
        for path in self._files(_NAME):
            self._read(path)

    def load(self, number: int) -> PassState | None:
        """The state of a pass; None if there is none, or it is damaged, of which a warning says.

        Raises:
            ValueError: If it is that of another fit.
        """
        return self._read(self._path(number))

    def save(self, number: int, state: PassState) -> None:
        """Write the state of a pass, in full or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        entries = [
            [entry.table, entry.key, entry.is_list, list(entry.value.shape)]
            for entry in state.entries
        ]
        described = {
            "num_batches": state.num_batches,
            # Integers beyond 2**53, and every bit of the sum, survive as texts.
            "first_mark": str(state.first_mark),
            "mark": str(state.mark),
            "num_examples": state.num_examples,
            "nll": state.nll.hex(),
            "num_outputs": state.num_outputs,
            "entries": entries,
        }
        texts = {"format": _FORMAT, "fit": json.dumps(self.fit), "pass": json.dumps(described)}
        tensors = {
            str(index): entry.value.detach().flatten() for index, entry in enumerate(state.entries)
        }
        with written_atomically(self._path(number)) as temporary:
            write_sealed(temporary, texts, tensors)

    def remove(self) -> None:
        """Remove the states, and the folder if nothing else is in it."""
        for path in [*self._files(_NAME), *self._files(_PARTIAL)]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"pass-{number}.safetensors"

    def _files(self, name: re.Pattern[str]) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if name.fullmatch(path.name))

    def _read(self, path: Path) -> PassState | None:
        if not os.path.lexists(path):
            return None
        try:
            texts, tensors = read_sealed(path, {_FORMAT: True})
        except UnknownFormatError as error:
            raise ValueError(
                f"{path} is of the format {error.args[0]!r}, and no state of a fit: give resume= "
                "a folder of its own."
            ) from error
        except DamagedFileError as error:
            path.unlink()
            warnings.warn(
                f"The state of the fit in {path} is damaged ({error}), and was removed: this pass "
                "begins anew.",
                stacklevel=2,
            )
            return None
        self._check_same(parsed_json(texts["fit"]))
        told = parsed_json(texts["pass"])
        entries = [
            Entry(table, key, is_list, tensors[str(index)].reshape(shape))
            for index, (table, key, is_list, shape) in enumerate(told["entries"])
        ]
        return PassState(
            told["num_batches"],
            int(told["first_mark"]),
            int(told["mark"]),
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
                f"{self.folder} holds the state of another fit, which differs in "
                f"{', '.join(different)}: give the model and the options of that fit, or another "
                "folder."
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


def _shown(there: Any, now: Any) -> str:
    """What differs; of the numbers of many tensors the names alone."""
    if isinstance(there, dict) and isinstance(now, dict):
        names = [name for name in dict.fromkeys([*there, *now]) if there.get(name) != now.get(name)]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{_short(there)} there, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
