"""Sealed files: named real tensors and a few texts in a safetensors file, with a checksum.

Any safetensors reader reads them. They are read and written here, not by that library, since a
posterior is kept for years and answers must not change without a word:

- The library gives tensors that are the mapped file itself. A file that is overwritten in place
  (`cp other posterior.safetensors`) changes the tensors of a program that has read it, or ends it.
  Here this is a choice (`mapped`), after the whole of the file was held against its checksum.
- It orders the texts at random, so that equal contents give unequal files.
- The checksum needs every byte of the header as it lies on disk.

The checksum protects against damage, not against somebody who edits a file and computes it anew. It
takes most of the time: about 0.7 GB a second are written or read.
"""

import mmap
import os
import re
from collections.abc import Callable, Mapping
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

_CHECKSUM = "checksum"
_BLANK = "0" * 64


def write_sealed(
    path: Path,
    texts: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor] | None = None,
) -> str:
    """Write a sealed file; equal contents give equal bytes.

    Needs no more memory than one tensor on the CPU.

    Args:
        path: The file, which is overwritten in place.
        texts: Texts by name, none of them called `checksum`.
        tensors: Tensors by name, float32 or float64, of at most three dimensions, on any device.
        fetch: From a name to the tensor's values, called in the order of `names_in_order` as they
            are written; `tensors` may be on the meta device then. None if they have values.

    Returns:
        Its checksum.

    Raises:
        OSError: If it cannot be written.
    """
    start = start_of({**texts, _CHECKSUM: _BLANK}, tensors)
    # Quotes within texts are escaped, so it is found nowhere else.
    place = start.index(f'"{_CHECKSUM}":"{_BLANK}"}}'.encode()) + len(_CHECKSUM) + 4
    digest = new_digest()
    with path.open("wb") as file:
        digest.update(start)
        file.write(start)
        for name in names_in_order(tensors):
            values = bytes_of(tensors[name] if fetch is None else fetch(name))
            digest.update(values)
            file.write(values)
        file.seek(place)
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def read_sealed(
    path: Path,
    formats: Mapping[str, bool],
    *,
    expected: str | None = None,
    mapped: bool = False,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a sealed file, once, into memory of its own or into a mapping.

    Beyond the tensors it takes memory for the header alone, whatever sizes that declares.

    Args:
        path: The file.
        formats: What the text `format` may be, and whether files of that format have a checksum.
        expected: The checksum that it must have; None for any that is that of its content.
        mapped: Whether the tensors are the file itself, whose parts the system reads as they are
            used and lets go of when memory is short. Writing to them does not change the file, but
            who overwrites the file in place changes them, and who cuts it off ends the program.

    Returns:
        Texts and tensors (on the CPU), by name.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        DamagedFileError: If it is no regular file, no safetensors file, or not the one that was
            written.
        UnknownFormatError: If it is a safetensors file of another format.
        OSError: If it cannot be read.
    """
    check_source(path)
    try:
        with path.open("rb") as file:
            return _read(file, formats, expected, mapped)
    except OSError as error:
        raise unreadable(path, error) from error


def _read(
    file: BufferedReader, formats: Mapping[str, bool], expected: str | None, mapped: bool
) -> tuple[dict[str, str], dict[str, Tensor]]:
    size = os.fstat(file.fileno()).st_size
    header = header_in(file, size)
    texts, described = texts_and_tensors(header)
    if texts.get("format") not in formats:
        raise UnknownFormatError(texts.get("format"))
    entries = entries_of(described, size - len(header))
    checksum = texts.pop(_CHECKSUM, None)
    if checksum is None and formats[texts["format"]]:
        raise DamagedFileError("its checksum is missing")
    digest = new_digest()
    digest.update(header if checksum is None else _without(header, checksum))
    if mapped:
        skim(file, digest, size - len(header))
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = {entry.name: view(contents, entry, len(header)) for entry in entries}
    else:
        tensors = {entry.name: tensor_in(file, entry, digest) for entry in entries}
    if checksum is not None and digest.hexdigest() != checksum:
        raise DamagedFileError("its checksum is not that of its content")
    if expected is not None and checksum != expected:
        raise DamagedFileError("it is the file of another save")
    return texts, tensors


def _without(header: bytes, checksum: str) -> bytes:
    """The header with zeros in the checksum's place."""
    found = checksum.encode(errors="replace")
    if not re.fullmatch(rb"[0-9a-f]{64}", found) or header.count(found) != 1:
        raise DamagedFileError("its checksum is malformed")
    return header.replace(found, _BLANK.encode())
