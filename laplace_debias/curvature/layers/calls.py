"""Gradients of each example with respect to parameters, from calls of modules that are run again.

A class token, a position table, a learned scale, a recurrent layer, a weight that several layers
share: what a call of a module gives depends on such a parameter in a way that its inputs and output
gradients alone do not tell. Given both, the call of one example is run once more and
differentiated. The sum over all calls that read the parameter is its Jacobian row.
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
from laplace_debias.curvature.network.inputs import call, differentiable, quiet
from laplace_debias.curvature.network.shared_copy import preserve_attributes
from laplace_debias.system.memory import is_out_of_memory

# Numbers in the rows that are made at a time.
_SLICE = 2**22

Parameters = Mapping[str, Tensor]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module, which can be run again for some of its examples.

    `leaves` are those of the tree of its arguments, `structure`: `(args, kwargs)`, or the inputs of
    the network, whose path is `""`. `outputs` are those that are floating-point tensors. `dims` and
    `output_dims` say which dimension has the examples; None for what all have in common.
    """

    path: str
    module: nn.Module
    leaves: list[Any]
    structure: Any
    outputs: list[Tensor] = field(default_factory=list)
    dims: Sequence[int | None] = ()
    output_dims: Sequence[int | None] = ()

    def of_examples(self, part: slice) -> list[Any]:
        """The leaves of its arguments for some examples; copies, which the call may overwrite."""
        size = part.stop - part.start
        return [
            leaf if dim is None else leaf.narrow(dim, part.start, size).clone()
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]

    def run(self, parameters: Parameters, leaves: Sequence[Any]) -> list[Tensor]:
        """Run the module again, with other values for some of its parameters, by name."""
        arguments: Any = pytree.tree_unflatten(list(leaves), self.structure)
        with preserve_attributes(self.module.modules()), differentiable(self.module):
            if not self.path:
                return [call(self.module, arguments, parameters)]
            found = functional_call(self.module, dict(parameters), *arguments)
        outputs, _ = pytree.tree_flatten(found)
        return [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]


