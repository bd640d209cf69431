"""Second moments of a convolution's patches, from products of the image's rows.

A patch consists of a few rows of the image, one below the other, of which each is as wide as the
kernel. So only the rows are unfolded: to `[height, C·k_w, batch·positions]`, where patches would
repeat each row for every kernel offset. The product of a row with itself and with those below, as
many as the kernel is high, serves every pair of the kernel's offsets at that distance: the sum over
the positions of the patches is a sum over rows.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# Numbers in the unfolded rows of a part of the examples: more do not fit the processor's cache.
_NUMBERS_AT_ONCE = 2**20
# Numbers in the products of the rows, which one block may take.
_MOST_PRODUCTS = 2**22
# Seconds, in the unit of those in `patches.py`, with which they are compared.
_SECONDS_PER_NUMBER = 3.2e-9
_SECONDS_PER_MULTIPLICATION = 3.3e-11
_SECONDS_PER_PRODUCT = 1.5e-8
_SECONDS_TO_BEGIN = 3.5e-4


def has_row_products(layer: nn.Module) -> bool:
    """Whether `row_moments` serves a layer: images, zero padding, rows that are neighbours."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.padding_mode == "zeros"
        and layer.kernel_size[0] > 1
        and layer.dilation[0] == 1
    )


def seconds_by_rows(
    layer: nn.Conv2d, num_groups: int, x: Float[Tensor, "batch channels height width"]
) -> float:
    """Estimate the time of `row_moments` for all groups; infinite if it takes much memory."""
    height, width = _num_rows_and_positions(layer, x)
    size = x.shape[1] // num_groups * layer.kernel_size[1]
    num_products = height * size**2 * layer.kernel_size[0]
    if num_products > _MOST_PRODUCTS:
        return float("inf")
    numbers = len(x) * height * width * size
    multiplications = num_products * len(x) * width
    seconds = (
        numbers * _SECONDS_PER_NUMBER
        + multiplications * _SECONDS_PER_MULTIPLICATION
        + num_products * _SECONDS_PER_PRODUCT
        + _SECONDS_TO_BEGIN
    )
    return num_groups * seconds


def row_moments(
    layer: nn.Conv2d, x: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "d_in d_in"]:
    """Compute `Σ_n Σ_t a aᵀ` over the patches of one group, in `unfold`'s order."""
    kernel_height, kernel_width = layer.kernel_size
    row_stride, column_stride = layer.stride
    reach = (kernel_width - 1) * layer.dilation[1] + 1
    num_rows, num_columns = _num_rows_and_positions(layer, x)
    padded = F.pad(x.contiguous(), layer._reversed_padding_repeated_twice)[:, :, :num_rows]
    pixels = padded.unfold(3, reach, column_stride)[..., :: layer.dilation[1]]
    channels = x.shape[1]
    size = channels * kernel_width
    products = x.new_zeros(num_rows, size, kernel_height * size)
    num_together = max(1, _NUMBERS_AT_ONCE // (num_rows * num_columns * size))
    for part in pixels.split(num_together):
        rows = part.permute(2, 1, 4, 0, 3).reshape(num_rows, size, -1).contiguous()
        _add_row_products(products, rows, kernel_height)
    sizes = channels, kernel_width
    A = x.new_empty(kernel_height, kernel_height, *sizes, *sizes)
    last_start = num_rows - kernel_height
    for i in range(kernel_height):
        # The rows that this offset of the kernel reads, with those below.
        total = products[i : i + last_start + 1 : row_stride].sum(0)
        by_distance = total.unflatten(1, (kernel_height, size)).movedim(1, 0)
        for k in range(i, kernel_height):
            product = by_distance[k - i]
            A[i, k] = product.view(*sizes, *sizes)
            A[k, i] = product.T.reshape(*sizes, *sizes)
    return A.permute(2, 0, 3, 4, 1, 5).reshape(size * kernel_height, size * kernel_height)


def _add_row_products(
    products: Float[Tensor, "height size below"],
    rows: Float[Tensor, "height size columns"],
    kernel_height: int,
) -> None:
    """Add the products of each row with itself and with the rows below."""
    # A view: rows that are neighbours in the image are neighbours in memory.
    windows = rows.unfold(0, kernel_height, 1).movedim(-1, 1).flatten(1, 2)
    num_windows = len(windows)
    products[:num_windows].baddbmm_(rows[:num_windows], windows.mT)
    for row in range(num_windows, len(rows)):
        last_rows = rows[row:].flatten(0, 1)
        products[row, :, : len(last_rows)].addmm_(rows[row], last_rows.T)


def _num_rows_and_positions(layer: nn.Conv2d, x: Tensor) -> tuple[int, int]:
    """Count the rows of the padded image that patches read, and the positions in each row."""
    left, right, above, below = layer._reversed_padding_repeated_twice
    height = x.shape[2] + above + below
    stride = layer.stride[0]
    num_rows = (height - layer.kernel_size[0]) // stride * stride + layer.kernel_size[0]
    reach = (layer.kernel_size[1] - 1) * layer.dilation[1] + 1
    num_columns = (x.shape[3] + left + right - reach) // layer.stride[1] + 1
    return num_rows, num_columns
