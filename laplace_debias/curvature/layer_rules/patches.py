"""Second moments of a convolution's patches, computed without the patches.

Over unfolded patches, `A = Σ_n Σ_t a aᵀ` needs a product for every pair of kernel offsets: a 3×3
kernel has 81 products of channel vectors per position. With stride 1, the product of two offsets
depends only on their displacement, except at the border. One product of the image with a shifted
copy of itself therefore serves all pairs of offsets at that displacement. Opposite displacements
give transposed products, so 13 products are enough. The products that a pair of offsets must not
include lie in a few rows and columns at the border, and are subtracted.

With stride s, an offset reads every s-th pixel, and these pixels form a phase. The same then holds
for the images of two phases: 36 products are enough for a 3×3 kernel with stride 2.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from laplace_debias.curvature.layer_rules.row_products import (
    has_row_products,
    row_moments,
    seconds_by_rows,
)

# Seconds, measured on one thread of a processor with AVX-512 in single precision; only their ratios
# matter. `python -m benchmarks.patch_shapes` compares the choice with the times of all methods.
_SECONDS_PER_BORDER_PRODUCT = 1e-4
_SECONDS_PER_PAIR = 6e-5
_SECONDS_PER_PAIR_ENTRY = 1.5e-8
_SECONDS_PER_DISPLACED_PIXEL = 1.7e-9
_SECONDS_PER_DISPLACED_MULTIPLICATION = 2e-11
_SECONDS_PER_UNFOLDED_ENTRY = 4e-9
_SECONDS_PER_UNFOLDED_MULTIPLICATION = 2.2e-11
_SECONDS_TO_UNFOLD = 5e-4


class Phase(NamedTuple):
    """The row and the column of the first pixel of a phase."""

    row: int
    column: int


Pairs = dict[tuple[int, int], int]
"""Pairs of kernel offsets along one dimension, with their displacements."""


def fastest_moments(
    layer: Any, num_groups: int, x: Float[Tensor, "batch channels *space"]
) -> Callable[[Any, Tensor], Tensor] | None:
    """Choose the function that computes a group's second moments in the least time.

    The time of each function is estimated from the shapes.

    Returns:
        `patch_moments` or `row_moments`; None if unfolded patches are faster than both functions.
    """
    seconds: dict[Callable[[Any, Tensor], Tensor], float] = {}
    if has_displacements(layer):
        seconds[patch_moments] = seconds_by_displacements(layer, num_groups, x)
    if has_row_products(layer):
        seconds[row_moments] = seconds_by_rows(layer, num_groups, x)
    if not seconds:
        return None
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _seconds_to_unfold(layer, num_groups, x) else None


def seconds_by_displacements(
    layer: nn.Conv1d | nn.Conv2d, num_groups: int, x: Float[Tensor, "batch channels *space"]
) -> float:
    """Estimate the time of `patch_moments` for all groups.

    There are a few operations for every pair of offsets and for every row and column at the border.
    With few channels or without padding, these operations cost more than the unfolded patches.
    """
    rows, columns = _axes(layer, tuple(x.shape[2:]))
    counts = _count_products(rows, columns)
    channels = x.shape[1] // num_groups
    squared_channels = channels**2
    pixels = len(x) * (counts.displaced_pixels + counts.border_pixels)
    seconds = (
        counts.num_border_products * _SECONDS_PER_BORDER_PRODUCT
        + counts.num_pairs * _SECONDS_PER_PAIR
        + counts.num_pairs * squared_channels * _SECONDS_PER_PAIR_ENTRY
        + pixels * channels * _SECONDS_PER_DISPLACED_PIXEL
        + pixels * squared_channels * _SECONDS_PER_DISPLACED_MULTIPLICATION
    )
    return num_groups * seconds


def _seconds_to_unfold(
    layer: nn.Conv1d | nn.Conv2d, num_groups: int, x: Float[Tensor, "batch channels *space"]
) -> float:
    """Estimate the time of products of unfolded patches for all groups."""
    axes = _axes(layer, tuple(x.shape[2:]))
    d_in = x.shape[1] // num_groups * prod(axis.size for axis in axes)
    num_rows = len(x) * prod(axis.num_positions for axis in axes)
    seconds = (
        num_rows * d_in**2 * _SECONDS_PER_UNFOLDED_MULTIPLICATION
        + num_rows * d_in * _SECONDS_PER_UNFOLDED_ENTRY
        + _SECONDS_TO_UNFOLD
    )
    return num_groups * seconds


def has_displacements(layer: nn.Module) -> bool:
    """Whether `patch_moments` supports a layer: zero padding, and a kernel wider than one pixel."""
    return (
        isinstance(layer, (nn.Conv1d, nn.Conv2d))
        and layer.padding_mode == "zeros"
        and max(layer.kernel_size) > 1
    )


def patch_moments(
    layer: nn.Conv1d | nn.Conv2d, x: Float[Tensor, "batch channels *space"]
) -> Float[Tensor, "d_in d_in"]:
    """Compute `Σ_n Σ_t a aᵀ` over the patches of one group in the order of `unfold`."""
    rows, columns = _axes(layer, tuple(x.shape[2:]))
    if x.ndim == 3:
        x = x.unsqueeze(2)
    channels = x.shape[1]
    sizes = rows.size, columns.size
    A = x.new_zeros(*sizes, *sizes, channels, channels)
    layout = torch.contiguous_format
    if x.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    images: dict[Phase, Tensor] = {}
    for phase in _phases(rows, columns):
        image = x[:, :, phase.row :: rows.stride, phase.column :: columns.stride]
        if image.numel():
            images[phase] = image.contiguous(memory_format=layout)
    for first, second in itertools.combinations_with_replacement(images, 2):
        products = _products_of_offsets(
            rows, columns, (first, second), images[first], images[second]
        )
        for (i, k), (j, m), product in products:
            A[i, j, k, m] = product
            A[k, m, i, j] = product.T
    # From [k_h, k_w, k_h, k_w, C, C] to [C, k_h, k_w, C, k_h, k_w].
    return A.permute(4, 0, 1, 5, 2, 3).reshape(channels * rows.size * columns.size, -1)


def _axes(layer: nn.Conv1d | nn.Conv2d, shape: tuple[int, ...]) -> tuple["_Offsets", "_Offsets"]:
    """Return the kernel's offsets along rows and columns; a 1-D convolution has one row."""
    # `F.pad` takes the last dimension first, and for each dimension the margins before and after.
    padding = layer._reversed_padding_repeated_twice
    margins = zip(padding[-2::-2], padding[::-2], strict=True)
    axes: list[_Offsets] = []
    for dim, margins_along in enumerate(margins):
        offsets = _Offsets(
            size=layer.kernel_size[dim],
            dilation=layer.dilation[dim],
            stride=layer.stride[dim],
            length=shape[dim],
            margins=margins_along,
        )
        axes.append(offsets)
    if len(axes) == 1:
        single_row = _Offsets(size=1, dilation=1, stride=1, length=1, margins=(0, 0))
        return single_row, axes[0]
    return axes[0], axes[1]


