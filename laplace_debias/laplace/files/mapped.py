"""Files whose tensors a posterior uses as they lie on disk."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laplace_debias.laplace.files.parts import Part

Stamp = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Mapped:
    """What a posterior is mapped from.

    Attributes:
        stamps: What told each file from others when it was mapped.
        folder: The folder of the parts; None of a single file.
        parts: By the blocks' names where each of them is.
        blocks: The operators that are made of them.
    """

    stamps: Mapping[Path, Stamp]
    folder: Path | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    blocks: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Require that nobody has written to a file; one that was removed or replaced still is.

        Raises:
            RuntimeError: Naming the file.
        """
        for path, (inode, *told) in self.stamps.items():
            try:
                now = path.stat()
            except OSError:
                continue
            if now.st_ino == inode and told != [now.st_size, now.st_mtime_ns]:
                raise RuntimeError(
                    f"{path} was written to since this posterior was mapped from it, so its "
                    "numbers may be wrong: load it again (mmap=False takes a copy), and replace "
                    "files instead of writing into them."
                )

    def part_of(self, folder: Path, name: str, block: Any) -> Part | None:
        """The part that a block of a posterior was mapped from, if it is in this folder."""
        if self.folder is None or self.blocks.get(name) is not block:
            return None
        part = self.parts.get(name)
        if part is None:
            return None
        # By the file, whatever the folder that it was mapped from is called now, if it is there.
        with suppress(OSError):
            if stamp_of(folder / part.file) == self.stamps[self.folder / part.file]:
                return part
        return None


def stamp_of(path: Path) -> Stamp:
    """What tells a file from others and from itself after it was written to."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
