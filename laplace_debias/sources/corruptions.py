"""Deterministic image corruptions at five severities, after CIFAR-10-C.

The module implements thirteen of the benchmark's nineteen corruptions, with the severity constants
of CIFAR-10-C. Lengths are in pixels, independent of the size of the image. The results differ from
the published files in two ways: `fog` uses value noise instead of the diamond-square fractal, and
the random numbers are different.

Reference:
    Hendrycks & Dietterich (2019), Benchmarking Neural Network Robustness to Common Corruptions and
    Perturbations.
"""

import io
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import PIL.Image
import torch
from jaxtyping import Float, UInt8
from numpy.random import Generator
from scipy import ndimage
from torch import Tensor

Image = Float[np.ndarray, "height width channels"]
Kind = Callable[[Image, int, Generator], Image]
"""A function from an image in [0, 1], a severity and a generator to the corrupted image."""


def corrupt(
    images: UInt8[Tensor, "n channels height width"],
    severity: int,
    kinds: Mapping[str, Kind] | None = None,
    seed: int = 0,
    offset: int = 0,
) -> UInt8[Tensor, "n channels height width"]:
    """Corrupt each image by one randomly chosen kind of corruption, as in the paper.

    The n-th image has the index `offset + n`. Its kind of corruption and its random numbers depend
    only on this index and on `seed`. Therefore, the result does not depend on the batch size, and
    an image is corrupted with the same random numbers at every severity.

    Reference:
        Hendrycks & Dietterich (2019), Section 3; the paper, Appendix B.1 (data).
    """
    kinds = KINDS if kinds is None else kinds
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity is {severity}. Pass 1, 2, 3, 4 or 5.")
    if images.shape[1] not in (1, 3):
        raise ValueError(
            f"The images have {images.shape[1]} channels. Pass images with 1 channel (grey) or 3 "
            "channels (RGB)."
        )
    result = torch.empty_like(images, device="cpu")
    for n, image in enumerate(images.cpu().numpy()):
        name = list(kinds)[np.random.default_rng((seed, offset + n)).integers(len(kinds))]
        rng = np.random.default_rng((seed, offset + n, zlib.crc32(name.encode())))
        clean = image.transpose(1, 2, 0) / 255.0
        corrupted = kinds[name](clean, severity, rng).clip(0.0, 1.0)
        result[n] = torch.from_numpy(np.rint(255.0 * corrupted).transpose(2, 0, 1))
    return result.to(images.device)


def _gaussian_noise(x: Image, severity: int, rng: Generator) -> Image:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * rng.standard_normal(x.shape)


def _shot_noise(x: Image, severity: int, rng: Generator) -> Image:
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return rng.poisson(photons * x) / photons


