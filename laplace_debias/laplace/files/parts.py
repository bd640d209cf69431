"""Parts of a posterior: files of several blocks' tensors, of which a reader takes some.

A part is a safetensors file. The checksums of its header and of each tensor stand in the index of
its folder, and not in the part: so a process that needs some of the tensors reads these alone, and
is sure of them.
"""

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from torch import Tensor

from laplace_debias.laplace.files.layout import (
    DamagedFileError,
    UnknownFormatError,
    bytes_of,
    check_source,
    entries_of,
    header_in,
    names_in_order,
    new_digest,
    skim,
    start_of,
    tensor_in,
    texts_and_tensors,
    unreadable,
    view,
)
from laplace_debias.system.atomic import written_atomically

FORMAT = "laplace-debias part/2"


@dataclass(frozen=True)
class Part:
    """What an index says of a file.

    Attributes:
        file: Its name.
        bytes: Its size.
        header: The checksum of its header.
        tensors: The checksums of those of its tensors that belong to the posterior.
    """

    file: str
    bytes: int
    header: str
    tensors: Mapping[str, str]

    def of(self, names: Collection[str]) -> "Part":
        """The same file, of which these tensors alone are asked for."""
        kept = {name: self.tensors[name] for name in sorted(names)}
        return Part(self.file, self.bytes, self.header, kept)


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> Part:
    """Write a part, atomically, with memory for one tensor on the CPU.

    Args:
        path: The file.
        tensors: As `start_of` takes them.

    Raises:
        OSError: If it cannot be written.
    """
    start, checksums = start_of({"format": FORMAT}, tensors), {}
    with written_atomically(path) as temporary, temporary.open("wb") as file:
        file.write(start)
        for name in names_in_order(tensors):
            values = bytes_of(tensors[name])
            checksums[name] = _checksum(values)
            file.write(values)
    return Part(path.name, path.stat().st_size, _checksum(start), checksums)


def read_part(path: Path, part: Part, mapped: bool) -> dict[str, Tensor]:
    """The tensors of a part that are asked for, on the CPU; the others are not read.

    Args:
        path: The file.
        part: What the index says of it.
        mapped: As `read_sealed` takes it.

    Raises:
        FileNotFoundError: If there is no such file.
        DamagedFileError: If it is not the one that was written with the index.
        UnknownFormatError: If it is a safetensors file of another format.
        OSError: If it cannot be read.
    """
    check_source(path)
    try:
        with path.open("rb") as file:
            return _read(file, part, mapped)
    except OSError as error:
        raise unreadable(path, error) from error


def _read(file: BufferedReader, part: Part, mapped: bool) -> dict[str, Tensor]:
    size = os.fstat(file.fileno()).st_size
    header = header_in(file, size)
    texts, described = texts_and_tensors(header)
    if texts.get("format") != FORMAT:
        raise UnknownFormatError(texts.get("format"))
    if _checksum(header) != part.header:
        raise DamagedFileError("its header was changed, or it is the file of another save")
    entries = {entry.name: entry for entry in entries_of(described, size - len(header))}
    contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else None
    found = {}
    for name, checksum in part.tensors.items():
        if name not in entries:
            raise DamagedFileError(f"it does not hold {name}, which the index says")
        entry, digest = entries[name], new_digest()
        file.seek(len(header) + entry.start)
        if contents is None:
            found[name] = tensor_in(file, entry, digest)
        else:
            skim(file, digest, entry.end - entry.start)
            found[name] = view(contents, entry, len(header))
        if digest.hexdigest() != checksum:
            raise DamagedFileError(f"the checksum of {name} is not that of its content")
    return found


def _checksum(content: bytes | memoryview) -> str:
    digest = new_digest()
    digest.update(content)
    return digest.hexdigest()
