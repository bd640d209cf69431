"""The layer as K-FAC sees it: rows of activations times rows of output gradients.

A layer's weight gradient for one cotangent is `Σ_t g_t a_tᵀ` over its T positions. This file turns
a layer's input and output gradients into these rows and sums, each layer type in its own way.
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
from laplace_debias.system.memory import ROOM

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
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        rows = _patches(layer, x)
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
    layer: Any, x: Float[Tensor, "batch channels *space"]
) -> Float[Tensor, "batch positions d_in"]:
    """The patch that a convolution sees from each output position.

    A transposed one is the convolution, with the kernel turned round, of its input with zeros
    between the pixels.
    """
    kernel, dilation, stride, dims = layer.kernel_size, layer.dilation, layer.stride, x.ndim - 2
    is_transposed = isinstance(layer, TRANSPOSED)
    if is_transposed:
        sizes = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], stride, strict=True)]
        stuffed = x.new_zeros(*x.shape[:2], *sizes)
        at: Any = (..., *(slice(None, None, step) for step in stride))
        stuffed[at] = x
        # As F.pad takes it: the last dimension first. Negative padding cuts.
        margins: list[int] = []
        for dim in reversed(range(dims)):
            margin = (kernel[dim] - 1) * dilation[dim] - layer.padding[dim]
            margins += [margin, margin + layer.output_padding[dim]]
        x, stride = F.pad(stuffed, margins), (1,) * dims
    else:
        x = padded(layer, x)
    for dim in range(dims):
        window = (kernel[dim] - 1) * dilation[dim] + 1
        x = x.unfold(2 + dim, window, stride[dim])[..., :: dilation[dim]]
    # [B, C, o_1, …, k_1, …] → [B, o_1·…, C·k_1·…]
    positions, kernels = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    x = x.flip(tuple(kernels)) if is_transposed else x
    return x.permute(0, *positions, 1, *kernels).flatten(1 + dims).flatten(1, dims)


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


def taking_examples(block: Block, uses: LayerUses) -> Masks:
    """All positions of the examples that have a gradient at the layer's outputs, by call.

    Whether a batch calls a layer for the others is a matter of how examples are batched.
    """
    masks = []
    has_gradient = torch.stack([(g != 0).flatten(2).any(2).any(0) for _, g in uses]).any(0)
    for _, g in uses:
        num_positions = g[0, 0].numel() // (block.num_groups * block.shape[0])
        masks.append(has_gradient.unsqueeze(1).expand(-1, num_positions))
    return masks


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
        unfolded = x[0, 0].numel() * torch.Size(layer.stride).numel() * d_in
    step = max(1, SLICE * ROOM[x.device.type] // (unfolded + extra))
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
            match layer:
                case nn.LayerNorm():
                    g = g * F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
                case nn.RMSNorm():
                    g = g * F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
                case nn.GroupNorm():
                    g = g * F.group_norm(x, layer.num_groups, eps=layer.eps)
                case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
                    g = g * F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        rows.append(output_gradients(layer, block, g).sum(-1))
    yield slice(0, rows[0].shape[1]), torch.stack(rows).sum(0)


def _kernel_rows(
    layer: Any, block: Block, x: Tensor, g: Tensor
) -> Float[Tensor, "columns batch groups d_out"]:
    """Jacobian rows of depthwise kernels, `Σ_t g_t a_t`, with `Σ_t g_t` behind in a joint block."""
    # oneDNN convolves tens of thousands of groups at once, where torch's own code loops over them.
    has_mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    is_flat = isinstance(layer, (nn.Conv1d, nn.Conv2d)) and layer.in_channels == layer.groups
    if has_mkldnn and is_flat and x.device.type == "cpu" and x.dtype == torch.float32:
        rows = _correlated(layer, x, g)
        total = output_gradients(layer, block, g).sum(-1)
        return torch.cat([rows, total], dim=-1) if block.is_joint else rows
    parts = []
    for part in slices(layer, block, x):
        a = activations(layer, block, x[part]).movedim(1, 2)  # [b, groups, T, d]
        columns = output_gradients(layer, block, g[:, part]).squeeze(-2)  # [K, b, groups, T]
        parts.append((columns.movedim(0, 2) @ a).movedim(2, 0))
    return torch.cat(parts, dim=1)


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
