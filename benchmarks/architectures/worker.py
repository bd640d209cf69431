"""One architecture in a process of its own."""

from pathlib import Path

from benchmarks.architectures import page
from benchmarks.architectures.measurement import Row, measure_architecture
from benchmarks.architectures.zoo import architectures
from benchmarks.results import machine_of, versions_of
from benchmarks.settings import Settings

SETTINGS = Settings(threads=1)
_PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft")
# Imported before any process is forked, with the libraries.
_KNOWN = architectures()


def measure_in_process(name: str, path: Path) -> None:
    """Measure an architecture and write its row.

    Args:
        name: The architecture's.
        path: The file to write.
    """
    SETTINGS.start()
    write(path, measure_architecture(_KNOWN[name], SETTINGS))


def write(path: Path, row: Row) -> None:
    """Write a row with this machine and these versions."""
    page.write(path, row, machine_of(SETTINGS), versions_of(_PACKAGES))
