"""Two backends that push cotangents back to the blocks of a network.

BackPACK supports plain sequential networks, and the layer tap supports any forward pass. Blocks are
yielded as a backward pass reaches their layers, and the memory of one block is freed before the
next block.

BackPACK's derivatives push all columns of the loss Hessian's root at once through the linear and
convolutional layers of a sequential network. This package contributes everything else:

- the loss: any `Likelihood` gives the columns, exact or sampled;
- the factors: BackPACK's convolution factor pairs the *sum* of the gradients over the positions
  with the *sum* over the positions of the activations' outer products, so its trace is too large by
  about the number of positions. Here, a block is measured as in the rest of the package, on the
  same rows of activations and gradients;
- layers without parameters (`AdaptiveAvgPool2d`, `GELU`, …), most of which BackPACK refuses: the
  columns pass through these layers by automatic differentiation;
- the propagation from layer to layer: BackPACK keeps its state in variables of the whole process
  (the active extensions, a list of hooks), which concurrent fits in two threads would mix up. In a
  sequential network, a loop is enough.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block, layer_rule
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.tap import Tap, not_batched
from laplace_debias.curvature.network.calling import as_columns, quiet
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.curvature.network.quantised import is_quantised


@cache
def _derivatives(name: str) -> Any:
    """Import a derivative class of BackPACK only when needed, as the import takes half a second.

    The name is `module.Class`.
    """
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(f"backpack.core.derivatives.{module}"), class_name)


def why_not_backpack(model: nn.Module) -> str | None:
    """Explain why BackPACK does not support a model, or return None if it supports the model.

    BackPACK follows modules, not operations: operations of a custom `forward` between modules would
    be lost. Supported models are therefore `nn.Sequential`s, possibly nested, of layers that
    BackPACK knows or that have no parameters.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype in NARROW:
            return f"{name} is in half precision, which is computed in single precision"
        if is_quantised(parameter):
            return f"{name} is quantised ({type(parameter).__name__})"
    visited: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        title = f"{path or 'model'} ({type(module).__name__})"
        if module in visited:
            return f"{title} is in the model twice"
        visited.add(module)
        obstacle = _obstacle_of_module(module)
        if obstacle is not None:
            return f"{title} {obstacle}"
    return None


def _obstacle_of_module(module: nn.Module) -> str | None:
    """Explain why BackPACK does not support a module itself, or return None if it does."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if not hook.__module__.startswith("backpack"):
            return "has forward hooks, which BackPACK ignores"
    if layer_rule(module).backpack_derivatives(module) is not None:
        padding = getattr(module, "padding", 0)
        mode = getattr(module, "padding_mode", "zeros")
        if getattr(module, "groups", 1) != 1 or isinstance(padding, str) or mode != "zeros":
            return "has padding or groups that BackPACK does not support"
        return None
    kind = type(module)
    if kind is nn.Sequential:
        return None
    if module._modules or not kind.__module__.startswith("torch.nn.modules"):
        return "has its own forward pass"
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            return f"contains {name} in a layer for which BackPACK has no rule"
    return None


class BackpackTap:
    """A tap of a sequential network whose backward passes are computed by BackPACK."""

    def __init__(self, tap: Tap, blocks: Sequence[Block]) -> None:
        self.tap = tap.attach(blocks)
        self._blocks: dict[nn.Module, list[Block]] = {}
        for block in blocks:
            layer = tap.network.get_submodule(block.layer)
            self._blocks.setdefault(layer, []).append(block)
        # The modules are called in this order, because `why_not_backpack` rejects all other models.
        modules = tap.network.modules()
        self._chain = [module for module in modules if type(module) is not nn.Sequential]
        # BackPACK needs the input of a layer after its call, so no layer may overwrite its input.
        # The network is a `shared_copy`, so this attribute may be set.
        for module in self._chain:
            module.inplace = False  # type: ignore[assignment]
        self._first = min(map(self._chain.index, self._blocks))

    def forward(self, x: Inputs) -> "SequentialPass":
        """Run the network and keep the inputs of its layers."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"A sequential network needs one tensor as input, got {type(x).__name__}. Pass a "
                "tensor."
            )
        # The inputs of the layers from the first block on, and the output of the last layer.
        activations: list[Tensor] = []
        current = x
        with torch.no_grad():
            for index, layer in enumerate(self._chain):
                if layer in self._blocks and len(current) != len(x):
                    raise not_batched(self._blocks[layer][0].layer, current, len(x))
                if index >= self._first:
                    activations.append(current)
                current = layer(current)
        activations.append(current)
        outputs = as_columns(current, x.shape[:1])
        return SequentialPass(self._chain[self._first :], self._blocks, outputs, activations)


