"""Files of a new user: folders of images, archives, tables, and modules with networks."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES = ("cat", "dog", "eel")
NETWORKS = """
import torch
from torch import nn

print("a library that talks")


def build(outputs=3, channels=3, width=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, outputs),
    )


def rows(inputs=4, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


class Small(nn.Sequential):
    pass


ready = rows()
no_network = 3


def returns_text():
    return "network"


def breaks():
    raise RuntimeError("no such file\\non two lines.")


def asks(for_something):
    return rows()
"""


def image_folder(root: Path, splits=(("train", 8), ("val", 4), ("test", 3)), size=(20, 16)) -> Path:
    """Write images of three classes; a class is brighter than the class before.

    Args:
        root: The folder to write.
        splits: The name of each split, and its number of images per class.
        size: The width and the height in pixels.
    """
    rng = np.random.default_rng(0)
    for split, number in splits:
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for n in range(number):
                pixels = rng.integers(60 * label, 60 * label + 90, (size[1], size[0], 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{n}.png")
    return root


def loose_images(root: Path, number=5, size=(12, 9)) -> Path:
    """Write grey images without classes."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for n in range(number):
        pixels = rng.integers(255, size=(size[1], size[0]), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{n}.png")
    return root


def arrays(targets="classes", sizes=(("train", 30), ("val", 12), ("test", 9)), classes=3):
    """Return rows of four numbers and targets, by the names `x_train`, `y_train` and so on.

    Args:
        targets: The kind of targets: `classes`, `numbers` or `labels`.
        sizes: The name of each split, and its number of rows.
        classes: The number of classes.
    """
    rng = np.random.default_rng(0)
    content = {}
    for split, number in sizes:
        content[f"x_{split}"] = rng.normal(size=(number, 4))
        content[f"y_{split}"] = {
            "classes": np.arange(number) % classes,
            "numbers": rng.normal(size=number),
            "labels": rng.integers(2, size=(number, 3)),
        }[targets]
    return content


def archive(path: Path, **content) -> Path:
    np.savez(path, **(content or arrays()))
    return path


def networks(folder: Path, monkeypatch) -> Path:
    """Write the module `nets` in the working directory, and forget it after the test."""
    (folder / "nets.py").write_text(NETWORKS)
    monkeypatch.chdir(folder)
    forget(monkeypatch, "nets")
    return folder


def forget(monkeypatch, *modules: str) -> None:
    """Import modules of the working directory again; restore the import path after the test."""
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)


def weights(path: Path, model: torch.nn.Module, prefix="", nest=None) -> Path:
    state = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save({nest: state, "epoch": 3} if nest else state, path)
    return path


def every(batches):
    """Return all inputs and all targets of some batches."""
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)
