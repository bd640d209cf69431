"""Image data sets of the test problems: pixels in memory, normalised when asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from laplace_debias.problems.image_folder import find_archive, is_image_folder, read_cached

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images held as bytes and returned as normalised floats, (pixel / 255 − mean) / std.

    It works with a plain `DataLoader`, which fetches a batch in one go. With several workers each
    has a copy of `generator`, so they flip alike; leave `num_workers` at 0, since nothing is read.

    Attributes:
        images: Pixels, uint8 [N, C, H, W].
        labels: Class indices, int64 [N].
        mean: Mean of each channel, of pixel / 255.
        std: Standard deviation of each channel, of pixel / 255.
        classes: Name of each class.
        flips: Whether each image is mirrored left to right with probability 1/2 when fetched.
        generator: Source of the flips; torch's global one by default.

    Raises:
        ValueError: If the lengths, the channels or the labels do not agree, or a standard
            deviation is not positive.
    """

    images: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, " n"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    flips: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{len(self.images)} images, {len(self.labels)} labels; expected one each"
            )
        if not len(self.mean) == len(self.std) == self.images.shape[1]:
            raise ValueError(
                f"{self.images.shape[1]} channels, mean {self.mean}, std {self.std}; "
                "expected one mean and one std a channel"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std}; expected positive numbers")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise ValueError(
                f"labels {self.labels.min()} … {self.labels.max()}; "
                f"expected 0 … {len(self.classes) - 1} for {len(self.classes)} classes"
            )

    def __len__(self) -> int:
        """Number of images, N."""
        return len(self.labels)

    def __getitem__(
        self, index: int
    ) -> tuple[Float[Tensor, "channels height width"], Int64[Tensor, ""]]:
        """One normalised image and its label."""
        image, label = self.batch([int(index)])
        return image[0], label[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Normalised images and their labels, what `DataLoader` fetches a batch by."""
        return list(zip(*self.batch(indices), strict=True))

    def batch(
        self, indices: Sequence[int] | Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch channels height width"], Int64[Tensor, " batch"]]:
        """Normalised, and where `flips` says so randomly mirrored, images and their labels.

        Args:
            indices: Which images, in −N … N − 1.

        Returns:
            Images, float32 [B, C, H, W], and labels [B].
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        images = self._normalised(self.images[index])
        if self.flips:
            mirrored = torch.rand(len(index), generator=self.generator) < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return images, self.labels[index]

    def tensors(self) -> tuple[Float[Tensor, "n channels height width"], Int64[Tensor, " n"]]:
        """All images, normalised and never mirrored, float32 [N, C, H, W], and all labels [N]."""
        return self._normalised(self.images), self.labels

    def subset(self, indices: Sequence[int] | Int64[Tensor, " m"]) -> "ImageDataset":
        """The data set of some of the images, in the order given.

        Args:
            indices: Which images, in 0 … N − 1.

        Returns:
            A data set with copies of these images, all else the same.

        Raises:
            ValueError: If an index is out of range.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        if len(index) and not 0 <= index.min() <= index.max() < len(self):
            raise ValueError(
                f"indices {index.min()} … {index.max()}; expected 0 … {len(self) - 1}: "
                "check that they were made for this data set"
            )
        return replace(self, images=self.images[index], labels=self.labels[index])

    def with_images(self, images: UInt8[Tensor, "n channels height width"]) -> "ImageDataset":
        """The data set with other pixels, e.g. corrupted ones, all else the same."""
        return replace(self, images=images)

    def with_flips(self, generator: torch.Generator | None = None) -> "ImageDataset":
        """The data set with each image mirrored at random when fetched."""
        return replace(self, flips=True, generator=generator)

    def _normalised(self, images: Shaped[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        return (images.to(torch.float32) / 255 - mean) / std


@dataclass(frozen=True)
class DigitsSplit:
    """The digits in three parts.

    Attributes:
        train: 1,000 images to train on.
        val: 297 images to tune on.
        test: 500 images to report on.
    """

    train: ImageDataset
    val: ImageDataset
    test: ImageDataset


def digits(seed: int = 0) -> DigitsSplit:
    """Scikit-learn's handwritten digits: 1,797 grey images of 8 × 8 pixels, in a random split.

    Args:
        seed: Seed of the split.

    Returns:
        Training, validation and test images, [N, 1, 8, 8], the 17 grey levels spread over 0 … 255.

    Raises:
        ImportError: If scikit-learn is missing.

    Reference:
        Alpaydin & Kaynak (1998), Optical Recognition of Handwritten Digits, UCI.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'laplace-debias[cli]'"
        ) from error
    raw = load_digits()
    whole = ImageDataset(
        images=torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None],
        labels=torch.from_numpy(raw.target.astype(np.int64)),
        mean=(0.3053,),
        std=(0.3760,),
        classes=tuple("0123456789"),
    )
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    train, val, test = order.split([1000, 297, 500])
    return DigitsSplit(whole.subset(train), whole.subset(val), whole.subset(test))


