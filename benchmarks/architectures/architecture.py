"""What a row of the table is about: a network of random weights, and data for it."""

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
# The arguments of a layer that are numbers of channels.
_SIZES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: ("in_channels", "out_channels", "groups"),
    nn.Linear: ("in_features", "out_features"),
    nn.BatchNorm2d: ("num_features",),
}


@dataclass(frozen=True)
class Architecture:
    """A network and its data.

    Attributes:
        name: What its library calls it.
        library: The package.
        build: The network with random weights, reduced.
        data: From a number of examples to inputs and targets.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Inputs, Tensor]]

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The network in eval mode, the same weights at every call.

        They are drawn as the library draws them and shifted at random: much of what is learned
        begins at zero (the last scale of a residual branch, tables of positions), where neither
        curvature nor gradients tell anything.

        Args:
            dtype: Of its parameters.
        """
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build().to(dtype).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model


def images(side: int) -> Callable[[int], tuple[Inputs, Tensor]]:
    """Random images `[size, 3, side, side]` and classes."""

    def data(size: int) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(size, 3, side, side, generator=generator)
        return x, torch.randint(CLASSES, (size,), generator=generator)

    return data


def sentences(size: int) -> tuple[Inputs, Tensor]:
    """Random tokens `[size, LENGTH]`, the second sentence padded; classes."""
    inputs, generator = _tokens(size)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def language(size: int) -> tuple[Inputs, Tensor]:
    """Random tokens and next tokens, both `[size, LENGTH]`."""
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
def narrow(by: int) -> Iterator[None]:
    """Make networks whose constructor has no width: what is built within has fewer channels.

    Every number of channels that `by` divides is divided by it, in convolutions, linear layers and
    normalisations. The layers and how they are connected stay what they are.

    Args:
        by: The divisor; it divides neither the channels of an image nor the classes.
    """
    with ExitStack() as stack:
        for layer, sizes in _SIZES.items():
            stack.enter_context(mock.patch.object(layer, "__init__", _divided(layer, sizes, by)))
        yield


def _divided(layer: type[nn.Module], sizes: tuple[str, ...], by: int) -> Callable[..., None]:
    original = layer.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def initialise(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        for name in sizes:
            value = bound.arguments.get(name, 1)
            bound.arguments[name] = value if value % by else value // by
        original(*bound.args, **bound.kwargs)

    return initialise