@dataclass(eq=False)
class SequentialPass:
    """A forward pass of a sequential network, whose outputs BackPACK differentiates.

    Attributes:
        layers: The layers, beginning with the first layer that has a block.
        blocks: The blocks of the layers.
        outputs: The outputs `[B, ..., C]` of the network.
        activations: The inputs of the layers, and the output of the last layer. These tensors are
            kept until the last part of the cotangents is pushed back.
    """

    layers: Sequence[nn.Module]
    blocks: Mapping[nn.Module, Sequence[Block]]
    outputs: Float[Tensor, "batch *outputs"]
    activations: Sequence[Tensor]

    def gated_layers(self) -> set[str]:
        """Return the empty set: a sequential network has no gates, so all examples reach it."""
        return set()

    def backward(
        self, columns: Float[Tensor, "columns batch *outputs"], keep_graph: bool = False
    ) -> Iterator[BlockRecord]:
        """Yield a record for each block as the cotangents reach its layer."""
        activations = self.activations
        if not keep_graph:
            self.activations = []
        columns = columns.view(len(columns), *activations[-1].shape)
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            x = activations[index]
            for block in self.blocks.get(layer, ()):
                yield BlockRecord(block, layer, [x], [columns])
            if index > 0:
                columns = _pull(layer, x, activations[index + 1], columns)


def _pull(layer: nn.Module, x: Tensor, z: Tensor, gradients: Tensor) -> Tensor:
    """Compute gradients `[K, B, ...]` at a layer's input from the gradients at its output."""
    derivatives = layer_rule(layer).backpack_derivatives(layer)
    if derivatives is not None:
        # BackPACK reads the input and the output from these attributes, which may be set because
        # the layer is part of a `shared_copy`.
        layer.input0 = x
        layer.output = z
        try:
            return _derivatives(derivatives)().jac_t_mat_prod(layer, (), (), gradients)
        finally:
            del layer.input0, layer.output
    x = x.detach().requires_grad_()
    # Call the layer's own forward pass, which runs no hooks.
    with torch.enable_grad():
        outputs = layer.forward(x)
    if len(gradients) == 1:
        (product,) = torch.autograd.grad(outputs, x, gradients[0])
        return product.unsqueeze(0)
    with quiet():
        (product,) = torch.autograd.grad(outputs, x, gradients, is_grads_batched=True)
    return product


def _differentiates_one_by_one(layer: nn.Module) -> bool:
    return layer_rule(layer).differentiates_one_by_one(layer)


Backend = Tap | BackpackTap
"""A backend runs batches forward and back, and yields the records of blocks."""


def make_backend(name: str, model: nn.Module, tap: Tap, blocks: Sequence[Block]) -> Backend:
    """Make the backend with the given name, which runs the network of a tap.

    Args:
        name: `"backpack"`, `"hooks"` or `"auto"`.
        model: The user's model.
        tap: The tap of its working copy.
        blocks: The curvature blocks.
    """
    if uses_backpack(name, model, blocks):
        return BackpackTap(tap, blocks)
    return tap.attach(blocks)


def uses_backpack(name: str, model: nn.Module, blocks: Sequence[Block] = ()) -> bool:
    """Whether the backend with the given name is BackPACK rather than hooks.

    `"auto"` selects BackPACK if it supports the model, except for convolutions on a CPU, where
    hooks are faster. Otherwise it selects hooks.

    Raises:
        ValueError: If there is no such backend.
        NotImplementedError: For `"backpack"`, if BackPACK does not support the model.
    """
    if name == "hooks":
        return False
    if name not in ("auto", "backpack"):
        raise ValueError(f"Unknown backend={name!r}. Use 'auto', 'backpack' or 'hooks'.")
    # Layers that are differentiated one cotangent at a time gain nothing from BackPACK.
    if name == "auto" and any(map(_differentiates_one_by_one, model.modules())):
        return False
    obstacle = why_not_backpack(model)
    for block in blocks:
        if obstacle is None and block.rule.is_generic:
            obstacle = f"{block.name} is not a parameter of a layer that BackPACK supports"
    if obstacle is None:
        return True
    if name == "auto":
        return False
    raise NotImplementedError(
        f'BackPACK does not support this model: {obstacle}. Use `backend="hooks"` or '
        '`backend="auto"`.'
    )
