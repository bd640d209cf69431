"""What a layer is to K-FAC: rows of activations times rows of output gradients.

A layer's weight gradient for one cotangent is `Σ_t g_t a_tᵀ` over its T positions. This file turns
a layer's input and output gradients into these rows and sums; it is the one place that knows layer
types.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import CONVOLUTIONS, Block

# Layers whose outputs are [B, channels, ...]; those of the others are [B, ..., features].
_CHANNELS_FIRST = (
    *CONVOLUTIONS,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)

# A layer's uses in one forward pass: input [B, ...] and output gradients [K, B, ...].
Uses = Sequence[tuple[Tensor, Tensor]]

# Unfolded activations are made in slices of at most so many numbers.
_SLICE = 2**22


def activations(layer: nn.Module, block: Block, x: Tensor) -> Float[Tensor, "batch positions d_in"]:
    """The rows that meet the weight, `[B, T, d_in]`.

    Args:
        layer: `nn.Linear` (T = the product of the leading dimensions behind the first) or an
            `nn.Conv1d/2d/3d` (T output positions, `d_in = C_in·k_1·…` ordered as `unfold` does).
        block: The weight block, whose group of channels is taken.
        x: The layer's input, `[B, ...]`.
    """
    if not isinstance(layer, CONVOLUTIONS):
        return x.reshape(x.shape[0], -1, x.shape[-1])
    x = group_of(layer, block, x)
    if any(layer._reversed_padding_repeated_twice):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    dims = len(layer.kernel_size)
    for dim, (size, step, gap) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        x = x.unfold(dim, (size - 1) * gap + 1, step)[..., ::gap]
    # [B, C, o_1, …, k_1, …] → [B, o_1·…, C·k_1·…]
    positions = list(range(2, 2 + dims))
    kernel = list(range(2 + dims, 2 + 2 * dims))
    x = x.permute(0, *positions, 1, *kernel)
    return x.flatten(1 + dims).flatten(1, dims)


def group_of(layer: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The input channels that meet the block's weight, `[B, C / groups, ...]`."""
    channels = x.shape[1] // layer.groups  # type: ignore[operator]
    return x[:, block.group * channels : (block.group + 1) * channels]


def output_gradients(
    layer: nn.Module, block: Block, g: Tensor
) -> Float[Tensor, "columns batch d_out positions"]:
    """The gradients at the layer's output as columns, `[K, B, d_out, T]`.

    Args:
        layer: As in `activations`.
        block: The block, whose group of channels is taken; a bias takes all channels.
        g: Gradients with respect to the layer's output, `[K, B, ...]`.
    """
    if not isinstance(layer, _CHANNELS_FIRST):
        return g.reshape(*g.shape[:2], -1, block.shape[0]).mT
    if not block.is_vector:
        d_out = block.shape[0]
        g = g[:, :, block.group * d_out : (block.group + 1) * d_out]
    return g.flatten(3) if g.ndim > 3 else g.unsqueeze(-1)


def slices(layer: nn.Module, block: Block, x: Tensor, extra: int = 0) -> Iterator[slice]:
    """Ranges of examples whose unfolded activations stay below a fixed size.

    Args:
        layer: As in `activations`.
        block: The block.
        x: The layer's input, `[B, ...]`.
        extra: Numbers that the caller makes for every example on top of the activations.
    """
    is_convolution = isinstance(layer, CONVOLUTIONS)
    unfolded = x[0, 0].numel() * block.shape[1] if is_convolution else x[0].numel()
    step = max(1, _SLICE // (unfolded + extra))
    for start in range(0, x.shape[0], step):
        yield slice(start, min(start + step, x.shape[0]))


def vector_rows(layer: nn.Module, block: Block, uses: Uses) -> Float[Tensor, "columns batch d_out"]:
    """Jacobian rows of a bias, `Σ_t g_t`, or of a scale, `Σ_t g_t ⊙ x̂_t`, `[K, B, d_out]`."""
    rows = []
    for x, g in uses:
        if block.role == "scale":
            g = g * _normalised(layer, x)
        rows.append(output_gradients(layer, block, g).sum(-1))
    return torch.stack(rows).sum(0)


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """What a normalisation's scale multiplies, in evaluation mode, of `x`'s shape."""
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
