"""Writing files so that they are there in full or not at all."""

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def written_atomically(
    path: str | os.PathLike[str], *, make_folders: bool = True
) -> Iterator[Path]:
    """Give a temporary path beside `path`, which takes its place when the block ends well.

    The content reaches the disk before it takes the place. A symbolic link stays: the file that it
    leads to is replaced. A file that is replaced keeps its permissions. Threads and processes may
    write one path at once: the last one to finish wins.

    After an exception what stood at `path` still stands there, and nothing else is left. A process
    that is killed leaves its temporary file, `.<name>.<16 hexadecimal digits>.partial`.

    Args:
        path: Where the file shall be.
        make_folders: Whether missing folders are made.

    Yields:
        An empty file, to be written or overwritten in place.

    Raises:
        OSError: As `check_target`. If the disk is full, or the file cannot be written for another
            reason, with a message that names `path` and says what to do.
    """
    target = check_target(path, make_folders=make_folders)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:16]}.partial")
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise _explained(error, path) from error
    try:
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        # Another file may have failed, which was to be copied here.
        if error.filename not in (None, str(temporary)):
            raise
        raise _explained(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: str | os.PathLike[str], *, make_folders: bool = False) -> Path:
    """Require that a file can be written to a path, before the work that goes into it.

    Args:
        path: The file, which may be there.
        make_folders: Whether missing folders will be made.

    Returns:
        The file that the path leads to along symbolic links.

    Raises:
        IsADirectoryError: If the path is a folder.
        NotADirectoryError: If one of its folders is a file.
        FileNotFoundError: If its folder is missing and will not be made.
        PermissionError: If the folder, or an existing file, must not be written.
        OSError: If it is a device or a pipe, which a file would replace, or a link to itself.
    """
    target = Path(os.path.realpath(path))
    if os.path.islink(target):
        raise OSError(f"{path} is a symbolic link that leads back to itself: remove it.")
    if os.path.isdir(target):
        raise IsADirectoryError(f"{path} is a folder: name a file in it.")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise OSError(
            f"{path} is a device or a pipe, which a file would replace: name a regular file."
        )
    folder = next(parent for parent in target.parents if os.path.lexists(parent))
    if not os.path.isdir(folder):
        raise NotADirectoryError(
            f"{path} cannot be written, since {folder} is a file and no folder: choose another "
            "place."
        )
    if folder != target.parent and not make_folders:
        raise FileNotFoundError(f"There is no folder {target.parent}: make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path} cannot be written, since the folder {folder} may not be written to: choose "
            "another place, or change its permissions."
        )
    if os.path.isfile(target) and not os.access(target, os.W_OK):
        raise PermissionError(
            f"{path} is write-protected: choose another name, or change its permissions."
        )
    return target


def _explained(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """The error of the same kind in a sentence; `str` of it is that sentence alone."""
    if error.errno in _NO_SPACE:
        told = f"There is no space left to write {path}: free some, or choose another place."
    elif error.errno == errno.EFBIG:
        told = (
            f"{path} would be larger than the file system or the limit of this process allows "
            "(`ulimit -f`): raise the limit, or choose another place."
        )
    else:
        told = (
            f"{path} cannot be written ({error.strerror or error}): choose another name or place."
        )
    kind = type(error) if error.errno is None else type(OSError(error.errno, ""))
    explained = kind(told)
    explained.errno = error.errno
    return explained
