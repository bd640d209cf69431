"""A fitted posterior in a folder: a file of each process that wrote it, and an index of them.

Files are written under names that were never used before, the index last: whoever reads finds the
old posterior or the new one. What the new index does not name is removed after it is there.

Each process writes all its blocks into one file. Many networks have hundreds of blocks, most of
them small; so many files are slow to make and to list on a network's file system, and a process
that maps them needs one open file each. The index has a checksum of every tensor, so any number of
processes read the blocks that they need and nothing else, whoever wrote them.
"""

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from torch import Tensor

from laplace_debias.laplace.files.header import Header
from laplace_debias.laplace.files.index import FILE, INDEX, index_of
from laplace_debias.laplace.files.parts import Part, write_part
from laplace_debias.system.atomic import check_target, written_atomically
from laplace_debias.system.ranks import ALONE, Ranks

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_PARTIAL = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{16}\.partial")
# Seconds that another machine may take to see a new file of a network's file system.
_SEEN_WITHIN = 30.0


class FolderWriter:
    """Writes the parts of a posterior into a folder, and in the end their index.

    Of several processes each writes its own parts, and rank 0 the index. All of them make the same
    calls, but for `write`.

    Args:
        folder: The folder, which is made if it is not there. All processes must see it.
        ranks: The processes.

    Raises:
        NotADirectoryError: If it is a file.
        OSError: If it cannot be written to; `BlockingIOError` if another writer is at it.
    """

    def __init__(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self.folder = check_folder(folder)
        self.ranks = ranks
        # What is removed after an error.
        self._written: list[Path] = []
        self._lock: int | None = None

    def __enter__(self) -> "FolderWriter":
        """Begin; nobody else writes into the folder until the end.

        Raises:
            ValueError: If a process does not see the folder of rank 0.
        """
        try:
            if self.ranks.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._take()
            self._check_shared()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for path in self._written:
                path.unlink(missing_ok=True)
        self._release()

    def write(self, what: str, tensors: Mapping[str, Tensor]) -> Part:
        """Write a part.

        Args:
            what: What is in it, for the file's name: `"mean"`, or `"blocks"`.
            tensors: Its tensors by name.

        Raises:
            OSError: If it cannot be written.
        """
        by = "" if what == "mean" else f"-{self.ranks.rank:05d}"
        path = self.folder / f"{what}{by}-{uuid.uuid4().hex[:16]}.safetensors"
        part = write_part(path, tensors)
        self._written.append(path)
        return part

    def finish(self, header: Header, parts: Sequence[Part]) -> None:
        """Write the index, and remove what it does not name.

        Args:
            header: The posterior's header.
            parts: The files of this process, without those of others.

        Raises:
            ValueError: If a number of the header is out of range; if rank 0 does not see a file.
            OSError: If it cannot be written.
        """
        of_ranks = self.ranks.gather((list(parts), [path.name for path in self._written]))
        # From here rank 0 answers for all files: whether the index names them it alone knows.
        is_first = self.ranks.rank == 0
        names = [name for _, of_rank in of_ranks for name in of_rank] if is_first else []
        self._written = [self.folder / name for name in names]
        self.ranks.exchange(None)
        if is_first:
            for rank, (of_rank, _) in enumerate(of_ranks):
                check_seen(self.folder, of_rank, 0, rank)
            everything = _joined(part for of_rank, _ in of_ranks for part in of_rank)
            content = index_of(header, everything)
            with written_atomically(self.folder / INDEX) as temporary:
                temporary.write_bytes(content)
            self._written = []
            self._clean({part.file for part in everything})
        # Nobody goes on before the index is there.
        self.ranks.exchange(None)

    def _clean(self, named: set[str]) -> None:
        """Remove files of earlier saves, and what a killed writer left."""
        for path in self.folder.iterdir():
            is_old = FILE.fullmatch(path.name) and path.name not in named
            if is_old or _is_partial(path.name):
                path.unlink(missing_ok=True)

    def _take(self) -> None:
        """Lock the folder."""
        if fcntl is None:
            return
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"Somebody else is writing a posterior into {self.folder}: wait for them, or "
                "name another folder."
            ) from error
        except OSError:  # A file system without locks.
            pass

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_shared(self) -> None:
        """Require that all processes see the same folder."""
        if self.ranks.size == 1:
            return
        mark = self.folder / f".{INDEX}.{uuid.uuid4().hex[:16]}.partial"
        name = self.ranks.exchange(mark.name if self.ranks.rank == 0 else None)[0]
        try:
            if self.ranks.rank == 0:
                mark.touch()
            self.ranks.exchange(None)
            if not _is_seen(self.folder / name, 0):
                raise ValueError(_unseen(self.folder / name, self.ranks.rank, 0))
            self.ranks.exchange(None)
        finally:
            mark.unlink(missing_ok=True)


def check_seen(folder: Path, parts: Iterable[Part], reader: int, writer: int) -> None:
    """Require that a process sees the files of another one.

    Args:
        folder: The folder.
        parts: The files.
        reader: The rank of this process.
        writer: The rank of the other one.

    Raises:
        ValueError: Naming the file that it does not see, or not in full.
    """
    for part in parts:
        path = folder / part.file
        if not _is_seen(path, part.bytes):
            raise ValueError(_unseen(path, reader, writer))


def _is_seen(path: Path, num_bytes: int) -> bool:
    end = time.monotonic() + _SEEN_WITHIN
    while True:
        try:
            # Reading the folder makes a network's file system ask for what is new.
            with os.scandir(path.parent) as entries:
                next(entries, None)
            if path.stat().st_size >= num_bytes:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def _unseen(path: Path, reader: int, writer: int) -> str:
    return (
        f"Rank {reader} does not see {path}, which rank {writer} has written: name a folder on a "
        "file system that all processes share."
    )


def _joined(parts: Iterable[Part]) -> list[Part]:
    """The files, each once, with the tensors of all its blocks."""
    found: dict[str, Part] = {}
    for part in parts:
        before = found[part.file].tensors if part.file in found else {}
        found[part.file] = Part(part.file, part.bytes, part.header, {**before, **part.tensors})
    return list(found.values())


def _is_partial(name: str) -> bool:
    """Whether a file is what a killed writer of this folder left."""
    found = _PARTIAL.fullmatch(name)
    return found is not None and (found["of"] == INDEX or bool(FILE.fullmatch(found["of"])))


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
