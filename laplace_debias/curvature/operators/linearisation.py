"""Networks that are linearised once per batch and multiplied many times."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from laplace_debias.curvature.losses import Labels, OutputLoss
from laplace_debias.curvature.network.calling import quiet
from laplace_debias.curvature.network.inputs import Inputs, tensors_of, with_tensors
from laplace_debias.curvature.operators.network import Network
from laplace_debias.curvature.operators.tracing import Program, Tensors, UntraceableError, trace
from laplace_debias.system.graph import graph_nodes
from laplace_debias.system.memory import is_out_of_memory, suppress_unsupported
from laplace_debias.system.threads import FORWARD_MODE

_NEEDS_SECOND_DERIVATIVES = 'Operators and `method="glm-mc"` need second derivatives of the model'
_TOLERANCE = 1e-2
"""The largest relative error of derivatives. It is wide, because matrix products on an accelerator
may have reduced precision."""
_REMEDY = "Replace this operation, or use Laplace or KFAC, which need only first derivatives."


@runtime_checkable
class LinearMap(Protocol):
    """A linear map of vectors, each of which consists of several tensors."""

    def __call__(self, vector: Tensors, /, *, batched: bool) -> Tensors:
        """Apply the map to a vector or, if batched, to several, stacked along a first dimension."""
        ...


@dataclass(frozen=True)
class Linearisation:
    """The linearisation of a network on one batch.

    Attributes:
        outputs: The outputs.
        maps: The Jacobian and its adjoint, or only the Hessian.
        num_bytes: The bytes of the tensors that the maps keep.
    """

    outputs: Tensor
    maps: tuple[LinearMap, ...]
    num_bytes: int

    @property
    def jacobian(self) -> LinearMap:
        """The Jacobian, which maps tangents at the parameters to the outputs."""
        jacobian, _ = self.maps
        return jacobian

    @property
    def adjoint(self) -> LinearMap:
        """The adjoint of the Jacobian, which maps cotangents at the outputs to the parameters."""
        _, adjoint = self.maps
        return adjoint

    @property
    def hessian(self) -> LinearMap:
        """The Hessian with respect to the parameters."""
        (hessian,) = self.maps
        return hessian


class Lineariser:
    """An object that linearises a network batch by batch, with traced programs where possible.

    A program (see `tracing`) is recorded once for inputs of the same shapes, and then used for all
    batches of these shapes. A product then needs neither a forward pass nor the bookkeeping of
    automatic differentiation, and the Jacobian and its adjoint share the tensors that are kept. For
    a network that cannot be recorded, graphs of automatic differentiation are kept instead, which
    are larger and slower.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        # Programs contain the network's constants, so they are stored per network.
        self.programs: dict[object, Program | None] = {}
        self._has_checked_graphs = False

    def first_order(self, inputs: Inputs) -> Linearisation:
        """Compute the outputs, and the Jacobian with respect to the parameters with its adjoint."""
        network = self._network

        def function(points: Tensors, tangents: Tensors, cotangents: Tensors) -> tuple:
            """Multiply the Jacobian by the tangents, and its adjoint by the cotangents."""
            parameters, forward = self._unpack_points(iter(points), inputs)
            outputs, tangent = jvp(forward, parameters, tuple(tangents))  # type: ignore[misc]
            _, pull = vjp(forward, *parameters)  # type: ignore[misc]
            return (outputs,), (tangent,), pull(cotangents[0])

        points = self._points(inputs)

        def vectors() -> tuple[Tensors, Tensors]:
            with torch.no_grad():
                return network.parameters, (network.outputs(network.parameters, inputs),)

        key = _program_key(inputs)
        program = self._program(key, function=function, points=points, vectors=vectors)
        if program is not None:
            return _evaluate(program, points, network.state)
        linearisation = self._by_reverse(inputs)
        self._check_graphs(linearisation, inputs)
        return linearisation

    def _by_reverse(self, inputs: Inputs) -> Linearisation:
        """Compute the outputs, the Jacobian and its adjoint by graphs of automatic differentiation.

        The Jacobian is the derivative of the backward pass, so it needs second derivatives.
        """
        network = self._network
        with network.differentiable():
            return linearised_by_reverse(
                lambda *leaves: network.outputs(leaves, inputs), network.parameters, network.state
            )

    def second_order(self, loss: OutputLoss, inputs: Inputs, labels: Labels) -> Linearisation:
        """Compute the Hessian of a batch's weighted loss with respect to the parameters.

        The Hessian's product with v is the derivative of the gradient in the direction v.
        """
        if loss.is_recordable:
            linearisation = self._recorded_hessian(loss, inputs, labels)
            if linearisation is not None:
                return linearisation
        network = self._network
        if not self._has_checked_graphs:
            # The Hessian itself may consist of rounding errors if the network is confident.
            self._check_graphs(self._by_reverse(inputs), inputs)
        with torch.enable_grad(), network.differentiable():
            leaves = tuple(p.detach().requires_grad_() for p in network.parameters)
            outputs = network.outputs(leaves, inputs)
            value = loss.weighted_value(outputs, labels)
            gradient = gradients((value,), leaves, (torch.ones_like(value),), create_graph=True)
        hessian = _with_fallback(partial(gradients, gradient, leaves))
        num_bytes = _graph_bytes(gradient, network.state)
        return Linearisation(outputs.detach(), (hessian,), num_bytes)

    def _check_graphs(self, linearisation: Linearisation, inputs: Inputs) -> None:
        """Check the first and second derivatives of the first linearisation by graphs."""
        if self._has_checked_graphs:
            return
        network = self._network
        check_second_derivatives(linearisation, network.parameters)
        generator = torch.Generator(network.device).manual_seed(0)
        (cotangents,) = _drawn_like([linearisation.outputs], generator)
        expected = network.module_gradients(inputs, cotangents)
        gradient = linearisation.adjoint([cotangents], batched=False)
        errors = [g - e for g, e in zip(gradient, expected, strict=True)]
        # A backward pass that calls the model again does not see the parameters of the graph, so
        # their derivatives would be zero.
        if _product(errors, errors) > _TOLERANCE**2 * _product(expected, expected):
            raise NotImplementedError(
                "A backward pass of the model calls one of its layers again, as in torchdiffeq's "
                "`odeint_adjoint`, so derivatives with respect to its parameters are missing. "
                "Replace this operation, for example by `odeint`."
            )
        self._has_checked_graphs = True

    def _recorded_hessian(
        self, loss: OutputLoss, inputs: Inputs, labels: Labels
    ) -> Linearisation | None:
        """Compute the Hessian by a program; return None if it cannot be recorded."""
        network = self._network

        def function(points: Tensors, tangents: Tensors) -> tuple:
            """Compute the outputs, and the Hessian's product with the tangents."""
            remaining = iter(points)
            parameters, forward = self._unpack_points(remaining, inputs)
            # The points of the network are followed by the tensors of the labels.
            point_labels = Labels(**with_tensors(vars(labels), remaining))

            def weighted_loss(p: tuple[Tensor, ...]) -> Tensor:
                return loss.weighted_value(forward(*p), point_labels)

            # Recording merges this forward pass with the forward pass of `weighted_loss`, so it
            # adds no cost.
            outputs = forward(*parameters)
            product = jvp(grad(weighted_loss), (parameters,), (tuple(tangents),))[1]
            return (outputs,), product

        points = [*self._points(inputs), *tensors_of(vars(labels))]
        program = self._program(
            (_program_key(inputs), _program_key(vars(labels))),
            function=function,
            points=points,
            vectors=lambda: (network.parameters,),
        )
        return None if program is None else _evaluate(program, points, network.state)

    def _points(self, inputs: Inputs) -> list[Tensor]:
        """List all tensors that the outputs depend on: parameters, buffers and inputs.

        A tensor that is left out becomes a constant of the program, and operations on constants
        only are recorded unchanged, including in-place operations.
        """
        return [*self._network.state, *tensors_of(inputs)]

    def _unpack_points(
        self, tensors: Iterator[Tensor], inputs: Inputs
    ) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
        """Take tensors, in the order of `_points`, from the front of an iterator.

        Returns:
            The parameters, and the outputs as a function of the parameters.
        """
        network = self._network
        parameters = tuple(islice(tensors, len(network.parameters)))
        fixed = tuple(islice(tensors, len(network.fixed)))
        point_inputs = with_tensors(inputs, tensors)

        def forward(*p: Tensor) -> Tensor:
            return network.outputs(p, point_inputs, fixed)

        return parameters, forward

    def _program(
        self,
        key: object,
        *,
        function: Callable[..., tuple[Tensors, ...]],
        points: Tensors,
        vectors: Callable[[], Sequence[Tensors]],
    ) -> Program | None:
        """Return the program with the given key (see `_program_key`); record it the first time.

        Args:
            key: The key.
            function: A function from the points, and one vector per linear map, to the outputs and
                the products at these points.
            points: The tensors that the linearisation depends on, as in `_points`.
            vectors: A function that returns example vectors for the linear maps.

        Returns:
            The program, or None if the network cannot be recorded.
        """
        # Recording can raise any error, for example because of control flow that depends on values,
        # operations without a forward derivative, or flags that cannot be hashed. The fallback to
        # graphs of automatic differentiation supports more models, and raises the error again if
        # the model is at fault.
        with suppress_unsupported(Exception):
            if key not in self.programs:
                # torch can only record in one thread at a time.
                with FORWARD_MODE, self._network.differentiable(), quiet():
                    program = trace(function, points, vectors())
                    _check_adjoint(_evaluate(program, points, ()), self._network.parameters)
                    self.programs[key] = program
            return self.programs[key]
        with suppress(TypeError):
            self.programs[key] = None
        return None


