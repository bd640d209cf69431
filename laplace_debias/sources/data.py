"""Data by name: what is there before the network is known."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from laplace_debias.sources.arrays import archive_parts
from laplace_debias.sources.image_files import View
from laplace_debias.sources.image_folders import find_image_folder
from laplace_debias.sources.imports import is_import_path
from laplace_debias.sources.own_data import own_parts
from laplace_debias.sources.parts import Parts
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.sources.tables import Columns, table_files, table_parts

_KINDS = (
    "a folder of images, a .npz file, a .csv or .parquet table, or an import path my_pkg.data:make"
)


@dataclass(frozen=True, eq=False)
class Found:
    """Data that is there.

    Attributes:
        num_outputs: How many outputs a network of it has; None if it is not known.
        open: Makes its parts for a network, and how pictures or rows are read.
    """

    num_outputs: int | None
    open: Callable[[nn.Module], tuple[Parts, View | None, Columns | None]]


def find_data(settings: SourceSettings) -> Found:
    """The data of the settings; the images of a folder are not read yet.

    Raises:
        ValueError: If there is none, it is of no known kind, it is damaged, or settings of another
            kind of data are given.
    """
    if settings.data is None:
        raise ValueError(f"there is no data; give --data: {_KINDS}")
    text = str(settings.data)
    path = Path(text)
    if is_import_path(text):
        _check_options(settings, "data of your own", "target", "features", "image_size")
        if not settings.standardise:
            raise ValueError("standardise is for tables, not for data of your own: leave it out")
        return _read(own_parts(text, settings))
    if not path.exists():
        raise ValueError(f"nothing is at {path}, which --data names: check the path")
    files = table_files(path)
    if not settings.standardise and files is None:
        raise ValueError(f"standardise is for tables, and {path} is none: leave it out")
    if path.suffix == ".npz":
        _check_options(settings, "a .npz file", "target", "features", "image_size")
        return _read(archive_parts(path, settings))
    if files is not None:
        _check_options(settings, "a table", "image_size", "mean", "std")
        parts, columns = table_parts(files, settings)
        return _read(parts, columns)
    if path.is_dir():
        _check_options(settings, "a folder of images", "target", "features")
        folder = find_image_folder(path)
        if settings.task not in (None, "classification", "binary"):
            raise ValueError(f"task is {settings.task}; class folders make a classification")
        if settings.task == "binary" and len(folder.classes) != 2:
            raise ValueError(f"task is binary; {path} has {len(folder.classes)} classes, not two")

        def opened(model: nn.Module) -> tuple[Parts, View | None, Columns | None]:
            return *folder.open(settings, model), None

        return Found(len(folder.classes), opened)
    raise ValueError(f"--data {path} is of no known kind; expected {_KINDS}")


def _read(parts: Parts, columns: Columns | None = None) -> Found:
    return Found(parts.num_outputs, lambda model: (parts, None, columns))


def _check_options(settings: SourceSettings, kind: str, *names: str) -> None:
    """Refuse options that would have no effect on a kind of data."""
    used = [name for name in names if getattr(settings, name) is not None]
    if used:
        raise ValueError(f"{' and '.join(used)} given with {kind}: leave it out")
