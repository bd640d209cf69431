"""Convolutions: plain, transposed, grouped and depthwise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import (
    Block,
    LayerInputs,
    LayerRule,
    ModuleTypes,
    OutputGradients,
)
from laplace_debias.curvature.layer_rules.patches import fastest_moments
from laplace_debias.operators.structures.directions import Basis, Directions

# Below these numbers of multiplications, the kernel gradient of an example takes less time than the
# overhead of the call. The first limit is for fewer than `_VECTOR_CHANNELS` input channels. Both
# were measured on one thread of a processor with AVX-512.
_CHEAP_IF_NARROW = 2**19
_CHEAP_IF_WIDE = 2**22
_VECTOR_CHANNELS = 8


class ConvolutionRule(LayerRule):
    """A convolution: its positions are output pixels, and its activations are patches.

    If there is one output channel per group, the weight of each group is a vector, and its
    curvature matrix is exact.
    """

    module_types: ClassVar[ModuleTypes] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    kind = "convolution"
    channels_first = True

    def blocks(
        self, layer: nn.Module, path: str, key: str, sharing: str, joint: bool
    ) -> list[Block]:
        """Make the block of the weight or the bias; kernels with one output channel are exact."""
        blocks = super().blocks(layer, path, key, sharing, joint)
        return [_depthwise(block) if block.shape[0] == 1 else block for block in blocks]

    def prepare(self, layer: Any) -> None:
        """Make a layer's attributes consistent if they were changed after its construction.

        The forward pass uses the current stride, dilation and padding, which may then be numbers,
        and the size of the weight. The layer's kernel size, and the padding that it stores in the
        order of `F.pad`, are those of the construction.
        """
        if layer.weight.ndim == len(layer.kernel_size) + 2:  # A sharded weight may be flat.
            layer.kernel_size = tuple(layer.weight.shape[2:])
        for name in ("stride", "dilation", "padding", "output_padding"):
            value = getattr(layer, name)
            if isinstance(value, int):
                value = (value,)
            if len(value) == 1:
                # A single number holds for all dimensions.
                setattr(layer, name, tuple(value) * len(layer.kernel_size))
        if layer.padding_mode == "zeros":
            layer._reversed_padding_repeated_twice = _margins_of_zeros(layer)

    def matrices(
        self, layer: Any, weight: Shaped[Tensor, "channels_out *kernel"]
    ) -> Shaped[Tensor, "*groups d_out d_in"]:
        """Flatten the kernels, and split their groups."""
        return _split_groups(layer, weight.flatten(1))

    def unfold(
        self, layer: Any, x: Float[Tensor, "batch channels *space"]
    ) -> Float[Tensor, "batch positions d_in"]:
        """Copy the patch seen from each output position, in the order of `F.unfold`."""
        patches = _patches(_pad(layer, x), layer, layer.stride)
        return _flatten_patches(patches)

    def activation_rows(
        self, layer: Any, block: Block, x: Float[Tensor, "batch channels *space"]
    ) -> Float[Tensor, "n *groups d_in"]:
        """Compute the patches of all examples as rows, stored column by column in memory.

        Positions that are neighbours in memory are then also neighbours in the image, so copying
        takes a fraction of the time of copying patch by patch.
        """
        patches = _patches(_pad(layer, x.contiguous()), layer, layer.stride)
        dims = (patches.ndim - 2) // 2
        positions = range(2, 2 + dims)
        kernel = range(2 + dims, 2 + 2 * dims)
        # From [B, C, o_1, …, k_1, …] to [C·k_1·…, B·o_1·…].
        columns = patches.permute(1, *kernel, 0, *positions)
        columns = columns.flatten(1 + dims).flatten(0, dims).unflatten(0, (*block.groups, -1))
        if block.is_joint:
            columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
        return columns.movedim(-1, 0)

    def num_positions(self, layer: Any, x: Float[Tensor, "batch channels *space"]) -> int:
        """Count the output positions."""
        # The padding has the order of `F.pad`, in which the last dimension comes first.
        padding = layer._reversed_padding_repeated_twice
        number = 1
        for dim, size in enumerate(reversed(x.shape[2:]), start=1):
            reach = (layer.kernel_size[-dim] - 1) * layer.dilation[-dim]
            padded_size = size + padding[2 * dim - 2] + padding[2 * dim - 1]
            number *= (padded_size - reach - 1) // layer.stride[-dim] + 1
        return number

    def unfolded_size(self, layer: nn.Module, block: Block, x: LayerInputs) -> int:
        """Return an upper bound that counts every pixel as an output position."""
        return x[0, 0].numel() * _patch_size(block)

    def jacobian_rows(
        self, layer: Any, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns batch *groups d_out"]:
        """Compute the rows of depthwise kernels, `Σ_t g_t a_t`, or of a bias, `Σ_t g_t`.

        In a joint block, `Σ_t g_t` follows the kernel's entries.
        """
        if not block.groups:  # a bias
            return super().jacobian_rows(layer, block, x, g)
        # oneDNN convolves tens of thousands of groups at once, where torch's own code loops over
        # them.
        has_mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        is_flat = isinstance(layer, (nn.Conv1d, nn.Conv2d)) and layer.in_channels == layer.groups
        if has_mkldnn and is_flat and x.device.type == "cpu" and x.dtype == torch.float32:
            rows = _correlate(layer, x, g)
            if not block.is_joint:
                return rows
            total = self.output_gradients(layer, block, x, g).sum(-1)
            return torch.cat([rows, total], dim=-1)
        rows_by_slice = []
        for examples in self.slices(layer, block, x):
            sliced_x = x[examples]
            a = self.activations(layer, block, sliced_x).movedim(1, 2)  # [b, groups, T, d]
            columns = self.output_gradients(layer, block, sliced_x, g[:, examples]).squeeze(-2)
            products = columns.movedim(0, 2) @ a  # [b, groups, K, d]
            rows_by_slice.append(products.movedim(2, 0))
        return torch.cat(rows_by_slice, dim=1)

    def summed_products(
        self, layer: Any, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "batch rows d_in"] | None:
        """Compute `Σ_t g_t a_tᵀ` without patches, as the gradient of the convolution's kernel.

        If the kernel has one pixel, the patches are the pixels themselves, and their products are
        faster.
        """
        is_pointwise = all(size == 1 for size in layer.kernel_size)
        if is_pointwise or not _convolves_faster(layer, block):
            return None
        gradients = g.transpose(0, 1).flatten(1, 2)
        if _has_cheap_examples(layer, gradients):
            products = _kernel_gradients_at_once(layer, x, gradients)
        else:
            products = _kernel_gradients_one_by_one(layer, x, gradients)
        rows = products.flatten(2)
        if not block.is_joint:
            return rows
        return torch.cat([rows, gradients.flatten(2).sum(-1, keepdim=True)], -1)

    def weight_gradients(
        self, layer: Any, block: Block, x: LayerInputs, g: OutputGradients
    ) -> Float[Tensor, "columns *groups d_out d_in"]:
        """Compute `Σ_n Σ_t g_t a_tᵀ`, without patches if this is faster."""
        if not _convolves_faster(layer, block):
            return super().weight_gradients(layer, block, x, g)
        gradients = g.transpose(0, 1).flatten(1, 2)
        rows = _kernel_gradient(layer, x, gradients).flatten(1)
        if block.is_joint:
            bias = gradients.sum(0).flatten(1).sum(-1, keepdim=True)
            rows = torch.cat([rows, bias], -1)
        return rows.unflatten(0, (len(g), -1))

    def activations_along(
        self, layer: Any, block: Block, x: LayerInputs, directions: Directions
    ) -> Float[Tensor, "batch positions *groups coordinates"]:
        """Compute the coordinates of patches along the directions.

        If it is faster, the image is convolved with the directions as filters.
        """
        if not isinstance(directions, Basis) or not _convolves_faster(layer, block):
            return super().activations_along(layer, block, x, directions)
        filters = directions.U
        bias: Tensor | None = None
        if block.is_joint:
            # The last entry of each direction multiplies the 1 that follows a patch.
            bias = filters[-1]
            filters = filters[:-1]
        filters = filters.T.unflatten(1, layer.weight.shape[1:])
        filtered = F.conv2d(_pad(layer, x), filters, bias, layer.stride, 0, layer.dilation)
        return filtered.flatten(2).mT

    def second_moments(
        self, layer: Any, block: Block, inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Compute A of each call without its patches, or return None if patches are faster."""
        # On a GPU, patches are used, because a few large products are faster than many small ones.
        if not layer.weight.is_cpu:
            return None
        moments_by_call: list[Tensor] = []
        for x in inputs:
            moments = fastest_moments(layer, block.num_groups, x)
            if moments is None:
                return None
            moments_by_call.append(self._moments_of_groups(layer, block, x, moments))
        return moments_by_call

    def _moments_of_groups(
        self, layer: Any, block: Block, x: LayerInputs, moments: Callable[[Any, Tensor], Tensor]
    ) -> Tensor:
        """Compute A group by group, including the row and the column of a joint bias."""
        factors = [moments(layer, channels) for channels in x.chunk(block.num_groups, dim=1)]
        A = torch.stack(factors) if block.groups else factors[0]
        if not block.is_joint:
            return A
        # Patches are linear in the image, so summing the images first gives the sum of their
        # patches.
        total = self.activations(layer, block, x.sum(0, keepdim=True))[0].sum(0)
        total[..., -1] *= len(x)
        A = F.pad(A, (0, 1, 0, 1))
        A[..., -1, :] = total
        A[..., :-1, -1] = total[..., :-1]
        return A

    def has_sequence(self, layer: Any) -> bool:
        """Return whether the positions may form a sequence, that is, have one dimension."""
        return len(layer.kernel_size) == 1

    def differentiates_one_by_one(self, layer: Any) -> bool:
        """Return whether the layer is on a CPU; on a GPU, one call for all cotangents is faster."""
        return layer.weight.is_cpu

    def backpack_derivatives(self, layer: nn.Module) -> str | None:
        """Return the class with which BackPACK pushes cotangents through the layer."""
        for dims, layer_type in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
            if type(layer) is layer_type:
                return f"conv{dims}d.Conv{dims}DDerivatives"
        return None


