"""Deterministic image corruptions at five severities, after CIFAR-10-C.

Seventeen of the benchmark's nineteen kinds, with the severity constants of CIFAR-10-C; lengths are
in pixels for images of any size, except in the elastic transform, whose lengths scale with the
size. Where they differ from the published files: `frost` is a made-up texture, since the
benchmark's is cut from photographs; `fog` is value noise instead of the diamond-square fractal; the
random numbers are others. `spatter` is missing: its drops follow OpenCV's Canny edges, distance
transform and histogram equalisation, which none of the dependencies offers.

Reference:
    Hendrycks & Dietterich (2019), Benchmarking Neural Network Robustness to Common Corruptions and
    Perturbations.
"""

import io
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from jaxtyping import Float, UInt8
from numpy.random import Generator
from scipy import ndimage
from torch import Tensor

Image = Float[np.ndarray, "height width channels"]


def corrupt(
    images: UInt8[Tensor, "n channels height width"],
    severity: int,
    kinds: str | Sequence[str] | None = None,
    seed: int = 0,
    offset: int = 0,
) -> UInt8[Tensor, "n channels height width"]:
    """Corrupt images as the paper makes CIFAR-10-C: each by one kind, chosen uniformly at random.

    Image n of the call is number `offset + n`; its kind and its random numbers depend on that
    number and `seed` alone, so the result does not depend on the batch size, and an image has the
    same kind and random numbers at every severity: severities are compared on the same draw.

    Args:
        images: Grey or RGB images, 0 … 255.
        severity: 1 (slight) to 5 (strong).
        kinds: One of `ALL_KINDS`, or several to choose from; `KINDS` by default.
        seed: Non-negative seed.
        offset: Number of the first image.

    Returns:
        Corrupted images on the device of `images`.

    Raises:
        ValueError: If a kind is unknown or there is none, the severity is not in 1 … 5, the images
            have neither 1 nor 3 channels, or the seed or offset is negative.

    Reference:
        Hendrycks & Dietterich (2019), Section 3; the paper, Appendix B.1 (data).
    """
    kinds = (kinds,) if isinstance(kinds, str) else KINDS if kinds is None else tuple(kinds)
    if not kinds or not set(kinds) <= set(ALL_KINDS):
        raise ValueError(f"kinds is {kinds}; expected one or several of {ALL_KINDS}")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity {severity}; expected 1, 2, 3, 4 or 5")
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images of {images.shape[1]} channels; expected 1 (grey) or 3 (RGB)")
    if seed < 0 or offset < 0:
        raise ValueError(f"seed {seed} and offset {offset}; expected non-negative numbers")
    result = torch.empty_like(images, device="cpu")
    for n, image in enumerate(images.cpu().numpy()):
        name = kinds[np.random.default_rng((seed, offset + n)).integers(len(kinds))]
        rng = np.random.default_rng((seed, offset + n, zlib.crc32(name.encode())))
        clean = image.transpose(1, 2, 0) / 255.0
        corrupted = _FUNCTIONS[name](clean, severity, rng).clip(0.0, 1.0)
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


def _glass_blur(x: Image, severity: int, rng: Generator) -> Image:
    sigma, reach, rounds = (
        (0.05, 1, 1),
        (0.25, 1, 1),
        (0.4, 1, 1),
        (0.25, 1, 2),
        (0.4, 1, 2),
    )[severity - 1]
    height, width, channels = x.shape
    blurred = ndimage.gaussian_filter(x, (sigma, sigma, 0.0), mode="nearest")
    order = list(range(height * width))
    steps = rng.integers(-reach, reach, size=(rounds, height, width, 2)).tolist()
    for number in range(rounds):
        # Each swap sees the ones before it, so the order of the pixels matters.
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                right, down = steps[number][row - 1][column - 1]
                here, there = row * width + column, (row + down) * width + column + right
                order[here], order[there] = order[there], order[here]
    shuffled = blurred.reshape(-1, channels)[order].reshape(x.shape)
    return ndimage.gaussian_filter(shuffled, (sigma, sigma, 0.0), mode="nearest")


def _motion_blur(x: Image, severity: int, rng: Generator) -> Image:
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return _streaked(x, radius, sigma, rng.uniform(-45.0, 45.0))


def _streaked(x: Image, radius: int, sigma: float, degrees: float) -> Image:
    """Each pixel smeared along a direction, with half-normal weights over 2 · radius + 1 steps."""
    angle = np.deg2rad(degrees)
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    rows, columns = np.arange(x.shape[0]), np.arange(x.shape[1])
    blurred = np.zeros_like(x)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        # The edge is repeated beyond the image, as a moving camera would see more of the same.
        moved_rows = (rows + round(step * np.sin(angle))).clip(0, x.shape[0] - 1)
        moved_columns = (columns + round(step * np.cos(angle))).clip(0, x.shape[1] - 1)
        blurred += weight * x[moved_rows[:, None], moved_columns]
    return blurred


def _zoom_blur(x: Image, severity: int, rng: Generator) -> Image:
    zooms = 1.0 + 0.01 * np.arange(1 + (5, 10, 15, 20, 25)[severity - 1])
    total = x.copy()
    for zoom in zooms:
        total += _zoomed(x, zoom)
    return total / (len(zooms) + 1)


def _zoomed(x: Image, zoom: float) -> Image:
    """The image's middle, magnified."""
    centre = np.array([(x.shape[0] - 1) / 2, (x.shape[1] - 1) / 2, 0.0])
    scale = np.array([1.0 / zoom, 1.0 / zoom, 1.0])
    return ndimage.affine_transform(x, scale, centre * (1.0 - scale), order=1, mode="nearest")


