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
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image [C, H, W] and its label."""
        images, labels = self.batch([index])
        return images[0], labels[0]

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images [B, C, H, W] and labels [B]."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        return (self.pixels[index].float() / 255 - mean) / std, self.labels[index]

    def subset(self, indices: Tensor) -> "Images":
        """Return some of the images, in the given order."""
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def corrupted(
        self, severity: int, offset: int = 0, kinds: Mapping[str, Kind] = KINDS
    ) -> "Images":
        """Return corrupted images; `corrupt` describes the arguments."""
        return replace(self, pixels=corrupt(self.pixels, severity, kinds, offset=offset))


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
        """Return the number of images."""
        return len(self.indices)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return images [B, 3, H, W] and labels [B]."""
        file_indices = self.indices[torch.as_tensor(indices)].tolist()
        examples = [self.files[i] for i in file_indices]
        return torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples])

    def subset(self, indices: Tensor) -> "FolderImages":
        """Return some of the images, in the given order."""
        return replace(self, indices=self.indices[indices])


def digits(root: Path | None = None) -> tuple[Images, Images]:
    """Load scikit-learn's 8 × 8 digits: 1,297 images for training and tuning, 500 for tests.

    Args:
        root: Not used, because the digits are a part of scikit-learn.
    """
    raw = load_digits()
    images = Images(
        pixels=torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None],
        labels=torch.from_numpy(raw.target).long(),
        mean=(0.3053,),
        std=(0.3760,),
        classes=tuple("0123456789"),
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[:1297]), images.subset(order[1297:])


def corrupted_digits(root: Path | None = None) -> tuple[Images, Images]:
    """Load the digits, corrupted at severity 5 with different random numbers for each image.

    Args:
        root: Not used; see `digits`.
    """
    train, test = digits()
    return train.corrupted(5), test.corrupted(5, offset=2000)


def cifar(num_classes: int, root: Path | None) -> tuple[Images, Images]:
    """Load CIFAR-10 or CIFAR-100: 50,000 and 10,000 images, 32 × 32.

    Args:
        num_classes: 10 or 100.
        root: A tar archive of `train/<class>/<name>.jpg` and `test/…`, or a root folder of
            torchvision, into which the data is downloaded if it is missing.

    Returns:
        The images for training and tuning, and the test images.
    """
    if root is None:
        raise ValueError(f"there is no path to CIFAR-{num_classes}; give it as --data")

    def images(pixels: Tensor, labels: Tensor, classes: Sequence[str]) -> Images:
        mean, std = CIFAR_MEAN[num_classes], CIFAR_STD[num_classes]
        return Images(pixels, labels, mean, std, tuple(classes))

    if root.is_file():
        tensors = _cached_tensors(root)
        classes = bytes(tensors["classes"].tolist()).decode().split()
        train = images(tensors["train.pixels"], tensors["train.labels"], classes)
        test = images(tensors["test.pixels"], tensors["test.labels"], classes)
        return train, test

    def downloaded(is_train: bool) -> Images:
        dataset_class = datasets.CIFAR10 if num_classes == 10 else datasets.CIFAR100
        dataset = dataset_class(root, train=is_train, download=True)
        pixels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2)
        return images(pixels, torch.tensor(dataset.targets), dataset.classes)

    return downloaded(is_train=True), downloaded(is_train=False)


def _cached_tensors(archive: Path) -> dict[str, Tensor]:
    """Return the tensors of an archive from a cache, which is made by the first call."""
    cache = Path(os.environ.get("LAPLACE_DEBIAS_CACHE", Path.home() / ".cache/laplace-debias"))
    file = cache / f"{archive.name}-{archive.stat().st_mtime_ns}.safetensors"
    if not file.exists():
        tensors = _read_archive(archive)
        cache.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
    return load_file(file)


def _read_archive(archive: Path) -> dict[str, Tensor]:
    """Read a tar archive of `train/<class>/<name>.jpg` and `test/<class>/<name>.jpg`.

    Returns:
        `train.pixels`, uint8 [N, 3, H, W], and `train.labels`, [N], in the order of class and name;
        the same for `test`; and `classes`, the bytes of the classes' names with spaces between.
    """
    images: dict[tuple[str, ...], np.ndarray] = {}
    with tarfile.open(archive) as members:
        for member in members:
            content = members.extractfile(member)
            if content is not None:  # The member is not a folder.
                split_class_name = PurePosixPath(member.name).parts[-3:]
                image = PIL.Image.open(io.BytesIO(content.read()))
                images[split_class_name] = np.asarray(image.convert("RGB"))
    classes = sorted({class_name for _, class_name, _ in images})
    class_bytes = list(" ".join(classes).encode())
    tensors = {"classes": torch.tensor(class_bytes, dtype=torch.uint8)}
    for split in ("train", "test"):
        keys = sorted(key for key in images if key[0] == split)
        pixels = torch.from_numpy(np.stack([images[key] for key in keys]))
        labels = [classes.index(class_name) for _, class_name, _ in keys]
        tensors[f"{split}.pixels"] = pixels.permute(0, 3, 1, 2).contiguous()
        tensors[f"{split}.labels"] = torch.tensor(labels)
    return tensors


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
    return {
        "train": pool.subset(split["split.train"]),
        "validation": pool.subset(split["split.val"]),
        "test": test,
    }
