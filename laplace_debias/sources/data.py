"""Data by name: what is there before the network is known."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laplace_debias.sources.arrays import archive_parts
from laplace_debias.sources.parts import Parts
from laplace_debias.sources.settings import SourceSettings


@dataclass(frozen=True, eq=False)
class Found:
    """Data that is there.

    Attributes:
        num_outputs: How many outputs a network of it has; None if it is not known.
        open: Makes its parts.
    """

    num_outputs: int | None
    open: Callable[[], Parts]


def find_data(settings: SourceSettings) -> Found:
    """The data of the settings, looked at but not read where that takes long.

    Raises:
        ValueError: If there is none, or it is of no known kind.
    """
    if settings.data is None:
        raise ValueError(
            "there is no data; give --data: a folder of images, a .npz file, a .csv or .parquet "
            "table, or an import path my_pkg.data:make"
        )
    path = Path(settings.data)
    if not path.exists():
        raise ValueError(f"nothing is at {path}, which --data names: check the path")
    if path.suffix == ".npz":
        parts = archive_parts(path, settings)
        return Found(parts.num_outputs, lambda: parts)
    raise ValueError(
        f"--data {path} is of no known kind; expected a folder of images, a .npz file, a .csv or "
        ".parquet table, or an import path my_pkg.data:make"
    )
