"""Gradients of batch normalisations for one example, which torch gets wrong in some layouts."""

from typing import Any

from torch import Tensor, nn


def lay_out_gradients(network: nn.Module) -> None:
    """Give batch normalisations contiguous output gradients where there is one example.

    If the output gradient of an example `[1, C, H, W]` has strides `(C, 1, CW, C)`, as it may from
    tokens `[1, HW, C]` behind the layer, torch's backward pass in eval mode reads its numbers in
    another order (torch 2.15, on the CPU).

    Args:
        network: A `shadow` of the model: hooks are left on it.
    """
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_hook(_hook, prepend=True)


def _hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
    if len(output) == 1 and output.requires_grad:
        output.register_hook(Tensor.contiguous)
