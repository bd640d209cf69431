"""A fitted posterior in a folder: a sealed file for each block, and an index of them.

Files are written under names that were never used before, the index last: whoever reads finds the
old posterior or the new one. What the new index does not name is removed after it is there.

The index is JSON, with the checksum of every file and one of its own, over all its bytes. So a file
that is damaged, was exchanged with another one, or is of another save, is found out.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from laplace_debias.laplace.files.header import LATER_FIELDS, Header, check_header
from laplace_debias.laplace.files.mapped import Mapped, Part, Stamp, stamp_of
from laplace_debias.laplace.files.plain_data import (
    TEXT,
    check_fields,
    list_of,
    parsed_json,
    record_of,
    shown,
    whole_number,
)
from laplace_debias.laplace.files.sealed import (
    DamagedFileError,
    UnknownFormatError,
    read_sealed,
    write_sealed,
)
from laplace_debias.system.atomic import check_target, written_atomically

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

INDEX = "index.json"
_FORMAT = "laplace-debias folder/1"
_PART_FORMAT = "laplace-debias part/1"
_FILE = re.compile(r"(mean|block-\d{5,})-[0-9a-f]{16}\.safetensors")
_PARTIAL = re.compile(rf"\.({_FILE.pattern}|index\.json)\.[0-9a-f]{{16}}\.partial")
_MAX_INDEX = 100_000_000
_BLANK = "0" * 64
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{64})"\}\s*\Z')
_FIELDS = {
    "format": TEXT,
    "header": record_of({}),
    "parts": list_of(
        record_of({"file": TEXT, "checksum": TEXT, "bytes": whole_number(1, 2**60)}), distinct=False
    ),
    "checksum": TEXT,
}


class FolderWriter:
    """Writes the parts of a posterior into a folder, and in the end their index.

    Args:
        folder: The folder, which is made if it is not there.

    Raises:
        NotADirectoryError: If it is a file.
        OSError: If it cannot be written to; `BlockingIOError` if another writer is at it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = check_folder(folder)
        self._written: list[Path] = []
        self._lock: int | None = None

    def __enter__(self) -> "FolderWriter":
        """Begin; nobody else writes into the folder until the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is not None:
            self._lock = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise BlockingIOError(
                    f"Somebody else is writing a posterior into {self.folder}: wait for them, or "
                    "name another folder."
                ) from error
            except OSError:  # A file system without locks.
                pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for path in self._written:
                path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)

    def write(
        self,
        what: str,
        tensors: Mapping[str, Tensor],
        fetch: Callable[[str], Tensor] | None = None,
    ) -> Part:
        """Write a part.

        Args:
            what: What is in it, for the file's name: `"mean"`, or `"block-00000"` and so on.
            tensors: Its tensors by name.
            fetch: As `write_sealed` takes it.

        Raises:
            OSError: If it cannot be written.
        """
        path = self.folder / f"{what}-{uuid.uuid4().hex[:16]}.safetensors"
        with written_atomically(path) as temporary:
            checksum = write_sealed(temporary, {"format": _PART_FORMAT}, tensors, fetch)
        self._written.append(path)
        return Part(path.name, checksum, path.stat().st_size)

    def finish(self, header: Header, parts: Sequence[Part]) -> None:
        """Write the index, and remove what it does not name.

        Raises:
            ValueError: If a number of the header is out of range.
            OSError: If it cannot be written.
        """
        plain = header.as_plain()
        check_header(plain, "The posterior cannot be saved: it")
        told = {"format": _FORMAT, "header": plain, "parts": [asdict(part) for part in parts]}
        text = json.dumps({**told, "checksum": _BLANK}, allow_nan=False).encode()
        checksum = hashlib.blake2b(text, digest_size=32).hexdigest()
        with written_atomically(self.folder / INDEX) as temporary:
            temporary.write_bytes(text[: -len(_BLANK) - 2] + checksum.encode() + b'"}')
        self._written.clear()
        named = {part.file for part in parts}
        for path in self.folder.iterdir():
            is_old = _FILE.fullmatch(path.name) and path.name not in named
            if is_old or _PARTIAL.fullmatch(path.name):
                path.unlink(missing_ok=True)


def check_folder(folder: Path) -> Path:
    """Require that parts can be written to a folder, before the work that goes into them.

    Raises:
        NotADirectoryError: If it is a file.
        OSError: As `check_target`.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder.")
    check_target(folder / INDEX, make_folders=True)
    return folder


