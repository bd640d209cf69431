"""The layer as K-FAC sees it: rows of activations times rows of output gradients.

A layer's weight gradient for one cotangent is `Σ_t g_t a_tᵀ` over its T positions. This file turns
a layer's input and output gradients into these rows and sums; it is the one place that knows layer
types.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.calls import CallUses
from laplace_debias.curvature.network.layer_types import CONVOLUTIONS, TRANSPOSED

# Layers whose outputs are [B, channels, ...]; those of the others are [B, ..., features].
_CHANNELS_FIRST = (
    *CONVOLUTIONS,
    *TRANSPOSED,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)

# A layer's uses in one forward pass: input [B, ...] and output gradients [K, B, ...]; or the calls
# of modules that read a parameter.
LayerUses = Sequence[tuple[Tensor, Tensor]]
Uses = LayerUses | CallUses

# For every use of a layer, which positions take part, [B, T]; uses may differ in T.
Masks = Sequence[Tensor]

# Unfolded activations are made in slices of at most so many numbers.
SLICE = 2**22


def activations(
    layer: nn.Module, block: Block, x: Tensor
) -> Float[Tensor, "batch positions *groups d_in"]:
    """The rows that meet the weight, `[B, T, *groups, d_in]`, in a joint block with a one behind.

    T is the product of a linear layer's leading dimensions behind the first, or the output
    positions of a convolution, transposed ones too, with `d_in = C_in·k_1·…` ordered as `unfold`
    does.
    """
    if isinstance(layer, TRANSPOSED):
        rows = _transposed_patches(layer, x)
    elif isinstance(layer, CONVOLUTIONS):
        rows = _patches(padded(layer, x), layer.kernel_size, layer.stride, layer.dilation)
    else:
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
    # Channels come first in a row, and a group's are neighbours.
    rows = rows.unflatten(2, (*block.groups, -1))
    return F.pad(rows, (0, 1), value=1.0) if block.is_joint else rows


def padded(layer: Any, x: Float[Tensor, "batch channels *space"]) -> Tensor:
    """A convolution's input with the padding that the layer gives it."""
    if not any(layer._reversed_padding_repeated_twice):
        return x
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _patches(
    x: Float[Tensor, "batch channels *space"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    flipped: bool = False,
) -> Float[Tensor, "batch positions d_in"]:
    dims = len(kernel)
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, (size - 1) * gap + 1, step)[..., ::gap]
    # [B, C, o_1, …, k_1, …] → [B, o_1·…, C·k_1·…]
    positions = list(range(2, 2 + dims))
    kernels = list(range(2 + dims, 2 + 2 * dims))
    if flipped:
        x = x.flip(kernels)
    x = x.permute(0, *positions, 1, *kernels)
    return x.flatten(1 + dims).flatten(1, dims)


def _transposed_patches(
    layer: Any, x: Float[Tensor, "batch channels *space"]
) -> Float[Tensor, "batch positions d_in"]:
    """The patch that a transposed convolution sees from each output position.

    It is the convolution, with the kernel turned round, of its input with zeros between the pixels.
    """
    stuffed = x.new_zeros(
        *x.shape[:2],
        *((n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)),
    )
    at: Any = (..., *(slice(None, None, s) for s in layer.stride))
    stuffed[at] = x
    geometry = zip(
        layer.kernel_size,
        layer.dilation,
        layer.padding,
        layer.output_padding,
        strict=True,
    )
    # As F.pad takes it: the last dimension first. Negative padding cuts.
    margins: list[int] = []
    for size, gap, padding, extra in reversed(list(geometry)):
        margin = (size - 1) * gap - padding
        margins += [margin, margin + extra]
    dims = len(layer.kernel_size)
    ones = (1,) * dims
    return _patches(F.pad(stuffed, margins), layer.kernel_size, ones, layer.dilation, flipped=True)


def tokens(x: Tensor) -> Int[Tensor, "batch positions"]:
    """The rows of the table that an embedding looks up, `[B, T]`."""
    return x.reshape(x.shape[0], -1)


def output_gradients(
    layer: nn.Module, block: Block, g: Tensor
) -> Float[Tensor, "columns batch *groups d_out positions"]:
    """The gradients at the layer's output as columns, `[K, B, *groups, d_out, T]`.

    A depthwise kernel has one output channel; a bias has those of all groups.
    """
    if not isinstance(layer, _CHANNELS_FIRST):
        return g.reshape(*g.shape[:2], -1, block.shape[0]).mT
    columns = g.flatten(3) if g.ndim > 3 else g.unsqueeze(-1)
    return columns.unflatten(2, (*block.groups, -1))


def chosen(
    rows: Float[Tensor, "columns batch positions *d"], mask: Bool[Tensor, "batch positions"]
) -> Float[Tensor, "columns n *d"]:
    """Rows of the positions that take part, `[K, n, ...]`, to be multiplied with themselves.

    On an accelerator the host would wait for their number: there the others are left in, as zeros.
    """
    if mask.device.type == "cpu":
        return rows[:, mask]
    # Not a product: what is padded may be infinite.
    return rows.where(mask.view(*mask.shape, *[1] * (rows.ndim - 3)), 0).flatten(1, 2)


