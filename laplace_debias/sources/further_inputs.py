"""Additional inputs for the network: out-of-distribution sets, or data to predict."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laplace_debias.sources.arrays import as_inputs, read_archive
from laplace_debias.sources.image_files import ImageFiles, View, header, images_below, unchanged
from laplace_debias.sources.imports import call_function, import_object, is_import_path
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.splits import Examples, ExampleSource, Splits
from laplace_debias.sources.table_files import SUFFIXES, read_table


@dataclass(frozen=True, eq=False)
class FurtherInputs:
    """Additional inputs without labels, named by their paths if they are images."""

    examples: ExampleSource
    names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def read_further_inputs(
    splits: Splits, shape: tuple[int, ...] | None, source: str | Path, option: str
) -> FurtherInputs:
    """Read inputs from a folder of images, a `.npz` file, a table or an import path.

    They are prepared like `splits`, the data of the network, and must have the shape `shape`.
    """
    if is_import_path(str(source)):
        examples = call_function(str(source), import_object(str(source), option), {}, option)
        if isinstance(examples, Mapping):
            raise ValueError(
                f"{option} {source}: got a {type(examples).__name__} with the entries "
                f"{reprlib.repr(list(examples))}, not one set of inputs. Pass the path of a "
                "callable that returns a DataLoader or a data set of these inputs."
            )
        return FurtherInputs(examples)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{option}: the path {path} does not exist. Check the path.")
    if path.suffix == ".npz":
        return _from_archive(splits, shape, path, option)
    if path.suffix in SUFFIXES:
        if splits.columns is None:
            raise ValueError(
                f"{option}: {path} is a table, but the network was not trained on a table. Pass "
                "inputs in the form of the training inputs."
            )
        return FurtherInputs(
            _unlabelled_examples(splits.columns.inputs(read_table(path), str(path)))
        )
    if path.is_dir():
        return _from_folder(splits, shape, path, option)
    raise ValueError(
        f"{option}: {path} has an unknown format. Pass a folder of images, a .npz file, a .csv "
        "or .parquet table, or an import path my_pkg.data:make."
    )


def _from_folder(
    splits: Splits, shape: tuple[int, ...] | None, path: Path, option: str
) -> FurtherInputs:
    """Read all images below a folder, and resize them for the network if necessary."""
    files = images_below(path)
    if not files:
        raise ValueError(f"{option}: {path} has no images (.jpg, .png, …). Check the path.")
    if splits.pixels is None or shape is None or len(shape) != 3:
        known_shape = "that is unknown" if shape is None else list(shape)
        raise ValueError(
            f"{option}: {path} is a folder of images, but the network takes inputs of "
            f"shape {known_shape}. If the inputs are images that your own loaders "
            "yield, pass --mean and --std."
        )
    channels, height, width = shape
    view = splits.view
    if view is None or not view.any_size:
        view = View(unchanged, splits.pixels, channels == 1).resized_to(height, width)
    (wide, high), _ = header(files[0])
    notes: tuple[str, ...] = ()
    if (high, wide) != (height, width):
        notes = (f"{option}: images of {high} × {wide} pixels are resized to {height} × {width}.",)
    names = tuple(str(file.relative_to(path)) for file in files)
    return FurtherInputs(ImageFiles(tuple((file, 0) for file in files), view), names, notes)


def _from_archive(
    splits: Splits, shape: tuple[int, ...] | None, path: Path, option: str
) -> FurtherInputs:
    """Read the array `x` or `x_test` of a `.npz` file, and prepare it like the training data."""
    arrays = read_archive(path)
    name = next((name for name in ("x", "x_test") if name in arrays), None)
    if name is None:
        raise ValueError(
            f"{option}: {path} must have an array x or x_test, but has "
            f"{', '.join(arrays) or 'no array'}. Add one of them."
        )
    x = as_inputs(arrays[name], str(path))
    pixels = None
    if x.dtype == torch.uint8 and x.ndim == 4:
        if splits.pixels is None:
            raise ValueError(
                f"{option}: {path} contains 8-bit images, but the normalisation that the network "
                "expects is unknown. Pass --mean and --std."
            )
        pixels = splits.pixels
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"{option}: {path} has inputs of shape {list(x.shape[1:])}, but the network takes "
            f"{list(shape)}. Pass inputs of this shape."
        )
    notes: tuple[str, ...] = ()
    if splits.columns is not None and x.ndim == 2:
        x = splits.columns.standardised(x.double().numpy())
        notes = (
            f"{option}: the columns of {path} are assumed to be those of the training table, in "
            "the same units.",
        )
    return FurtherInputs(_unlabelled_examples(x, pixels), notes=notes)


def _unlabelled_examples(x: Tensor, pixels: Pixels | None = None) -> Examples:
    """Combine unlabelled inputs with the label 0, which is not used."""
    return Examples(x, torch.zeros(len(x), dtype=torch.int64), pixels)
