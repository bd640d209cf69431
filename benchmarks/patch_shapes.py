"""Time of both ways to a convolution's input factor, for 40 shapes, and the way that is chosen.

`python -m benchmarks.patch_shapes` prints a table: medians in milliseconds on one thread.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.directions import add_moments
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layer_rules.patches import displacements_are_faster, patch_moments
from laplace_debias.curvature.layers.blocks import curvature_blocks

# Channels, kernel, image size, stride, padding.
SHAPES = (
    (1, 3, 28, 1, 1),
    (1, 5, 28, 1, 0),
    (1, 5, 28, 1, 2),
    (1, 7, 28, 1, 3),
    (3, 3, 32, 1, 1),
    (3, 3, 32, 1, 0),
    (3, 4, 64, 4, 0),
    (3, 5, 32, 1, 0),
    (3, 7, 64, 2, 3),
    (3, 7, 224, 2, 3),
    (3, 11, 64, 4, 2),
    (4, 5, 28, 1, 2),
    (6, 5, 14, 1, 0),
    (6, 5, 12, 1, 0),
    (8, 3, 28, 1, 1),
    (16, 3, 8, 1, 1),
    (16, 3, 28, 1, 1),
    (16, 3, 28, 2, 1),
    (16, 5, 14, 1, 2),
    (20, 5, 12, 1, 0),
    (32, 3, 14, 1, 1),
    (32, 3, 26, 1, 0),
    (32, 3, 28, 1, 1),
    (32, 3, 28, 2, 1),
    (32, 5, 14, 1, 2),
    (48, 5, 27, 1, 2),
    (64, 3, 7, 1, 1),
    (64, 3, 14, 1, 1),
    (64, 3, 56, 1, 1),
    (64, 3, 56, 2, 1),
    (64, 5, 8, 1, 2),
    (96, 3, 32, 1, 1),
    (128, 3, 14, 2, 1),
    (128, 3, 28, 1, 1),
    (192, 3, 8, 1, 0),
    (192, 3, 16, 1, 1),
    (256, 3, 14, 1, 1),
    (256, 3, 8, 1, 1),
    (384, 3, 13, 1, 1),
    (512, 3, 7, 1, 1),
)
_NUM_REPETITIONS = 5


def median_time(function: Callable[[], object]) -> float:
    """Milliseconds of a call, as the median of a few."""
    function()
    times = []
    for _ in range(_NUM_REPETITIONS):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def unfolded_moments(layer: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The input factor from unfolded patches, a slice of the examples at a time."""
    factor = x.new_zeros(block.shape[1], block.shape[1])
    for examples in block.rule.slices(layer, block, x):
        rows = block.rule.activations(layer, block, x[examples])
        add_moments(factor, rows.flatten(0, 1))
    return factor


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("channels kernel image stride padding  displaced ms  unfolded ms  chosen / best")
    worst = 1.0
    for channels, kernel, size, stride, padding in SHAPES:
        layer = nn.Conv2d(channels, 8, kernel, stride, padding, bias=False)
        (block,) = curvature_blocks(layer, ["weight"])
        batch = 64 if channels * size**2 < 40_000 else 16
        x = torch.randn(batch, channels, size, size)
        displaced = median_time(partial(patch_moments, layer, x))
        unfolded = median_time(partial(unfolded_moments, layer, block, x))
        chosen = displaced if displacements_are_faster(layer, 1, x) else unfolded
        ratio = chosen / min(displaced, unfolded)
        worst = max(worst, ratio)
        print(
            f"{channels:8d} {kernel:6d} {size:5d} {stride:6d} {padding:7d} "
            f"{displaced:13.2f} {unfolded:12.2f} {ratio:14.2f}"
        )
    print(f"The choice takes at most {worst:.2f} times the better time.")


if __name__ == "__main__":
    main()
