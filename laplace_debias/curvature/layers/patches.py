"""Second moments of a convolution's patches, without the patches.

`A = Σ_n Σ_t a aᵀ` over unfolded patches pairs every kernel offset with every other: 81 products of
channel vectors a position for a 3×3 kernel. With stride 1, the product of two offsets depends on
their displacement alone, up to the border: one product of the image with a shifted copy of itself
serves every pair of offsets at that displacement, and displacements come in pairs that are each
other's transposes, so 13 products are enough. What a pair must not count lies in a few rows and
columns at the border, which are subtracted.
"""

import itertools

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# Images laid out for the products are at most so many numbers at a time.
_SLICE = 2**22
LARGE = 2**18
"""From so many multiplications in a product of two offsets on `patch_moments` is faster.

It takes a few products for every pair of offsets. Where these are small, as with one channel per
group, they cost more than the unfolded patches do.
"""


def has_displacements(layer: nn.Module) -> bool:
    """Whether `patch_moments` serves a layer: a kernel wider than one, stride 1, zero padding."""
    return (
        isinstance(layer, (nn.Conv1d, nn.Conv2d))
        and set(layer.stride) == {1}
        and layer.padding_mode == "zeros"
        and max(layer.kernel_size) > 1
    )


def patch_moments(
    layer: nn.Conv1d | nn.Conv2d, x: Float[Tensor, "batch channels *space"]
) -> Float[Tensor, "d_in d_in"]:
    """`Σ_n Σ_t a aᵀ` over the patches of one group, in `unfold`'s order, exact to rounding."""
    x = x.unsqueeze(2) if x.ndim == 3 else x
    kernel, dilation = tuple(layer.kernel_size), tuple(layer.dilation)
    # As F.pad takes it: the last dimension first, before and behind.
    padding = layer._reversed_padding_repeated_twice
    margins = list(zip(padding[-2::-2], padding[::-2], strict=True))
    if len(kernel) == 1:
        kernel, dilation, margins = (1, *kernel), (1, *dilation), [(0, 0), *margins]
    rows, columns = (
        _Offsets(*key) for key in zip(kernel, dilation, x.shape[2:], margins, strict=True)
    )
    image = (rows.length + rows.gap) * (columns.length + columns.gap) * x.shape[1]
    products = _Products(rows, columns)
    for part in x.split(max(1, _SLICE // image)):
        products.add(part)
    return products.assemble()


class _Offsets:
    """Kernel offsets along one dimension of the image.

    Offset k of the kernel sees pixel `t + k·dilation − before` from output position t.
    """

    def __init__(self, size: int, dilation: int, length: int, margins: tuple[int, int]) -> None:
        self.size = size
        self.dilation = dilation
        self.length = length
        self.gap = (size - 1) * dilation
        self._before = margins[0]
        self._positions = length + sum(margins) - self.gap

    def pairs(self, displacement: int) -> list[tuple[int, int]]:
        """Pairs of offsets `(k, k + displacement)`."""
        ks = range(max(0, -displacement), min(self.size, self.size - displacement))
        return [(k, k + displacement) for k in ks]

    def excluded(self, k: int, displacement: int) -> list[int]:
        """Pixels r that the pair `(k, k + displacement)` must not count.

        Of all r for which r and its displaced partner lie in the image, those that offset k does
        not see from any output position.
        """
        shift = displacement * self.dilation
        first = k * self.dilation - self._before
        inside = range(max(0, -shift), min(self.length, self.length - shift))
        return [r for r in inside if not first <= r < first + self._positions]


class _Products:
    """Products of images with displaced copies of themselves, whole and along the border."""

    def __init__(self, rows: _Offsets, columns: _Offsets) -> None:
        self._rows = rows
        self._columns = columns
        # One of each two opposite displacements.
        self._displacements = [
            (dy, dx)
            for dy in range(rows.size)
            for dx in range(1 - columns.size if dy else 0, columns.size)
        ]
        # By displacement, and the row, column or pixel that the product is confined to.
        self._sums: dict[tuple[int, int, int | None, int | None], Tensor] = {}

    def add(self, x: Float[Tensor, "batch channels height width"]) -> None:
        """Add the products of some images."""
        # Pixels as rows of a matrix, with zeros between lines and between images, so that a
        # displaced copy of all images is a slice of the same matrix.
        gaps = (0, 0, 0, self._columns.gap, 0, self._rows.gap)
        image = F.pad(x.permute(0, 2, 3, 1), gaps)
        pixels = image.reshape(-1, x.shape[1])
        for dy, dx in self._displacements:
            down, right = dy * self._rows.dilation, dx * self._columns.dilation
            shift = down * image.shape[2] + right
            self._add((dy, dx, None, None), pixels[: len(pixels) - shift], pixels[shift:])
            border_rows = self._border(self._rows, dy)
            border_columns = self._border(self._columns, dx)
            for r, c in itertools.product([None, *border_rows], [None, *border_columns]):
                if r is not None or c is not None:
                    self._add((dy, dx, r, c), *_confined(image, r, c, down, right))

    def _add(self, key: tuple[int, int, int | None, int | None], a: Tensor, b: Tensor) -> None:
        if key in self._sums:
            self._sums[key].addmm_(a.T, b)
        else:
            self._sums[key] = a.T @ b

    @staticmethod
    def _border(offsets: _Offsets, displacement: int) -> list[int]:
        excluded = [offsets.excluded(k, displacement) for k, _ in offsets.pairs(displacement)]
        return sorted(set(itertools.chain(*excluded)))

    def assemble(self) -> Float[Tensor, "d_in d_in"]:
        """The matrix of all pairs of offsets, by inclusion and exclusion."""
        some = self._sums[0, 0, None, None]
        height, width, channels = self._rows.size, self._columns.size, len(some)
        A = some.new_empty(height, width, height, width, channels, channels)
        for dy, dx in self._displacements:
            for (i, k), (j, m) in itertools.product(self._rows.pairs(dy), self._columns.pairs(dx)):
                total = self._sums[dy, dx, None, None].clone()
                rows, columns = self._rows.excluded(i, dy), self._columns.excluded(j, dx)
                for r in rows:
                    total -= self._sums[dy, dx, r, None]
                for c in columns:
                    total -= self._sums[dy, dx, None, c]
                for r, c in itertools.product(rows, columns):
                    total += self._sums[dy, dx, r, c]
                A[i, j, k, m] = total
                A[k, m, i, j] = total.T
        return A.permute(4, 0, 1, 5, 2, 3).reshape(channels * height * width, -1)


def _confined(
    image: Float[Tensor, "batch height width channels"],
    row: int | None,
    column: int | None,
    down: int,
    right: int,
) -> tuple[Float[Tensor, "pixels channels"], Float[Tensor, "pixels channels"]]:
    """The pixels of one row, one column or both, and their displaced partners."""
    sizes = image.shape[1:3]
    starts = [max(0, -shift) if at is None else at for at, shift in ((row, down), (column, right))]
    stops = [
        size - max(0, shift) if at is None else at + 1
        for at, shift, size in zip((row, column), (down, right), sizes, strict=True)
    ]
    (y, x), (y_end, x_end) = starts, stops
    here = image[:, y:y_end, x:x_end]
    there = image[:, y + down : y_end + down, x + right : x_end + right]
    return here.flatten(0, 2), there.flatten(0, 2)
