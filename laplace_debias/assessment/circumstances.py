"""Under what circumstances a run was made: versions, revision, memory."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_PACKAGES = ("laplace-debias", "torch", "numpy", "torchmetrics", "backpack-for-pytorch", "timm")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision(folder: Path | None = None) -> str | None:
    """The revision of the working directory's repository, `+` if it has changes; None without."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def peak_bytes() -> int | None:
    """The most memory that this process has had, bytes; of a GPU where one was used."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
