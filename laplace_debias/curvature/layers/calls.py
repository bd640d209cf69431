"""Per-example gradients with respect to parameters, computed by running modules' calls again.

This is for parameters whose gradients do not follow directly from the inputs and output gradients
of a module, for example a class token, a position table, a learned scale, a weight of a recurrent
layer, or a weight that several layers share. Therefore, the module's call is run again for each
example, and is differentiated at the output gradients. The sum over all calls that read a parameter
is its Jacobian row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.layer_calls import LayerOutput
from laplace_debias.curvature.network.calling import call, differentiable, quiet
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.system.memory import suppress_unsupported

# The maximum number of entries of rows that are computed together.
_SLICE = 2**22

Parameters = Mapping[str, Tensor]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module, which can be run again for some of its examples.

    Attributes:
        path: The path of the module; `""` for the network itself.
        module: The module.
        leaves: The leaves of the tree of the call's arguments, `(args, kwargs)`, or of the inputs
            for the network itself.
        structure: The structure of this tree.
        loops: The paths of modules that `vmap` cannot run; modules with which it fails are added.
        outputs: The outputs that are floating-point tensors, as the rest of the pass uses them.
        dims: For each leaf, the dimension of the examples, or None if all examples share it.
        output_dims: The dimension of the examples in each output.
    """

    path: str
    module: nn.Module
    leaves: list[Any]
    structure: Any
    loops: set[str]
    outputs: list[LayerOutput] = field(default_factory=list)
    dims: Sequence[int | None] = ()
    output_dims: Sequence[int | None] = ()

    def select_examples(self, examples: slice) -> list[Any]:
        """Copy the arguments of the call for selected examples."""
        size = examples.stop - examples.start
        return [
            leaf if dim is None else leaf.narrow(dim, examples.start, size).clone()
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]

    def run(self, parameters: Parameters, leaves: Sequence[Any]) -> list[Tensor]:
        """Run the module again, with `parameters` in place of its parameters of these names."""
        arguments: Any = pytree.tree_unflatten(list(leaves), self.structure)
        with preserve_attributes(self.module.modules()), differentiable(self.module):
            if not self.path:
                return [call(self.module, arguments, parameters)]
            output = functional_call(self.module, dict(parameters), *arguments)
        outputs, _ = pytree.tree_flatten(output)
        return [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]