class ReplayedCalls:
    """The calls that read some parameters, with the gradients at their outputs.

    Gradients have the columns before all other dimensions, and are None at an output that nothing
    depends on. `loops` are paths of modules that `vmap` does not run; what it is found to fail with
    is added.
    """

    def __init__(
        self,
        network: nn.Module,
        calls: Sequence[tuple[ModuleCall, Sequence[Tensor | None]]],
        names: Sequence[str],
        batch: int,
        loops: set[str],
    ) -> None:
        self._network = network
        self._calls = calls
        self._names = list(names)
        self._loops = loops
        self._known: dict[str, Tensor] = {}
        self.num_examples = batch
        self.num_columns = next(len(g) for _, of in calls for g in of if g is not None)

    def rows(self, block: Block) -> Iterator[tuple[slice, Float[Tensor, "columns part size"]]]:
        """Jacobian rows of a block's parameter, with the examples that they belong to."""
        (name,) = block.parameters
        sizes = {n: self._network.get_parameter(n).numel() for n in self._names}
        everything = slice(0, self.num_examples)
        per_example = self.num_columns * sum(sizes.values())
        if per_example * self.num_examples <= _SLICE:
            if not self._known:
                # Small parameters of one module share what it takes to run it.
                self._known = self._of_examples(self._names, everything)
            yield everything, self._known[name]
            return
        step = max(1, _SLICE // (self.num_columns * sizes[name]))
        for start in range(0, self.num_examples, step):
            part = slice(start, min(start + step, self.num_examples))
            yield part, self._of_examples([name], part)[name]

    def _of_examples(self, names: Sequence[str], part: slice) -> dict[str, Tensor]:
        """The rows of some parameters for some examples, `[K, b, size]`."""
        total: dict[str, Tensor] = {}
        for one, gradients in self._calls:
            inner = {id(p): n for n, p in one.module.named_parameters()}
            parameters = {n: self._network.get_parameter(n) for n in names}
            read = {n: inner[id(p)] for n, p in parameters.items() if id(p) in inner}
            values = {read[n]: parameters[n].detach() for n in read}
            found = self._differentiated(one, values, gradients, part)
            for name, inside in read.items():
                rows = found[inside].reshape(*found[inside].shape[:2], -1)
                total[name] = total[name] + rows if name in total else rows
        return total

    def _differentiated(
        self,
        call: ModuleCall,
        parameters: Parameters,
        gradients: Sequence[Tensor | None],
        part: slice,
    ) -> dict[str, Tensor]:
        size, cotangents = part.stop - part.start, {}
        for index, (g, dim) in enumerate(zip(gradients, call.output_dims, strict=True)):
            if g is not None and dim is not None:
                # Each example's as one example's output has it.
                of_examples = g.narrow(dim + 1, part.start, size).movedim(dim + 1, 1)
                cotangents[index] = of_examples.unsqueeze(dim + 2)
        if call.path in self._loops:
            return _one_by_one(call, parameters, cotangents, part)
        try:
            return _vectorised(call, parameters, cotangents, part)
        # Whatever a forward pass raises under `vmap`: a branch on the data, an operation without a
        # rule. What is wrong with the pass itself is raised by the loop again.
        except Exception as error:
            if is_out_of_memory(error):
                raise
        self._loops.add(call.path)
        return _one_by_one(call, parameters, cotangents, part)


def _vectorised(
    call: ModuleCall, parameters: Parameters, cotangents: Mapping[int, Tensor], part: slice
) -> dict[str, Tensor]:
    """Gradients of some examples, `[K, b, ...]`: run once, and differentiated together.

    Every example has parameters of its own. Cotangents are `[K, b, *output of one example]`.
    """
    size = part.stop - part.start
    own = {name: value.expand(size, *value.shape) for name, value in parameters.items()}

    def of_example(values: dict[str, Tensor], leaves: list[Any]) -> dict[int, Tensor]:
        one = [
            leaf if dim is None else leaf.unsqueeze(dim)
            for leaf, dim in zip(leaves, call.dims, strict=True)
        ]
        found = call.run(values, one)
        return {index: found[index] for index in cotangents}

    def outputs(values: dict[str, Tensor]) -> dict[int, Tensor]:
        return torch.func.vmap(of_example, (0, list(call.dims)))(values, call.of_examples(part))

    with quiet():
        pull_back = torch.func.vjp(outputs, own)[1]
        (found,) = torch.func.vmap(pull_back)(dict(cotangents))
    return found


def _one_by_one(
    call: ModuleCall, parameters: Parameters, cotangents: Mapping[int, Tensor], part: slice
) -> dict[str, Tensor]:
    """Gradients of some examples, `[K, b, ...]`, example by example and column by column."""
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    num_columns = len(next(iter(cotangents.values())))
    for index in range(part.stop - part.start):
        start = part.start + index
        values = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        with torch.enable_grad():
            outputs = call.run(values, call.of_examples(slice(start, start + 1)))
        # An example may go another way, which reads none of the parameters.
        reached = {i: g for i, g in cotangents.items() if outputs[i].requires_grad}
        of_columns = []
        for column in range(num_columns):
            found: Sequence[Tensor | None] = [None] * len(values)
            if reached:
                found = torch.autograd.grad(
                    [outputs[i] for i in reached],
                    list(values.values()),
                    [g[column, index] for g in reached.values()],
                    retain_graph=column + 1 < num_columns,
                    allow_unused=True,
                )
            of_columns.append(found)
        for position, (name, value) in enumerate(values.items()):
            columns = [found[position] for found in of_columns]
            rows[name].append(
                torch.stack([torch.zeros_like(value) if g is None else g for g in columns])
            )
    return {name: torch.stack(of_examples, 1).detach() for name, of_examples in rows.items()}
