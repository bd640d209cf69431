"""Layers with a forward pass of their own, held against what their base class computes."""

import torch
from torch import nn

from laplace_debias.curvature.blocks import Block, is_overridden
from laplace_debias.curvature.kfac.magnitudes import rotated_jacobians
from laplace_debias.curvature.tap import Use


def check_overridden(network: nn.Module, blocks: list[Block], uses: list[Use]) -> None:
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
        wrong = [use for use in uses if use.layer == block.layer and not _agrees(layer, block, use)]
        if wrong:
            raise NotImplementedError(
                f"{block.layer} ({type(layer).__name__}) has a forward pass of its own, which does "
                f"not compute what its base class does, so {list(block.parameters)} have no "
                "curvature here. Leave them out on purpose with params=lambda name, parameter: ..."
            )


def _agrees(layer: nn.Module, block: Block, use: Use) -> bool:
    """Whether the block's Jacobian along one random cotangent is that of autograd."""
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
    weight = expected[0]
    rows = slice(block.group * block.shape[0], (block.group + 1) * block.shape[0])
    matrix = weight[rows].flatten(1) if block.role == "weight" else weight.flatten()[:, None]
    if block.is_joint:
        matrix = torch.cat([matrix, expected[1][rows, None]], dim=1)
    return matrix.shape == J.shape and torch.allclose(
        J, matrix, rtol=1e-2, atol=1e-3 * float(matrix.abs().max())
    )
