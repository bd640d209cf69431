"""Activation checkpointing, which is switched off in working copies of a model.

A checkpointed function keeps no graph, and the backward pass runs it again. By then, the hooks that
record the calls of layers are gone, so the second run differs from the first run. Derivatives of
higher order, along several columns or with respect to single tensors are not supported either.
Therefore, the passes of this package run a checkpointed function as a plain call, with the same
results.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction

# torch 2.8 uses the first name, and later versions use the second name. These generators receive
# the function and its arguments. They yield just before the function is called, and resume after it
# returns.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
# The composable `checkpoint(module)` imports a generator by name, so it has its own reference.
_MODULES = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
_INHERITED_APPLY = CheckpointFunction.apply


class _Recomputed:
    """A checkpointed function of this package, whose second run needs no hooks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping its graph; the backward pass calls it again."""
    # The whole function is run again, so that accelerate's hooks unload the weights that they load.
    with torch_checkpoint.set_checkpoint_early_stop(False):
        return torch_checkpoint.checkpoint(
            _Recomputed(function), *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


class PlainCheckpoints:
    """A context in which `torch.utils.checkpoint` runs functions as plain calls.

    The functions that `checkpoint` calls are replaced, because models import `checkpoint` itself by
    name. A context must be left before it is entered again.

    Args:
        is_pass: A function that returns whether the calling thread runs a pass of this package. In
            other threads, such as a thread that trains at the same time, checkpoints work as usual.
    """

    def __init__(self, is_pass: Callable[[], bool]) -> None:
        self._is_pass = is_pass
        # Create these functions once, in the constructor, because every pass enters the context.
        self._replacements = {
            name: partial(self._start, name)
            for name in _GENERATORS
            if hasattr(torch_checkpoint, name)
        }
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._originals = {name: getattr(torch_checkpoint, name) for name in self._replacements}
        self._replace(self._replacements)
        CheckpointFunction.apply = self._call_or_apply

    def __exit__(self, *_: object) -> None:
        self._replace(self._originals)
        # After the attribute is deleted, the class inherits the original method again.
        del CheckpointFunction.apply

    def _replace(self, functions: dict[str, Any]) -> None:
        for module in filter(None, map(sys.modules.get, _MODULES)):
            for name, function in functions.items():
                if name in vars(module):
                    setattr(module, name, function)

    def _start(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_pass() and not isinstance(function, _Recomputed):
            return _nothing()
        return self._originals[name](function, *args, **kwargs)

    def _call_or_apply(
        self, function: Callable[..., Any], preserves_rng_state: bool, *args: Any
    ) -> Any:
        if self._is_pass():
            return function(*args)
        return _INHERITED_APPLY(function, preserves_rng_state, *args)


def _nothing() -> Iterator[None]:
    """Do nothing before and after the function is called."""
    yield
