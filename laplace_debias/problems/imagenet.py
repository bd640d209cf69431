"""ImageNet, or any folder of images by class: decoded when fetched, not held in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import Dataset

from laplace_debias.problems.images import check_range
from laplace_debias.problems.pillow import pillow

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, eq=False)
class FolderImages(Dataset[tuple[Tensor, Tensor]]):
    """RGB images on disk, each decoded, resized, cropped and normalised when it is fetched.

    Attributes:
        files: Path of each image.
        labels: Class indices, int64 [N].
        mean: Mean of each channel, of pixel / 255.
        std: Standard deviation of each channel, of pixel / 255.
        classes: Name of each class.
        size: Height and width of what is returned, in pixels.
        resize: Length of the shorter side before the centre is cropped.
        interpolation: How images are resized.
        flips: Whether each image is mirrored left to right with probability 1/2.
        crops: Whether a random part (8 … 100 % of the area, aspect 3/4 … 4/3) is resized to `size`
            instead of the centre being cropped.
        generator: Source of the flips and the crops; torch's global one by default.

    Raises:
        ValueError: If the lengths, the labels or the sizes do not agree.
    """

    files: tuple[Path, ...]
    labels: Int64[Tensor, " n"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    classes: tuple[str, ...]
    size: int = 224
    resize: int = 256
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    flips: bool = False
    crops: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if len(self.files) != len(self.labels):
            raise ValueError(
                f"{len(self.files)} files, {len(self.labels)} labels; expected one each"
            )
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"size {self.size}, resize {self.resize}; expected 1 ≤ size ≤ resize")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(
                f"interpolation {self.interpolation!r}; expected 'bilinear' or 'bicubic'"
            )
        check_range(self.labels, len(self.classes), "labels")

    def __len__(self) -> int:
        """Number of images, N."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "3 size size"], Int64[Tensor, ""]]:
        """One normalised image and its label."""
        image, label = self.batch([int(index)])
        return image[0], label[0]

    def batch(
        self, indices: Sequence[int] | Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch 3 size size"], Int64[Tensor, " batch"]]:
        """Normalised images, float32 [B, 3, size, size], and their labels [B].

        Args:
            indices: Which images, in −N … N − 1.

        Raises:
            ValueError: If an image is broken.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        images = torch.stack([self._read(self.files[i]) for i in index.tolist()])
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.mean, self.std))
        images = (images.to(torch.float32) / 255 - mean) / std
        if self.flips:
            mirrored = torch.rand(len(index), generator=self.generator) < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return images, self.labels[index]

    def subset(self, indices: Sequence[int] | Int64[Tensor, " m"]) -> "FolderImages":
        """The data set of some of the images, in the order given.

        Args:
            indices: Which images, in 0 … N − 1.

        Raises:
            ValueError: If an index is out of range.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        check_range(index, len(self), "indices")
        files = tuple(self.files[i] for i in index.tolist())
        return replace(self, files=files, labels=self.labels[index])

    def augmented(
        self, flips: bool, crops: bool, generator: torch.Generator | None = None
    ) -> "FolderImages":
        """The data set with its images mirrored, cropped or both at random when fetched."""
        return replace(self, flips=flips, crops=crops, generator=generator)

    def _read(self, file: Path) -> Tensor:
        """An image's pixels, uint8 [3, size, size]."""
        imaging = pillow()
        try:
            with imaging.open(file) as picture:
                image = picture.convert("RGB")
        # On broken bytes Pillow's decoders raise errors of any type.
        except Exception as error:
            raise ValueError(f"{file} is no readable image ({error}); replace it") from error
        width, height = image.size
        method = getattr(imaging.Resampling, self.interpolation.upper())
        if self.crops:
            box = self._random_box(width, height)
            image = image.resize((self.size, self.size), method, box=box)
        else:
            scale = self.resize / min(width, height)
            # Torchvision's rounding, so that published accuracies come out.
            wide, high = (
                self.resize if side == min(width, height) else int(side * scale)
                for side in (width, height)
            )
            image = image.resize((wide, high), method)
            left, top = round((wide - self.size) / 2), round((high - self.size) / 2)
            image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def _random_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of a random part of an image, in pixels."""
        draws = torch.rand(4, generator=self.generator, dtype=torch.float64).tolist()
        area = (0.08 + 0.92 * draws[0]) * width * height
        aspect = math.exp((2 * draws[1] - 1) * math.log(4 / 3))
        # A part that would stick out is cut to the image.
        wide, high = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
        left, top = draws[2] * (width - wide), draws[3] * (height - high)
        return left, top, left + wide, top + high


def imagenet(
    root: str | Path,
    train: bool,
    *,
    num_classes: int | None = 1000,
    size: int = 224,
    resize: int = 256,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
) -> FolderImages:
    """ImageNet's training or validation images from `<root>/train/<class>` or `<root>/val/<class>`.

    ImageNet cannot be downloaded without an account. The class folders, in the order of the
    alphabet, give the labels: with the usual `n01440764`, … that is the order of the published
    networks. Any other image folder of this layout can be read too. Images are ordered by class,
    then by file name.

    Args:
        root: The folder; `test/` is read where there is no `val/`.
        train: Whether the training images are wanted, else the validation images.
        num_classes: How many class folders there must be; any number if None.
        size: Height and width of what is returned, in pixels.
        resize: Length of the shorter side before the centre is cropped.
        interpolation: How images are resized.
        mean: Mean of each channel, of pixel / 255.
        std: Standard deviation of each channel, of pixel / 255.

    Returns:
        The images, decoded when fetched.

    Raises:
        ValueError: If the folder or a class is missing, a class is empty, or there are others.

    Reference:
        Deng et al. (2009), ImageNet: A Large-Scale Hierarchical Image Database.
    """
    root = Path(root)
    names = ("train",) if train else ("val", "test")
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise ValueError(
            f"no {names[0]}/ in {root}; expected train/<class>/<name>.jpg and val/…: check the "
            "path (ImageNet must be fetched by hand from image-net.org)"
        )
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if not classes or (num_classes is not None and len(classes) != num_classes):
        raise ValueError(
            f"{folder} has {len(classes)} class folders; expected {num_classes or 'at least one'}"
            f"{_missing(root, folder, classes)}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            path
            for path in (folder / name).iterdir()
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        )
        if not found:
            raise ValueError(
                f"{folder / name} has no images; expected .jpg, .jpeg or .png files: complete it"
            )
        files += found
        labels += [label] * len(found)
    return FolderImages(
        tuple(files),
        torch.tensor(labels, dtype=torch.int64),
        mean,
        std,
        classes,
        size,
        resize,
        interpolation,
    )


def _missing(root: Path, folder: Path, classes: tuple[str, ...]) -> str:
    """Which classes a split lacks that its sibling has."""
    siblings = {
        path.name
        for split in ("train", "val", "test")
        if (root / split).is_dir() and root / split != folder
        for path in (root / split).iterdir()
        if path.is_dir()
    }
    missing = sorted(siblings - set(classes))
    return (
        f": {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''} is missing"
        if missing
        else ""
    )