def cifar10(
    root: str | Path,
    train: bool,
    cache: str | Path | None = None,
    download: bool = False,
    progress: bool = False,
) -> ImageDataset:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 RGB pixels.

    Images of an image folder, in an archive or not, come in its order: classes by the alphabet,
    then file names; they are decoded once and kept in the cache. Those of torchvision come in its
    own order, so a split by index that was made for one order is wrong for the other.

    Args:
        root: An image folder (`train/<class>/<name>.jpg` or `.png`, `test/…`); a tar archive of
            one; a folder that holds the archive `cifar10.tar.xz`; or a root of
            `torchvision.datasets.CIFAR10`.
        train: Whether the training images are wanted, else the test images.
        cache: Folder for the decoded images; `$LAPLACE_DEBIAS_CACHE`, or else
            `~/.cache/laplace-debias`, by default.
        download: Whether torchvision may download the data to `root` where `root` has none.
        progress: Whether to show a progress bar while images are decoded.

    Returns:
        The images, normalised by `CIFAR10_MEAN` and `CIFAR10_STD`.

    Raises:
        ValueError: If nothing is at `root`, if it is laid out otherwise, if a class is missing or
            empty, or if an image is broken or of another size.
        ConnectionError: If the download fails.
        ImportError: If Pillow is missing and images must be decoded.

    Reference:
        Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images.
    """
    root = Path(root)
    if not root.exists() and not download:
        raise ValueError(
            f"nothing at {root}; expected an image folder, an archive of one or a torchvision "
            "CIFAR-10 root: check the path, or download (needs a network)"
        )
    source = find_archive(root, "cifar10") or (root if is_image_folder(root) else None)
    if source is not None:
        images, labels = read_cached(
            source, "train" if train else "test", CIFAR10_CLASSES, (32, 32), cache, progress
        )
    elif download or (root / "cifar-10-batches-py").is_dir():
        images, labels = _torchvision_cifar10(root, train, download)
    else:
        raise ValueError(
            f"{root} is no CIFAR-10; expected train/<class>/<name>.jpg and test/…, an archive "
            "cifar10.tar.xz of these, or cifar-10-batches-py: check the path, or download"
        )
    return ImageDataset(images, labels, CIFAR10_MEAN, CIFAR10_STD, CIFAR10_CLASSES)


def _torchvision_cifar10(
    root: Path, train: bool, download: bool
) -> tuple[UInt8[Tensor, "n 3 32 32"], Int64[Tensor, " n"]]:
    from torchvision.datasets import CIFAR10

    try:
        data = CIFAR10(str(root), train=train, download=download)
    except OSError as error:
        raise ConnectionError(
            f"CIFAR-10 could not be downloaded to {root} ({error}); "
            "check the network, or give the path of a copy"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"the CIFAR-10 at {root} is damaged ({error}); remove it and download it again"
        ) from error
    images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(data.targets)
