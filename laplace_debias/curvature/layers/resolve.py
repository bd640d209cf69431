"""Finds the blocks of a model's parameters, found by running an example or two.

A layer's class says how its parameters act, and a model may do otherwise: a forward pass of its
own, a weight that is read from outside of its layer, windows or time steps in the place of the
examples. So every block is held against automatic differentiation. A parameter whose block does not
agree is measured at calls of the module that holds it; if these do not tell either, at those of the
module around it, and so on; the network itself is the last of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import (
    Block,
    Sharing,
    Site,
    around,
    curvature_blocks,
    entries_of,
    owners_of_parameters,
)
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, call, join, num_examples, take
from laplace_debias.curvature.network.outputs import check_outputs, check_repeatable
from laplace_debias.curvature.network.selection import leaving_out
from laplace_debias.curvature.network.shadow import coarsest_eps, shadow
from laplace_debias.system.memory import is_out_of_memory

Calls = Mapping[str, Sequence[str]]

# Examples that are run where not all of a model takes part in the outputs of two.
_MORE = 16


@dataclass(frozen=True)
class Resolved:
    """The findings that an example gave of some parameters.

    Attributes:
        blocks: Their blocks, of those that the outputs depend on.
        calls: Where parameters are measured that are not at their layers, as `curvature_blocks`
            takes it.
        unused: Names of those that the outputs do not depend on by differentiable operations.
    """

    blocks: list[Block]
    calls: dict[str, tuple[str, ...]]
    unused: list[str]


def resolve(
    model: nn.Module,
    names: Sequence[str],
    x: Inputs,
    joint: bool = False,
    sharing: Sharing = "expand",
) -> Resolved:
    """The blocks of some parameters, verified.

    Args:
        model: The model, with outputs `[B, ..., C]`; left untouched.
        names: The parameters, as `select_parameters` gives them.
        x: Inputs, `[B, ...]`, on the model's device; two examples are run, and `_MORE` if some
            parameter takes no part in the outputs of one of them, as in a mixture of experts.
        joint: As `curvature_blocks` takes it.
        sharing: As `curvature_blocks` takes it.

    Raises:
        ValueError: If the model is random, mixes the examples of a batch, or its outputs are not
            finite or not of shape `[B, ..., C]`.
        NotImplementedError: If a parameter cannot be measured anywhere.
    """
    few = take(x, slice(0, 2))
    if num_examples(few) == 1:
        # Of one example no dimension tells that it is that of the examples.
        few = join([few, few])
    with torch.no_grad():
        outputs = call(shadow(model), take(few, slice(0, 1)))
    check_outputs(outputs, num_examples(x))
    check_repeatable(model, few, outputs)
    reference, more = _Reference(model, names, few), None
    unused = reference.unused
    if reference.is_partial:
        more = take(x, slice(0, _MORE))
        unused = _unused(model, unused, more)
    used = [name for name in names if name not in unused]
    calls: dict[str, tuple[str, ...]] = {}
    owners = owners_of_parameters(model)
    while True:
        blocks = curvature_blocks(model, used, joint, sharing, calls) if used else []
        wrong = dict(_wrong(model, blocks, few, more, reference)) if blocks else {}
        if not wrong:
            return Resolved(blocks, calls, unused)
        lost: dict[str, Exception] = {}
        for name, (block, error) in wrong.items():
            paths: Sequence[str] | None = owners[id(model.get_parameter(name))]
            if block.calls:
                further = around(model, block.calls)
                paths = None if further is None else (further,)
            if paths is None:
                lost[name] = error
            else:
                calls[name] = tuple(paths)
        if lost:
            raise NotImplementedError(
                f"The gradients of single examples cannot be computed for {list(lost)} "
                f"({next(iter(lost.values()))}) Leave these parameters out with "
                f"{leaving_out(list(lost))}, or freeze them with requires_grad_(False)."
            )


class _Reference:
    """Gradients of a few examples along one random cotangent, by automatic differentiation.

    Args:
        model: The model.
        names: Parameters.
        x: One example or two.

    Attributes:
        cotangent: `[B, ...]`, of the outputs' shape.
        gradients: By the parameter's name, for every example.
        unused: Parameters that no example's outputs depend on.
        is_partial: Whether the gradient of some parameter is zero for some example.
        rounding: What is nothing but rounding in the norm of a gradient.
        eps: Rounding of one number.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], x: Inputs) -> None:
        twin = shadow(model)
        parameters = [twin.get_parameter(name).requires_grad_(True) for name in names]
        with torch.enable_grad():
            outputs = call(twin, x)
        generator = torch.Generator(outputs.device).manual_seed(0)
        self.cotangent = torch.randn(
            outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device
        )
        # Not each example alone: some gradients of torch are wrong for a batch of one.
        found = []
        for index in range(num_examples(x)):
            of_example = torch.zeros_like(self.cotangent)
            of_example[index] = self.cotangent[index]
            found.append(_gradients(outputs, parameters, of_example))
        self.gradients = {
            name: [torch.zeros_like(p) if (g := of[i]) is None else g.to_dense() for of in found]
            for i, (name, p) in enumerate(zip(names, parameters, strict=True))
        }
        self.unused = [n for i, n in enumerate(names) if all(of[i] is None for of in found)]
        self.eps = coarsest_eps(twin)
        norms = torch.stack([g.norm() for of_name in self.gradients.values() for g in of_name])
        self.is_partial = bool((norms == 0).any())
        # Some gradients are nothing but rounding: that of the keys' bias, which no softmax sees.
        self.rounding = self.eps**0.5 * float(norms.nan_to_num(0.0, 0.0).max())


