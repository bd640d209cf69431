"""The measurement of one architecture in a separate process."""

from pathlib import Path

from benchmarks.architectures import page
from benchmarks.architectures.measurement import Row, measure_architecture
from benchmarks.architectures.zoo import architectures
from benchmarks.results import describe_machine, installed_versions
from benchmarks.settings import Settings

SETTINGS = Settings(threads=1)
_PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft")
# The libraries are imported here, before any process is forked.
_ARCHITECTURES = architectures()


def measure_in_process(name: str, path: Path) -> None:
    """Measure an architecture and write its row.

    Args:
        name: The name of the architecture.
        path: The file to write.
    """
    SETTINGS.start()
    write(path, measure_architecture(_ARCHITECTURES[name], SETTINGS))


def write(path: Path, row: Row) -> None:
    """Write a row with the machine and versions of this process."""
    page.write(path, row, describe_machine(SETTINGS), installed_versions(_PACKAGES))
