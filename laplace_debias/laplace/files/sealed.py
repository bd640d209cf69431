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

import hashlib
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from laplace_debias.laplace.files.plain_data import parsed_json, shown

Buffer = TypeVar("Buffer", bytearray, memoryview)

_DTYPES = {torch.float64: "F64", torch.float32: "F32"}
_NUMPY: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}
_MAX_HEADER = 100_000_000  # As the safetensors library has it.
_MAX_BYTES = 2**60
_CHECKSUM = "checksum"
_BLANK = "0" * 64


class DamagedFileError(ValueError):
    """A file that is not what was written; the message says what is wrong in it."""


class UnknownFormatError(ValueError):
    """A file of another format; the first argument is its format, None where it says none."""


@dataclass(frozen=True)
class _Entry:
    """A tensor's place in the file, in bytes from the header's end."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


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
    names = names_in_order(tensors)
    described: dict[str, Any] = {"__metadata__": {**texts, _CHECKSUM: _BLANK}}
    start = 0
    for name in names:
        end = start + tensors[name].numel() * tensors[name].element_size()
        described[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-len(header) % 8)
    start_of_file = len(header).to_bytes(8, "little") + header
    # Quotes within texts are escaped, so it is found nowhere else.
    place = start_of_file.index(f'"{_CHECKSUM}":"{_BLANK}"}}'.encode()) + len(_CHECKSUM) + 4
    digest = _new_digest()
    with path.open("wb") as file:
        digest.update(start_of_file)
        file.write(start_of_file)
        for name in names:
            values = _bytes_of(tensors[name] if fetch is None else fetch(name))
            digest.update(values)
            file.write(values)
        file.seek(place)
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def names_in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors in the order of a file: wide ones first, so that each is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


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
        raise _unreadable(path, error) from error


def _read(
    file: BufferedReader, formats: Mapping[str, bool], expected: str | None, mapped: bool
) -> tuple[dict[str, str], dict[str, Tensor]]:
    size = os.fstat(file.fileno()).st_size
    length = file.read(8)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= num_bytes <= min(size - 8, _MAX_HEADER):
        raise DamagedFileError(f"it has {size} bytes, and its header should have {num_bytes}")
    header = bytes(_exactly(file, bytearray(num_bytes)))
    texts, described = _texts_and_tensors(header)
    if texts.get("format") not in formats:
        raise UnknownFormatError(texts.get("format"))
    entries = _entries(described, size - 8 - num_bytes)
    checksum = texts.pop(_CHECKSUM, None)
    if checksum is None and formats[texts["format"]]:
        raise DamagedFileError("its checksum is missing")
    digest = _new_digest()
    digest.update(length)
    digest.update(header if checksum is None else _without(header, checksum))
    if mapped:
        start = file.tell()
        _skim(file, digest)
        contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = {entry.name: _view(contents, entry, start) for entry in entries}
    else:
        tensors = {entry.name: _tensor(file, entry, digest) for entry in entries}
    if checksum is not None and digest.hexdigest() != checksum:
        raise DamagedFileError("its checksum is not that of its content")
    if expected is not None and checksum != expected:
        raise DamagedFileError("it is the file of another save")
    return texts, tensors


def _skim(file: BufferedReader, digest: hashlib.blake2b) -> None:
    """Read to the end for the checksum alone."""
    buffer = memoryview(bytearray(2**20))
    while size := file.readinto(buffer):
        digest.update(buffer[:size])


def _view(contents: mmap.mmap, entry: _Entry, start: int) -> Tensor:
    """A tensor that lies in a mapped file."""
    count = (entry.end - entry.start) // entry.dtype.itemsize
    if not count:
        return torch.from_numpy(np.empty(0, entry.dtype.newbyteorder("="))).reshape(entry.shape)
    values = np.frombuffer(contents, entry.dtype, count, start + entry.start)
    native = values.astype(entry.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native).reshape(entry.shape)


def _tensor(file: BufferedReader, entry: _Entry, digest: hashlib.blake2b) -> Tensor:
    num_bytes = entry.end - entry.start
    try:
        values = np.empty(num_bytes // entry.dtype.itemsize, entry.dtype)
    except MemoryError as error:
        raise DamagedFileError(
            f"it says that {shown(entry.name)} has {num_bytes} bytes, more than there is memory for"
        ) from error
    digest.update(_exactly(file, values.view(np.uint8).data))
    native = values.astype(entry.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native).reshape(entry.shape)


def check_source(path: Path) -> None:
    """Require that there is a regular file, without opening it: a pipe would wait for a writer.

    Raises:
        FileNotFoundError: If there is none.
        IsADirectoryError: If it is a folder.
        DamagedFileError: If it is a device or a pipe.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"There is no file {path}: check the path.") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder: name the file in it.")
    if not stat.S_ISREG(mode):
        raise DamagedFileError("it is a device or a pipe, not a regular file")


