"""The layout of image folders: parts, classes, files."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from laplace_debias.sources.image_files import ImageFiles, View, images_below, view_of
from laplace_debias.sources.parts import Parts, split_by_seed
from laplace_debias.sources.settings import SourceSettings

_PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True)
class ImageFolder:
    """An image folder, of which no image is decoded yet.

    Attributes:
        root: Its path.
        classes: Names of the class folders, in the order of the labels.
        parts: For each part (`train`, `val`, `test`) its files with their labels; `all` alone where
            there are no parts.
    """

    root: Path
    classes: tuple[str, ...]
    parts: dict[str, list[tuple[Path, int]]]

    def open(self, settings: SourceSettings, model: nn.Module) -> tuple[Parts, View]:
        """Its parts as the network takes them."""
        view, notes = view_of(settings, model)
        parts = self.parts
        if "all" in parts:
            files = parts["all"]
            indices = split_by_seed(len(files), settings.seed, settings.held_out)
            parts = {
                name: [files[i] for i in chosen.tolist()]
                for name, chosen in zip(("train", "val", "test"), indices, strict=True)
            }
            notes += (
                f"{self.root} has no train/ and test/: {len(parts['val'])} validation and "
                f"{len(parts['test'])} test images are chosen by the seed {settings.seed}. The "
                "network must not have been trained on them.",
            )
        found = {
            name: ImageFiles(tuple(f for f, _ in files), tuple(label for _, label in files), view)
            for name, files in parts.items()
        }
        return Parts(
            train=found["train"],
            validation=found.get("val"),
            test=found["test"],
            task="classification",
            num_outputs=len(self.classes),
            classes=self.classes,
            input_name="image",
            pixels=view.pixels,
            was_whole="all" in self.parts,
            notes=notes,
        ), view


def find_image_folder(root: Path) -> ImageFolder:
    """Look at an image folder.

    Args:
        root: A folder with `train/CLASS/…`, `test/CLASS/…` and perhaps `val/CLASS/…`, or with
            class folders alone.

    Raises:
        ValueError: If a part is missing, it lacks a class or has one too many, a class is empty, or
            there are no images.
    """
    there = {
        part: next((root / name for name in names if (root / name).is_dir()), None)
        for part, names in _PARTS.items()
    }
    found = {part: folder for part, folder in there.items() if folder is not None}
    if not found:
        classes, files = _classes_of(root)
        return ImageFolder(root, classes, {"all": files})
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
                "or "
                "rename them"
            )
        parts[part] = files
    return ImageFolder(root, classes, parts)


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