class TransposedConvolutionRule(ConvolutionRule):
    """A transposed convolution.

    It equals a convolution with the flipped kernel, after zeros are inserted between the pixels.
    """

    module_types = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

    def matrices(
        self, layer: Any, weight: Shaped[Tensor, "channels_in channels_out *kernel"]
    ) -> Shaped[Tensor, "*groups d_out d_in"]:
        """Move the output channels, of which each group has the same number, to the front."""
        flat = weight.flatten(2)
        if layer.groups > 1:
            flat = flat.unflatten(0, (layer.groups, -1))
        return flat.transpose(-3, -2).flatten(-2)

    def unfold(
        self, layer: Any, x: Float[Tensor, "batch channels *space"]
    ) -> Float[Tensor, "batch positions d_in"]:
        """Copy the patch seen from each output position."""
        dims = x.ndim - 2
        sizes = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], layer.stride, strict=True)]
        stuffed = x.new_zeros(*x.shape[:2], *sizes)
        pixels: Any = (..., *(slice(None, None, step) for step in layer.stride))
        stuffed[pixels] = x
        # The margins have the order of `F.pad`, in which the last dimension comes first. Negative
        # margins crop.
        margins: list[int] = []
        for dim in reversed(range(dims)):
            margin = (layer.kernel_size[dim] - 1) * layer.dilation[dim] - layer.padding[dim]
            margins += [margin, margin + layer.output_padding[dim]]
        patches = _patches(F.pad(stuffed, margins), layer, (1,) * dims)
        return _flatten_patches(patches.flip(tuple(range(2 + dims, 2 + 2 * dims))))

    def activation_rows(
        self, layer: nn.Module, block: Block, x: LayerInputs
    ) -> Float[Tensor, "n *groups d_in"]:
        """Compute the patches of all examples as rows."""
        return self.activations(layer, block, x).flatten(0, 1)

    def num_positions(self, layer: Any, x: Float[Tensor, "batch channels *space"]) -> int:
        """Count the output positions."""
        number = 1
        for dim, size in enumerate(x.shape[2:]):
            reach = (layer.kernel_size[dim] - 1) * layer.dilation[dim]
            stuffed_size = (size - 1) * layer.stride[dim] + 1
            margins = reach - 2 * layer.padding[dim] + layer.output_padding[dim]
            number *= stuffed_size + margins
        return number

    def unfolded_size(self, layer: Any, block: Block, x: LayerInputs) -> int:
        """Return an upper bound that counts as many positions per pixel as the stride allows."""
        return x[0, 0].numel() * torch.Size(layer.stride).numel() * _patch_size(block)


