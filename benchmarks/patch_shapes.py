"""Times of all ways to compute a convolution's input factor, and the chosen way.

`python -m benchmarks.patch_shapes` prints a table for 54 shapes: medians in milliseconds, on one
thread. With `--docs`, it writes `docs/patch_shapes.md`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import markdown_table
from laplace_debias.curvature.fits.gram_factor import add_gram
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layer_rules.patches import (
    fastest_moments,
    has_displacements,
    patch_moments,
)
from laplace_debias.curvature.layer_rules.row_products import has_row_products, row_moments
from laplace_debias.curvature.layers.blocks import curvature_blocks

# Each entry is: channels, kernel, image size, stride, padding.
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
# Each entry is: dimensions, channels, kernel, image size, stride, padding, dilation, groups.
FURTHER_SHAPES = (
    (2, 16, 3, 28, 1, 2, 2, 1),
    (2, 64, 3, 14, 1, 2, 2, 1),
    (2, 64, 3, 28, 1, 4, 4, 1),
    (2, 16, 5, 28, 1, 4, 2, 1),
    (2, 64, 3, 14, 1, 1, 1, 4),
    (2, 128, 3, 14, 1, 1, 1, 32),
    (2, 96, 3, 28, 2, 1, 1, 8),
    (1, 1, 7, 128, 1, 3, 1, 1),
    (1, 32, 3, 128, 1, 1, 1, 1),
    (1, 64, 9, 256, 1, 4, 1, 1),
    (1, 64, 3, 256, 1, 4, 4, 1),
    (1, 64, 5, 128, 2, 2, 1, 2),
    (3, 1, 3, 16, 1, 1, 1, 1),
    (3, 16, 3, 8, 1, 1, 1, 1),
)
_LAYER_TYPES: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NUM_ROUNDS = 9
DISPLACED = "displaced"
ROWS = "rows"
UNFOLDED = "unfolded"
# The names of the ways, by what `fastest_moments` returns.
_WAYS: dict[Any, str] = {patch_moments: DISPLACED, row_moments: ROWS, None: UNFOLDED}


@dataclass(frozen=True)
class Shape:
    """A convolution and the size of its images; all dimensions of an image are equal.

    Attributes:
        dims: The number of dimensions of an image.
        channels: The number of input channels.
        kernel: The size of the kernel.
        size: The size of an image.
        stride: The stride.
        padding: The padding on each side.
        dilation: The dilation.
        groups: The number of groups.
    """

    dims: int
    channels: int
    kernel: int
    size: int
    stride: int
    padding: int
    dilation: int
    groups: int


@dataclass(frozen=True)
class Measurement:
    """The times for one shape.

    Attributes:
        shape: The shape.
        num_examples: The number of images of the batch.
        times: The time of each way that supports the shape, in milliseconds.
        choice: The way that the cost model chooses.
    """

    shape: Shape
    num_examples: int
    times: dict[str, float]
    choice: str

    @property
    def ratio(self) -> float:
        """The time of the chosen way divided by the time of the fastest way."""
        return self.times[self.choice] / min(self.times.values())


def median_times(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Return each function's median milliseconds over rounds in which all are called."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(_NUM_ROUNDS):
        for function, function_times in zip(functions, times, strict=True):
            # Processor time is measured, because other programs affect it less.
            start = time.thread_time()
            function()
            function_times.append(1e3 * (time.thread_time() - start))
    return [statistics.median(function_times) for function_times in times]


def unfolded_moments(layer: nn.Module, block: Block, x: Tensor) -> Tensor:
    """Compute the input factor from unfolded patches, a slice of the examples at a time."""
    factor = x.new_zeros(block.factor_shapes[1])
    for examples in block.rule.slices(layer, block, x):
        add_gram(factor, block.rule.activation_rows(layer, block, x[examples]))
    return factor


def moments_of_groups(
    layer: nn.Module, x: Tensor, moments: Callable[[Any, Tensor], Tensor]
) -> list[Tensor]:
    """Compute the input factors of all groups without unfolding patches."""
    return [moments(layer, channels) for channels in x.chunk(layer.groups, dim=1)]  # type: ignore[arg-type]


def measure_shape(shape: Shape) -> Measurement:
    """Measure all ways that support a shape."""
    layer = _LAYER_TYPES[shape.dims](
        shape.channels,
        8 * shape.groups,
        shape.kernel,
        shape.stride,
        shape.padding,
        shape.dilation,
        shape.groups,
        bias=False,
    )
    (block,) = curvature_blocks(layer, ["weight"])
    num_examples = 64 if shape.channels * shape.size**shape.dims < 40_000 else 16
    x = torch.randn(num_examples, shape.channels, *[shape.size] * shape.dims)
    ways: dict[str, Callable[[], object]] = {}
    if has_displacements(layer):
        ways[DISPLACED] = partial(moments_of_groups, layer, x, patch_moments)
    if has_row_products(layer):
        ways[ROWS] = partial(moments_of_groups, layer, x, row_moments)
    ways[UNFOLDED] = partial(unfolded_moments, layer, block, x)
    times = dict(zip(ways, median_times(list(ways.values())), strict=True))
    choice = _WAYS[fastest_moments(layer, shape.groups, x)]
    return Measurement(shape, num_examples, times, choice)


def measure_shapes() -> list[Measurement]:
    """Measure every shape."""
    shapes = [Shape(2, *numbers, dilation=1, groups=1) for numbers in SHAPES]
    shapes += [Shape(*numbers) for numbers in FURTHER_SHAPES]
    return [measure_shape(shape) for shape in shapes]


def table_row(measurement: Measurement) -> dict[str, object]:
    """Return the row of a shape; a dash stands for a way that does not support it."""
    shape = measurement.shape
    row: dict[str, object] = {
        "channels": shape.channels,
        "kernel": " × ".join([str(shape.kernel)] * shape.dims),
        "image": " × ".join([str(shape.size)] * shape.dims),
        "stride": shape.stride,
        # A zero would be shown as a dash.
        "padding": str(shape.padding),
        "dilation": shape.dilation,
        "groups": shape.groups,
        "examples": measurement.num_examples,
    }
    for way in (DISPLACED, ROWS, UNFOLDED):
        row[f"{way}, ms"] = None
        if way in measurement.times:
            row[f"{way}, ms"] = f"{measurement.times[way]:.2f}"
    row["choice"] = measurement.choice
    row["choice / best"] = f"{measurement.ratio:.2f}"
    return row


def page(measurements: Sequence[Measurement]) -> str:
    """Return the page of the documentation."""
    worst_ratio = max(measurement.ratio for measurement in measurements)
    table = markdown_table([table_row(measurement) for measurement in measurements])
    return (
        "# Shapes of convolutions\n\n"
        "The input factor of a convolution can be computed in three ways: by unfolding the "
        "patches; from products of the image with displaced copies of itself, corrected at the "
        "border; or from products of the image's rows with the rows below them. A cost model "
        "counts the operations that each way takes for the given shapes, and the way with the "
        "fewest operations is chosen. For 54 shapes, the table shows how long each way takes and "
        "which one the cost model chooses. In three dimensions, patches are always unfolded.\n\n"
        "`python -m benchmarks.patch_shapes --docs` writes this page. The times are median "
        f"processor times over {_NUM_ROUNDS} rounds, each of which measures all ways in turn, in "
        "float32, on one thread of an AMD EPYC with 2 cores. The chosen way takes "
        f"at most {worst_ratio:.2f} times as long as the fastest one.\n\n{table}\n"
    )


def main() -> None:
    """Print the table, or write it to the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch_shapes", description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write docs/patch_shapes.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = page(measure_shapes())
    print(text)
    if options.docs:
        path = Path(__file__).parent.parent / "docs" / "patch_shapes.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
