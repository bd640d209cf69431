"""Images for shifts and OOD sets: corrupted test images, shuffled patches and digits."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from laplace_debias.curvature.data.batches import Batches
from laplace_debias.sources.corruptions import corrupt
from laplace_debias.sources.pixels import Pixels
from laplace_debias.sources.splits import Examples

_KEPT_BYTES = 2**30
_GRID = 4


class Changed:
    """Batches whose inputs are changed by a function when they are read.

    The function is called with the inputs of a batch and the index of its first example.
    """

    def __init__(self, batches: Batches, change: Callable[[Tensor, int], Tensor]) -> None:
        self.source = batches
        self._change = change

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        offset = 0
        for batch in self.source:
            yield self.changed(batch, offset)
            offset += len(batch[0])

    def changed(self, batch: Any, offset: int) -> tuple[Tensor, Tensor]:
        """Change the inputs of a batch; the index of its first example is `offset`."""
        x, y = batch
        return self._change(x, offset), y


class Corruption:
    """A corruption of images at a given severity, as in CIFAR-10-C.

    Images are corrupted after they have been resized for the network. Up to 1 GiB of corrupted
    images is cached, because some corruptions take longer than the network.
    """

    def __init__(self, pixels: Pixels, severity: int, seed: int) -> None:
        self._pixels = pixels
        self._severity = severity
        self._seed = seed
        self._kept: dict[int, UInt8[Tensor, "batch channels height width"]] = {}

    def __call__(self, x: Float[Tensor, "batch channels height width"], offset: int) -> Tensor:
        """Corrupt a batch of images, the first of which has the index `offset`."""
        corrupted = self._kept.get(offset)
        if corrupted is None or len(corrupted) != len(x):
            pixels = self._pixels.pixels(x)
            corrupted = corrupt(pixels, self._severity, seed=self._seed, offset=offset)
            num_bytes = sum(images.nbytes for images in self._kept.values())
            if corrupted.nbytes + num_bytes <= _KEPT_BYTES:
                self._kept[offset] = corrupted
        return self._pixels.inputs(corrupted).to(x.dtype)


def shuffled_patches(
    x: Float[Tensor, "batch channels height width"], offset: int, seed: int
) -> Tensor:
    """Divide each image into 4 × 4 patches, and shuffle them.

    The first image has the index `offset`; an image's index and the seed determine its permutation.
    """
    height, width = (side // _GRID for side in x.shape[2:])
    if not height or not width:
        raise ValueError(
            f"Images of {x.shape[2]} × {x.shape[3]} pixels are too small for 4 × 4 patches. Use "
            "larger images."
        )
    # Pixels at the right and bottom that do not fit into the grid are not moved.
    inner = x[:, :, : _GRID * height, : _GRID * width]
    # [batch, channels, grid rows, height, grid columns, width] becomes [batch, patches, channels,
    # height, width], and back below.
    patches = inner.unflatten(3, (_GRID, width)).unflatten(2, (_GRID, height))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    places = []
    for n in range(len(x)):
        generator = torch.Generator().manual_seed((seed << 32) + offset + n)
        places.append(torch.randperm(_GRID**2, generator=generator))
    patches = patches[torch.arange(len(x))[:, None], torch.stack(places)]
    moved = patches.unflatten(1, (_GRID, _GRID)).permute(0, 3, 1, 4, 2, 5)
    result = x.clone()
    result[:, :, : _GRID * height, : _GRID * width] = moved.flatten(4, 5).flatten(2, 3)
    return result


def drawn_digits(shape: tuple[int, ...], pixels: Pixels) -> Examples:
    """Return scikit-learn's 1,797 handwritten digits, resized to images of shape `[C, H, W]`."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[order, None]
    labels = torch.from_numpy(raw.target.astype(np.int64))[order]
    drawn = nn.functional.interpolate(images.float(), size=shape[1:], mode="bilinear")
    drawn = drawn.round().to(torch.uint8).expand(-1, shape[0], -1, -1)
    return Examples(drawn, labels, pixels)
