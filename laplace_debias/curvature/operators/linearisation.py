"""Networks linearised once per batch, as programs or graphs, and multiplied many times."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from laplace_debias.curvature.losses import Labels, OutputLoss
from laplace_debias.curvature.network.inputs import (
    Inputs,
    quiet,
    tensors_of,
    with_tensors,
)
from laplace_debias.curvature.network.network import Network
from laplace_debias.curvature.operators.tracing import Program, Tensors, UntraceableError, trace
from laplace_debias.system.memory import is_out_of_memory
from laplace_debias.system.threads import FORWARD_MODE

# From the tensors of one vector, or of several stacked along a new first dimension (True).
Map = Callable[[Tensors, bool], Tensors]


@dataclass(frozen=True)
class Linearisation:
    """A network on a batch at its parameters: outputs, and linear maps.

    The maps are the Jacobian and its adjoint, or the Hessian alone.
    """

    outputs: Tensor
    maps: tuple[Map, ...]
    num_bytes: int


class Lineariser:
    """Linearises a network batch by batch, as a traced program where that is possible.

    A program (see `tracing`) is recorded once for inputs of a kind and serves all batches of it; a
    product then runs no forward pass, no bookkeeping of automatic differentiation, and shares
    between Jacobian and adjoint what is kept. Where a network cannot be recorded, graphs of
    automatic differentiation are kept instead: larger and slower, and the same numbers.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        # The network's constants are recorded in them.
        self.programs: dict[object, Program | None] = {}

    def first_order(self, inputs: Inputs) -> Linearisation:
        """Outputs, Jacobian and adjoint Jacobian in the parameters."""
        network = self._network

        def function(points: Tensors, tangents: Tensors, cotangents: Tensors) -> tuple:
            parameters, forward, _ = self._at(points, inputs)
            outputs, tangent = jvp(forward, parameters, tuple(tangents))  # type: ignore[misc]
            _, pull = vjp(forward, *parameters)  # type: ignore[misc]
            return (outputs,), (tangent,), pull(cotangents[0])

        points = self._points(inputs)

        def vectors() -> tuple[Tensors, Tensors]:
            with torch.no_grad():
                return network.parameters, (network.outputs(network.parameters, inputs),)

        program = self._program(inputs, (), function, points, vectors)
        if program is not None:
            return _evaluate(program, points, network.state)
        with network.differentiable():
            return linearised_by_reverse(
                lambda *leaves: network.outputs(leaves, inputs), network.parameters, network.state
            )

    def second_order(self, loss: OutputLoss, inputs: Inputs, labels: Labels) -> Linearisation:
        """The Hessian, in the parameters, of the loss's sum over a batch."""
        network = self._network

        def function(points: Tensors, tangents: Tensors) -> tuple:
            parameters, forward, rest = self._at(points, inputs)

            def total(p: tuple[Tensor, ...]) -> Tensor:
                return loss.value(forward(*p), rest)

            outputs = forward(*parameters)  # recorded once with that of the total
            return (outputs,), jvp(grad(total), (parameters,), (tuple(tangents),))[1]

        if loss.is_recordable:
            points = [*self._points(inputs), *labels]
            program = self._program(inputs, labels, function, points, lambda: (network.parameters,))
            if program is not None:
                return _evaluate(program, points, network.state)
        with torch.enable_grad(), network.differentiable():
            leaves = tuple(p.detach().requires_grad_() for p in network.parameters)
            outputs = network.outputs(leaves, inputs)
            value = loss.value(outputs, labels)
            gradient = gradients((value,), leaves, (torch.ones_like(value),), create_graph=True)
        hessian = _side_by_side(partial(gradients, gradient, leaves))
        return Linearisation(outputs.detach(), (hessian,), _graph_bytes(gradient, network.state))

    def _points(self, inputs: Inputs) -> list[Tensor]:
        """Everything that the outputs depend on.

        The model's buffers too: what is left out becomes a constant of the program, and operations
        on constants alone are recorded as they are, in place where they work in place.
        """
        return [*self._network.state, *tensors_of(inputs)]

    def _at(
        self, points: Tensors, inputs: Inputs
    ) -> tuple[tuple[Tensor, ...], Callable[..., Tensor], tuple[Tensor, ...]]:
        """Of such points: the parameters, the outputs as their function, and what comes after."""
        network = self._network
        left = iter(points)
        parameters = tuple(islice(left, len(network.parameters)))
        fixed = tuple(islice(left, len(network.fixed)))
        held = with_tensors(inputs, left)

        def forward(*p: Tensor) -> Tensor:
            return network.outputs(p, held, fixed)

        return parameters, forward, tuple(left)

    def _program(
        self,
        inputs: Inputs,
        labels: Labels,
        function: Callable[..., tuple[Tensors, ...]],
        points: Tensors,
        vectors: Callable[[], Sequence[Tensors]],
    ) -> Program | None:
        """The program for inputs of this kind, None if there can be none."""
        kind = (_kind_of(inputs), tuple((x.shape, x.dtype) for x in labels))
        try:
            if kind not in self.programs:
                # Recording is torch's business of one thread, too.
                with FORWARD_MODE, self._network.differentiable(), quiet():
                    program = trace(function, points, vectors())
                    _check_adjoint(_evaluate(program, points, ()), self._network.parameters)
                    self.programs[kind] = program
        # Whatever recording raises (control flow that looks at values, operations without a forward
        # derivative, flags that cannot be hashed): the graphs of automatic differentiation can do
        # more, and raise what is the model's own fault.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            try:
                self.programs[kind] = None
            except TypeError:
                return None
        return self.programs[kind]