class ReplayedCalls:
    """The calls that read some parameters, with the gradients at their outputs.

    Args:
        network: The network.
        calls: Each call, with the gradients of the K columns at each of its outputs,
            `[K, *output]`. The gradient at an output on which nothing depends is None.
        names: The names of the parameters in the network.
        num_examples: The number of examples.
    """

    def __init__(
        self,
        network: nn.Module,
        calls: Sequence[tuple[ModuleCall, Sequence[Tensor | None]]],
        names: Sequence[str],
        num_examples: int,
    ) -> None:
        self._network = network
        self._calls = calls
        self._names = list(names)
        self._small_rows: dict[str, Tensor] = {}
        self.num_examples = num_examples
        gradients = [g for _, call_gradients in calls for g in call_gradients if g is not None]
        self.num_columns = len(gradients[0])

    def rows(self, block: Block) -> Iterator[tuple[slice, Float[Tensor, "columns part size"]]]:
        """Yield Jacobian rows of a parameter, with the slice of their examples."""
        (name,) = block.parameters
        sizes = {n: self._network.get_parameter(n).numel() for n in self._names}
        all_examples = slice(0, self.num_examples)
        example_size = self.num_columns * sum(sizes.values())
        if example_size * self.num_examples <= _SLICE:
            if not self._small_rows:
                # Small parameters of one module are differentiated in a single run of the module.
                self._small_rows = self._jacobian_rows(self._names, all_examples)
            yield all_examples, self._small_rows[name]
            return
        step = max(1, _SLICE // (self.num_columns * sizes[name]))
        for start in range(0, self.num_examples, step):
            examples = slice(start, min(start + step, self.num_examples))
            yield examples, self._jacobian_rows([name], examples)[name]

    def _jacobian_rows(self, names: Sequence[str], examples: slice) -> dict[str, Tensor]:
        """Compute the Jacobian rows of given parameters for given examples, `[K, b, size]`."""
        total: dict[str, Tensor] = {}
        parameters = {name: self._network.get_parameter(name) for name in names}
        for module_call, gradients in self._calls:
            # The names of the parameters in the called module, which need not have all of them.
            names_by_id = {id(p): name for name, p in module_call.module.named_parameters()}
            inner_names = {
                name: names_by_id[id(parameter)]
                for name, parameter in parameters.items()
                if id(parameter) in names_by_id
            }
            values = {inner: parameters[name].detach() for name, inner in inner_names.items()}
            jacobians = _gradients_of_call(module_call, values, gradients, examples)
            for name, inner_name in inner_names.items():
                # Rows are flattened after the first dimensions, because a parameter may be a number
                # without dimensions.
                J = jacobians[inner_name]
                rows = J.reshape(*J.shape[:2], -1)
                total[name] = total[name] + rows if name in total else rows
        return total


def _gradients_of_call(
    call: ModuleCall,
    parameters: Parameters,
    gradients: Sequence[Tensor | None],
    examples: slice,
) -> dict[str, Tensor]:
    """Compute gradients of a call's parameters for the given examples, `[K, b, *shape]`.

    Args:
        call: The call.
        parameters: The parameters, by their names in the called module.
        gradients: The output gradients of all examples, `[K, *output]`; None for an output that
            does not affect the network's outputs.
        examples: The examples.
    """
    size = examples.stop - examples.start
    cotangents = {}
    for index, (g, dim) in enumerate(zip(gradients, call.output_dims, strict=True)):
        if g is not None and dim is not None:
            # Each cotangent has the shape of a single example's output.
            selected = g.narrow(dim + 1, examples.start, size).movedim(dim + 1, 1)
            cotangents[index] = selected.unsqueeze(dim + 2)
    if call.path in call.loops:
        return _gradients_one_by_one(call, parameters, cotangents, examples)
    # A forward pass may raise any error under `vmap`, because of a branch on the data or an
    # operation without a rule. The loop raises errors of the pass itself again.
    with suppress_unsupported(Exception):
        return _gradients_in_one_run(call, parameters, cotangents, examples)
    call.loops.add(call.path)
    return _gradients_one_by_one(call, parameters, cotangents, examples)


def _gradients_in_one_run(
    call: ModuleCall, parameters: Parameters, cotangents: Mapping[int, Tensor], examples: slice
) -> dict[str, Tensor]:
    """Compute gradients of the given examples, `[K, b, ...]`, with one run for all examples.

    Every example has its own copy of the parameters. Cotangents are
    `[K, b, *output of one example]`.
    """
    size = examples.stop - examples.start
    copies = {name: value.expand(size, *value.shape) for name, value in parameters.items()}

    def run_example(values: dict[str, Tensor], leaves: list[Any]) -> dict[int, Tensor]:
        # `vmap` removes the dimension of the examples, which the module expects.
        batch_of_one = [
            leaf if dim is None else leaf.unsqueeze(dim)
            for leaf, dim in zip(leaves, call.dims, strict=True)
        ]
        outputs = call.run(values, batch_of_one)
        return {index: outputs[index] for index in cotangents}

    def run_examples(values: dict[str, Tensor]) -> dict[int, Tensor]:
        run = torch.func.vmap(run_example, (0, list(call.dims)))
        return run(values, call.select_examples(examples))

    with quiet():
        pull_back = torch.func.vjp(run_examples, copies)[1]
        (gradients,) = torch.func.vmap(pull_back)(dict(cotangents))
    return gradients


def _gradients_one_by_one(
    call: ModuleCall, parameters: Parameters, cotangents: Mapping[int, Tensor], examples: slice
) -> dict[str, Tensor]:
    """Compute gradients of the given examples, `[K, b, ...]`, one example and column at a time."""
    rows_by_example = []
    for index in range(examples.stop - examples.start):
        start = examples.start + index
        example_cotangents = {output: g[:, index] for output, g in cotangents.items()}
        example = slice(start, start + 1)
        rows_by_example.append(_gradients_of_example(call, parameters, example_cotangents, example))
    return {
        name: torch.stack([rows[name] for rows in rows_by_example], 1).detach()
        for name in parameters
    }


def _gradients_of_example(
    call: ModuleCall, parameters: Parameters, cotangents: Mapping[int, Tensor], example: slice
) -> dict[str, Tensor]:
    """Compute gradients of a single example, `[K, ...]`, one column at a time."""
    values = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    with torch.enable_grad():
        outputs = call.run(values, call.select_examples(example))
    # An example may take a path that reads none of the parameters. Its gradient is then zero.
    reached = {output: g for output, g in cotangents.items() if outputs[output].requires_grad}
    num_columns = len(next(iter(cotangents.values())))
    gradients_by_column: list[Sequence[Tensor | None]] = []
    for column in range(num_columns):
        gradients: Sequence[Tensor | None] = [None] * len(values)
        if reached:
            gradients = torch.autograd.grad(
                [outputs[output] for output in reached],
                list(values.values()),
                [g[column] for g in reached.values()],
                retain_graph=column + 1 < num_columns,
                allow_unused=True,
            )
        gradients_by_column.append(gradients)
    rows = {}
    gradients_by_parameter = zip(*gradients_by_column, strict=True)
    for (name, value), columns in zip(values.items(), gradients_by_parameter, strict=True):
        rows[name] = torch.stack([torch.zeros_like(value) if g is None else g for g in columns])
    return rows
