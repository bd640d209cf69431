"""What layers are taken to compute, held against automatic differentiation of one example."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block, entries_of, is_overridden
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.tap import Tap, Use
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, call
from laplace_debias.curvature.network.shadow import shadow


def check_overridden(network: nn.Module, blocks: Sequence[Block], uses: Sequence[Use]) -> None:
    """Require subclasses of torch's layers to have the Jacobian of the layer that they extend.

    A library's own `LayerNorm` computes what torch's does; weight standardisation or an adapter
    does not, and K-FAC of it would be wrong without a word. Automatic differentiation of the layer
    alone, on what went into it, tells the two apart.

    Args:
        network: A `shadow` of the model.
        blocks: The curvature blocks.
        uses: The tapped layers' uses, for one example.

    Raises:
        NotImplementedError: Naming the layer and its parameters.
    """
    for block in blocks:
        layer = network.get_submodule(block.layer)
        if not is_overridden(layer):
            continue
        wrong = [
            use for use in uses if use.layer == block.layer and not _agrees(network, block, use)
        ]
        if wrong:
            raise NotImplementedError(
                f"{block.layer} ({type(layer).__name__}) has a forward pass of its own, which does "
                f"not compute what its base class does, so {list(block.parameters)} have no "
                "curvature here. Leave them out on purpose with params=lambda name, parameter: ..."
            )


def _agrees(network: nn.Module, block: Block, use: Use) -> bool:
    """Whether the block's Jacobian along one random cotangent is that of autograd."""
    layer = network.get_submodule(block.layer)
    parameters = [getattr(layer, name.rpartition(".")[2]) for name in block.parameters]
    generator = torch.Generator(use.z.device).manual_seed(0)
    cotangent = torch.randn(
        use.z.shape, generator=generator, dtype=use.z.dtype, device=use.z.device
    )
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        # The class's forward: the hooks on the module belong to the tap.
        outputs = type(layer).forward(layer, use.x)
        expected = torch.autograd.grad(outputs, parameters, cotangent, allow_unused=True)
        for parameter in parameters:
            parameter.requires_grad_(False)
    if any(gradient is None for gradient in expected):
        return False
    pairs = [(use.x, cotangent.unsqueeze(0))]
    J = torch.cat([part.J for part in rotated_jacobians(layer, block, pairs, None, None)])[0, 0]
    matrix = entries_of(network, block, dict(zip(block.parameters, expected, strict=True)))
    return matrix.shape == J.shape and torch.allclose(
        J, matrix, rtol=1e-2, atol=1e-3 * float(matrix.abs().max())
    )


def check_jacobians(
    network: nn.Module,
    model: nn.Module,
    blocks: Sequence[Block],
    x: Inputs,
    tap: Tap,
    outputs: Tensor,
) -> None:
    """Require the outputs to depend on the blocks' parameters through their layers alone.

    A weight that the forward pass takes out of its layer (`F.linear(h, self.embedding.weight)`, the
    head of many language models) has a Jacobian that the layer's inputs and output gradients do not
    tell: curvature would be wrong without a word.

    Args:
        network: The shadow of the model that the tap is on.
        model: The model.
        blocks: The curvature blocks.
        x: One example.
        tap: A tap on the blocks' layers after its forward pass of the example.
        outputs: What that gave.

    Raises:
        NotImplementedError: Naming the layer and its parameters.
    """
    generator = torch.Generator(outputs.device).manual_seed(0)
    cotangent = torch.randn(
        outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device
    )
    uses = dict(tap.backward(outputs, cotangent.unsqueeze(0), again=True))
    twin = shadow(model)
    names = list(dict.fromkeys(name for block in blocks for name in block.parameters))
    parameters = [twin.get_parameter(name).requires_grad_(True) for name in names]
    with torch.enable_grad():
        found = torch.autograd.grad(call(twin, x), parameters, cotangent, allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
    eps = torch.finfo(outputs.dtype).eps
    # Some gradients are nothing but rounding: that of the keys' bias, which no softmax sees.
    rounding = eps**0.5 * max(float(gradient.norm()) for gradient in gradients.values())
    for block in blocks:
        expected = entries_of(twin, block, gradients)
        J = _jacobian(network.get_submodule(block.layer), block, uses[block.layer], expected)
        if (J - expected).norm() > max(1e-2, 16 * eps) * expected.norm() + rounding:
            raise NotImplementedError(
                f"The outputs depend on {list(block.parameters)} in another way than through the "
                f"layer {block.layer}: the forward pass uses the parameters outside of it (a tied "
                "head, `F.linear` with its weight, ...), so they have no curvature here. Leave "
                "them out on purpose with params=lambda name, parameter: ..., or freeze them with "
                "requires_grad_(False)."
            )


def _jacobian(layer: nn.Module, block: Block, uses: Uses, like: Tensor) -> Tensor:
    """The block's Jacobian along the one cotangent of the one example, `[d_out, d_in]`."""
    J = torch.zeros_like(like)
    for _, part, columns in rotated_jacobians(layer, block, uses, None, None):
        if columns is None:
            J += part[0, 0]
        else:
            J[:, columns] += part[0, 0]
    return J
