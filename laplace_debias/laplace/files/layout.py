"""How named real tensors and a few texts lie in a safetensors file: its header and its tensors."""

import json
import math
import mmap
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
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


class DamagedFileError(ValueError):
    """A file that is not what was written; the message says what is wrong in it."""


class UnknownFormatError(ValueError):
    """A file of another format; the first argument is its format, None where it says none."""


@dataclass(frozen=True)
class Entry:
    """A tensor's place in the file, in bytes from the header's end."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


def start_of(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """A file's bytes before its tensors: the header's length, and the header.

    Args:
        texts: Texts by name.
        tensors: Tensors by name, float32 or float64, of at most three dimensions, on any device.
    """
    described: dict[str, Any] = {"__metadata__": dict(texts)}
    start = 0
    for name in names_in_order(tensors):
        end = start + tensors[name].numel() * tensors[name].element_size()
        described[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def names_in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors in the order of a file: wide ones first, so that each is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def header_in(file: BufferedReader, size: int) -> bytes:
    """The header of a file of so many bytes, read from its start, with its length before it.

    Raises:
        DamagedFileError: If the file is too short for it.
    """
    length = file.read(8)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= num_bytes <= min(size - 8, _MAX_HEADER):
        raise DamagedFileError(f"it has {size} bytes, and its header should have {num_bytes}")
    return length + bytes(_exactly(file, bytearray(num_bytes)))


def texts_and_tensors(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """What a header says: texts by name, and an entry of each tensor.

    Args:
        header: As `header_in` gives it.

    Raises:
        DamagedFileError: If it is not JSON, or no safetensors header.
    """
    try:
        described = parsed_json(header[8:])
    except ValueError as error:
        raise DamagedFileError(str(error)) from error
    if not isinstance(described, dict):
        raise DamagedFileError("its header is not a JSON object")
    texts = described.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise DamagedFileError("its metadata do not map names to texts")
    return texts, described


def entries_of(described: Mapping[str, Any], num_bytes: int) -> list[Entry]:
    """The tensors in the order in which they lie in the file, without gaps or overlaps.

    Args:
        described: As `texts_and_tensors` gives them.
        num_bytes: How many there are behind the header.

    Raises:
        DamagedFileError: If one is malformed, or they do not fill these bytes.
    """
    entries = sorted(
        (_entry_of(name, entry) for name, entry in described.items()),
        key=lambda e: (e.start, e.end),
    )
    ends = [0, *(entry.end for entry in entries)]
    if [*(entry.start for entry in entries), num_bytes] != ends:
        raise DamagedFileError(f"its tensors do not fill the {num_bytes} bytes behind the header")
    return entries


def _entry_of(name: str, entry: Any) -> Entry:
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
    return Entry(name, _NUMPY[dtype], tuple(shape), *place)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def skim(file: BufferedReader, digest: blake2b, num_bytes: int) -> None:
    """Read so many bytes for the checksum alone."""
    buffer = memoryview(bytearray(min(num_bytes, 2**20)))
    while num_bytes:
        part = _exactly(file, buffer[:num_bytes])
        digest.update(part)
        num_bytes -= len(part)


def view(contents: mmap.mmap, entry: Entry, start: int) -> Tensor:
    """A tensor that lies in a mapped file.

    Args:
        contents: The file.
        entry: Where the tensor is.
        start: Where the header ends.
    """
    count = (entry.end - entry.start) // entry.dtype.itemsize
    if not count:
        return torch.from_numpy(np.empty(0, entry.dtype.newbyteorder("="))).reshape(entry.shape)
    values = np.frombuffer(contents, entry.dtype, count, start + entry.start)
    native = values.astype(entry.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native).reshape(entry.shape)


def tensor_in(file: BufferedReader, entry: Entry, digest: blake2b) -> Tensor:
    """The tensor that begins where the file is read next, in memory of its own.

    Raises:
        DamagedFileError: If the file ends too early, or there is not so much memory.
    """
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


def new_digest() -> blake2b:
    """What a checksum is made with."""
    return blake2b(digest_size=32)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's entries as they are in a file."""
    array = tensor.detach().cpu().contiguous().reshape(-1).numpy()
    return array.astype(_NUMPY[_DTYPES[tensor.dtype]], copy=False).view(np.uint8).data


def _exactly(file: BufferedReader, buffer: Buffer) -> Buffer:
    """Fill a buffer from the file, and give it back."""
    if file.readinto(buffer) != len(buffer):
        raise DamagedFileError("it ends too early")
    return buffer


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
        raise unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder: name the file in it.")
    if not stat.S_ISREG(mode):
        raise DamagedFileError("it is a device or a pipe, not a regular file")


def unreadable(path: Path, error: OSError) -> OSError:
    """The error of the same kind, with what to do."""
    told = f"{path} cannot be read ({error.strerror or error}): check the path and its permissions."
    return type(error)(told)
