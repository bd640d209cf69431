"""Find the blocks of a model's parameters by running a few examples.

A layer's class determines how its parameters are expected to act, but a model may behave
differently: it may have its own forward pass, read a weight from outside its layer, or pass windows
or time steps to a layer instead of examples. Therefore, every block is compared with automatic
differentiation. A parameter whose block differs is measured at the calls of the module that has the
parameter. If the result still differs, the calls of the enclosing module are used, and so on up to
the network itself. For a parameter without a layer, or a parameter of a normalisation, operations
that multiply by the parameter or add it, entry by entry, are tried first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block, Site
from laplace_debias.curvature.layers.blocks import (
    Sharing,
    curvature_blocks,
    enclosing_module,
    owners_of_parameters,
    parameter_order,
)
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.curvature.layers.reference import FIRST_EXAMPLES, Reference, find_references
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, join, num_examples, take
from laplace_debias.curvature.network.outputs import (
    are_repeated,
    check_outputs,
    check_repeatable,
)
from laplace_debias.curvature.network.selection import leaving_out
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.operators.structures.directions import Axes
from laplace_debias.system.memory import is_out_of_memory


@dataclass(frozen=True)
class Resolved:
    """The blocks of parameters, verified on a few examples.

    Attributes:
        blocks: The blocks.
        calls: For each parameter that is not measured at its layer, the paths of the modules whose
            calls read the parameter. Without paths, the parameter is measured at operations.
        unused: Parameters on which the outputs do not depend through differentiable operations.
    """

    blocks: list[Block]
    calls: dict[str, tuple[str, ...]]
    unused: list[str]


def resolve(
    tap: Tap,
    names: Sequence[str],
    x: Inputs,
    joint: bool = False,
    sharing: Sharing = "expand",
    more_batches: Iterable[Inputs] = (),
) -> Resolved:
    """Find the blocks of parameters, and verify them on a few examples.

    Two examples of the first batch `x` are run. If the outputs of an example do not depend on a
    parameter, as in a mixture of experts, `x` and `more_batches` are searched for examples that use
    the parameter. The tap stays attached to the blocks. Models that are random or that mix the
    examples of a batch are rejected.
    """
    network = tap.network
    reference = _first_reference(network, names, _two_examples(x))
    later_references, unused = find_references(network, names, reference, x, more_batches)
    references = [reference, *later_references]
    used = [name for name in names if name not in unused]
    # Two examples may take the same path through a model by chance, so more examples are run.
    mixed = take(x, slice(0, FIRST_EXAMPLES)) if reference.is_partial else None
    # If a parameter has no layer, operations are tried before the calls of its module.
    calls: dict[str, tuple[str, ...]] = {
        block.name: ()
        for block in curvature_blocks(network, used, joint, sharing)
        if len(block.calls) == 1
    }
    while True:
        blocks = curvature_blocks(network, used, joint, sharing, calls)
        # All blocks are checked again, because recording one block elsewhere may change what the
        # tap records for other blocks.
        wrong = _wrong(tap, blocks, references, mixed)
        if not wrong:
            return Resolved(blocks, calls, unused)
        calls |= _next_calls(network, wrong)


def _first_reference(network: nn.Module, names: Sequence[str], few: Inputs) -> Reference:
    """Compute the reference of a few examples, and check the outputs of the first example.

    The outputs must be finite, and must not depend on the other examples.
    """
    first_example = take(few, slice(0, 1))
    with torch.no_grad(), preserve_attributes(network.modules()):
        outputs = call(network, first_example)
    check_outputs(outputs)
    reference = Reference.compute(network, names, few)
    check_repeatable(network, first_example, outputs, reference.outputs[:1])
    return reference


def _two_examples(x: Inputs) -> Inputs:
    """Take two examples of a batch, or its only example twice.

    The dimension of the examples cannot be recognised with one example.
    """
    few = take(x, slice(0, 2))
    return join([few, few]) if num_examples(few) == 1 else few


def _next_calls(network: nn.Module, wrong: Mapping[Block, Exception]) -> dict[str, tuple[str, ...]]:
    """Return the calls at which the parameters of wrong blocks are measured next.

    Raises:
        NotImplementedError: If a parameter is already measured at the calls of the whole network.
    """
    owners = owners_of_parameters(network)
    calls: dict[str, tuple[str, ...]] = {}
    errors: dict[str, Exception] = {}
    for block, error in wrong.items():
        for name in block.parameters:
            own_modules = owners[id(network.get_parameter(name))]
            paths = _next_paths(network, block, own_modules)
            if paths is None:
                errors[name] = error
            else:
                calls[name] = paths
    if errors:
        raise NotImplementedError(
            f"The gradients of single examples cannot be computed for {list(errors)}. "
            f"{next(iter(errors.values()))} Exclude these parameters with "
            f"`{leaving_out(list(errors))}`, or freeze them with `requires_grad_(False)`."
        )
    return calls


def _next_paths(
    network: nn.Module, block: Block, own_modules: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return the paths of the modules at whose calls a parameter of a block is measured next.

    The result `()` means that the parameter is measured at operations, and None that no further
    module encloses the block. `own_modules` are the modules that have the parameter.
    """
    if block.rule.is_entrywise:
        return ()
    if not block.calls:
        return own_modules
    enclosing = enclosing_module(network, block.calls)
    return None if enclosing is None else (enclosing,)


