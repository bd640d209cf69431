"""Writing files so that they are there in full or not at all."""

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


@contextmanager
def written_atomically(
    path: str | os.PathLike[str], *, make_folders: bool = True
) -> Iterator[Path]:
    """Give a temporary path beside `path`, which takes its place when the block ends well.

    The file and its folder reach the disk before the function returns, so that a power failure
    leaves the old file or the new one. A symbolic link stays: the file that it leads to is
    replaced. A file that is replaced keeps its permissions. Threads and processes may write one
    path at once: the last one to finish wins.

    After an exception what stood at `path` still stands there, and nothing else is left. A process
    that is killed leaves its temporary file, `.<name>.<16 hexadecimal digits>.partial`. The next
    write of the same path removes it: a writer holds a lock on its temporary file (`flock`), which
    ends with the process. On Windows, and where the file system has no locks, it stays.

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
        _remove_abandoned(target)
        temporary, descriptor = _locked_partial(target)
    except OSError as error:
        raise _explained(error, path) from error
    is_open = True
    try:
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        yield temporary
        os.fsync(descriptor)
        if fcntl is None:  # Windows moves no file that is open.
            os.close(descriptor)
            is_open = False
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        # Another file may have failed, which was to be copied here.
        if error.filename not in (None, str(temporary), str(target.parent)):
            raise
        raise _explained(error, path) from error
    finally:
        if is_open:
            os.close(descriptor)
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


def _locked_partial(target: Path) -> tuple[Path, int]:
    """A new file beside the target, open, and locked where that can be."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    while True:
        path = target.with_name(f".{target.name}.{uuid.uuid4().hex[:16]}.partial")
        descriptor = os.open(path, flags, 0o666)
        if fcntl is not None:
            # A file system without locks has none for those who look for abandoned files either.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        # Somebody took it for abandoned before it was locked.
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Remove the target's temporary files whose writers are gone."""
    if fcntl is None or not os.access(target.parent, os.R_OK):
        return
    partial = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.partial")
    with os.scandir(target.parent) as entries:
        found = [entry.path for entry in entries if partial.fullmatch(entry.name)]
    for path in found:
        # It may be another user's, held by its writer, or gone by now: then it is left alone.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt" or not os.access(folder, os.R_OK):
        return  # It cannot be opened.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # Some file systems cannot; the file is in place.
            raise
    finally:
        os.close(descriptor)


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