@dataclass(frozen=True)
class _ProductCounts:
    """The numbers of products that `patch_moments` forms.

    Attributes:
        num_pairs: Pairs of kernel offsets whose product is written.
        num_border_products: Products of rows and columns at the border, which are subtracted.
        displaced_pixels: Pixels of one image in the products at all displacements.
        border_pixels: Pixels of one image in the border products.
    """

    num_pairs: int
    num_border_products: int
    displaced_pixels: int
    border_pixels: int


@cache
def _count_products(rows: "_Offsets", columns: "_Offsets") -> _ProductCounts:
    """Count the products that `patch_moments` forms for these offsets, without forming any."""
    num_pairs = 0
    num_border_products = 0
    displaced_pixels = 0
    border_pixels = 0
    for phases in itertools.combinations_with_replacement(_phases(rows, columns), 2):
        row_pairs, column_pairs = _pairs_of_phases(rows, columns, phases)
        num_pairs += len(row_pairs) * len(column_pairs)
        num_displacements = len(rows.between(row_pairs.values())) * len(
            columns.between(column_pairs.values())
        )
        height = rows.num_pixels(phases[0].row)
        width = columns.num_pixels(phases[0].column)
        displaced_pixels += num_displacements * height * width
        # One product for each row and each column, and for each pixel where they cross.
        confined_rows = rows.confined_displacements(row_pairs)
        confined_columns = columns.confined_displacements(column_pairs)
        unconfined = len(set(row_pairs.values())) * len(set(column_pairs.values()))
        num_products = len(confined_rows) * len(confined_columns) - unconfined
        num_border_products += num_products
        border_pixels += num_products * max(height, width) // 2
    return _ProductCounts(num_pairs, num_border_products, displaced_pixels, border_pixels)


