"""The index of a posterior in a folder: its header, and the files that hold its tensors.

It is JSON, with checksums of every file's header and tensors and one of its own, over all its
bytes. So a file that is damaged, was exchanged with another one, or is of another save, is found
out, and a process that needs some of the tensors reads these alone.

Format 1 had a sealed file for each block, with one checksum for all of it. It is still read.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laplace_debias.laplace.files.header import LATER_FIELDS, Header, check_header
from laplace_debias.laplace.files.parts import Part
from laplace_debias.laplace.files.plain_data import (
    TEXT,
    Kind,
    check_fields,
    list_of,
    mapping_to,
    parsed_json,
    record_of,
    shown,
    whole_number,
)

INDEX = "index.json"
FORMAT = "laplace-debias folder/2"
_OF_BLOCKS = "laplace-debias folder/1"
FILE = re.compile(r"(mean|blocks-\d{5,}|block-(?P<block>\d{5,}))-[0-9a-f]{16}\.safetensors")
_BLANK = "0" * 64
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{64})"\}\s*\Z')
_SIZE = whole_number(1, 2**60)


@dataclass(frozen=True)
class SealedPart:
    """What an index of format 1 says of a file.

    Attributes:
        file: Its name.
        checksum: That of all its content, as it says itself.
        bytes: Its size.
    """

    file: str
    checksum: str
    bytes: int

    @property
    def block(self) -> int | None:
        """The number of the block in it; None of the mean."""
        found = FILE.fullmatch(self.file)
        return None if found is None or found["block"] is None else int(found["block"])


_PARTS: dict[Any, tuple[type[Part] | type[SealedPart], Kind]] = {
    FORMAT: (
        Part,
        record_of({"file": TEXT, "bytes": _SIZE, "header": TEXT, "tensors": mapping_to(TEXT)}),
    ),
    _OF_BLOCKS: (SealedPart, record_of({"file": TEXT, "checksum": TEXT, "bytes": _SIZE})),
}


def index_of(header: Header, parts: Sequence[Part]) -> bytes:
    """The content of an index.

    Raises:
        ValueError: If a number of the header is out of range.
    """
    plain = header.as_plain()
    check_header(plain, "The posterior cannot be saved: it")
    told = {"format": FORMAT, "header": plain, "parts": [asdict(part) for part in parts]}
    text = json.dumps({**told, "checksum": _BLANK}, allow_nan=False).encode()
    checksum = hashlib.blake2b(text, digest_size=32).hexdigest()
    return text[: -len(_BLANK) - 2] + checksum.encode() + b'"}'


def parsed_index(path: Path, raw: bytes) -> tuple[Header, list[Part] | list[SealedPart]]:
    """The header and the files of an index.

    Args:
        path: What errors call it.
        raw: Its content.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        found = _CHECKSUM.search(raw)
        if found is None:
            raise ValueError("its checksum is missing")
        blank = raw[: found.start(1)] + _BLANK.encode() + raw[found.end(1) :]
        if hashlib.blake2b(blank, digest_size=32).hexdigest().encode() != found[1]:
            raise ValueError("its checksum is not that of its content")
        told: Any = parsed_json(raw)
        if not isinstance(told, dict) or told.get("format") not in list(_PARTS):
            raise ValueError(f"its format is not {FORMAT!r}")
        header = told.get("header")
        part, kind = _PARTS[told["format"]]
        fields = {
            "format": TEXT,
            "header": record_of({}),
            "parts": list_of(kind),
            "checksum": TEXT,
        }
        check_fields({**told, "header": {}}, fields, "it")
        check_header(header, "its header", LATER_FIELDS[max(LATER_FIELDS)])
        parts: Any = [part(**of_part) for of_part in told["parts"]]
        odd = [of.file for of in parts if not FILE.fullmatch(of.file)]
        if odd:
            raise ValueError(f"it names {shown(odd)}")
        if part is Part:
            _check_distinct(parts)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): save the posterior again.") from error
    assert isinstance(header, dict)
    numbers = {name: float(header[name]) for name in ("nll", "temperature") if name in header}
    return Header(**{**header, **numbers}), parts


def _check_distinct(parts: Sequence[Part]) -> None:
    """Require that no two files hold the same tensor, and that no file is named twice."""
    names = Counter(name for part in parts for name in (part.file, *part.tensors))
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(f"it names {shown(twice)} twice")