def _program_key(inputs: Inputs) -> object:
    """Return everything that a program depends on: shapes, dtypes, names, and non-tensor values."""

    def value_key(x: object) -> object:
        return (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else (type(x), x)

    if isinstance(inputs, Tensor):
        return value_key(inputs)
    if isinstance(inputs, dict):
        return type(inputs), tuple((key, value_key(x)) for key, x in inputs.items())
    return tuple(value_key(x) for x in inputs)


def linearised_by_reverse(
    function: Callable[..., Tensor], parameters: Tensors, not_counted: Tensors = ()
) -> Linearisation:
    """Linearise a function of parameters by two reverse passes.

    The maps are the Jacobian and its adjoint. The adjoint is linear in its cotangent, so the
    Jacobian is computed as the adjoint of the adjoint. The bytes of the tensors `not_counted` are
    not counted.
    """
    with torch.enable_grad():
        leaves = tuple(p.detach().requires_grad_() for p in parameters)
        outputs = function(*leaves)
        u = torch.zeros_like(outputs, requires_grad=True)
        adjoint = gradients((outputs,), leaves, (u,), create_graph=True)
    push = _with_fallback(partial(gradients, adjoint, (u,)))
    pull = _with_fallback(partial(gradients, (outputs,), leaves))
    num_bytes = _graph_bytes([outputs, *adjoint], not_counted)
    return Linearisation(outputs.detach(), (push, pull), num_bytes)


def _check_adjoint(linearisation: Linearisation, parameters: Tensors) -> None:
    """Require that the last map is the adjoint of the first, because some torch rules disagree.

    A Hessian, as the only map, must be its own adjoint.
    """
    if not are_adjoint(linearisation.maps[0], linearisation.maps[-1], parameters):
        raise UntraceableError("derivatives forward and back differ")


def check_second_derivatives(linearisation: Linearisation, parameters: Tensors) -> None:
    """Require that the Jacobian, from second derivatives, agrees with its adjoint, from first ones.

    They do not agree if the backward pass of a `torch.autograd.Function` hides operations from
    automatic differentiation. torch then takes the missing derivatives as zero, without an error.
    """
    error = _adjoint_error(linearisation.jacobian, linearisation.adjoint, parameters)
    # Products that are NaN are reported where they are used.
    if error > _TOLERANCE:
        raise NotImplementedError(
            f"{_NEEDS_SECOND_DERIVATIVES}, but those of torch are wrong for one of the model's "
            "operations. It may be a `torch.autograd.Function` whose backward pass torch cannot "
            f"differentiate, such as torchdiffeq's `odeint_adjoint`. {_REMEDY}"
        )


def are_adjoint(push: LinearMap, pull: LinearMap, parameters: Tensors) -> bool:
    """Test with random vectors whether two linear maps are adjoint."""
    return _adjoint_error(push, pull, parameters) <= torch.finfo(parameters[0].dtype).eps ** 0.5


def _adjoint_error(push: LinearMap, pull: LinearMap, parameters: Tensors) -> float:
    """Measure with random vectors how far two linear maps are from being adjoint, relatively."""
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    v = _drawn_like(parameters, generator)
    pushed = push(v, batched=False)
    # u is drawn, because the pushed vector itself is zero where a derivative is missing.
    u = _drawn_like(pushed, generator)
    pulled = pull(u, batched=False)
    # For adjoint maps, ⟨push v, u⟩ = ⟨v, pull u⟩. The standard deviation of each product is the
    # norm of the factor that is not drawn.
    scale = max(_product(pushed, pushed), _product(pulled, pulled)) ** 0.5
    difference = abs(_product(pushed, u) - _product(pulled, v))
    return difference / scale if scale > 0 else difference


def _drawn_like(tensors: Tensors, generator: torch.Generator) -> Tensors:
    return [
        torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device) for x in tensors
    ]


