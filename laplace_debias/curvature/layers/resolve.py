"""Finds the blocks of a model's parameters by running an example or two.

A layer's class says how its parameters act, and a model may do otherwise: a forward pass of its
own, a weight that is read from outside of its layer, windows or time steps in the place of the
examples. So every block is held against automatic differentiation. A parameter whose block does not
agree is measured at calls of the module that holds it; if these do not tell either, at those of the
module around it, and so on; the network itself is the last of them. What has no layer, or that of a
normalisation, is first looked for in operations that multiply by it or add it, entry by entry.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import (
    Block,
    Sharing,
    Site,
    around,
    curvature_blocks,
    owners_of_parameters,
    parameter_order,
)
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.inputs import Inputs, call, join, num_examples, take
from laplace_debias.curvature.network.layer_types import NORMS
from laplace_debias.curvature.network.outputs import check_outputs, check_repeatable
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.curvature.network.selection import leaving_out
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.system.memory import is_out_of_memory

# Examples that are run where not all of a model takes part in the outputs of two.
_MORE = 16


@dataclass(frozen=True)
class Resolved:
    """The findings that an example gave of some parameters.

    `calls` says where parameters are measured that are not at their layers: at operations if there
    are none. On `unused` ones the
    outputs do not depend by differentiable operations.
    """

    blocks: list[Block]
    calls: dict[str, tuple[str, ...]]
    unused: list[str]


def resolve(
    tap: Tap, names: Sequence[str], x: Inputs, joint: bool = False, sharing: Sharing = "expand"
) -> Resolved:
    """The blocks of some parameters, verified.

    Two examples are run, and `_MORE` if some parameter takes no part in the outputs of one of them,
    as in a mixture of experts. The tap is left where the blocks are. A random model, and one that
    mixes the examples of a batch, is refused.
    """
    network, few, more = tap.network, take(x, slice(0, 2)), None
    if num_examples(few) == 1:
        # Of one example no dimension tells that it is that of the examples.
        few = join([few, few])
    one = take(few, slice(0, 1))
    with torch.no_grad(), preserve_attributes(network.modules()):
        outputs = call(network, one)
    check_outputs(outputs)
    reference = _Reference.of(network, names, few)
    check_repeatable(network, one, outputs, reference.outputs[:1])
    unused, used = reference.unused, list(names)
    if reference.is_partial:
        more = take(x, slice(0, _MORE))
        unused = _Reference.of(network, unused, more).unused if unused else []
    for name in unused:
        used.remove(name)
    calls: dict[str, tuple[str, ...]] = {}
    owners, right = owners_of_parameters(network), set[tuple[str, Site]]()
    for block in curvature_blocks(network, used, joint, sharing):
        if len(block.calls) == 1:
            calls[block.name] = ()
    while True:
        blocks = curvature_blocks(network, used, joint, sharing, calls)
        wrong = _wrong(tap, blocks, right, names, few, more, reference)
        if not wrong:
            return Resolved(blocks, calls, unused)
        right.update((block.name, block.site) for block in blocks if block not in wrong)
        lost: dict[str, Exception] = {}
        for block, error in wrong.items():
            further = around(network, block.calls) if block.calls else None
            is_of_norm = block.role in ("scale", "bias") and isinstance(
                network.get_submodule(block.layer), NORMS
            )
            for name in block.parameters:
                if is_of_norm:
                    calls[name] = ()
                elif not block.calls:
                    calls[name] = owners[id(network.get_parameter(name))]
                elif further is not None:
                    calls[name] = (further,)
                else:
                    lost[name] = error
        if lost:
            raise NotImplementedError(
                f"The gradients of single examples cannot be computed for {list(lost)} "
                f"({next(iter(lost.values()))}) Leave these parameters out with "
                f"{leaving_out(list(lost))}, or freeze them with requires_grad_(False)."
            )


@dataclass(frozen=True)
class _Reference:
    """Gradients of two examples along one random cotangent, by automatic differentiation.

    `cotangent` has the outputs' shape, `gradients` are `[B, D]`. No example's outputs depend on
    `unused` parameters; `is_partial` says whether the gradient of some parameter is zero for some
    example. `rounding` is that in the norm of a gradient, `eps` that of one number.
    """

    outputs: Tensor
    cotangent: Tensor
    gradients: Tensor
    unused: list[str]
    is_partial: bool
    rounding: float
    eps: float

    @classmethod
    def of(cls, network: nn.Module, names: Sequence[str], x: Inputs) -> "_Reference":
        """Run a network, and differentiate the outputs for the first two examples."""
        parameters, of_examples = list(map(network.get_parameter, names)), []
        for parameter in parameters:
            parameter.requires_grad_()
        try:
            with torch.enable_grad(), preserve_attributes(network.modules()):
                outputs = call(network, x)
            device, dtype = outputs.device, outputs.dtype
            generator = torch.Generator(device).manual_seed(0)
            drawn = torch.randn(outputs.shape, generator=generator, dtype=dtype, device=device)
            for example in range(min(2, len(drawn))):
                # Not an example alone: some gradients of torch are wrong for a batch of one.
                cotangent = torch.zeros_like(drawn)
                cotangent[example] = drawn[example]
                of_examples.append(_gradients(outputs, parameters, cotangent))
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)
        parts, norms, unused = [], [], []
        for name, parameter, *gradients in zip(names, parameters, *of_examples, strict=True):
            rows = []
            for gradient in gradients:
                rows.append(
                    torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                )
            parts.append(torch.stack(rows).reshape(len(rows), -1))
            norms.append(parts[-1].norm(dim=1))
            if gradients[0] is None:
                unused.append(name)
        of_parts, eps = torch.stack(norms), coarsest_eps(network)
        # Some gradients are nothing but rounding: that of the keys' bias, which no softmax sees.
        rounding = eps**0.5 * float(of_parts.nan_to_num(0.0, 0.0).max())
        is_partial = bool((of_parts == 0).any())
        joined = torch.cat(parts, 1)
        return cls(outputs.detach(), drawn, joined, unused, is_partial, rounding, eps)


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
            "in its forward pass; with recurrent layers on a GPU make every call within "
            "`with torch.backends.cudnn.flags(enabled=False):`."
        ) from error


def _wrong(
    tap: Tap,
    blocks: Sequence[Block],
    right: Collection[tuple[str, Site]],
    names: Sequence[str],
    x: Inputs,
    more: Inputs | None,
    reference: _Reference,
) -> dict[Block, Exception]:
    """Blocks that are not what automatic differentiation says, and why; the right ones are not."""
    if not blocks:
        return {}
    tap.at(blocks)
    # Two examples may take the same way through a model by chance.
    faults: dict[Site, Exception] = {}
    if more is not None:
        tap.forward(more, strict=False)
        faults |= tap.faults
    outputs = tap.forward(x, strict=False)
    faults |= tap.faults
    uses: dict[Block, tuple[nn.Module, Uses]] = {}
    if outputs.shape == reference.cotangent.shape:
        columns = reference.cotangent.unsqueeze(0)
        if not tap.one_by_one or any(map(attrgetter("calls"), blocks)):
            # Some gradients of torch are wrong where several columns come at once.
            columns = torch.cat([-columns, columns])
        for number, layer, of_block in tap.backward(outputs, columns, strict=False):
            uses[blocks[number]] = layer, of_block
    wrong: dict[Block, Exception] = {}
    norms: dict[Block, Tensor] = {}
    order, stop = parameter_order(tap.network, names, blocks), 0
    for block in blocks:
        start, stop = stop, stop + block.size
        if block.site in faults:
            wrong[block] = faults[block.site]
        elif block not in uses:
            wrong[block] = ValueError(f"The outputs do not depend on {block.site}.")
        elif (block.name, block.site) not in right:
            try:
                places = slice(start, stop) if order is None else order[start:stop]
                norms[block] = _deviation(block, *uses[block], reference.gradients[:, places])
            # What a layer raises that is not what its class says, or a module run by itself.
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                wrong[block] = error
    of_blocks = torch.stack(list(norms.values())).tolist() if norms else []
    for block, (off, sizes) in zip(norms, of_blocks, strict=True):
        for deviation, size in zip(off, sizes, strict=True):
            # The fit finds what is not finite, and says where.
            allowed = max(1e-2, 16 * reference.eps) * size + reference.rounding
            if math.isfinite(size) and not deviation <= allowed:
                wrong[block] = NotImplementedError(
                    f"The outputs depend on {list(block.parameters)} in another way than through "
                    f"{block.site}."
                )
    return wrong


def _deviation(
    block: Block, layer: nn.Module, uses: Uses, expected: Float[Tensor, "batch size"]
) -> Float[Tensor, "2 batch"]:
    """By how much a block's Jacobian along the last cotangent is off, and its norm, by example."""
    off = expected.clone()
    matrices = off.view(len(off), *block.groups, *block.shape)
    for part, J, columns in rotated_jacobians(layer, block, uses, None, None):
        if columns is None:
            matrices[part] -= J[:, -1]
        else:
            matrices[part].index_add_(-1, columns, J[:, -1], alpha=-1)
    return torch.stack([off.norm(dim=1), expected.norm(dim=1)])