def _unused(model: nn.Module, names: Sequence[str], x: Inputs) -> list[str]:
    """The parameters, of some, that the outputs of no example depend on."""
    twin = shadow(model)
    parameters = [twin.get_parameter(name).requires_grad_(True) for name in names]
    with torch.enable_grad():
        outputs = call(twin, x)
    found = _gradients(outputs, parameters, torch.ones_like(outputs)) if names else []
    return [name for name, gradient in zip(names, found, strict=True) if gradient is None]


def _gradients(
    outputs: Tensor, parameters: Sequence[Tensor], cotangent: Tensor
) -> Sequence[Tensor | None]:
    if not outputs.requires_grad:
        return [None] * len(parameters)
    try:
        return torch.autograd.grad(
            outputs, parameters, cotangent, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise NotImplementedError(
            f"torch cannot differentiate the model's outputs ({error}) Use out-of-place operations "
            "in its forward pass."
        ) from error


def _wrong(
    model: nn.Module,
    blocks: Sequence[Block],
    x: Inputs,
    more: Inputs | None,
    reference: _Reference,
) -> Iterator[tuple[str, tuple[Block, Exception]]]:
    """Parameters whose block is not what automatic differentiation says, with the block and why."""
    network = shadow(model)
    tap = Tap.on(network, blocks)
    # Two examples may take the same way through a model by chance.
    of_more = {} if more is None else tap.look(more)[1]
    outputs, faults = tap.look(x)
    faults = of_more | faults
    uses: dict[Site, Uses] = {}
    if outputs.shape == reference.cotangent.shape:
        uses = dict(tap.backward(outputs, reference.cotangent.unsqueeze(0), strict=False))
    for block in blocks:
        error = faults.get(block.site)
        if error is None:
            error = _error(network, tap, block, uses.get(block.site), reference)
        if error is not None:
            for name in block.parameters:
                yield name, (block, error)


def _error(
    network: nn.Module,
    tap: Tap,
    block: Block,
    uses: Uses | None,
    reference: _Reference,
) -> Exception | None:
    if uses is None:
        return ValueError(f"The outputs do not depend on {block.site}.")
    layer = tap.module(block.site)
    expected = [
        entries_of(network, block, {n: reference.gradients[n][index] for n in block.parameters})
        for index in range(len(reference.cotangent))
    ]
    try:
        rows = _jacobians(layer, block, uses, expected)
    # Whatever a layer raises that is not what its class says, or a module that is run by itself.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
    for J, of_example in zip(rows, expected, strict=True):
        if not of_example.isfinite().all():
            continue  # The fit finds what is not finite, and says where.
        allowed = max(1e-2, 16 * reference.eps) * of_example.norm() + reference.rounding
        if not (J - of_example).norm() <= allowed:
            return NotImplementedError(
                f"The outputs depend on {list(block.parameters)} in another way than through "
                f"{block.site}."
            )
    return None


def _jacobians(layer: nn.Module, block: Block, uses: Uses, like: Sequence[Tensor]) -> list[Tensor]:
    """The block's Jacobian along the one cotangent of each example, `[d_out, d_in]`."""
    found = [torch.zeros_like(matrix) for matrix in like]
    for part, J, columns in rotated_jacobians(layer, block, uses, None, None):
        for J_n, into in zip(J[:, 0], found[part], strict=True):
            if columns is None:
                into += J_n
            else:
                into[:, columns] += J_n
    return found