def _depthwise(block: Block) -> Block:
    """Convert a block with one output channel per group, so that each kernel is a vector."""
    if block.num_groups == 1 or block.is_vector:
        return block
    return replace(block, shape=(block.shape[1], 1), is_vector=True)


def _split_groups(layer: Any, kernels: Tensor) -> Tensor:
    return kernels if layer.groups == 1 else kernels.unflatten(0, (layer.groups, -1))


def _patch_size(block: Block) -> int:
    """Count the entries of a patch, over all groups."""
    d_out, d_in = block.shape
    # The vectors of an exact block are depthwise kernels, whose entries are the entries of a patch.
    return block.num_groups * (d_out if block.is_vector else d_in)


def _convolves_faster(layer: Any, block: Block) -> bool:
    """Return whether convolutions are faster than products of patches, as they are on a CPU."""
    return isinstance(layer, nn.Conv2d) and not block.groups and layer.weight.is_cpu


def _has_cheap_examples(layer: Any, gradients: Float[Tensor, "batch rows *space"]) -> bool:
    """Whether the kernel gradient of one example takes less time than the overhead of a call.

    In a convolution with one group for each example, groups of few channels do not fill the vector
    registers of the processor, so the limit is lower for such layers.
    """
    multiplications = gradients[0].numel() * layer.weight[0].numel()
    limit = _CHEAP_IF_WIDE
    if layer.in_channels < _VECTOR_CHANNELS:
        limit = _CHEAP_IF_NARROW
    return multiplications < limit


