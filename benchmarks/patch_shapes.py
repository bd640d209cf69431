"""Times of all ways to compute a convolution's input factor, and the chosen way.

`python -m benchmarks.patch_shapes` prints a table for 54 shapes: medians in milliseconds, on one
thread. With `--docs`, it writes `docs/patch_shapes.md`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
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
_NAMES: dict[Any, str] = {patch_moments: "displaced", row_moments: "rows", None: "unfolded"}


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


def measure_shapes() -> tuple[list[dict[str, object]], float]:
    """Measure every shape; return the rows, and the largest ratio of the choice to the best."""
    rows: list[dict[str, object]] = []
    worst = 1.0
    shapes = [(2, *shape, 1, 1) for shape in SHAPES]
    for dims, channels, kernel, size, stride, padding, dilation, groups in (
        *shapes,
        *FURTHER_SHAPES,
    ):
        layer = _LAYER_TYPES[dims](
            channels,
            8 * groups,
            kernel,
            stride,
            padding,
            dilation,
            groups,
            bias=False,
        )
        (block,) = curvature_blocks(layer, ["weight"])
        batch = 64 if channels * size**dims < 40_000 else 16
        x = torch.randn(batch, channels, *[size] * dims)
        ways: dict[Any, Callable[[], object]] = {}
        if has_displacements(layer):
            ways[patch_moments] = partial(moments_of_groups, layer, x, patch_moments)
        if has_row_products(layer):
            ways[row_moments] = partial(moments_of_groups, layer, x, row_moments)
        ways[None] = partial(unfolded_moments, layer, block, x)
        times = dict(zip(ways, median_times(list(ways.values())), strict=True))
        chosen = fastest_moments(layer, groups, x)
        ratio = times[chosen] / min(times.values())
        worst = max(worst, ratio)
        row: dict[str, object] = {
            "channels": channels,
            "kernel": " × ".join([str(kernel)] * dims),
            "image": " × ".join([str(size)] * dims),
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
            "examples": batch,
            "displaced, ms": _milliseconds(times.get(patch_moments)),
            "rows, ms": _milliseconds(times.get(row_moments)),
            "unfolded, ms": _milliseconds(times[None]),
            "choice": _NAMES[chosen],
            "choice / best": f"{ratio:.2f}",
        }
        rows.append({name: str(value) for name, value in row.items()})
    return rows, worst


def _milliseconds(time: float | None) -> str:
    """Format a time; a dash stands for a way that does not support the shape."""
    return "–" if time is None else f"{time:.2f}"


def page(rows: list[dict[str, object]], worst: float) -> str:
    """Return the page of the documentation."""
    return (
        "# Shapes of convolutions\n\n"
        "The input factor of a convolution is computed in one of three ways: by unfolding the "
        "patches; from products of the image with displaced copies of itself, corrected at the "
        "border; or from products of the image's rows with the rows below them. From the "
        "shapes, a cost model counts the operations that each way takes. The way with the fewest "
        "operations is chosen. For 54 shapes, the table shows how long each way takes, and which "
        "way the cost model chooses. In three dimensions patches are always unfolded.\n\n"
        "`python -m benchmarks.patch_shapes --docs` writes this page. The times are medians of "
        f"processor time over {_NUM_ROUNDS} rounds. Each round measures all ways in turn, in "
        "float32, on one thread of an AMD EPYC with 2 cores. The chosen way takes "
        f"at most {worst:.2f} times as long as the fastest one.\n\n{markdown_table(rows)}\n"
    )


def main() -> None:
    """Print the table, or write it to the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch_shapes", description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write docs/patch_shapes.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = page(*measure_shapes())
    print(text)
    if options.docs:
        path = Path(__file__).parent.parent / "docs" / "patch_shapes.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