def check_space(folder: Path, needed: int) -> None:
    """Require that there is room for so many bytes where a folder is or will be.

    Raises:
        ValueError: Otherwise.
    """
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"The posterior takes {needed:,} bytes, and {free:,} are free where {folder} is: free "
            "some, or name another place."
        )


def is_folder(path: Path) -> bool:
    """Whether a posterior lies there in parts."""
    return (path / INDEX).is_file()


def part_name(index: int) -> str:
    """What the part of a block is called."""
    return f"block-{index:05d}"


def load_folder(folder: Path, mapped: bool) -> tuple[Header, dict[str, Tensor], Mapped]:
    """Read an index and all parts.

    Args:
        folder: The folder.
        mapped: As `read_sealed` takes it.

    Returns:
        The header, the tensors, and the files; their `parts` are by the files' names.

    Raises:
        ValueError: If the index or a part is damaged, missing, or of another save.
        OSError: If they cannot be read.
    """
    raw = _bytes_of_index(folder)
    while True:
        try:
            return _load(folder, raw, mapped)
        except FileNotFoundError as error:
            # Somebody may have saved another posterior since the index was read.
            again = _bytes_of_index(folder)
            if again == raw:
                raise ValueError(
                    f"A file that {folder / INDEX} names is missing ({error}): save the posterior "
                    "again."
                ) from error
            raw = again


def _load(folder: Path, raw: bytes, mapped: bool) -> tuple[Header, dict[str, Tensor], Mapped]:
    header, parts = _parsed(folder / INDEX, raw)
    tensors: dict[str, Tensor] = {}
    stamps: dict[Path, Stamp] = {}
    for part in parts:
        path = folder / part.file
        stamps[path] = stamp_of(path)
        tensors.update(read_part(path, part, mapped))
    return header, tensors, Mapped(stamps, folder, {part.file: part for part in parts})


def read_part(path: Path, part: Part, mapped: bool) -> dict[str, Tensor]:
    """The tensors of a part.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or not the one that was written with the index.
    """
    try:
        _, tensors = read_sealed(path, {_PART_FORMAT: True}, expected=part.checksum, mapped=mapped)
    except UnknownFormatError as error:
        raise ValueError(
            f"{path} is of format {shown(error.args[0])}, and no part of a posterior: save it "
            "again."
        ) from error
    except DamagedFileError as error:
        raise ValueError(
            f"{path} is damaged ({error}): save the posterior again, or copy the whole folder."
        ) from error
    return tensors


def _bytes_of_index(folder: Path) -> bytes:
    with (folder / INDEX).open("rb") as file:
        return file.read(_MAX_INDEX)


def _parsed(path: Path, raw: bytes) -> tuple[Header, list[Part]]:
    try:
        found = _CHECKSUM.search(raw)
        if found is None:
            raise ValueError("its checksum is missing")
        blank = raw[: found.start(1)] + _BLANK.encode() + raw[found.end(1) :]
        if hashlib.blake2b(blank, digest_size=32).hexdigest().encode() != found[1]:
            raise ValueError("its checksum is not that of its content")
        told: Any = parsed_json(raw)
        if not isinstance(told, dict) or told.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        header = told.get("header")
        check_fields({**told, "header": {}}, _FIELDS, "it")
        check_header(header, "its header", LATER_FIELDS[max(LATER_FIELDS)])
        parts = [Part(**part) for part in told["parts"]]
        odd = [part.file for part in parts if not _FILE.fullmatch(part.file)]
        if odd:
            raise ValueError(f"it names {shown(odd)}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): save the posterior again.") from error
    assert isinstance(header, dict)
    numbers = {name: float(header[name]) for name in ("nll", "temperature") if name in header}
    return Header(**{**header, **numbers}), parts