def _product(x: Tensors, y: Tensors) -> float:
    return sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))


def _evaluate(program: Program, points: Tensors, not_counted: Tensors) -> Linearisation:
    """Compute the outputs and the linear maps of a program at points."""
    with torch.no_grad():
        residuals = program.residuals(*points)
    maps: list[LinearMap] = []
    for recorded_map in program.maps:
        own_residuals = [residuals[index] for index in recorded_map.residual_indices]
        apply = partial(_apply_function, recorded_map.function, own_residuals)
        maps.append(_with_fallback(apply))
    return Linearisation(residuals[0], tuple(maps), _num_bytes(residuals, not_counted))


def _with_fallback(linear_map: LinearMap) -> LinearMap:
    """Apply a map to batched vectors one after the other if torch cannot apply it in one call."""

    def apply(vector: Tensors, /, *, batched: bool) -> Tensors:
        try:
            return linear_map(vector, batched=batched)
        except RuntimeError as error:
            if not batched or is_out_of_memory(error):
                raise
        products = [linear_map(v, batched=False) for v in zip(*vector, strict=True)]
        return [torch.stack(tensors) for tensors in zip(*products, strict=True)]

    return apply


def _apply_function(
    function: Callable[..., Tensors], residuals: Tensors, vector: Tensors, *, batched: bool
) -> Tensors:
    """Apply a function to residuals and a vector, or to a batch of vectors."""
    in_dims = (*(None,) * len(residuals), *(0,) * len(vector))
    if not batched:
        with torch.no_grad():
            return function(*residuals, *vector)
    with torch.no_grad(), quiet():
        return vmap(function, in_dims)(*residuals, *vector)


