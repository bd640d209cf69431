"""The stream of a batch's curvature blocks through BackPACK.

BackPACK propagates all columns of the loss Hessian's root through a sequential network and calls
an `extension_hook` at every layer. Three of its rules are replaced here:

- the loss: any `Likelihood` gives the columns, exact or sampled;
- Linear and convolutions: BackPACK's convolution factor pairs the *sum* of the gradients over
  the positions with the *sum* over the positions of the activations' outer products, so its trace
  is too large by about the number of positions. The rule here measures the block as the rest of the
  package does, on the same rows of activations and gradients;
- layers without parameters (`AdaptiveAvgPool2d`, `GELU`, …), most of which BackPACK refuses: they
  pass the columns through by automatic differentiation.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from backpack import backpack, extend
from backpack.context import CTX
from backpack.extensions import KFLR
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.hbp.conv1d import HBPConv1d
from backpack.extensions.secondorder.hbp.conv2d import HBPConv2d
from backpack.extensions.secondorder.hbp.conv3d import HBPConv3d
from backpack.extensions.secondorder.hbp.linear import HBPLinear
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from laplace_debias.curvature.blocks import LAYERS, Block
from laplace_debias.curvature.inputs import Inputs
from laplace_debias.curvature.kfac.stream import Columns, Consume, Measure
from laplace_debias.curvature.tap import check_batched

Measured = TypeVar("Measured")
_HBP_RULES = {
    nn.Linear: HBPLinear,
    nn.Conv1d: HBPConv1d,
    nn.Conv2d: HBPConv2d,
    nn.Conv3d: HBPConv3d,
}


def why_not_backpack(model: nn.Module) -> str | None:
    """Why BackPACK cannot be trusted with a model, or None if it can.

    BackPACK follows modules, not operations: what a custom `forward` does between them would be
    lost, and it hands columns from module to module by the address of their data. So it takes
    `nn.Sequential`s, nested at will, of layers that it knows or that have no parameters.
    """
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        name = f"{path or 'model'} ({type(module).__name__})"
        if id(module) in seen:
            return f"{name} stands in the model twice"
        seen.add(id(module))
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not hook.__module__.startswith("backpack") for hook in hooks):
            return f"{name} has forward hooks, which BackPACK does not see"
        if type(module) is nn.Sequential:
            continue
        if type(module) in _HBP_RULES:
            if getattr(module, "groups", 1) != 1:
                return f"{name} is a grouped convolution"
            if isinstance(getattr(module, "padding", 0), str):
                return f"{name} has padding={module.padding!r}, which BackPACK cannot follow"
            if getattr(module, "padding_mode", "zeros") != "zeros":
                return f"{name} has padding_mode={module.padding_mode!r}, which BackPACK ignores"
        elif any(True for _ in module.children()):
            return f"{name} has a forward pass of its own"
        elif any(p.requires_grad for p in module.parameters()):
            parameters = [f"{path}.{key}".lstrip(".") for key, _ in module.named_parameters()]
            return f"{name} holds parameters {parameters} in a layer that BackPACK has no rule for"
        elif not type(module).__module__.startswith("torch.nn.modules"):
            return f"{name} is not one of torch's layers"
    if not isinstance(model, (nn.Sequential, *LAYERS)):
        return f"the model ({type(model).__name__}) is neither an nn.Sequential nor a layer"
    return None


class BackpackStream:
    """The stream through BackPACK; arguments as `HookStream`."""

    def __init__(self, network: nn.Module, blocks: Sequence[Block]) -> None:
        wanted = {block.parameters[0] for block in blocks}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in wanted)
        self._by_module: dict[nn.Module, list[Block]] = {}
        for block in blocks:
            self._by_module.setdefault(network.get_submodule(block.layer), []).append(block)
        self._first = network.get_parameter(blocks[0].parameters[0])
        handles_before = len(CTX.hook_handles)
        self._network = extend(network)
        self._loss = extend(_ColumnLoss())
        # BackPACK keeps every hook's handle in a global list for good.
        del CTX.hook_handles[handles_before:]

    def __call__(
        self,
        x: Inputs,
        columns: Columns,
        measure: Measure[Measured],
        consume: Consume[Measured],
        at_once: int,
    ) -> None:
        """Measure every block on one batch; arguments as `HookStream`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"A sequential network takes one tensor, got {type(x).__name__}.")
        parts: list[Tensor] = []

        def first_part(outputs: Tensor) -> Tensor:
            parts.extend(columns(outputs).split(at_once))
            return parts[0]

        self._run(x, first_part, measure, consume)
        # BackPACK frees its graph: further parts of the cotangents take a forward pass each.
        for part in parts[1:]:
            self._run(x, lambda _, part=part: part, measure, consume)  # type: ignore[misc]

    def _run(
        self, x: Tensor, columns: Columns, measure: Measure[Measured], consume: Consume[Measured]
    ) -> None:
        extension = _BlockExtension(self._network, self._by_module, columns, measure, len(x))

        def hand_over(module: nn.Module) -> None:
            for block in self._by_module.get(module, ()):
                parameter = getattr(module, block.role)
                consume(block, parameter.__dict__.pop(extension.savefield))

        with (
            torch.enable_grad(),
            warnings.catch_warnings(),
            backpack(extension, extension_hook=hand_over),
        ):
            # torch announces that the first layer's hook sees no gradient of its input: none is
            # wanted.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            # BackPACK rides on a backward pass of its own; differentiating one parameter of the
            # first block visits every layer behind it and computes no other weight gradient.
            torch.autograd.grad(self._loss(self._network(x)), self._first)


class _ColumnLoss(_Loss):
    """Stands behind the network: its BackPACK rule hands out the columns."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.sum()


class _LossRule(ModuleExtension):
    def backpropagate(
        self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Tensor:
        return extension.columns(module.input0.detach())


class _PassThrough(ModuleExtension):
    """Columns through a layer without parameters, by differentiating the layer."""

    def backpropagate(
        self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Tensor
    ) -> Tensor:
        x = module.input0.detach().requires_grad_()
        # The layer's own forward, without BackPACK's hooks around it.
        with torch.enable_grad():
            outputs = module.forward(x)
        (product,) = torch.autograd.grad(outputs, x, bpQuantities, is_grads_batched=True)
        return product


class _BlockExtension(KFLR):
    """BackPACK's exact Kronecker extension with the rules of this package."""

    def __init__(
        self,
        network: nn.Module,
        by_module: dict[nn.Module, list[Block]],
        columns: Columns,
        measure: Measure,
        batch: int,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.by_module = by_module
        self.columns = columns
        self.measure = measure
        self.set_module_extension(_ColumnLoss, _LossRule())
        for kind, rule in _HBP_RULES.items():
            self.set_module_extension(kind, _measuring(rule), overwrite=True)
        for module in network.modules():
            if type(module) is not nn.Sequential and type(module) not in _HBP_RULES:
                self.set_module_extension(type(module), _PassThrough(), overwrite=True)


def _measuring(rule: type) -> ModuleExtension:
    """BackPACK's rule for a layer with what it computes of weight and bias replaced."""

    def measure_role(role: str) -> Any:
        def measured(_: Any, ext: Any, module: Any, g_inp: Any, g_out: Any, columns: Tensor) -> Any:
            block = next(b for b in ext.by_module[module] if b.role == role)
            check_batched(block.layer, module.input0, ext.batch)
            return ext.measure(module, block, [(module.input0.detach(), columns)])

        return measured

    kind = type(
        f"Measuring{rule.__name__}",
        (rule,),
        {"weight": measure_role("weight"), "bias": measure_role("bias")},
    )
    return kind()