def takes_part(layer: nn.Module, g: Tensor) -> Bool[Tensor, "batch positions"]:
    """Where one cotangent's gradients at a layer's output, `[B, ...]`, do not vanish, `[B, T]`."""
    return (g != 0).any(1 if isinstance(layer, _CHANNELS_FIRST) else -1).flatten(1)


def token_gradients(
    layer: Any, block: Block, x: Tensor, g: Tensor
) -> Float[Tensor, "columns batch d_out positions"]:
    """The gradients at an embedding's output, zero where the token is its `padding_idx`.

    torch does not differentiate with respect to that row of the table.
    """
    columns = output_gradients(layer, block, g)
    padding = layer.padding_idx
    return columns if padding is None else columns * tokens(x).ne(padding).unsqueeze(1)


def slices(layer: Any, block: Block, x: Tensor, extra: int = 0) -> Iterator[slice]:
    """Ranges of examples whose unfolded activations stay below a fixed size.

    `extra` numbers are made by the caller for every example on top of the activations.
    """
    unfolded = x[0].numel()
    d_in = block.num_groups * (block.shape[0] if block.role == "depthwise" else block.shape[1])
    if isinstance(layer, CONVOLUTIONS):
        unfolded = x[0, 0].numel() * d_in
    elif isinstance(layer, TRANSPOSED):
        stride = torch.Size(layer.stride).numel()
        unfolded = x[0, 0].numel() * stride * d_in
    step = max(1, SLICE // (unfolded + extra))
    for start in range(0, x.shape[0], step):
        yield slice(start, min(start + step, x.shape[0]))


def exact_rows(
    layer: nn.Module, block: Block, uses: Uses
) -> Iterator[tuple[slice, Float[Tensor, "columns part *groups d_out"]]]:
    """Jacobian rows of what has an exact block, with the examples that they belong to.

    Of a bias `Σ_t g_t`, of a scale or another factor `Σ_t g_t ⊙ x_t`, of a depthwise kernel
    `Σ_t g_t a_t`, where g is the gradient at the group's one output channel; of any other parameter
    those that automatic differentiation gives.
    """
    if isinstance(uses, CallUses):
        yield from uses.rows(block)
        return
    rows = []
    for x, g in uses:
        if block.role == "depthwise":
            rows.append(_kernel_rows(layer, block, x, g))
            continue
        if block.role == "entries":
            rows.append((g * x).sum(2))
            continue
        if block.role == "scale":
            g = g * _normalised(layer, x)
        rows.append(output_gradients(layer, block, g).sum(-1))
    yield slice(0, rows[0].shape[1]), torch.stack(rows).sum(0)


def _kernel_rows(
    layer: Any, block: Block, x: Tensor, g: Tensor
) -> Float[Tensor, "columns batch groups d_out"]:
    """Jacobian rows of depthwise kernels, `Σ_t g_t a_t`, with `Σ_t g_t` behind in a joint block."""
    if _has_fast_convolutions(layer, x):
        rows = _correlated(layer, x, g)
        total = output_gradients(layer, block, g).sum(-1)
        return torch.cat([rows, total], dim=-1) if block.is_joint else rows
    parts = []
    for part in slices(layer, block, x):
        a = activations(layer, block, x[part]).movedim(1, 2)  # [b, groups, T, d]
        columns = output_gradients(layer, block, g[:, part]).squeeze(-2)  # [K, b, groups, T]
        parts.append((columns.movedim(0, 2) @ a).movedim(2, 0))
    return torch.cat(parts, dim=1)


def _has_fast_convolutions(layer: nn.Module, x: Tensor) -> bool:
    """Whether `_correlated` serves a layer, and fast.

    oneDNN convolves tens of thousands of groups at once, where torch's own code loops over them.
    """
    is_there = bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    is_in_reach = x.device.type == "cpu" and x.dtype == torch.float32
    is_known = isinstance(layer, (nn.Conv1d, nn.Conv2d)) and layer.in_channels == layer.groups
    return is_there and is_in_reach and is_known


def _correlated(layer: Any, x: Tensor, g: Tensor) -> Float[Tensor, "columns batch groups d_in"]:
    """`Σ_t g_t a_t` without patches.

    The correlation of an image with a gradient is a convolution whose kernel is the gradient:
    stride and dilation change places, and every image of every channel is a group of its own.
    """
    num_columns, batch, channels = g.shape[:3]
    x = padded(layer, x)
    at_once = x.reshape(1, -1, *x.shape[2:])
    kernels = g.movedim(0, 2).reshape(-1, 1, *g.shape[3:])
    convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    full = convolve(
        at_once, kernels, stride=layer.dilation, dilation=layer.stride, groups=batch * channels
    )
    # Where the stride leaves a rest, the padded image is larger than what the kernel sees.
    inside: Any = (0, slice(None), *(slice(size) for size in layer.kernel_size))
    return full[inside].reshape(batch, channels, num_columns, -1).permute(2, 0, 1, 3)


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """The values that a normalisation's scale multiplies, in evaluation mode, of `x`'s shape."""
    match layer:
        case nn.LayerNorm():
            return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        case nn.RMSNorm():
            return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        case nn.GroupNorm():
            return F.group_norm(x, layer.num_groups, eps=layer.eps)
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
    raise TypeError(f"{type(layer).__name__} has no scale.")
