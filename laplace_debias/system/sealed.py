"""Files of tensors and texts in the safetensors format, with one checksum over every byte."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}
_BLANK = "0" * 64
# Quotes within names and texts are escaped: this stands in one place of a header.
_CHECKSUM = re.compile(rb'"checksum": ?"([0-9a-f]{64})"')


class DamagedFileError(ValueError):
    """A file that is not what was written; the message says what is wrong in it."""


def write_sealed(path: Path, texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write a file in place; equal contents give equal bytes.

    Not by the library, which writes texts in no fixed order and needs memory for all tensors once
    more; this needs it for one of them, on the CPU.

    Args:
        path: The file.
        texts: Texts by name, none of them called `checksum`.
        tensors: Tensors by name, on any device, of the dtypes above.

    Raises:
        OSError: If it cannot be written.
    """
    described: dict[str, Any] = {"__metadata__": {**texts, "checksum": _BLANK}}
    # Wide entries first: so each tensor is aligned.
    names, start = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in names:
        of, end = tensors[name], start + tensors[name].nbytes
        offsets = {"shape": list(of.shape), "data_offsets": [start, end]}
        described[name], start = {"dtype": _DTYPES[of.dtype], **offsets}, end
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.blake2b(digest_size=32)
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header, *(map(tensors.get, names))):
            content = part if isinstance(part, bytes) else _bytes_of(part)
            digest.update(content)
            file.write(content)
        found = _CHECKSUM.search(header)
        assert found is not None
        file.seek(8 + found.start(1))
        file.write(digest.hexdigest().encode())


def read_sealed(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The texts and the tensors (on the CPU) of a file that is as it was written.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        DamagedFileError: If it is not a file of this kind, or not the one that was written.
        OSError: If it cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DamagedFileError("it is a device or a pipe")
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    found = _CHECKSUM.search(raw[8:end])
    if found is None:
        raise DamagedFileError("it has no checksum")
    start = 8 + found.start(1)
    digest = hashlib.blake2b(raw[:start] + _BLANK.encode(), digest_size=32)
    digest.update(memoryview(raw)[start + len(_BLANK) :])
    if digest.hexdigest().encode() != found[1]:
        raise DamagedFileError("its checksum is not that of its content")
    try:
        texts = json.loads(raw[8:end])["__metadata__"]
        return {name: texts[name] for name in texts if name != "checksum"}, load(raw)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _bytes_of(tensor: Any) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
