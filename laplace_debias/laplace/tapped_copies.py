"""Working copies of a model that are kept between predictions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.module_snapshot import (
    ModuleSnapshot,
    UncomparableAttributeError,
)
from laplace_debias.curvature.network.precision import NARROW
from laplace_debias.laplace.model_spec import ModelSpec
from laplace_debias.laplace.parameter_blocks import ParameterBlocks

# Copies that are kept for predictions of several threads.
_MOST_IDLE = 4


@dataclass(frozen=True, eq=False)
class _TappedCopy:
    """A tapped working copy, with the snapshots that it is compared with.

    Attributes:
        tap: The tap, on the copy.
        model_snapshot: The user's modules.
        copy_snapshot: The copied modules, which forward passes must leave as they are.
    """

    tap: Tap
    model_snapshot: ModuleSnapshot
    copy_snapshot: ModuleSnapshot

    def refresh_buffers(self) -> None:
        """Copy the values of the user's buffers, which forward passes may overwrite."""
        if self.copy_snapshot.buffers:
            with torch.no_grad():
                torch._foreach_copy_(self.copy_snapshot.buffers, self.model_snapshot.buffers)


class TappedCopies:
    """The tapped working copies of a model that are not in use.

    A prediction takes one for itself, since threads cannot share the hooks of a tap, and returns it
    after its last pass. A copy is dropped if the user's modules have changed: an attribute, a hook,
    a submodule, or the place of a tensor. The parameters of the copy are the user's, and the
    buffers are read at every prediction. Models whose modules hold anything else that may change
    are copied every time. A copy of this object, or what comes out of a pickle, is empty.
    """

    def __init__(self) -> None:
        self._idle: list[_TappedCopy] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return TappedCopies, ()

    @contextmanager
    def borrow(self, spec: ModelSpec, parameters: ParameterBlocks) -> Iterator[Tap]:
        """Return a tap on a working copy that is not in use."""
        model = spec.plain_model
        copy = self._take_current(model)
        if copy is None:
            model_snapshot = _snapshot(model)
            tap = Tap(spec.network(parameters.names), parameters.blocks)
            is_narrow = any(parameter.dtype in NARROW for parameter in model.parameters())
            # The copy of a model in half precision has values of its own.
            copy_snapshot = None if tap.learns_dims or is_narrow else _snapshot(tap.network)
            if model_snapshot is not None and copy_snapshot is not None:
                copy = _TappedCopy(tap, model_snapshot, copy_snapshot)
        else:
            tap = copy.tap.attach(parameters.blocks)
        yield tap
        # An exception drops the copy, whose state may be anything.
        tap.start_anew()
        if copy is not None and copy.copy_snapshot.is_current(tap.network):
            self._keep(copy)

    def _take_current(self, model: nn.Module) -> _TappedCopy | None:
        """Take an idle copy of the model as it is now; drop those that are out of date."""
        while True:
            try:
                copy = self._idle.pop()
            except IndexError:
                return None
            if copy.model_snapshot.is_current(model):
                copy.refresh_buffers()
                return copy

    def _keep(self, copy: _TappedCopy) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(copy)


def _snapshot(model: nn.Module) -> ModuleSnapshot | None:
    """Take a snapshot; None for modules of which changes cannot be detected."""
    try:
        return ModuleSnapshot(model)
    except UncomparableAttributeError:
        return None
