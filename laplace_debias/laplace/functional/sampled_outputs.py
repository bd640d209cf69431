"""Outputs of the network, or of the linearised network, at sampled parameters."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp, vmap

from laplace_debias.curvature.network.calling import call, differentiable, quiet
from laplace_debias.curvature.network.inputs import Inputs, take
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.operators.linearisation import (
    are_adjoint,
    check_second_derivatives,
    gradients,
    linearised_by_reverse,
)
from laplace_debias.system.memory import suppress_unsupported
from laplace_debias.system.threads import FORWARD_MODE

# The number of weight samples that are passed through the network together.
SAMPLES_AT_ONCE = 8
SampledOutputs = Float[Tensor, "samples batch *outputs"]


def network_outputs(
    network: nn.Module,
    names: Sequence[str],
    x: Inputs,
    parameters: Float[Tensor, "samples parameters"],
    keeps_graph: bool = False,
) -> SampledOutputs:
    """Compute the network's outputs at sampled parameters, `[S, B, ..., C]`.

    Gradients flow back to the inputs only if `keeps_graph`. The activations of all samples are then
    kept in memory.
    """
    shapes = [network.get_parameter(name).shape for name in names]
    outputs = []
    for samples in _chunks(parameters, shapes):
        with torch.set_grad_enabled(keeps_graph), quiet():
            outputs.append(_for_each_sample(_outputs_as_function(network, names, x), samples))
    return _join_samples(outputs)


def linearised_outputs(
    network: nn.Module,
    names: Sequence[str],
    x: Inputs,
    parameters: Float[Tensor, "samples parameters"],
) -> SampledOutputs:
    r"""Compute the linearised network's outputs at sampled parameters, `[S, B, ..., C]`.

    $f_{lin}(x, \theta_s) = f(x, \theta^*) + J(x)(\theta_s - \theta^*)$ (Eq. 18) is computed from
    Jacobian-vector products in forward mode, or by two reverse passes if the forward derivative in
    torch is missing or wrong.

    Raises:
        ValueError: If outputs are not finite.
        NotImplementedError: If an operation has neither a forward derivative nor a second
            derivative in torch.
    """
    trained = tuple(network.get_parameter(name).detach() for name in names)
    chunks = _chunks(parameters, [value.shape for value in trained])
    function = _outputs_as_function(network, names, x)
    if _has_forward_derivative(network, names, take(x, slice(0, 1))):
        return _join_samples([_linearised_forward(function, trained, chunk) for chunk in chunks])
    with differentiable(network):
        linearisation = linearised_by_reverse(function, trained)
        check_second_derivatives(linearisation, trained)
    push = linearisation.jacobian
    outputs = []
    for samples in chunks:
        (products,) = push(_steps(samples, trained), batched=True)
        outputs.append(linearisation.outputs + products)
    return _join_samples(outputs)


def _linearised_forward(
    function: Callable[..., Tensor], trained: Sequence[Tensor], samples: Sequence[Tensor]
) -> SampledOutputs:
    """Compute the linearised outputs at a few samples in forward mode.

    Args:
        function: The network's outputs as a function of its parameters.
        trained: The trained parameters.
        samples: The sampled parameters, one tensor `[samples, *shape]` per parameter.
    """

    def linearised(*sample: Tensor) -> Tensor:
        tangents = tuple(_steps(sample, trained))
        outputs, product = jvp(function, tuple(trained), tangents)  # type: ignore[misc]
        return outputs + product

    # The lock is released between chunks of samples, so that other threads can run.
    with torch.no_grad(), FORWARD_MODE, quiet():
        return _for_each_sample(linearised, samples)


def _steps(parameters: Sequence[Tensor], trained: Sequence[Tensor]) -> list[Tensor]:
    """Compute θ_s − θ* for each parameter."""
    pairs = zip(parameters, trained, strict=True)
    return [value - trained_value for value, trained_value in pairs]


def _outputs_as_function(
    network: nn.Module, names: Sequence[str], x: Inputs
) -> Callable[..., Tensor]:
    """Return a function from the parameters to the outputs."""

    def outputs(*values: Tensor) -> Tensor:
        return call(network, x, dict(zip(names, values, strict=True)))

    return outputs


def _has_forward_derivative(network: nn.Module, names: Sequence[str], example: Inputs) -> bool:
    """Whether torch's forward derivative of the network exists and agrees with the reverse mode.

    Forward mode is preferred because, for a convolutional network on a CPU, two reverse passes take
    twice as long and keep the activations of a batch twice.
    """
    trained = tuple(network.get_parameter(name).detach() for name in names)
    function = _outputs_as_function(network, names, example)

    def push(tangents: Sequence[Tensor], /, *, batched: bool) -> Sequence[Tensor]:
        with torch.no_grad(), FORWARD_MODE, quiet():
            return jvp(function, trained, tuple(tangents))[1:]

    def pull(cotangents: Sequence[Tensor], /, *, batched: bool) -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [value.requires_grad_() for value in trained]
            return gradients([function(*leaves)], leaves, cotangents)

    # Operations without a forward derivative raise this error or one of its subclasses.
    with suppress_unsupported(RuntimeError):
        return are_adjoint(push, pull, trained)
    return False


def _chunks(
    parameters: Float[Tensor, "samples parameters"], shapes: Sequence[torch.Size]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few samples at a time, as one tensor `[samples, *shape]` per parameter."""
    sizes = [shape.numel() for shape in shapes]
    for rows in parameters.split(SAMPLES_AT_ONCE):
        columns = rows.split(sizes, dim=1)
        pairs = zip(columns, shapes, strict=True)
        yield tuple(values.reshape(-1, *shape) for values, shape in pairs)


def _for_each_sample(function: Callable[..., Tensor], samples: Sequence[Tensor]) -> Tensor:
    """Apply a function to each sample, vectorised if torch supports it."""
    with suppress_unsupported(RuntimeError):
        return vmap(function)(*samples)
    # Recurrent layers cannot be vectorised, so the samples are processed one after the other.
    return torch.stack([function(*sample) for sample in zip(*samples, strict=True)])


def _join_samples(
    chunks: Sequence[Tensor],
) -> Float[Tensor, "samples batch *outputs"]:
    """Join the outputs of the chunks, and require that they are finite."""
    outputs = torch.cat(list(chunks))
    check_outputs(outputs.flatten(0, 1))
    return outputs
