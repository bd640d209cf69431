"""The images of the test problems: digits, CIFAR, and folders such as ImageNet."""

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import PIL.Image
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets

from laplace_debias.sources.corruptions import KINDS, Kind, corrupt

CIFAR_MEAN = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}
CIFAR_STD = {10: (0.2470, 0.2435, 0.2616), 100: (0.2673, 0.2564, 0.2762)}


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images that are stored as bytes and returned as floats, (pixel / 255 − mean) / std.

    Attributes:
        pixels: uint8 [N, C, H, W].
        labels: Class indices, int64 [N].
        mean: Mean of each channel, of pixel / 255.
        std: Standard deviation of each channel, of pixel / 255.
        classes: Name of each class.
    """

    pixels: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image [C, H, W] and its label."""
        images, labels = self.batch([index])
        return images[0], labels[0]

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W] and labels [B]."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (self.pixels[index].float() / 255 - mean) / std, self.labels[index]

    def subset(self, indices: Tensor) -> "Images":
        """Return some of the images, in the given order."""
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def corrupted(
        self, severity: int, offset: int = 0, kinds: Mapping[str, Kind] = KINDS
    ) -> "Images":
        """Return corrupted images, each with one of the kinds of corruption."""
        pixels = corrupt(self.pixels, severity, kinds, offset=offset)
        return replace(self, pixels=pixels)


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Images on disk; fetched images have the same form as those of `Images`.

    Attributes:
        files: Torchvision's data set of a folder, with the transform of the published weights.
        indices: The indices of the selected images of the data set, [N].
    """

    files: datasets.ImageFolder
    indices: Tensor

    @property
    def labels(self) -> Tensor:
        """Class indices, [N]."""
        return torch.tensor(self.files.targets)[self.indices]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] and labels [B]."""
        found = [self.files[i] for i in self.indices[torch.as_tensor(indices)].tolist()]
        return torch.stack([x for x, _ in found]), torch.tensor([y for _, y in found])

    def subset(self, indices: Tensor) -> "FolderImages":
        """Return some of the images."""
        return replace(self, indices=self.indices[indices])


def digits(root: Path | None = None) -> tuple[Images, Images]:
    """Load scikit-learn's 8 × 8 digits: 1,297 images for training and tuning, 500 for tests."""
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None]
    classes = tuple("0123456789")
    data = Images(pixels, torch.from_numpy(raw.target).long(), (0.3053,), (0.3760,), classes)
    return data.subset(order[:1297]), data.subset(order[1297:])


def corrupted_digits(root: Path | None = None) -> tuple[Images, Images]:
    """Load the digits, corrupted at severity 5 with different random numbers for each image."""
    train, test = digits()
    return train.corrupted(5), test.corrupted(5, offset=2000)


def cifar(number: int, root: Path | None) -> tuple[Images, Images]:
    """Load CIFAR-10 or CIFAR-100: 50,000 and 10,000 images, 32 × 32.

    Args:
        number: The number of classes.
        root: A tar archive of `train/<class>/<name>.jpg` and `test/…`, or a root folder of
            torchvision, into which the data is downloaded if it is missing.
    """
    if root is None:
        raise ValueError(f"there is no path to CIFAR-{number}; give it as --data")
    if root.is_file():
        parts, classes = _archived(root)
    else:
        kind = datasets.CIFAR10 if number == 10 else datasets.CIFAR100
        sets = [kind(root, train=train, download=True) for train in (True, False)]
        classes = sets[0].classes
        parts = [
            (torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets))
            for data in sets
        ]
    mean, std = CIFAR_MEAN[number], CIFAR_STD[number]
    train, test = (Images(*part, mean, std, tuple(classes)) for part in parts)
    return train, test


def _archived(archive: Path) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
    """Return pixels and labels, in the order of class and name, from a cache; and the classes."""
    cache = Path(os.environ.get("LAPLACE_DEBIAS_CACHE", Path.home() / ".cache/laplace-debias"))
    file = cache / f"{archive.name}-{archive.stat().st_mtime_ns}.safetensors"
    if not file.exists():
        images: dict[tuple[str, ...], np.ndarray] = {}
        with tarfile.open(archive) as members:
            for member in members:
                content = members.extractfile(member)
                if content is not None:  # The member is not a folder.
                    key = PurePosixPath(member.name).parts[-3:]
                    image = PIL.Image.open(io.BytesIO(content.read()))
                    images[key] = np.asarray(image.convert("RGB"))
        classes = sorted({name for _, name, _ in images})
        tensors = {"classes": torch.tensor(list(" ".join(classes).encode()), dtype=torch.uint8)}
        for part in ("train", "test"):
            keys = sorted(key for key in images if key[0] == part)
            pixels = torch.from_numpy(np.stack([images[key] for key in keys]))
            tensors[f"{part}.pixels"] = pixels.permute(0, 3, 1, 2).contiguous()
            tensors[f"{part}.labels"] = torch.tensor([classes.index(key[1]) for key in keys])
        cache.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
    found = load_file(file)
    parts = [(found[f"{part}.pixels"], found[f"{part}.labels"]) for part in ("train", "test")]
    return parts, bytes(found["classes"].tolist()).decode().split()


def digits_parts() -> dict[str, Images]:
    """Return the digits for the commands: `--data examples.paper.data:digits_parts`."""
    pool, test = digits()
    return {
        "train": pool.subset(torch.arange(1000)),
        "validation": pool.subset(torch.arange(1000, 1297)),
        "test": test,
    }


def cifar10_parts() -> dict[str, Images]:
    """Return CIFAR-10 from `$LAPLACE_DEBIAS_DATA`, split as in `$LAPLACE_DEBIAS_CHECKPOINT`."""
    pool, test = cifar(10, Path(os.environ["LAPLACE_DEBIAS_DATA"]))
    split = load_file(os.environ["LAPLACE_DEBIAS_CHECKPOINT"])
    train, validation = pool.subset(split["split.train"]), pool.subset(split["split.val"])
    return {"train": train, "validation": validation, "test": test}
