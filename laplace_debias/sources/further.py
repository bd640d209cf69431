"""More inputs of the kind that the network takes: out-of-distribution sets, data to predict."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laplace_debias.sources.arrays import as_inputs, read_archive
from laplace_debias.sources.image_files import ImageFiles, View, header, images_below, unchanged
from laplace_debias.sources.imports import called, imported, is_import_path
from laplace_debias.sources.parts import Examples, Part, Parts
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.tables import SUFFIXES, read_table


@dataclass(frozen=True, eq=False)
class Further:
    """More inputs, whose labels mean nothing; names are paths in the folder, or None."""

    part: Part
    names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def read_further(
    parts: Parts, shape: tuple[int, ...] | None, source: str | Path, what: str
) -> Further:
    """Inputs of a folder of images, a `.npz` file, a table or an import path.

    They are of a `shape`, for a network that was trained on `parts`.
    """
    if is_import_path(str(source)):
        return Further(called(str(source), imported(str(source), what), {}, what))
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{what}: nothing is at {path}: check the path")
    if path.suffix == ".npz":
        return _of_archive(parts, shape, path, what)
    if path.suffix in SUFFIXES:
        if parts.columns is None:
            raise ValueError(f"{what}: {path} is a table, but the network was not trained on one")
        return Further(_unlabelled(parts.columns.inputs(read_table(path), str(path))))
    if path.is_dir():
        return _of_folder(parts, shape, path, what)
    raise ValueError(
        f"{what}: {path} has an unknown format; expected a folder of images, a .npz file, a "
        ".csv or .parquet table, or an import path my_pkg.data:make"
    )


def _of_folder(parts: Parts, shape: tuple[int, ...] | None, path: Path, what: str) -> Further:
    files = images_below(path)
    if not files:
        raise ValueError(f"{what}: {path} has no images (.jpg, .png, …): check the path")
    if parts.pixels is None or shape is None or len(shape) != 3:
        told = "that is not known" if shape is None else list(shape)
        raise ValueError(
            f"{what}: {path} is a folder of images, but the network takes inputs of shape "
            f"{told}; for images of loaders of your own give --mean and --std"
        )
    channels, height, width = shape
    view = parts.view
    if view is None or not view.any_size:
        view = View(unchanged, parts.pixels, channels == 1).of_size(height, width)
    (wide, high), _ = header(files[0])
    notes: tuple[str, ...] = ()
    if (high, wide) != (height, width):
        notes = (f"{what}: images of {high} × {wide} pixels are resized to {height} × {width}.",)
    names = tuple(str(file.relative_to(path)) for file in files)
    return Further(ImageFiles(tuple((file, 0) for file in files), view), names, notes)


def _of_archive(parts: Parts, shape: tuple[int, ...] | None, path: Path, what: str) -> Further:
    arrays = read_archive(path)
    name = next((name for name in ("x", "x_test") if name in arrays), None)
    if name is None:
        raise ValueError(
            f"{what}: {path} has {', '.join(arrays) or 'no array'}; expected an array x or x_test"
        )
    x, pixels = as_inputs(arrays[name], str(path)), None
    if x.dtype == torch.uint8 and x.ndim == 4:
        if parts.pixels is None:
            raise ValueError(
                f"{what}: {path} holds images of bytes, but how the network's are normalised "
                "is not known; give --mean and --std"
            )
        pixels = parts.pixels
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"{what}: {path} has inputs of shape {list(x.shape[1:])}, the network takes "
            f"{list(shape)}; give inputs of this shape"
        )
    return Further(_unlabelled(x, pixels))


def _unlabelled(x: Tensor, pixels: Pixels | None = None) -> Examples:
    return Examples(x, torch.zeros(len(x), dtype=torch.int64), pixels)