def _num_bytes(tensors: Iterable[Tensor], not_counted: Iterable[Tensor]) -> int:
    """Count the bytes of the storages of tensors; a shared storage counts once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
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
    """Compute Σ_i (∂outputs_i / ∂inputs)ᵀ cotangents_i.

    Args:
        outputs: The outputs.
        inputs: The inputs, on which the outputs need not depend.
        cotangents: A cotangent for each output; if batched, several along a first dimension.
        batched: Whether there are several cotangents for each output.
        create_graph: Whether the result can be differentiated.
    """
    pairs = [(f, c) for f, c in zip(outputs, cotangents, strict=True) if f.requires_grad]
    sums: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs:
        with _explained_missing_derivatives(), quiet() if batched else nullcontext():
            sums = torch.autograd.grad(
                [f for f, _ in pairs],
                inputs,
                [c for _, c in pairs],
                retain_graph=True,
                create_graph=create_graph,
                is_grads_batched=batched,
                allow_unused=True,
            )
    batch_shape = cotangents[0].shape[:1] if batched else ()
    products: list[Tensor] = []
    for x, product in zip(inputs, sums, strict=True):
        products.append(x.new_zeros((*batch_shape, *x.shape)) if product is None else product)
    return products


@contextmanager
def _explained_missing_derivatives() -> Iterator[None]:
    """Explain the error of an operation that torch cannot differentiate twice."""
    try:
        yield
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise NotImplementedError(
            f"{_NEEDS_SECOND_DERIVATIVES}, but torch cannot compute them for one of the model's "
            f"operations ({error}). {_REMEDY}"
        ) from error


def _graph_bytes(roots: Tensors, not_counted: Tensors) -> int:
    """Count the bytes of the tensors that a graph of automatic differentiation saves."""
    saved_tensors: list[Tensor] = []
    for node in graph_nodes(*roots):
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for name in (*names, "saved_tensors"):
            saved = getattr(node, name, None)
            values = saved if isinstance(saved, (tuple, list)) else (saved,)
            saved_tensors += [x for x in values if isinstance(x, Tensor)]
    return _num_bytes(saved_tensors, not_counted)
