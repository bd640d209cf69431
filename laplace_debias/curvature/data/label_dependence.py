"""A check that a model's outputs do not depend on the targets, which it never receives."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.calling import logits_of
from laplace_debias.curvature.network.inputs import move, take
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.curvature.network.quantised import device_of_model
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.system.memory import is_out_of_memory

_ROUNDINGS = 2.0**10
_LARGEST_TOLERANCE = 0.05
"""Differences between outputs, relative to the largest output, count as rounding errors if they are
at most `_ROUNDINGS` units of the model's precision, and at most this number."""


@torch.inference_mode(False)
def check_outputs_without_targets(
    model: nn.Module, batch: Mapping[str, Any], inputs: Any, name: str
) -> None:
    """Require that a model has the same outputs with and without the targets of a batch.

    Only the first example of the batch is used, on a copy of the model. If the model raises an
    error with the targets, or returns only a loss, there are no outputs to compare.

    Args:
        model: A model whose forward pass accepts the targets by name.
        batch: The batch with its targets, as the data yield it.
        inputs: The arguments of the model: the batch without the targets.
        name: The name of the entry with the targets.

    Raises:
        ValueError: If the outputs differ.
    """
    working_copy = shared_copy(model)
    device = device_of_model(model)
    dtypes = {p.dtype for p in model.parameters()}
    with torch.no_grad():
        try:
            targets: Any = take(move({name: batch[name]}, device, None), slice(0, 1))
            entries = {key: value for key, value in batch.items() if key != name}
            example: Any = take(move(entries, device, dtypes), slice(0, 1))
            outputs_with = logits_of(working_copy(**example, **targets))
            example = take(move(inputs, device, dtypes), slice(0, 1))
            if isinstance(example, Mapping):
                outputs_without = logits_of(working_copy(**example))
            else:
                outputs_without = logits_of(working_copy(example))
        except Exception as error:  # A forward pass may raise any error.
            if is_out_of_memory(error):
                raise
            return
    if outputs_with.ndim == 0:
        return
    if not _are_close(outputs_with, outputs_without, model):
        raise ValueError(
            f"{type(model).__name__} uses the targets {name!r} to compute its outputs, but a fit "
            "calls the model without the targets. For the first example, the outputs with and "
            "without the targets differ. The model computes a missing input (such "
            f"as decoder_input_ids) from {name!r}. Add this input to the batch, or pass "
            "`batch=`, a function that converts a batch to (inputs, targets) and "
            "adds this input to the inputs."
        )


def _are_close(first: Tensor, second: Tensor, model: nn.Module) -> bool:
    if first.shape != second.shape:
        return False
    tolerance = min(_ROUNDINGS * coarsest_eps(model), _LARGEST_TOLERANCE)
    largest = float(second.abs().max())
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * largest, equal_nan=True)