@dataclass(frozen=True)
class _Offsets:
    """Kernel offsets along one dimension of the image.

    At output position t, offset k reads the pixel `t·stride + k·dilation − before`. This pixel has
    the index `t + shift` among the pixels of its phase, `x[phase::stride]`.

    Attributes:
        size: The number of offsets.
        dilation: The distance between two offsets.
        stride: The distance between two output positions.
        length: The image's size.
        margins: The padding before and after the image.
    """

    size: int
    dilation: int
    stride: int
    length: int
    margins: tuple[int, int]

    @property
    def step(self) -> int:
        """The distance between displacements."""
        return self.dilation if self.stride == 1 else 1

    @cached_property
    def _shifts_and_phases(self) -> list[tuple[int, int]]:
        first_margin = self.margins[0]
        return [divmod(k * self.dilation - first_margin, self.stride) for k in range(self.size)]

    @cached_property
    def shifts(self) -> list[int]:
        """For each offset, the pixel that output position 0 reads, as an index within its phase."""
        return [shift for shift, _ in self._shifts_and_phases]

    @cached_property
    def phases(self) -> list[int]:
        """For each offset, the phase of the pixels that it reads."""
        return [phase for _, phase in self._shifts_and_phases]

    @property
    def num_positions(self) -> int:
        """The number of output positions."""
        reach = (self.size - 1) * self.dilation
        return (self.length + sum(self.margins) - reach - 1) // self.stride + 1

    def num_pixels(self, phase: int) -> int:
        """Count the pixels of a phase."""
        return len(range(phase, self.length, self.stride))

    def pairs(self, first_phase: int, second_phase: int) -> Pairs:
        """Return pairs of offsets, one from each phase, with their displacements."""
        return {
            (i, k): self.shifts[k] - self.shifts[i]
            for i, k in itertools.product(range(self.size), repeat=2)
            if (self.phases[i], self.phases[k]) == (first_phase, second_phase)
        }

    def between(self, displacements: Iterable[int]) -> range:
        """Return all displacements from the least to the greatest, extended to include 0."""
        with_zero = [0, *displacements]
        return range(min(with_zero), max(with_zero) + 1, self.step)

    def excluded_pixels(self, i: int, k: int) -> list[int]:
        """Return the pixels of offset i's phase that a pair of offsets must not count.

        These pixels and their displaced partners lie in the image, but there is no output position
        at which offset i reads them.
        """
        shift = self.shifts[k] - self.shifts[i]
        first = self.shifts[i]
        num_pixels = self.num_pixels(self.phases[i])
        num_partners = self.num_pixels(self.phases[k])
        inside = range(max(0, -shift), min(num_pixels, num_partners - shift))
        return [r for r in inside if not first <= r < first + self.num_positions]

    def confined_displacements(self, pairs: Pairs) -> set[tuple[int, int | None]]:
        """Return pairs of a displacement with None and with each pixel that its offsets exclude."""
        confined: set[tuple[int, int | None]] = set()
        for (i, k), displacement in pairs.items():
            confined.add((displacement, None))
            confined.update((displacement, pixel) for pixel in self.excluded_pixels(i, k))
        return confined


def _phases(rows: _Offsets, columns: _Offsets) -> list[Phase]:
    """List the phases of the pixels that a kernel reads, in ascending order."""
    phases = itertools.product(sorted(set(rows.phases)), sorted(set(columns.phases)))
    return [Phase(row, column) for row, column in phases]