def _kind_of(inputs: Inputs) -> object:
    """The key of a program: shapes and dtypes, names, and values other than tensors."""

    def of(x: object) -> object:
        return (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else (type(x), x)

    if isinstance(inputs, Tensor):
        return of(inputs)
    if isinstance(inputs, dict):
        return type(inputs), tuple((key, of(x)) for key, x in inputs.items())
    return tuple(of(x) for x in inputs)


def linearised_by_reverse(
    function: Callable[..., Tensor], parameters: Tensors, not_counted: Tensors = ()
) -> Linearisation:
    """Linearise a function of parameters by two reverse passes, as graphs that are kept.

    Its maps are the Jacobian and the adjoint Jacobian. The adjoint is linear in its cotangent u, so
    that its own adjoint is the Jacobian. Bytes of the tensors `not_counted` do not count.
    """
    with torch.enable_grad():
        leaves = tuple(p.detach().requires_grad_() for p in parameters)
        outputs = function(*leaves)
        u = torch.zeros_like(outputs, requires_grad=True)
        adjoint = gradients((outputs,), leaves, (u,), create_graph=True)
    push = _side_by_side(partial(gradients, adjoint, (u,)))
    pull = _side_by_side(partial(gradients, (outputs,), leaves))
    num_bytes = _graph_bytes([outputs, *adjoint], not_counted)
    return Linearisation(outputs.detach(), (push, pull), num_bytes)


def _check_adjoint(linearisation: Linearisation, parameters: Tensors) -> None:
    """Require that the last map is the first one's adjoint, as not all of torch's rules agree."""
    if not are_adjoint(linearisation.maps[0], linearisation.maps[-1], parameters):
        raise UntraceableError("derivatives forward and back differ")


def are_adjoint(push: Map, pull: Map, parameters: Tensors) -> bool:
    """Whether two linear maps are each other's adjoints, along two random vectors."""
    generator = torch.Generator(parameters[0].device).manual_seed(0)

    def drawn_like(tensors: Tensors) -> Tensors:
        return [
            torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            for x in tensors
        ]

    v = drawn_like(parameters)
    pushed = push(v, False)
    # Not the pushed vector itself, which is zero where a derivative is missing.
    u = drawn_like(pushed)
    pulled = pull(u, False)
    # The standard deviation of either product is the norm of what was not drawn.
    scale = max(_product(pushed, pushed), _product(pulled, pulled)) ** 0.5
    allowed = torch.finfo(v[0].dtype).eps ** 0.5 * scale
    return abs(_product(pushed, u) - _product(pulled, v)) <= allowed


def _product(x: Tensors, y: Tensors) -> float:
    return sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))


def _evaluate(program: Program, points: Tensors, not_counted: Tensors) -> Linearisation:
    with torch.no_grad():
        residuals = program.at(*points)
    maps = [
        _side_by_side(partial(_applied, function, [residuals[i] for i in used]))
        for function, used in program.maps
    ]
    return Linearisation(residuals[0], tuple(maps), _num_bytes(residuals, not_counted))


def _side_by_side(one: Map) -> Map:
    """The same map, of several vectors one after the other where torch cannot do it at once."""

    def of(vector: Tensors, batched: bool) -> Tensors:
        try:
            return one(vector, batched)
        except RuntimeError as error:
            if not batched or is_out_of_memory(error):
                raise
        found = [one(v, False) for v in zip(*vector, strict=True)]
        return [torch.stack(of_all) for of_all in zip(*found, strict=True)]

    return of


def _applied(
    function: Callable[..., Tensors], held: Tensors, vector: Tensors, batched: bool
) -> Tensors:
    """A function of residuals and of a vector, or of several vectors side by side."""
    in_dims = (*(None,) * len(held), *(0,) * len(vector))
    if not batched:
        with torch.no_grad():
            return function(*held, *vector)
    with torch.no_grad(), quiet():
        return vmap(function, in_dims)(*held, *vector)


def _num_bytes(held: Iterable[Tensor], not_counted: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    for x in not_counted:
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def gradients(
    outputs: Tensors,
    inputs: Tensors,
    cotangents: Tensors,
    batched: bool = False,
    create_graph: bool = False,
) -> Tensors:
    """Σ_i (∂outputs_i / ∂inputs)ᵀ cotangents_i; an output without a graph is a constant."""
    lead = cotangents[0].shape[:1] if batched else ()
    pairs = [(f, c) for f, c in zip(outputs, cotangents, strict=True) if f.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs:
        try:
            with quiet() if batched else nullcontext():
                gradients = torch.autograd.grad(
                    [f for f, _ in pairs],
                    inputs,
                    [c for _, c in pairs],
                    retain_graph=True,
                    create_graph=create_graph,
                    is_grads_batched=batched,
                    allow_unused=True,
                )
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise NotImplementedError(
                'The model cannot be differentiated twice, as operators and method="glm-mc" do: '
                "torch lacks a "
                f"derivative ({error}). Replace the operation that it belongs to, or use Laplace "
                "or KFAC, which differentiate once."
            ) from error
    return [
        x.new_zeros(*lead, *x.shape) if g is None else g
        for x, g in zip(inputs, gradients, strict=True)
    ]


def _graph_bytes(roots: Tensors, not_counted: Tensors) -> int:
    """Bytes of the tensors that a graph of automatic differentiation holds on to."""
    seen = set()
    held: list[Tensor] = []
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in (*names, "saved_tensors"):
            saved = getattr(node, name, None)
            values = saved if isinstance(saved, (tuple, list)) else (saved,)
            held += [x for x in values if isinstance(x, Tensor)]
        stack += [source for source, _ in node.next_functions if source is not None]
    return _num_bytes(held, not_counted)
