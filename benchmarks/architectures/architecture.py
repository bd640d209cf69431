"""The subject of a row of the table: a network with random weights, and its data."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor]
CLASSES = 3
VOCABULARY = 13
LENGTH = 6
END = 1  # the token that ends a sentence
PAD = 0
# The arguments of each type of layer that are numbers of channels.
_CHANNEL_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: ("in_channels", "out_channels", "groups"),
    nn.Linear: ("in_features", "out_features"),
    nn.BatchNorm2d: ("num_features",),
}


@dataclass(frozen=True)
class Architecture:
    """A network and its data.

    Attributes:
        name: The name of the network in its library.
        library: The name of the package.
        build: A function that builds the reduced network with random weights.
        data: A function from a number of examples to inputs and targets.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Inputs, Tensor]]

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the network in eval mode, with the same weights at every call.

        The weights are initialised by the library and then shifted at random. Many weights are
        initialised to zero (the last scale of a residual branch, position tables), where curvature
        and gradients would test nothing.

        Args:
            dtype: The dtype of the parameters.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build().to(dtype).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model


def images(side: int) -> Callable[[int], tuple[Inputs, Tensor]]:
    """Return a function for random images `[size, 3, side, side]` and classes."""

    def data(size: int) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(size, 3, side, side, generator=generator)
        return x, torch.randint(CLASSES, (size,), generator=generator)

    return data


def sentences(size: int) -> tuple[Inputs, Tensor]:
    """Return random tokens `[size, LENGTH]`, with the second sentence padded, and classes."""
    inputs, generator = _tokens(size)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def language(size: int) -> tuple[Inputs, Tensor]:
    """Return random tokens and next tokens, both `[size, LENGTH]`."""
    inputs, generator = _tokens(size)
    return inputs, torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)


def _tokens(size: int) -> tuple[dict[str, Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    ids[:, -1] = END
    mask = torch.ones_like(ids)
    ids[1, -2:] = torch.tensor([END, PAD])
    mask[1, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}, generator


@contextmanager
def narrow(divisor: int) -> Iterator[None]:
    """Reduce the channels of networks that are built in the context.

    This is for networks whose constructor has no argument for the width. Every number of channels
    that is a multiple of the divisor is divided by it, in convolutions, linear layers and
    normalisations. The layers and their connections do not change.

    Args:
        divisor: The divisor of the widths. It must divide neither the channels of an image nor the
            number of classes.
    """
    with ExitStack() as stack:
        for layer_type, arguments in _CHANNEL_ARGUMENTS.items():
            initialise = _divide_arguments(layer_type, arguments, divisor)
            stack.enter_context(mock.patch.object(layer_type, "__init__", initialise))
        yield


def _divide_arguments(
    layer_type: type[nn.Module], names: tuple[str, ...], divisor: int
) -> Callable[..., None]:
    """Return a constructor that divides these arguments first, and then calls the original one."""
    original = layer_type.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def initialise(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        for name in names:
            value = bound.arguments.get(name, 1)
            if value % divisor == 0:
                value //= divisor
            bound.arguments[name] = value
        original(*bound.args, **bound.kwargs)

    return initialise
