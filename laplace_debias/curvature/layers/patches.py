"""Second moments of a convolution's patches, without the patches.

`A = Σ_n Σ_t a aᵀ` over unfolded patches pairs every kernel offset with every other: 81 products of
channel vectors a position for a 3×3 kernel. With stride 1, the product of two offsets depends on
their displacement alone, up to the border: one product of the image with a shifted copy of itself
serves every pair of offsets at that displacement, and displacements come in pairs that are each
other's transposes, so 13 products are enough. What a pair must not count lies in a few rows and
columns at the border, which are subtracted.

With stride s an offset sees every s-th pixel, those of one phase. The same then holds of the
images of two phases: 36 products for a 3×3 kernel with stride 2.
"""

import itertools
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

LARGE = 2**18
"""From so many multiplications in a product of two offsets on `patch_moments` is faster.

It takes a few products for every pair of offsets. Where these are small, as with one channel per
group, they cost more than the unfolded patches do.
"""


def has_displacements(layer: nn.Module) -> bool:
    """Whether `patch_moments` serves a layer: a kernel wider than one, zero padding."""
    return (
        isinstance(layer, (nn.Conv1d, nn.Conv2d))
        and layer.padding_mode == "zeros"
        and max(layer.kernel_size) > 1
    )


def patch_moments(
    layer: nn.Conv1d | nn.Conv2d, x: Float[Tensor, "batch channels *space"]
) -> Float[Tensor, "d_in d_in"]:
    """`Σ_n Σ_t a aᵀ` over the patches of one group, in `unfold`'s order, exact to rounding."""
    # As F.pad takes it: the last dimension first, before and behind.
    padding = layer._reversed_padding_repeated_twice
    margins = zip(padding[-2::-2], padding[::-2], strict=True)
    geometry = layer.kernel_size, layer.dilation, layer.stride, x.shape[2:], margins
    along = [_Offsets(*key) for key in zip(*geometry, strict=True)]
    if x.ndim == 3:
        x, along = x.unsqueeze(2), [_Offsets(1, 1, 1, 1, (0, 0)), *along]
    rows, columns = along
    channels, sizes = x.shape[1], (rows.size, columns.size)
    A = x.new_zeros(*sizes, *sizes, channels, channels)
    phases = itertools.product(sorted(set(rows.phases)), sorted(set(columns.phases)))
    layouts = torch.channels_last, torch.contiguous_format
    layout = layouts[not x.is_contiguous(memory_format=torch.channels_last)]
    images = [(of, x[:, :, of[0] :: rows.stride, of[1] :: columns.stride]) for of in phases]
    images = [(of, part.contiguous(memory_format=layout)) for of, part in images if part.numel()]
    for here, there in itertools.combinations_with_replacement(images, 2):
        _write(A, rows, columns, here, there)
    return A.permute(4, 0, 1, 5, 2, 3).reshape(channels * rows.size * columns.size, -1)


class _Offsets:
    """Kernel offsets along one dimension of the image.

    From output position t offset k sees pixel `t·stride + k·dilation − before`: of the pixels of
    its phase, `x[phase::stride]`, that at `t + place`.
    """

    def __init__(
        self, size: int, dilation: int, stride: int, length: int, margins: tuple[int, int]
    ) -> None:
        self.size, self.stride, self._length = size, stride, length
        # That between displacements.
        self.step = dilation if stride == 1 else 1
        seen = [divmod(k * dilation - margins[0], stride) for k in range(size)]
        self._places, self.phases = zip(*seen, strict=True)
        self._positions = (length + sum(margins) - (size - 1) * dilation - 1) // stride + 1

    def pairs(self, here: int, there: int) -> dict[tuple[int, int], int]:
        """Pairs of offsets, the first of one phase, the second of another: their displacement."""
        pairs = itertools.product(range(self.size), repeat=2)
        wanted = here, there
        return {
            (i, k): self._places[k] - self._places[i]
            for i, k in pairs
            if (self.phases[i], self.phases[k]) == wanted
        }

    def between(self, displacements: Iterable[int]) -> range:
        """All from the least to the greatest, 0 among them."""
        found = [0, *displacements]
        return range(min(found), max(found) + 1, self.step)

    def excluded(self, i: int, k: int) -> list[int]:
        """Pixels r of its phase that a pair must not count.

        Of all r for which r and its displaced partner lie in the image, those that offset i does
        not see from any output position.
        """
        shift, first = self._places[k] - self._places[i], self._places[i]
        n, m = (len(range(self.phases[of], self._length, self.stride)) for of in (i, k))
        inside = range(max(0, -shift), min(n, m - shift))
        return [r for r in inside if not first <= r < first + self._positions]


def _write(
    A: Float[Tensor, "height width height width channels channels"],
    rows: _Offsets,
    columns: _Offsets,
    *images: tuple[tuple[int, int], Float[Tensor, "batch channels _ _"]],
) -> None:
    """Write the products of offsets of two phases, and their transposes."""
    phases, (here, there) = zip(*images, strict=True)
    (of_rows, of_columns) = (
        along.pairs(*of)
        for along, of in zip((rows, columns), zip(*phases, strict=True), strict=True)
    )
    if phases[0] == phases[1]:
        # One of each two opposite displacements.
        of_rows = {pair: down for pair, down in of_rows.items() if down >= 0}
    down, right = rows.between(of_rows.values()), columns.between(of_columns.values())
    # A product at every displacement is the weight gradient of a convolution, of which one image is
    # the input and the other the output gradients.
    behind = [here.shape[dim] - there.shape[dim] for dim in (2, 3)]
    whole = conv2d_weight(
        F.pad(there, (-right[0], right[-1] + behind[1], -down[0], down[-1] + behind[0])),
        (here.shape[1], here.shape[1], len(down), len(right)),
        here,
        dilation=(rows.step, columns.step),
    )
    whole = whole.permute(2, 3, 0, 1).contiguous()

    @cache
    def confined(dy: int, dx: int, row: int | None, column: int | None) -> Tensor:
        (y, y_there), (z, z_there) = (
            _slices(at, shift, here.shape[dim], there.shape[dim])
            for at, shift, dim in ((row, dy, 2), (column, dx, 3))
        )
        return torch.einsum("nchw,ndhw->cd", here[:, :, y, z], there[:, :, y_there, z_there])

    for ((i, k), dy), ((j, m), dx) in itertools.product(of_rows.items(), of_columns.items()):
        total = whole[down.index(dy), right.index(dx)].clone()
        # By inclusion and exclusion.
        border = itertools.product((None, *rows.excluded(i, k)), (None, *columns.excluded(j, m)))
        for row, column in list(border)[1:]:
            total.add_(confined(dy, dx, row, column), alpha=-1 if None in (row, column) else 1)
        A[i, j, k, m] = total
        A[k, m, i, j] = total.T


def _slices(at: int | None, shift: int, here: int, there: int) -> tuple[slice, slice]:
    """The pixels of one row or column, all if None, and their displaced partners."""
    start = max(0, -shift) if at is None else at
    stop = max(start, min(here, there - shift)) if at is None else at + 1
    return slice(start, stop), slice(start + shift, stop + shift)
