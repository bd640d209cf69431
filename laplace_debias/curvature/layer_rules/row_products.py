"""Second moments of a convolution's patches, computed from products of the image's rows.

A patch consists of a few adjacent rows of the image, each as wide as the kernel. Therefore, only
the rows are unfolded, to `[height, C·k_w, batch·positions]`, whereas patches would repeat each row
for every vertical offset of the kernel. Each row is multiplied by itself and by the rows below it,
up to the height of the kernel. A product of two rows serves all pairs of vertical offsets at the
distance of these rows: the sum over the positions of the patches becomes a sum over rows.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# The maximum size of the unfolded rows that are computed together. More rows would not fit in the
# processor's cache.
_NUMBERS_AT_ONCE = 2**20
# The largest size of the products of the rows of one block.
_MOST_PRODUCTS = 2**22
# Seconds, on the same scale as in `patches.py`, because the times are compared.
_SECONDS_PER_NUMBER = 3.2e-9
_SECONDS_PER_MULTIPLICATION = 3.3e-11
_SECONDS_PER_PRODUCT = 1.5e-8
_SECONDS_TO_BEGIN = 3.5e-4


def has_row_products(layer: nn.Module) -> bool:
    """Whether `row_moments` supports a layer: 2-D, zero padding, and adjacent kernel rows."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.padding_mode == "zeros"
        and layer.kernel_size[0] > 1
        and layer.dilation[0] == 1
    )


def seconds_by_rows(
    layer: nn.Conv2d, num_groups: int, x: Float[Tensor, "batch channels height width"]
) -> float:
    """Estimate the time of `row_moments` for all groups, or return ∞ if it needs much memory."""
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
    """Compute `Σ_n Σ_t a aᵀ` over the patches of one group in the order of `unfold`."""
    upper = _upper_triangle(_sum_over_patches(layer, _row_products(layer, x)))
    # The entries of a patch are ordered by channel, then by row and by column of the kernel.
    channels = x.shape[1]
    by_channel = upper.unflatten(3, (channels, -1)).unflatten(1, (channels, -1))
    d_in = channels * layer.kernel_size[0] * layer.kernel_size[1]
    # From [k_h, C, k_w, k_h, C, k_w] to [C, k_h, k_w, C, k_h, k_w].
    matrix = by_channel.permute(1, 0, 2, 4, 3, 5).contiguous().view(d_in, -1)
    return matrix + matrix.T


def _row_products(
    layer: nn.Conv2d, x: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "rows size columns"]:
    """Multiply each unfolded row of the padded image by itself and by the rows below it.

    Returns:
        The products of each row, summed over the examples and over the positions in the row, with
        as many rows as the kernel is high. `size` is C·k_w, and `columns` is k_h times as many.
    """
    kernel_height, kernel_width = layer.kernel_size
    column_stride = layer.stride[1]
    reach = (kernel_width - 1) * layer.dilation[1] + 1
    num_rows, num_columns = _num_rows_and_positions(layer, x)
    left, right, above, _ = layer._reversed_padding_repeated_twice
    # Rows of zeros are added below the last row that patches read, so that every row has the same
    # number of rows below it.
    image = x[:, :, : max(0, num_rows - above)]
    below = num_rows + kernel_height - 1 - above - image.shape[2]
    padded = F.pad(image, (left, right, above, below))
    pixels = padded.unfold(3, reach, column_stride)[..., :: layer.dilation[1]]
    size = x.shape[1] * kernel_width
    num_together = max(1, _NUMBERS_AT_ONCE // (num_rows * num_columns * size))
    products: Tensor | None = None
    for part in pixels.split(num_together):
        # From [B, C, rows, columns, k_w] to [rows, C·k_w, B·columns].
        rows = part.permute(2, 1, 4, 0, 3).contiguous().view(num_rows + kernel_height - 1, size, -1)
        # The rows below each row are a view, because neighbouring rows of the image are neighbours
        # in memory.
        windows = rows.unfold(0, kernel_height, 1).movedim(-1, 1).flatten(1, 2)
        if products is None:
            products = rows[:num_rows].bmm(windows.mT)
        else:
            products.baddbmm_(rows[:num_rows], windows.mT)
    assert products is not None
    return products


def _sum_over_patches(
    layer: nn.Conv2d, products: Float[Tensor, "rows size columns"]
) -> Float[Tensor, "kernel_height size kernel_height size"]:
    """Sum the products of the rows that each vertical offset of the kernel reads.

    Returns:
        For offset i and distance j, the product of the offsets i and i + j, `[size, size]`. It has
        no meaning if i + j is not an offset.
    """
    kernel_height = layer.kernel_size[0]
    num_starts = len(products) - kernel_height + 1
    # Offset i reads the rows i, i + stride, i + 2 · stride, …, within `num_starts` rows from row i.
    totals = products.unfold(0, num_starts, 1)[..., :: layer.stride[0]].sum(-1)
    return totals.unflatten(2, (kernel_height, -1))


def _upper_triangle(
    by_distance: Float[Tensor, "kernel_height size kernel_height size"],
) -> Float[Tensor, "kernel_height size kernel_height size"]:
    """Arrange the products by the offsets i and k; the products for k < i are left zero.

    The products for k = i are halved, so that the result and its transpose add up to all products.
    `by_distance` is overwritten.
    """
    kernel_height, size = by_distance.shape[:2]
    by_distance[:, :, 0].mul_(0.5)
    # The distance from offset i to offset k ≥ i is k − i. Zeros are appended to the distances of
    # each row. Row i of the view begins i distances before its own data, among the zeros of the row
    # before, so its entries for k < i are zero. For three offsets, the products p(i, distance) are
    # stored as  p00 p01 p02 0 0 | p10 p11 p12 0 0 | p20 p21 p22 0 0,  and the rows of the view are
    # p00 p01 p02,  0 p10 p11  and  0 0 p20.
    num_distances = 2 * kernel_height - 1
    with_zeros = by_distance.new_zeros(kernel_height, size, num_distances, size)
    with_zeros[:, :, :kernel_height] = by_distance
    next_row, *strides = with_zeros.stride()
    shape = kernel_height, size, kernel_height, size
    return with_zeros.as_strided(shape, (next_row - size, *strides))


def _num_rows_and_positions(layer: nn.Conv2d, x: Tensor) -> tuple[int, int]:
    """Count the rows of the padded image that patches read, and the positions in each row."""
    left, right, above, below = layer._reversed_padding_repeated_twice
    height = x.shape[2] + above + below
    stride = layer.stride[0]
    num_rows = (height - layer.kernel_size[0]) // stride * stride + layer.kernel_size[0]
    reach = (layer.kernel_size[1] - 1) * layer.dilation[1] + 1
    num_columns = (x.shape[3] + left + right - reach) // layer.stride[1] + 1
    return num_rows, num_columns
