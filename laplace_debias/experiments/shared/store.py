"""The folder of an experiment: parts, tables and pictures of one run, never of two."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from laplace_debias.problems.storage import read_tensors, write_tensors
from laplace_debias.report.style import save
from laplace_debias.report.tables import read_csv, write_csv
from laplace_debias.system.atomic import written_atomically

Row = dict[str, Any]
Rows = list[Row]

_SETTINGS = "settings.json"
_INPUTS = ("data", "machine", "checkpoints")
"""Parts that describe the inputs of a run; they are not results."""
_PLACES = {
    *("output", "data", "cache", "download", "checkpoint", "checkpoints"),
    *("device", "resume", "progress"),
}
"""Settings that do not change the results."""


class Store:
    """What a run has found so far, in files that are complete or absent.

    Results are read back from their files, so that an interrupted and resumed run gives the same as
    an uninterrupted one, to the last bit.

    Args:
        folder: The folder, which `open_store` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of a part of the run, on the CPU: the stored ones if there are any.

        Args:
            name: Name of the part.
            compute: Computes them.

        Raises:
            ValueError: If the stored part is damaged, or cannot be written.
        """
        path = self.part(f"{name}.safetensors")
        if not path.exists():
            write_tensors(path, compute())
        return read_tensors(path)

    def rows(self, name: str, compute: Callable[[], Sequence[Mapping[str, object]]]) -> Rows:
        """Rows of a part of the run: the stored ones if there are any.

        Args:
            name: Name of the part.
            compute: Computes them; strings among them must not look like numbers.

        Raises:
            ValueError: If the stored part is damaged.
        """
        path = self.part(f"{name}.csv")
        if not path.exists():
            write_csv(compute(), path)
        return read_csv(path)

    def matches(self, name: str, found: Rows) -> bool:
        """Whether the inputs of a run are those that it began with.

        Args:
            name: One of `data`, `machine`, `checkpoints`.
            found: The inputs now; the first call stores them.

        Raises:
            ValueError: If the stored part is damaged.
        """
        return self.rows(name, lambda: found) == found

    def table(self, rows: Sequence[Mapping[str, object]], name: str = "results") -> Path:
        """Writes a table of results; returns its path."""
        path = self.folder / f"{name}.csv"
        write_csv(rows, path)
        return path

    def picture(self, figure: Figure, name: str) -> list[Path]:
        """Writes a picture as PNG and PDF; returns their paths."""
        paths = [self.folder / f"{name}{suffix}" for suffix in (".png", ".pdf")]
        for path in paths:
            save(figure, path)
        return paths

    def part(self, name: str) -> Path:
        """Path of a part of the run."""
        return self.folder / "parts" / name


def open_store(experiment: str, settings: Any, *, growing: Sequence[str] = ()) -> Store:
    """The store of a run: a new folder, or that of the same run when it is resumed.

    A folder in which an earlier run left no result counts as new.

    Args:
        experiment: Name of the experiment.
        settings: Its settings, with `output`, `resume` and perhaps `checkpoint`. Two runs are the
            same if all settings but paths and devices are equal, and the content of the checkpoint.
        growing: Names of settings that only say how much is measured. A run may be resumed with
            other values of these.

    Raises:
        FileExistsError: If the folder holds other files, or results while `resume` is false.
        ValueError: If it holds results of another experiment or of other settings, or the
            checkpoint is missing. Nothing is overwritten.
    """
    folder = Path(settings.output)
    described = _described(experiment, settings)
    path = folder / _SETTINGS
    if path.exists():
        found = _read_settings(path)
        if _is_fresh(folder):
            for name in _INPUTS:
                (folder / "parts" / f"{name}.csv").unlink(missing_ok=True)
            _write_settings(path, described)
            return Store(folder)
        _check_same(folder, found, described, growing)
        if not settings.resume:
            raise FileExistsError(
                f"{folder} holds results of these settings already; give --resume to continue, "
                "or choose another --output"
            )
        return Store(folder)
    if folder.is_dir():
        others = sorted(entry.name for entry in folder.iterdir() if entry.name[:1] != ".")
        if others:
            raise FileExistsError(
                f"{folder} holds other files ({', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}); choose an empty folder as --output"
            )
    _write_settings(path, described)
    return Store(folder)


def _is_fresh(folder: Path) -> bool:
    """Whether a run in the folder failed before its first result."""
    inputs = {f"{name}.csv" for name in _INPUTS}
    parts = folder / "parts"
    entries = {entry.name for entry in folder.iterdir()} - {_SETTINGS, parts.name}
    inner = {entry.name for entry in parts.iterdir()} - inputs if parts.is_dir() else set()
    return not entries and not inner


def _write_settings(path: Path, described: dict[str, Any]) -> None:
    with written_atomically(path) as temporary:
        temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content.

    Raises:
        ValueError: If there is no such file.
    """
    if not Path(path).is_file():
        raise ValueError(f"no file at {os.fspath(path)}; expected a checkpoint: check the path")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def tensor_digest(*tensors: Tensor) -> str:
    """SHA-256 of some tensors' content."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _described(experiment: str, settings: Any) -> dict[str, Any]:
    """What identifies a run, as JSON gives it back."""
    values = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _PLACES}
    checkpoint = getattr(settings, "checkpoint", None)
    values["checkpoint"] = None if checkpoint is None else file_digest(checkpoint)
    plain = json.dumps({"experiment": experiment, "settings": values}, default=str)
    return json.loads(plain)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"experiment": found["experiment"], "settings": _leaves(found["settings"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another --output") from error


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings by their names on the command line, e.g. `recipe.epochs`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict)
        found |= _leaves(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _check_same(
    folder: Path, found: dict[str, Any], described: dict[str, Any], growing: Sequence[str]
) -> None:
    if found["experiment"] != described["experiment"]:
        raise ValueError(
            f"{folder} holds results of the experiment {found['experiment']!r}, not of "
            f"{described['experiment']!r}; choose another --output"
        )
    there, here = found["settings"], _leaves(described["settings"])
    keys = [key for key in {**there, **here} if key not in growing]
    differing = [key for key in keys if there.get(key) != here.get(key)]
    if differing:
        listed = "; ".join(f"{k} was {there.get(k)}, is {here.get(k)}" for k in differing)
        raise ValueError(
            f"{folder} holds results of other settings ({listed}); choose another --output, "
            "or resume with the earlier settings"
        )
