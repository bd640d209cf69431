"""Images in memory: pixels as bytes, normalised when fetched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor, nn
from torch.utils.data import Dataset

_CROP_PADDING = 4


@runtime_checkable
class Images(Protocol):
    """A data set of images, in memory or on disk."""

    @property
    def labels(self) -> Tensor:
        """Class indices, int64 [N]."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class."""

    def __len__(self) -> int:
        """Number of images, N."""

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images, float32 [B, C, H, W], and labels [B]."""

    def subset(self, indices: Sequence[int] | Tensor) -> "Images":
        """The data set of some of the images, in the order given."""

    def augmented(self, flips: bool, crops: bool, generator: torch.Generator | None) -> "Images":
        """The data set with its images mirrored, cropped or both at random when fetched."""


def check_range(values: Tensor, number: int, name: str) -> None:
    """Refuse labels or indices that a data set does not have.

    Args:
        values: The labels or indices, int64.
        number: How many there are: 0 … number − 1.
        name: What they are called.

    Raises:
        ValueError: If one of them is out of range.
    """
    if len(values) and not 0 <= values.min() <= values.max() < number:
        raise ValueError(
            f"{name} {values.min()} … {values.max()}; expected 0 … {number - 1}: "
            "check that they were made for this data set"
        )


class ImageBatches:
    """Batches of some images of a data set, in the order given, any number of times.

    Args:
        images: The data set.
        indices: Which of its images, [N].
        batch_size: Images per batch; the last batch may be smaller.
        dtype: Of the images in a batch; as the data set gives them if None.
    """

    def __init__(
        self, images: Images, indices: Tensor, batch_size: int, dtype: torch.dtype | None = None
    ) -> None:
        self._images = images
        self._parts = indices.split(batch_size)
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self._parts:
            x, y = self._images.batch(part)
            yield (x if self._dtype is None else x.to(self._dtype)), y


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images held as bytes and returned as normalised floats, (pixel / 255 − mean) / std.

    It works with a plain `DataLoader`, which fetches a batch in one go. With several workers each
    has a copy of `generator`, so all flip in the same way; leave `num_workers` at 0, because
    nothing is read.

    Attributes:
        images: Pixels, uint8 [N, C, H, W].
        labels: Class indices, int64 [N].
        mean: Mean of each channel, of pixel / 255.
        std: Standard deviation of each channel, of pixel / 255.
        classes: Name of each class.
        flips: Whether each image is mirrored left to right with probability 1/2 when fetched.
        crop_padding: Pixels by which each image is padded, by reflection, and cropped back to its
            size at a random place when fetched; 0 for none.
        generator: Source of the flips and the crops; torch's global one by default.

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
    crop_padding: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{len(self.images)} images, {len(self.labels)} labels; expected one each"
            )
        if not len(self.mean) == len(self.std) == self.images.shape[1]:
            raise ValueError(
                f"{self.images.shape[1]} channels, mean {self.mean}, std {self.std}; "
                "expected one mean and one std per channel"
            )
        if not 0 <= self.crop_padding < max(1, *self.images.shape[2:]):
            raise ValueError(
                f"crop_padding {self.crop_padding} of images of {tuple(self.images.shape[2:])} "
                "pixels; expected at least 0 and less than their size"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std}; expected positive numbers")
        check_range(self.labels, len(self.classes), "labels")

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
        """Normalised images and their labels; `DataLoader` calls it for a batch."""
        return list(zip(*self.batch(indices), strict=True))

    def batch(
        self, indices: Sequence[int] | Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch channels height width"], Int64[Tensor, " batch"]]:
        """Normalised images, mirrored and cropped at random if so set, and their labels.

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
        if self.crop_padding:
            images = self._cropped(images)
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
        check_range(index, len(self), "indices")
        return replace(self, images=self.images[index], labels=self.labels[index])

    def with_images(self, images: UInt8[Tensor, "n channels height width"]) -> "ImageDataset":
        """The data set with other pixels, e.g. corrupted ones, all else the same."""
        return replace(self, images=images)

    def augmented(
        self, flips: bool, crops: bool, generator: torch.Generator | None = None
    ) -> "ImageDataset":
        """The data set with its images mirrored, cropped or both at random when fetched.

        Args:
            flips: Whether images are mirrored left to right with probability 1/2.
            crops: Whether images are padded by 4 pixels and cropped back at a random place.
            generator: Source of both; torch's global one by default.

        Returns:
            A data set of the same images.
        """
        padding = _CROP_PADDING if crops else 0
        return replace(self, flips=flips, crop_padding=padding, generator=generator)

    def _cropped(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        number, _, height, width = images.shape
        places = 2 * self.crop_padding + 1
        down, right = torch.randint(places, (2, number), generator=self.generator)
        padded = nn.functional.pad(images, [self.crop_padding] * 4, mode="reflect")
        rows = (down[:, None] + torch.arange(height))[:, None, :, None]
        columns = (right[:, None] + torch.arange(width))[:, None, None, :]
        channels = torch.arange(images.shape[1])[None, :, None, None]
        return padded[torch.arange(number)[:, None, None, None], channels, rows, columns]

    def _normalised(self, images: Shaped[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        return (images.to(torch.float32) / 255 - mean) / std