def _kernel_gradients_at_once(
    layer: Any,
    x: Float[Tensor, "batch channels *space"],
    gradients: Float[Tensor, "batch rows *space_out"],
) -> Float[Tensor, "batch rows channels *kernel"]:
    """Compute each example's kernel gradient by one convolution with a group for each example."""
    batch, num_rows = gradients.shape[:2]
    image = x.contiguous().view(1, -1, *x.shape[2:])
    gradient = gradients.contiguous().view(1, -1, *gradients.shape[2:])
    kernel = _kernel_gradient(layer, image, gradient, num_groups=batch)
    return kernel.unflatten(0, (batch, num_rows))


def _kernel_gradients_one_by_one(
    layer: Any,
    x: Float[Tensor, "batch channels *space"],
    gradients: Float[Tensor, "batch rows *space_out"],
) -> Float[Tensor, "batch rows channels *kernel"]:
    """Compute each example's kernel gradient separately."""
    pairs = zip(x.split(1), gradients.split(1), strict=True)
    return torch.stack([_kernel_gradient(layer, image, gradient) for image, gradient in pairs])


def _kernel_gradient(
    layer: Any,
    image: Float[Tensor, "batch channels *space"],
    gradient: Float[Tensor, "batch rows *space_out"],
    num_groups: int = 1,
) -> Float[Tensor, "rows channels_of_group *kernel"]:
    """Compute the gradient of a kernel, summed over the batch."""
    padding = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        image = _pad(layer, image)
        padding = (0, 0)
    # `conv2d_weight` is not called, because it would allocate a full-size placeholder, of which
    # only the shape is read.
    shape = (gradient.shape[1], *layer.weight.shape[1:])
    placeholder = image.as_strided(shape, (0, 0, 0, 0))
    _, kernel, _ = torch.ops.aten.convolution_backward(
        gradient,
        image,
        placeholder,
        bias_sizes=None,
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        transposed=False,
        output_padding=(0, 0),
        groups=num_groups,
        output_mask=(False, True, False),
    )
    return kernel


def _margins_of_zeros(layer: Any) -> list[int]:
    """Return the margins before and after the image, in the order of `F.pad`: last dimension first.

    With `padding="same"`, the image keeps its size.
    """
    margins: list[int] = []
    for dim, size in reversed(list(enumerate(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[dim] * (size - 1)
        elif layer.padding == "valid":
            total = 0
        else:
            total = 2 * layer.padding[dim]
        margins += [total // 2, total - total // 2]
    return margins


def _pad(layer: Any, x: Float[Tensor, "batch channels *space"]) -> Tensor:
    """Pad the input as the layer does."""
    if not any(layer._reversed_padding_repeated_twice):
        return x
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _patches(
    x: Float[Tensor, "batch channels *space"], layer: Any, stride: Sequence[int]
) -> Float[Tensor, "batch channels *positions_and_kernel"]:
    """Return the patches of an image, `[B, C, o_1, …, k_1, …]`."""
    for dim in range(x.ndim - 2):
        window = (layer.kernel_size[dim] - 1) * layer.dilation[dim] + 1
        x = x.unfold(2 + dim, window, stride[dim])[..., :: layer.dilation[dim]]
    return x


def _flatten_patches(
    patches: Float[Tensor, "batch channels *positions_and_kernel"],
) -> Float[Tensor, "batch positions d_in"]:
    """Flatten `[B, C, o_1, …, k_1, …]` to `[B, o_1·…, C·k_1·…]`."""
    dims = (patches.ndim - 2) // 2
    positions = range(2, 2 + dims)
    kernels = range(2 + dims, 2 + 2 * dims)
    return patches.permute(0, *positions, 1, *kernels).flatten(1 + dims).flatten(1, dims)


def _correlate(
    layer: Any, x: LayerInputs, g: OutputGradients
) -> Float[Tensor, "columns batch groups d_in"]:
    """Compute `Σ_t g_t a_t` without patches.

    The correlation of an image with a gradient is a convolution whose kernel is the gradient:
    stride and dilation are swapped, and every channel of every image is a separate group.
    """
    num_columns, batch, channels = g.shape[:3]
    x = _pad(layer, x)
    images = x.reshape(1, -1, *x.shape[2:])
    kernels = g.movedim(0, 2).reshape(-1, 1, *g.shape[3:])
    convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    full = convolve(
        images, kernels, stride=layer.dilation, dilation=layer.stride, groups=batch * channels
    )
    # If the stride leaves a remainder, the padded image is larger than the part that kernels cover.
    inside: Any = (0, slice(None), *(slice(size) for size in layer.kernel_size))
    return full[inside].reshape(batch, channels, num_columns, -1).permute(2, 0, 1, 3)