def _impulse_noise(x: Image, severity: int, rng: Generator) -> Image:
    hit = rng.random(x.shape) < (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    return np.where(hit, rng.integers(2, size=x.shape).astype(x.dtype), x)


def _speckle_noise(x: Image, severity: int, rng: Generator) -> Image:
    return x * (1.0 + (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1] * rng.standard_normal(x.shape))


def _gaussian_blur(x: Image, severity: int, rng: Generator) -> Image:
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return ndimage.gaussian_filter(x, (sigma, sigma, 0.0), mode="nearest")


def _defocus_blur(x: Image, severity: int, rng: Generator) -> Image:
    radius, sigma = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    rows, columns = np.mgrid[-3:4, -3:4]
    disk = (rows**2 + columns**2 <= radius**2).astype(x.dtype)
    kernel = ndimage.gaussian_filter(disk / disk.sum(), sigma, radius=1)
    return ndimage.convolve(x, kernel[:, :, None], mode="mirror")


def _motion_blur(x: Image, severity: int, rng: Generator) -> Image:
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return streaked(x, radius, sigma, rng.uniform(-45.0, 45.0))


def streaked(x: Image, radius: int, sigma: float, degrees: float) -> Image:
    """Blur an image along a direction, with half-normal weights.

    There is one weight for each of 2 · radius + 1 steps.
    """
    angle = np.deg2rad(degrees)
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    rows = np.arange(x.shape[0])
    columns = np.arange(x.shape[1])
    blurred = np.zeros_like(x)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        # Beyond the image, repeat the pixels at its edge, because a moving camera would probably
        # see similar pixels there.
        moved_rows = (rows + round(step * np.sin(angle))).clip(0, x.shape[0] - 1)
        moved_columns = (columns + round(step * np.cos(angle))).clip(0, x.shape[1] - 1)
        blurred += weight * x[moved_rows[:, None], moved_columns]
    return blurred


def _zoom_blur(x: Image, severity: int, rng: Generator) -> Image:
    zooms = 1.0 + 0.01 * np.arange(1 + (5, 10, 15, 20, 25)[severity - 1])
    total = x.copy()
    for zoom in zooms:
        total += zoomed(x, zoom)
    return total / (len(zooms) + 1)


def zoomed(x: Image, zoom: float) -> Image:
    """Magnify an image around its centre, and keep its size."""
    centre = np.array([(x.shape[0] - 1) / 2, (x.shape[1] - 1) / 2, 0.0])
    scale = np.array([1.0 / zoom, 1.0 / zoom, 1.0])
    return ndimage.affine_transform(x, scale, centre * (1.0 - scale), order=1, mode="nearest")


def _fog(x: Image, severity: int, rng: Generator) -> Image:
    """Add a haze, which is noise at several scales, and reduce the contrast."""
    amount, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    height, width = x.shape[:2]
    haze = np.zeros((height, width))
    for octave in range(1, int(np.ceil(np.log2(max(height, width)))) + 1):
        haze += value_noise(height, width, octave, rng) / decay**octave
    haze = (haze - haze.min()) / max(np.ptp(haze), np.finfo(haze.dtype).tiny)
    return (x + amount * haze[:, :, None]) * x.max() / (x.max() + amount)


def value_noise(height: int, width: int, octave: int, rng: Generator) -> np.ndarray:
    """Draw random numbers on a coarse grid, and interpolate them to pixels.

    The grid has 2^octave cells per side, and uniform random numbers at its nodes.
    """
    cells = 2**octave
    grid = rng.uniform(size=(cells + 1, cells + 1))
    nodes = np.ix_(np.linspace(0, cells, height), np.linspace(0, cells, width))
    return ndimage.map_coordinates(grid, np.broadcast_arrays(*nodes), order=1)


def _brightness(x: Image, severity: int, rng: Generator) -> Image:
    # Change only the value in HSV, which is the largest channel, and not hue and saturation.
    value = x.max(axis=2, keepdims=True)
    brighter = np.minimum(value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1], 1.0)
    return np.where(value > 0.0, x * brighter / np.where(value > 0.0, value, 1.0), brighter)


def _contrast(x: Image, severity: int, rng: Generator) -> Image:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (x - mean)


def _pixelate(x: Image, severity: int, rng: Generator) -> Image:
    scale = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    height, width = x.shape[:2]
    coarse = max(1, int(scale * width)), max(1, int(scale * height))
    box = PIL.Image.Resampling.BOX
    return _from_pillow(_to_pillow(x).resize(coarse, box).resize((width, height), box), x)


def _jpeg_compression(x: Image, severity: int, rng: Generator) -> Image:
    buffer = io.BytesIO()
    _to_pillow(x).save(buffer, "JPEG", quality=(80, 65, 58, 50, 40)[severity - 1])
    return _from_pillow(PIL.Image.open(buffer), x)


def _to_pillow(x: Image) -> Any:
    pixels = np.rint(255.0 * x).astype(np.uint8)
    return PIL.Image.fromarray(pixels[:, :, 0] if x.shape[2] == 1 else pixels)


def _from_pillow(picture: Any, like: Image) -> Image:
    return np.asarray(picture).reshape(like.shape) / 255.0


KINDS: Mapping[str, Kind] = {
    function.__name__[1:]: function
    for function in (
        *(_gaussian_noise, _shot_noise, _impulse_noise, _speckle_noise),
        *(_gaussian_blur, _defocus_blur, _motion_blur, _zoom_blur),
        *(_fog, _brightness, _contrast, _pixelate, _jpeg_compression),
    )
}
"""The kinds of corruption. Each changes every image, even a grey or tiny one, and changes it more
at a higher severity."""
