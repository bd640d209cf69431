"""Writing results so that a file is there in full or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path beside `path`, which takes its place when the block ends well.

    Missing parent folders are made. After an exception what stood at `path` still stands there, and
    nothing else is left.

    Args:
        path: Where the file shall be.

    Yields:
        Where to write it, with the same suffix.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