def _snow(x: Image, severity: int, rng: Generator) -> Image:
    mean, spread, zoom, threshold, radius, sigma, kept = (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    )[severity - 1]
    flakes = _zoomed(mean + spread * rng.standard_normal((*x.shape[:2], 1)), zoom)
    flakes = np.where(flakes < threshold, 0.0, flakes.clip(0.0, 1.0))
    falling = _streaked(flakes, radius, sigma, rng.uniform(-135.0, -45.0))
    whitened = np.maximum(x, 1.5 * _grey(x) + 0.5)
    return kept * x + (1.0 - kept) * whitened + falling + np.rot90(falling, 2)


def _grey(x: Image) -> Float[np.ndarray, "height width 1"]:
    return x if x.shape[2] == 1 else (x @ np.array([0.299, 0.587, 0.114]))[:, :, None]


def _frost(x: Image, severity: int, rng: Generator) -> Image:
    kept, amount = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    height, width = x.shape[:2]
    # Crystals are the ridges of noise at several scales, denser towards the border.
    crystals = np.zeros((height, width))
    for octave in range(1, int(np.ceil(np.log2(max(height, width)))) + 1):
        crystals += (1.0 - np.abs(2.0 * _value_noise(height, width, octave, rng) - 1.0)) ** 2
    crystals /= crystals.max()
    rows, columns = np.mgrid[-1.0 : 1.0 : height * 1j, -1.0 : 1.0 : width * 1j]
    crystals *= 0.6 + 0.4 * np.maximum(np.abs(rows), np.abs(columns))
    tint = np.array([0.85, 0.95, 1.0]) if x.shape[2] == 3 else np.array([0.93])
    return kept * x + amount * crystals[:, :, None] * tint


def _fog(x: Image, severity: int, rng: Generator) -> Image:
    amount, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    height, width = x.shape[:2]
    haze = np.zeros((height, width))
    for octave in range(1, int(np.ceil(np.log2(max(height, width)))) + 1):
        haze += _value_noise(height, width, octave, rng) / decay**octave
    haze = (haze - haze.min()) / max(np.ptp(haze), np.finfo(haze.dtype).tiny)
    return (x + amount * haze[:, :, None]) * x.max() / (x.max() + amount)


def _value_noise(height: int, width: int, octave: int, rng: Generator) -> np.ndarray:
    """Uniform random numbers on a grid of 2^octave cells per side, interpolated to pixels."""
    cells = 2**octave
    grid = rng.uniform(size=(cells + 1, cells + 1))
    where = np.ix_(np.linspace(0, cells, height), np.linspace(0, cells, width))
    return ndimage.map_coordinates(grid, np.broadcast_arrays(*where), order=1)


def _brightness(x: Image, severity: int, rng: Generator) -> Image:
    # The value of HSV is the largest channel; hue and saturation stay as they are.
    value = x.max(axis=2, keepdims=True)
    brighter = np.minimum(value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1], 1.0)
    return np.where(value > 0.0, x * brighter / np.where(value > 0.0, value, 1.0), brighter)


def _contrast(x: Image, severity: int, rng: Generator) -> Image:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (x - mean)


def _elastic_transform(x: Image, severity: int, rng: Generator) -> Image:
    shift, smoothness, corner = (
        (0.0, 0.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    height, width = x.shape[:2]
    size = min(height, width)
    # An affine map that takes three points of the middle square to randomly shifted ones.
    third = size // 3
    centre = np.array([height // 2, width // 2])
    points = centre + np.array([[third, third], [-third, third], [-third, -third]])
    moved = points + size * corner * rng.uniform(-1.0, 1.0, size=points.shape)
    ones = np.ones((3, 1))
    back = np.linalg.solve(np.hstack([moved, ones]), points)
    matrix, start = np.eye(3), np.zeros(3)
    matrix[:2, :2], start[:2] = back[:2].T, back[2]
    x = ndimage.affine_transform(x, matrix, start, order=1, mode="mirror")
    noise = rng.uniform(-1.0, 1.0, size=(2, height, width))
    smooth = [
        size * shift * ndimage.gaussian_filter(n, size * smoothness, mode="reflect", truncate=3)
        for n in noise
    ]
    where = np.mgrid[:height, :width] + np.stack(smooth)
    channels = [
        ndimage.map_coordinates(x[:, :, c], where, order=1, mode="reflect")
        for c in range(x.shape[2])
    ]
    return np.stack(channels, axis=2)


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


_FUNCTIONS: dict[str, Callable[[Image, int, Generator], Image]] = {
    function.__name__[1:]: function
    for function in (
        _gaussian_noise,
        _shot_noise,
        _impulse_noise,
        _speckle_noise,
        _gaussian_blur,
        _defocus_blur,
        _glass_blur,
        _motion_blur,
        _zoom_blur,
        _snow,
        _frost,
        _fog,
        _brightness,
        _contrast,
        _elastic_transform,
        _pixelate,
        _jpeg_compression,
    )
}

ALL_KINDS: tuple[str, ...] = tuple(_FUNCTIONS)
"""The benchmark's fifteen kinds and two of its four additional ones."""

BENCHMARK_KINDS: tuple[str, ...] = tuple(
    kind for kind in ALL_KINDS if kind not in ("speckle_noise", "gaussian_blur")
)
"""The benchmark's fifteen kinds, for RGB images of 32 × 32 pixels."""

KINDS: tuple[str, ...] = tuple(
    kind for kind in ALL_KINDS if kind not in ("glass_blur", "snow", "frost", "elastic_transform")
)
"""Kinds whose distance to the clean image grows with the severity, for grey and tiny images too."""
