"""The fifteen kinds of corruption of the benchmark; four need at least 32 × 32 pixels.

The lengths of the elastic transform scale with the image size. `frost` is a synthetic texture,
since the texture of the benchmark is cut from photographs.
"""

import numpy as np
from jaxtyping import Float
from numpy.random import Generator
from scipy import ndimage

from laplace_debias.sources.corruptions import KINDS, Image, streaked, value_noise, zoomed


def _glass_blur(x: Image, severity: int, rng: Generator) -> Image:
    """Blur, swap neighbouring pixels at random, and blur again."""
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
        # Each swap acts on the result of the earlier swaps, so the order of the pixels matters.
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                right, down = steps[number][row - 1][column - 1]
                pixel = row * width + column
                neighbour = (row + down) * width + column + right
                order[pixel], order[neighbour] = order[neighbour], order[pixel]
    shuffled = blurred.reshape(-1, channels)[order].reshape(x.shape)
    return ndimage.gaussian_filter(shuffled, (sigma, sigma, 0.0), mode="nearest")


def _snow(x: Image, severity: int, rng: Generator) -> Image:
    """Add falling snowflakes, and whiten the image."""
    mean, spread, zoom, threshold, radius, sigma, weight = (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    )[severity - 1]
    flakes = zoomed(mean + spread * rng.standard_normal((*x.shape[:2], 1)), zoom)
    flakes = np.where(flakes < threshold, 0.0, flakes.clip(0.0, 1.0))
    falling = streaked(flakes, radius, sigma, rng.uniform(-135.0, -45.0))
    whitened = np.maximum(x, 1.5 * _grey(x) + 0.5)
    return weight * x + (1.0 - weight) * whitened + falling + np.rot90(falling, 2)


def _grey(x: Image) -> Float[np.ndarray, "height width 1"]:
    """Return the brightness of each pixel."""
    if x.shape[2] == 1:
        return x
    return (x @ np.array([0.299, 0.587, 0.114]))[:, :, None]


def _frost(x: Image, severity: int, rng: Generator) -> Image:
    """Add crystals of frost, and darken the image."""
    weight, amount = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    height, width = x.shape[:2]
    # The crystals are the ridges of noise at several scales, and are denser towards the border.
    crystals = np.zeros((height, width))
    for octave in range(1, int(np.ceil(np.log2(max(height, width)))) + 1):
        crystals += (1.0 - np.abs(2.0 * value_noise(height, width, octave, rng) - 1.0)) ** 2
    crystals /= crystals.max()
    rows, columns = np.mgrid[-1.0 : 1.0 : height * 1j, -1.0 : 1.0 : width * 1j]
    crystals *= 0.6 + 0.4 * np.maximum(np.abs(rows), np.abs(columns))
    tint = np.array([0.85, 0.95, 1.0]) if x.shape[2] == 3 else np.array([0.93])
    return weight * x + amount * crystals[:, :, None] * tint


def _elastic_transform(x: Image, severity: int, rng: Generator) -> Image:
    """Shift and stretch the image by a random affine map and a smooth random field."""
    shift, smoothness, corner = (
        (0.0, 0.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    height, width = x.shape[:2]
    size = min(height, width)
    # An affine map moves three points of the middle square by random shifts.
    third = size // 3
    centre = np.array([height // 2, width // 2])
    points = centre + np.array([[third, third], [-third, third], [-third, -third]])
    moved = points + size * corner * rng.uniform(-1.0, 1.0, size=points.shape)
    ones = np.ones((3, 1))
    back = np.linalg.solve(np.hstack([moved, ones]), points)
    matrix = np.eye(3)
    matrix[:2, :2] = back[:2].T
    start = np.zeros(3)
    start[:2] = back[2]
    x = ndimage.affine_transform(x, matrix, start, order=1, mode="mirror")
    noise = rng.uniform(-1.0, 1.0, size=(2, height, width))
    displacements = [
        size * shift * ndimage.gaussian_filter(n, size * smoothness, mode="reflect", truncate=3)
        for n in noise
    ]
    coordinates = np.mgrid[:height, :width] + np.stack(displacements)
    channels = [
        ndimage.map_coordinates(x[:, :, c], coordinates, order=1, mode="reflect")
        for c in range(x.shape[2])
    ]
    return np.stack(channels, axis=2)


_KINDS = {
    **KINDS,
    "glass_blur": _glass_blur,
    "snow": _snow,
    "frost": _frost,
    "elastic_transform": _elastic_transform,
}
_ORDER = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
# The order matters, because the random choice of a kind is an index.
BENCHMARK_KINDS = {name: _KINDS[name] for name in _ORDER}
"""The benchmark's fifteen kinds, for RGB images of 32 × 32 pixels."""