def differing_blocks(
    network: nn.Module, blocks: Sequence[Block], names: Sequence[str], x: Inputs
) -> list[Block]:
    """Find blocks that do not agree with automatic differentiation on the first two examples.

    The result is empty if two passes give different outputs, because their gradients cannot be
    compared then. Sites that cannot be measured on so few examples are left out; a pass over all
    examples raises an error.
    """
    few = _two_examples(x)
    reference = Reference.compute(network, names, few)
    check_outputs(reference.outputs)
    tap = Tap(network, blocks)
    if reference.is_partial:
        # The tap learns the dimensions of the examples from a batch of several examples, in which
        # they are clear.
        tap.forward(take(x, slice(0, FIRST_EXAMPLES)), strict=False)
    forward_pass = tap.forward(few, strict=False)
    if not are_repeated(reference.outputs, forward_pass.outputs):
        return []
    compared = [block for block in blocks if block.site not in forward_pass.faults]
    return list(_different(network, compared, forward_pass, reference))


def _wrong(
    tap: Tap,
    blocks: Sequence[Block],
    references: Sequence[Reference],
    mixed: Inputs | None,
) -> dict[Block, Exception]:
    """Find the blocks that differ from automatic differentiation, with an error for each.

    The `mixed` examples are run to find sites that cannot be measured in such a batch.
    """
    if not blocks:
        return {}
    tap.attach(blocks)
    faults: dict[Site, Exception] = {}
    if mixed is not None:
        faults |= tap.forward(mixed, strict=False).faults
        for reference in references:
            for number in range(num_examples(reference.x)):
                # Run a single example, so that the tap learns which layers it does not call.
                tap.forward(take(reference.x, slice(number, number + 1)), strict=False)
    wrong: dict[Block, Exception] = {}
    for reference in references:
        forward_pass = tap.forward(reference.x, strict=False)
        faults |= forward_pass.faults
        compared = [
            block
            for block in blocks
            if block.site not in faults and reference.gradients.keys() >= set(block.parameters)
        ]
        wrong |= _different(tap.network, compared, forward_pass, reference)
    for block in blocks:
        if block.site in faults:
            wrong[block] = faults[block.site]
    return wrong


def _different(
    network: nn.Module,
    compared: Sequence[Block],
    forward_pass: ForwardPass,
    reference: Reference,
) -> dict[Block, Exception]:
    """Find blocks whose Jacobian along the cotangent differs from the reference, and why.

    The Jacobian at a site that is not reached is zero.
    """
    deviations, wrong = _deviations(network, compared, forward_pass, reference)
    if not deviations:
        return wrong
    # All numbers are moved to the host at once, `[blocks, 2, batch]`.
    numbers_by_block = torch.stack(list(deviations.values())).tolist()
    for block, (deviations_of_block, norms) in zip(deviations, numbers_by_block, strict=True):
        for deviation, norm in zip(deviations_of_block, norms, strict=True):
            # A norm that is not finite is not reported here, because the fit reports where such
            # numbers occur.
            allowed = max(1e-2, 16 * reference.eps) * norm + reference.rounding
            if math.isfinite(norm) and not deviation <= allowed:
                wrong[block] = NotImplementedError(
                    f"The outputs depend on {list(block.parameters)} not only through "
                    f"{block.site}, but also through other paths, for example through a "
                    "`torch.autograd.Function` that takes them as inputs, such as torchdiffeq's "
                    "`odeint_adjoint` (replace it by `odeint`)."
                )
    return wrong


def _deviations(
    network: nn.Module,
    compared: Sequence[Block],
    forward_pass: ForwardPass,
    reference: Reference,
) -> tuple[dict[Block, Float[Tensor, "2 batch"]], dict[Block, Exception]]:
    """Compute each block's `_deviation`, or else the error that its Jacobian raises."""
    deviations: dict[Block, Tensor] = {}
    errors: dict[Block, Exception] = {}
    records: Iterable[BlockRecord] = ()
    if forward_pass.outputs.shape == reference.cotangent.shape:
        # Two columns are used because some gradients of torch are wrong for several columns at
        # once.
        records = forward_pass.backward(torch.stack([-reference.cotangent, reference.cotangent]))
    for record in records:
        if record.block not in compared:
            continue
        try:
            expected = _reference_gradients(network, record.block, reference)
            deviations[record.block] = _deviation(record, expected)
        # A layer that does not behave like its class, or a replayed module, may raise any error.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            errors[record.block] = error
    for block in compared:
        if block not in deviations and block not in errors:
            # There is no record, so the block's Jacobian is zero and deviates by the gradients.
            norms = _reference_gradients(network, block, reference).norm(dim=1)
            deviations[block] = torch.stack([norms, norms])
    return deviations, errors


def _reference_gradients(
    network: nn.Module, block: Block, reference: Reference
) -> Float[Tensor, "batch size"]:
    """Return a reference's gradients for a block's parameters, ordered like its entries."""
    by_parameter = [reference.gradients[name] for name in block.parameters]
    gradients = torch.cat(by_parameter, 1) if len(by_parameter) > 1 else by_parameter[0]
    order = parameter_order(network, block.parameters, [block])
    return gradients if order is None else gradients[:, order]


def _deviation(
    record: BlockRecord, expected: Float[Tensor, "batch size"]
) -> Float[Tensor, "2 batch"]:
    """Compute a Jacobian's deviation along the last cotangent, and its norm, by example."""
    difference = expected.clone()
    block = record.block
    matrices = difference.view(len(difference), *block.groups, *block.shape)
    d_out, d_in = block.shape
    for examples, J, columns in rotated_jacobians(record, Axes(d_out), Axes(d_in)):
        if columns is None:
            matrices[examples] -= J[:, -1]
        else:
            matrices[examples].index_add_(-1, columns, J[:, -1], alpha=-1)
    return torch.stack([difference.norm(dim=1), expected.norm(dim=1)])
