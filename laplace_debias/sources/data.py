"""Find data by name or path, before the network is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from laplace_debias.curvature.losses.likelihoods import Categorical, Likelihood
from laplace_debias.sources.arrays import archive_splits
from laplace_debias.sources.image_files import ImageFiles, images_below, view_of
from laplace_debias.sources.imports import call_function, import_object, is_import_path
from laplace_debias.sources.likelihoods import task_name
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.sources.splits import SPLIT_NAMES, Splits, split_indices
from laplace_debias.sources.table_files import table_files, table_splits
from laplace_debias.system.shown import first_names

_KINDS = (
    "a folder of images, a .npz file, a .csv or .parquet table, or an import path my_pkg.data:make"
)
_TABLE_OPTIONS = ("target", "features", "standardise")


@dataclass(frozen=True)
class FoundData:
    """Data that was found, but whose images are not read until the network has been built.

    Attributes:
        num_outputs: The number of outputs that a network for this data has; None if it is unknown.
        splits_for: A function that returns the splits in the form that a given network needs.
    """

    num_outputs: int | None
    splits_for: Callable[[nn.Module], Splits]

    @classmethod
    def from_splits(cls, splits: Splits) -> "FoundData":
        """Wrap splits that are the same for every network."""
        return cls(splits.num_outputs, lambda _: splits)


def find_data(settings: SourceSettings, chosen: Likelihood | None) -> FoundData:
    """Find the data that the settings specify, without reading the images of a folder.

    If no likelihood was chosen, it is inferred from the data.
    """
    if settings.data is None:
        raise ValueError(f"No data was specified. Pass --data with {_KINDS}.")
    text = str(settings.data)
    path = Path(text)
    if is_import_path(text):
        _check_options(settings, "your own data", *_TABLE_OPTIONS, "image_size")
        return FoundData.from_splits(own_splits(text, settings))
    if not path.exists():
        raise ValueError(f"The path {path} of --data does not exist. Check the path.")
    files = table_files(path)
    if path.suffix == ".npz":
        _check_options(settings, "a .npz file", *_TABLE_OPTIONS, "image_size")
        return FoundData.from_splits(archive_splits(path, settings, chosen))
    if files is not None:
        _check_options(settings, "a table", "image_size", "mean", "std")
        return FoundData.from_splits(table_splits(files, settings, chosen))
    if path.is_dir():
        _check_options(settings, "a folder of images", *_TABLE_OPTIONS)
        classes, image_files = find_image_folder(path)
        likelihood = chosen or Categorical()
        if likelihood.targets != "class":
            raise ValueError(
                f"`task` is {task_name(likelihood)}, but a folder of images with one subfolder per "
                "class is classification data. Remove `task`."
            )
        splits_for = partial(_open_image_folder, path, classes, image_files, settings, likelihood)
        return FoundData(likelihood.num_outputs(len(classes)), splits_for)
    raise ValueError(f"The data {path} has an unknown format. Pass {_KINDS}.")


def _check_options(settings: SourceSettings, kind: str, *names: str) -> None:
    """Raise an error for options that would have no effect on this kind of data."""
    used = [name for name in names if getattr(settings, name) != getattr(SourceSettings, name)]
    if used:
        raise ValueError(f"{' and '.join(used)} cannot be used with {kind}. Remove this option.")


_KEYS = ("train", "validation", "test", "ood", "classes")


def own_splits(path: str, settings: SourceSettings) -> Splits:
    """Call the user's function at an import path, and return its data as splits.

    The function must return `train` and `test`; `validation`, `ood` (by name) and `classes` are
    optional. Each part is a data set, a `DataLoader` or a list of batches `(x, y)`; the batches of
    `ood` need no targets. A data set, or a plain `DataLoader` for a data set, is read in the same
    order each time.
    """
    content = call_function(path, import_object(path, "data"), {}, "data")
    if not isinstance(content, Mapping) or not {"train", "test"} <= set(content) <= set(_KEYS):
        keys = ""
        if isinstance(content, Mapping):
            keys = f" of {', '.join(map(str, content))}"
        raise ValueError(
            f"The function {path} of --data returned a {type(content).__name__}{keys}. Return a "
            f"dict with the keys {', '.join(_KEYS)} (only train and test are required)."
        )
    dataset = getattr(content["train"], "dataset", content["train"])
    classes = content.get("classes", getattr(dataset, "classes", None))
    if classes is not None:
        classes = tuple(map(str, classes))
    return Splits(
        train=content["train"],
        validation=content.get("validation"),
        test=content["test"],
        ood=content.get("ood") or {},
        num_targets=None if classes is None else len(classes),
        classes=classes,
        # The inputs are already normalised, so only the settings can specify mean and std.
        pixels=Pixels.from_settings(settings),
    )


def _open_image_folder(
    root: Path,
    classes: tuple[str, ...],
    files: dict[str, list[tuple[Path, int]]],
    settings: SourceSettings,
    likelihood: Likelihood,
    model: nn.Module,
) -> Splits:
    """Return the splits of an image folder in the form that the network needs."""
    file_by_class = {label: file for split in files.values() for file, label in split}
    view, notes = view_of(settings, model, file_by_class.values())
    was_whole = "all" in files
    if was_whole:
        all_files = files["all"]
        indices, note = split_indices(len(all_files), settings, str(root), "image")
        files = {name: [all_files[i] for i in split.tolist()] for name, split in indices.items()}
        notes += (note,)
    images = {name: ImageFiles(tuple(split), view) for name, split in files.items()}
    return Splits(
        train=images["train"],
        validation=images.get("val"),
        test=images["test"],
        likelihood=likelihood,
        num_targets=len(classes),
        classes=classes,
        input_name="image",
        pixels=view.pixels,
        view=view,
        was_whole=was_whole,
        notes=notes,
    )


def find_image_folder(root: Path) -> tuple[tuple[str, ...], dict[str, list[tuple[Path, int]]]]:
    """List the images of a folder by split and class.

    Returns the names of the classes, and the files and labels of `train`, `val` and `test`, or of
    `all` if there are no splits. No image is decoded.
    """
    folders: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is not None:
            folders[split] = folder
    if not folders:
        classes, images = _find_classes(root)
        return classes, {"all": images}
    for split in ("train", "test"):
        if split not in folders:
            raise ValueError(
                f"{root} has {', '.join(f'{folder.name}/' for folder in folders.values())}, "
                f"but no {split}/. Use the folders train/CLASS/NAME.jpg, test/CLASS/NAME.jpg, "
                "and optionally val/CLASS/NAME.jpg."
            )
    classes, _ = _find_classes(folders["train"])
    files = {}
    for split, folder in folders.items():
        names, files[split] = _find_classes(folder)
        missing = sorted(set(classes) - set(names))
        unknown = sorted(set(names) - set(classes))
        problems = []
        if missing:
            problems.append(f"no class folder {first_names(missing, 4)}")
        if unknown:
            problems.append(f"unknown classes {first_names(unknown, 4)}")
        if problems:
            advice = ""
            if missing:
                advice = (
                    " If there are no images of a class, pass loaders from a function of your own "
                    "as --data my_pkg.data:make."
                )
            raise ValueError(
                f"{folder} has {' and '.join(problems)}. Use the same class folders as in "
                f"{folders['train']}.{advice}"
            )
    return classes, files


def _find_classes(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Return the names of the class folders, and all images with their labels, sorted by path."""
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files: list[tuple[Path, int]] = []
    for label, path in enumerate(folders):
        images = images_below(path)
        if not images:
            raise ValueError(
                f"{path} has no images (.jpg, .png, …). Add at least one image, or remove the "
                "folder."
            )
        files += [(file, label) for file in images]
    if not files:
        raise ValueError(
            f"{folder} has no class folders. Check the path, or store the images as "
            f"{folder}/CLASS/NAME.jpg."
        )
    return tuple(path.name for path in folders), files
