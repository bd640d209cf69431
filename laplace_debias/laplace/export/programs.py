"""Predictives as modules that `torch.export` can trace."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import vmap

from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs, call, call_with, like, tensors_of
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.laplace.export.answers import Answers, of_gaussian, of_samples
from laplace_debias.laplace.export.last_layer import last_layer_covariance
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.links import variances_suffice
from laplace_debias.laplace.predictive import SAMPLES_AT_ONCE

# Stands where a tensor goes.
_TENSOR = object()


class Predictive(nn.Module):
    """A predictive that is called with the tensors among a model's inputs.

    Args:
        network: The network with its outputs `[B, ..., C]`; a copy of it is held.
        example: Inputs; what is not a tensor (None, a flag) is fixed to what it is there.
    """

    def __init__(self, network: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.network = shadow(network)
        fixed = fixed_part(example)

        def forward(*args: Tensor, **kwargs: Tensor) -> Answers:
            if isinstance(fixed, Mapping):
                return self.answers(like(fixed, {**fixed, **kwargs}))
            left = iter(args)
            return self.answers(tuple(next(left) if x is _TENSOR else x for x in fixed))

        # With `**kwargs` torch (2.15) writes programs that it cannot call, so every input has a
        # name of its own.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = [inspect.Parameter(name, kind) for name in input_names(example)]
        forward.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        self.forward = forward

    def answers(self, inputs: Inputs) -> Answers:
        """What it gives for the model's inputs."""
        raise NotImplementedError


class LinearisedPredictive(Predictive):
    """The closed-form `"glm"` predictive of a posterior over a linear last layer.

    It answers as `of_gaussian`.

    Args:
        fitted: The fit.
        example: Inputs on the model's device.
        link: From logits to class probabilities.

    Raises:
        NotImplementedError: If the posterior is not one over a linear layer whose outputs are the
            network's, as they are.
    """

    def __init__(self, fitted: Fitted, example: Inputs, link: str) -> None:
        super().__init__(fitted.network, example)
        self._layer = _last_linear_layer(fitted, example)
        self._likelihood = fitted.likelihood
        self._link = link
        self.covariance = last_layer_covariance(fitted.parameters.blocks, fitted.posterior)

    def answers(self, inputs: Inputs) -> Answers:
        """As `Predictive.answers`."""
        read: list[Tensor] = []
        handle = self.network.get_submodule(self._layer).register_forward_hook(
            lambda _, given, named, __: read.append(
                given[0] if given else next(iter(named.values()))
            ),
            with_kwargs=True,
        )
        try:
            mean = call(self.network, inputs)
        finally:
            handle.remove()
        covariance = self.covariance(read[0], variances_suffice(self._likelihood, self._link))
        return of_gaussian(self._likelihood, self._link, mean, covariance)


class SampledPredictive(Predictive):
    """The `"nn"` predictive, with the parameters' samples in it.

    It answers as `of_samples`.

    Args:
        fitted: The fit.
        example: Inputs on the model's device.
        draws: Samples of the Bayesian parameters, `[S, D]`.
        vectorised: Whether several samples go through the network at once, or one after the other,
            which makes a longer program.
    """

    def __init__(
        self,
        fitted: Fitted,
        example: Inputs,
        draws: Float[Tensor, "samples parameters"],
        vectorised: bool,
    ) -> None:
        super().__init__(fitted.network, example)
        self._names = fitted.parameters.names
        self._likelihood = fitted.likelihood
        self._vectorised = vectorised
        shapes = [self.network.get_parameter(name).shape for name in self._names]
        columns = draws.split([shape.numel() for shape in shapes], dim=1)
        for index, (part, shape) in enumerate(zip(columns, shapes, strict=True)):
            # A copy: of a view the file would hold what it is a view of, all the draws.
            samples = part.clone(memory_format=torch.contiguous_format).reshape(-1, *shape)
            self.register_buffer(f"samples_{index}", samples)

    def answers(self, inputs: Inputs) -> Answers:
        """As `Predictive.answers`."""

        def outputs(*values: Tensor) -> Tensor:
            parameters = dict(zip(self._names, values, strict=True))
            return call_with(self.network, parameters, inputs)

        stacks = [getattr(self, f"samples_{index}") for index in range(len(self._names))]
        if not self._vectorised:
            parts = [outputs(*values) for values in zip(*stacks, strict=True)]
            return of_samples(self._likelihood, torch.stack(parts))
        chunks = zip(*(stack.split(SAMPLES_AT_ONCE) for stack in stacks), strict=True)
        return of_samples(self._likelihood, torch.cat([vmap(outputs)(*part) for part in chunks]))


def tensors_alone(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What a `Predictive` is called with for a model's inputs, by position and by name."""
    if isinstance(inputs, Mapping):
        return (), {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return tuple(tensors_of(inputs)), {}


def input_names(inputs: Inputs) -> list[str]:
    """What the inputs of a `Predictive` are called: as the model has them, or `input`."""
    args, kwargs = tensors_alone(inputs)
    if kwargs:
        return list(kwargs)
    return ["input"] if len(args) == 1 else [f"input_{index}" for index in range(len(args))]


def fixed_part(inputs: Inputs) -> Mapping[str, Any] | tuple[Any, ...]:
    """What the same inputs hold besides tensors; by position, with a mark where a tensor is."""
    if isinstance(inputs, Mapping):
        return like(inputs, {n: x for n, x in inputs.items() if not isinstance(x, Tensor)})
    every = (inputs,) if isinstance(inputs, Tensor) else inputs
    return tuple(_TENSOR if isinstance(x, Tensor) else x for x in every)


def _last_linear_layer(fitted: Fitted, example: Inputs) -> str:
    """The path of the one layer that is Bayesian and whose outputs are the network's.

    Raises:
        NotImplementedError: If there is none.
    """
    blocks = fitted.parameters.blocks
    network = shadow(fitted.network)
    layers = list(dict.fromkeys(block.layer for block in blocks))
    remedy = (
        'Fit with params="last_layer" a model that ends in an nn.Linear, or export samples of the '
        'parameters, method="nn".'
    )
    if len(layers) > 1:
        raise NotImplementedError(
            'The "glm" predictive is exported of a posterior over the last layer alone, but '
            f"{len(layers)} layers are Bayesian here: {', '.join(layers[:3])}"
            f"{', …' if len(layers) > 3 else ''}. {remedy}"
        )
    tap = Tap.on(network, blocks)
    outputs = tap.forward(example)
    last = tap.last_layer(outputs)
    layer = network.get_submodule(layers[0])
    is_linear = isinstance(layer, nn.Linear) and all(b.role in ("weight", "bias") for b in blocks)
    if last is None or not is_linear or last.x.shape[:-1] != outputs.shape[:-1]:
        raise NotImplementedError(
            f"The outputs are not those of {layers[0]} ({type(layer).__name__}) as a linear layer "
            f'gives them, which the export of the "glm" predictive needs. {remedy}'
        )
    return layers[0]
