"""Data by name: what is there before the network is known."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import nn

from laplace_debias.sources.arrays import archive_parts
from laplace_debias.sources.image_files import ImageFiles, images_below, view_of
from laplace_debias.sources.imports import called, imported, is_import_path
from laplace_debias.sources.parts import Parts, parted
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.sources.tables import table_files, table_parts

_KINDS = (
    "a folder of images, a .npz file, a .csv or .parquet table, or an import path my_pkg.data:make"
)
_OF_TABLES = ("target", "features", "standardise")


def find_data(settings: SourceSettings) -> tuple[int | None, Callable[[nn.Module], Parts]]:
    """The data of the settings; the images of a folder are not read yet.

    Returns how many outputs a network of it has, None if that is not known, and a function that
    makes the parts for a network.
    """
    if settings.data is None:
        raise ValueError(f"there is no data; give --data: {_KINDS}")
    text = str(settings.data)
    path = Path(text)
    if is_import_path(text):
        _check_options(settings, "data of your own", *_OF_TABLES, "image_size")
        return _read(own_parts(text, settings))
    if not path.exists():
        raise ValueError(f"nothing is at {path}, which --data names: check the path")
    files = table_files(path)
    if path.suffix == ".npz":
        _check_options(settings, "a .npz file", *_OF_TABLES, "image_size")
        return _read(archive_parts(path, settings))
    if files is not None:
        _check_options(settings, "a table", "image_size", "mean", "std")
        return _read(table_parts(files, settings))
    if path.is_dir():
        _check_options(settings, "a folder of images", *_OF_TABLES)
        classes, found = find_image_folder(path)
        if settings.task not in (None, "classification", "binary"):
            raise ValueError(f"task is {settings.task}; class folders make a classification")
        if settings.task == "binary" and len(classes) != 2:
            raise ValueError(f"task is binary; {path} has {len(classes)} classes, not two")
        return len(classes), partial(_opened, path, classes, found, settings)
    raise ValueError(f"--data {path} has an unknown format; expected {_KINDS}")


def _read(parts: Parts) -> tuple[int | None, Callable[[nn.Module], Parts]]:
    return parts.num_outputs, lambda _: parts


def _check_options(settings: SourceSettings, kind: str, *names: str) -> None:
    """Refuse options that would have no effect on a kind of data."""
    used = [name for name in names if getattr(settings, name) != getattr(SourceSettings, name)]
    if used:
        raise ValueError(f"{' and '.join(used)} given with {kind}: leave it out")


_KEYS = ("train", "validation", "test", "ood", "classes")


def own_parts(path: str, settings: SourceSettings) -> Parts:
    """Data of the callable at an import path, a dict of its parts.

    `train` and `test` are needed; `validation`, `ood` (by name) and `classes` are not. Each part
    is a data set, a `DataLoader` or a list of batches `(x, y)`. A data set, and a plain
    `DataLoader` of one, is read in an order that is the same each time.
    """
    found = called(path, imported(path, "data"), {}, "data")
    if not isinstance(found, Mapping) or not {"train", "test"} <= set(found) <= set(_KEYS):
        keys = f" of {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
        raise ValueError(
            f"data {path} returned a {type(found).__name__}{keys}; expected a dict of "
            f"{', '.join(_KEYS)} (train and test are needed)"
        )
    dataset = getattr(found["train"], "dataset", found["train"])
    classes = found.get("classes", getattr(dataset, "classes", None))
    return Parts(
        train=found["train"],
        validation=found.get("validation"),
        test=found["test"],
        ood=found.get("ood") or {},
        num_outputs=None if classes is None else len(classes),
        classes=None if classes is None else tuple(map(str, classes)),
        # Inputs are as they were normalised; by what, only the user knows.
        pixels=Pixels.from_settings(settings),
    )


_PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def _opened(
    root: Path,
    classes: tuple[str, ...],
    parts: dict[str, list[tuple[Path, int]]],
    settings: SourceSettings,
    model: nn.Module,
) -> Parts:
    """The parts of an image folder as the network takes them."""
    of_classes = {label: file for files in parts.values() for file, label in files}
    view, notes = view_of(settings, model, of_classes.values())
    was_whole = "all" in parts
    if was_whole:
        files = parts["all"]
        indices, note = parted(len(files), settings, str(root), "images")
        parts = {name: [files[i] for i in some.tolist()] for name, some in indices.items()}
        notes += (note,)
    found = {name: ImageFiles(tuple(files), view) for name, files in parts.items()}
    return Parts(
        train=found["train"],
        validation=found.get("val"),
        test=found["test"],
        task="classification",
        num_outputs=len(classes),
        classes=classes,
        input_name="image",
        pixels=view.pixels,
        view=view,
        was_whole=was_whole,
        notes=notes,
    )


def find_image_folder(root: Path) -> tuple[tuple[str, ...], dict[str, list[tuple[Path, int]]]]:
    """Look at a folder with `train/CLASS`, `test/CLASS`, perhaps `val/CLASS`; or with `CLASS`.

    Returns the classes, and files and labels of `train`, `val` and `test`; of `all` alone where
    there are no parts. No image is decoded.
    """
    there = {
        part: next((root / name for name in names if (root / name).is_dir()), None)
        for part, names in _PARTS.items()
    }
    found = {part: folder for part, folder in there.items() if folder is not None}
    if not found:
        classes, files = _classes_of(root)
        return classes, {"all": files}
    for part in ("train", "test"):
        if part not in found:
            raise ValueError(
                f"{root} has {', '.join(f'{folder.name}/' for folder in found.values())}, but no "
                f"{part}/; expected train/CLASS/NAME.jpg, test/… and perhaps val/…"
            )
    classes, _ = _classes_of(found["train"])
    parts = {}
    for part, folder in found.items():
        names, files = _classes_of(folder)
        missing, unknown = sorted(set(classes) - set(names)), sorted(set(names) - set(classes))
        if missing or unknown:
            wrong = " and ".join(
                f"{what} {', '.join(some[:4])}{', …' if len(some) > 4 else ''}"
                for what, some in (("no class folder", missing), ("unknown classes", unknown))
                if some
            )
            raise ValueError(
                f"{folder} has {wrong}; expected the class folders of {found['train']}: complete "
                "or rename them"
            )
        parts[part] = files
    return classes, parts


def _classes_of(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Class folders, and all images with their labels, by class and then by path."""
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files: list[tuple[Path, int]] = []
    for label, path in enumerate(folders):
        images = images_below(path)
        if not images:
            raise ValueError(
                f"{path} has no images (.jpg, .png, …); expected at least one of each class: "
                "complete or remove the folder"
            )
        files += [(file, label) for file in images]
    if not files:
        raise ValueError(
            f"{folder} has no class folders; expected {folder}/CLASS/NAME.jpg: check the path"
        )
    return tuple(path.name for path in folders), files