def _unreadable(path: Path, error: OSError) -> OSError:
    told = f"{path} cannot be read ({error.strerror or error}): check the path and its permissions."
    return type(error)(told)


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


def _bytes_of(tensor: Tensor) -> memoryview:
    array = tensor.detach().cpu().contiguous().reshape(-1).numpy()
    return array.astype(_NUMPY[_DTYPES[tensor.dtype]], copy=False).view(np.uint8).data


def _exactly(file: BufferedReader, buffer: Buffer) -> Buffer:
    """Fill a buffer from the file, and give it back."""
    if file.readinto(buffer) != len(buffer):
        raise DamagedFileError("it ends too early")
    return buffer


def _texts_and_tensors(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        described = parsed_json(header)
    except ValueError as error:
        raise DamagedFileError(str(error)) from error
    if not isinstance(described, dict):
        raise DamagedFileError("its header is not a JSON object")
    texts = described.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise DamagedFileError("its metadata do not map names to texts")
    return texts, described


def _entries(described: Mapping[str, Any], num_bytes: int) -> list[_Entry]:
    """The tensors in the order in which they lie in the file, without gaps or overlaps."""
    entries = sorted(
        (_entry(name, entry) for name, entry in described.items()), key=lambda e: (e.start, e.end)
    )
    ends = [0, *(entry.end for entry in entries)]
    if [*(entry.start for entry in entries), num_bytes] != ends:
        raise DamagedFileError(f"its tensors do not fill the {num_bytes} bytes behind the header")
    return entries


def _entry(name: str, entry: Any) -> _Entry:
    expected = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != expected:
        raise DamagedFileError(f"its entry of {shown(name)} has other keys than {sorted(expected)}")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NUMPY:
        raise DamagedFileError(f"the dtype of {shown(name)} is {shown(dtype)}, expected F32 or F64")
    if not _are_sizes(shape) or len(shape) > 3 or not _are_sizes(place) or len(place) != 2:
        raise DamagedFileError(
            f"{shown(name)} has the shape {shown(shape)} and lies at {shown(place)}, expected at "
            "most three sizes and two places"
        )
    itemsize = _NUMPY[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) > _MAX_BYTES:
        raise DamagedFileError(f"the shape of {shown(name)}, {shown(shape)}, is too large")
    if place[1] - place[0] != math.prod(shape) * itemsize:
        raise DamagedFileError(f"{shown(name)} of shape {shown(shape)} lies at {shown(place)}")
    return _Entry(name, _NUMPY[dtype], tuple(shape), *place)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _without(header: bytes, checksum: str) -> bytes:
    """The header with zeros in the checksum's place."""
    found = checksum.encode(errors="replace")
    if not re.fullmatch(rb"[0-9a-f]{64}", found) or header.count(found) != 1:
        raise DamagedFileError("its checksum is malformed")
    return header.replace(found, _BLANK.encode())