def _pairs_of_phases(
    rows: _Offsets, columns: _Offsets, phases: tuple[Phase, Phase]
) -> tuple[Pairs, Pairs]:
    """Return the pairs of row offsets and of column offsets whose products are needed.

    Every pair of row offsets is combined with every pair of column offsets. Within one phase,
    opposite displacements give transposed products, so upward displacements are left out.
    """
    first, second = phases
    row_pairs = rows.pairs(first.row, second.row)
    column_pairs = columns.pairs(first.column, second.column)
    if first == second:
        row_pairs = {pair: dy for pair, dy in row_pairs.items() if dy >= 0}
    return row_pairs, column_pairs


def _products_of_offsets(
    rows: _Offsets,
    columns: _Offsets,
    phases: tuple[Phase, Phase],
    image: Float[Tensor, "batch channels _ _"],
    partner: Float[Tensor, "batch channels _ _"],
) -> Iterator[tuple[tuple[int, int], tuple[int, int], Float[Tensor, "channels channels"]]]:
    """Yield the products of kernel offsets of two phases, summed over the output positions.

    Args:
        rows: The offsets along the rows.
        columns: The offsets along the columns.
        phases: The two phases.
        image: The pixels of the first phase.
        partner: The pixels of the second phase.

    Yields:
        The row offsets (i, k), the column offsets (j, m), and the product of the pixels that the
        offset (i, j) reads with the pixels that the offset (k, m) reads.
    """
    row_pairs, column_pairs = _pairs_of_phases(rows, columns, phases)
    down = rows.between(row_pairs.values())
    right = columns.between(column_pairs.values())
    products = _displaced_products(image, partner, down, right)
    confined_product = cache(partial(_confined_product, image, partner))
    for (i, k), dy in row_pairs.items():
        excluded_rows = rows.excluded_pixels(i, k)
        for (j, m), dx in column_pairs.items():
            excluded_columns = columns.excluded_pixels(j, m)
            product = products[down.index(dy), right.index(dx)].clone()
            # Subtract the products at the border by inclusion and exclusion.
            border = itertools.product((None, *excluded_rows), (None, *excluded_columns))
            for row, column in list(border)[1:]:
                is_crossing = row is not None and column is not None
                product.add_(confined_product(dy, dx, row, column), alpha=1 if is_crossing else -1)
            yield (i, k), (j, m), product


def _displaced_products(
    image: Float[Tensor, "batch channels _ _"],
    partner: Float[Tensor, "batch channels _ _"],
    down: range,
    right: range,
) -> Float[Tensor, "down right channels channels"]:
    """Compute the products of an image with its partner at all displacements, over all pixels.

    They are the weight gradient of a convolution: the partner is the input, and the image is the
    output gradients. The partner is padded so that the image, at its least displacement, begins at
    the first pixel, and at its greatest displacement, ends at the last pixel.
    """
    margin_above = -down[0]
    margin_below = down[-1] + image.shape[2] - partner.shape[2]
    margin_left = -right[0]
    margin_right = right[-1] + image.shape[3] - partner.shape[3]
    products = conv2d_weight(
        F.pad(partner, (margin_left, margin_right, margin_above, margin_below)),
        (image.shape[1], image.shape[1], len(down), len(right)),
        image,
        dilation=(down.step, right.step),
    )
    return products.permute(2, 3, 0, 1).contiguous()


def _confined_product(
    image: Float[Tensor, "batch channels _ _"],
    partner: Float[Tensor, "batch channels _ _"],
    dy: int,
    dx: int,
    row: int | None,
    column: int | None,
) -> Float[Tensor, "channels channels"]:
    """Compute the product at a displacement within one row, one column, or where they cross."""
    y, partner_y = _slices(row, dy, image.shape[2], partner.shape[2])
    z, partner_z = _slices(column, dx, image.shape[3], partner.shape[3])
    return torch.einsum("nchw,ndhw->cd", image[:, :, y, z], partner[:, :, partner_y, partner_z])


def _slices(pixel: int | None, shift: int, size: int, partner_size: int) -> tuple[slice, slice]:
    """Return slices of one pixel (of all pixels if it is None) and of the displaced partners."""
    if pixel is None:
        start = max(0, -shift)
        stop = max(start, min(size, partner_size - shift))
    else:
        start = pixel
        stop = pixel + 1
    return slice(start, stop), slice(start + shift, stop + shift)
