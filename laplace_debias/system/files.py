"""Files that contain a checksum and are written atomically."""

import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor


@contextmanager
def written_atomically(
    path: str | os.PathLike[str], *, make_folders: bool = True
) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces `path` if the block succeeds.

    The content is flushed to the disk before it replaces the file. If `path` is a symbolic link,
    the file to which it points is replaced. The new file gets the permissions of the old one.
    Several threads and processes may write to the same path at once; the last one to finish wins.

    The temporary file is empty at first, and the block writes to it or overwrites it in place. If
    the block raises an exception, `path` is unchanged and the temporary file is removed. A process
    that is killed leaves its temporary file behind, as `.<name>.<16 hexadecimal digits>.partial`.
    """
    target = check_target(path, make_folders=make_folders)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:16]}.partial")
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise _explained_error(error, path) from error
    try:
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        # Leave errors about other files unchanged, such as a file that the block copies.
        if error.filename not in (None, str(temporary)):
            raise
        raise _explained_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: str | os.PathLike[str], *, make_folders: bool = False) -> Path:
    """Check that a file can be written to a path, before its content is computed.

    Returns the path of the file after following all symbolic links.
    """
    target = Path(os.path.realpath(path))
    if os.path.isdir(target):
        raise IsADirectoryError(f"{path} is a folder. Pass the path of a file in it.")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise OSError(
            f"{path} is a device, a pipe or a symbolic link that points back to itself. Pass the "
            "path of a regular file."
        )
    folder = target.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not os.path.isdir(folder):
        raise NotADirectoryError(
            f"{path} cannot be written, because {folder} is a file, not a folder. Choose a "
            "different path."
        )
    if folder != target.parent and not make_folders:
        raise FileNotFoundError(f"The folder {target.parent} does not exist. Create it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path} cannot be written, because the folder {folder} is write-protected. Choose a "
            "different folder, or change its permissions."
        )
    if os.path.isfile(target) and not os.access(target, os.W_OK):
        raise PermissionError(
            f"{path} is write-protected. Choose a different name, or change its permissions."
        )
    return target


def _explained_error(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """Return an error of the same type whose message explains what is wrong and what to do."""
    reason = error if error.errno is None else os.strerror(error.errno)
    message = (
        f"{path} cannot be written ({reason}). Choose a different path, or free some space on "
        "the disk."
    )
    kind = type(error) if error.errno is None else type(OSError(error.errno, ""))
    explained = kind(message)
    explained.errno = error.errno
    return explained


STORED_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a file can contain, and their names in the safetensors format."""
_BLANK = "0" * 64
# Quotes within names and strings are escaped, so a header contains this pattern only once.
_CHECKSUM = re.compile(rb'"checksum": ?"([0-9a-f]{64})"')


class DamagedFileError(ValueError):
    """Raised if a file is damaged."""


def write_sealed(path: Path, texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write strings and tensors to a file in place; equal contents always give equal bytes.

    In the safetensors format, a file consists of the size of the header (8 bytes), the header (JSON
    with the strings, and the dtype, shape and position of each tensor), and the tensors' entries.
    The checksum, among the strings, is that of the file with zeros in its place.

    The safetensors library is not used, because it writes strings in no fixed order and needs
    memory for a copy of all tensors. This function needs CPU memory for a copy of only one tensor.
    The name `checksum` is reserved and must not be used for a string.
    """
    entries: dict[str, Any] = {"__metadata__": {**texts, "checksum": _BLANK}}
    # Put tensors with wide entries first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    # Positions are relative to the end of the header.
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    # Pad the header, so that the tensors begin at a multiple of 8 bytes.
    header += b" " * (-len(header) % 8)
    digest = hashlib.blake2b(digest_size=32)
    with path.open("wb") as file:
        for content in (len(header).to_bytes(8, "little"), header):
            digest.update(content)
            file.write(content)
        for name in names:
            values = bytes_of(tensors[name])
            digest.update(values)
            file.write(values)
        checksum = _CHECKSUM.search(header)
        assert checksum is not None
        file.seek(8 + checksum.start(1))
        file.write(digest.hexdigest().encode())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's entries in row-major order."""
    entries = tensor.detach().cpu().reshape(-1)
    if entries.stride(0) != 1:
        # Copy explicitly, because torch regards a single-entry tensor as contiguous, whatever its
        # stride.
        entries = entries.clone(memory_format=torch.contiguous_format)
    return entries.view(torch.uint8).numpy().data


def read_sealed(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file's strings and tensors, and check that the file is not damaged."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DamagedFileError("it is a device or a pipe")
    raw = path.read_bytes()
    end_of_header = 8 + int.from_bytes(raw[:8], "little")
    checksum = _CHECKSUM.search(raw[8:end_of_header])
    if checksum is None:
        raise DamagedFileError("it has no checksum")
    # When the checksum was computed, there were zeros in its place.
    start = 8 + checksum.start(1)
    digest = hashlib.blake2b(raw[:start] + _BLANK.encode(), digest_size=32)
    digest.update(memoryview(raw)[start + len(_BLANK) :])
    if digest.hexdigest().encode() != checksum[1]:
        raise DamagedFileError("its checksum does not match its content")
    try:
        texts = json.loads(raw[8:end_of_header])["__metadata__"]
        return {name: texts[name] for name in texts if name != "checksum"}, load(raw)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{type(error).__name__}: {str(error)[:200]}") from error


_MOST_SHOWN_DIFFERENCES = 5


def differences(earlier: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Describe the settings that differ, as in `seed was 0, is now 1; ...`."""
    earlier_leaves = _leaves(earlier)
    present_leaves = _leaves(present)
    lines = []
    for key in {**earlier_leaves, **present_leaves}:
        was = earlier_leaves.get(key)
        is_now = present_leaves.get(key)
        if was != is_now:
            lines.append(f"{key} was {_shorten(was)}, is now {_shorten(is_now)}")
    num_hidden = len(lines) - _MOST_SHOWN_DIFFERENCES
    if num_hidden > 0:
        lines = [*lines[:_MOST_SHOWN_DIFFERENCES], f"and {num_hidden} more"]
    return "; ".join(lines)


def _shorten(value: Any) -> str:
    """Convert a value to a string of at most 60 characters, plus an ellipsis if it is cut off."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into a dictionary with keys such as `methods.laplace.examples`."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        leaves.update(_leaves(value, name))
    return leaves
