"""Checks of what comes out of a network: finite, of the expected shape, the same twice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.faults import require
from laplace_debias.curvature.network.inputs import Inputs, call, take
from laplace_debias.curvature.network.precision import coarsest_eps
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.memory import is_out_of_memory


def check_outputs(outputs: Tensor, probed: int | None = None) -> None:
    """Require finite outputs of shape `[B, C]` or `[B, ..., C]`.

    Args:
        outputs: What the model gave.
        probed: If that was for one example alone: how many examples the user's batch has, so that
            the error tells of these.

    Raises:
        ValueError: Otherwise.
    """
    if outputs.ndim < 2:
        came = tuple(outputs.shape)
        if probed is not None and came == (1,):
            came = (probed,)
        raise ValueError(
            f"The model must return outputs of shape [batch, outputs] or [batch, positions, "
            f"outputs], got {came}: wrap it in a module that "
            f"{'keeps a dimension for the examples' if not came else 'flattens or selects them'}."
        )
    check_finite_outputs(outputs)


def check_finite_outputs(outputs: Tensor) -> None:
    """Require finite outputs; within a pass over data as `Faults` has it.

    Raises:
        ValueError: If an output is not finite.
    """
    require(
        outputs.isfinite().all(),
        lambda: ValueError(
            "The model's outputs hold NaN or Inf for these examples: check the inputs' scale and "
            "the checkpoint."
        ),
    )


@contextmanager
def explaining_unbatched(model: nn.Module, x: Inputs) -> Iterator[None]:
    """Says what is wrong where the work within fails as the inputs are one example, not a batch.

    Args:
        model: The model.
        x: What the user gave.

    Raises:
        ValueError: In the place of what was raised, if the model takes the inputs with one more
            dimension, and not as they are.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or not isinstance(x, Tensor):
            raise
        if _takes(model, x) or not _takes(model, x.unsqueeze(0)):
            raise
        raise ValueError(
            f"The inputs of shape {tuple(x.shape)} are one example without a dimension for the "
            f"examples: pass x.unsqueeze(0), of shape {(1, *x.shape)}."
        ) from error


def _takes(model: nn.Module, x: Tensor) -> bool:
    """Whether the model has a row of outputs for each of the inputs."""
    try:
        with torch.no_grad():
            outputs = call(shadow(model), x)
    # Whatever a forward pass raises.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return outputs.ndim > 1 and len(outputs) == len(x)


def check_repeatable(model: nn.Module, x: Inputs, outputs: Tensor) -> None:
    """Require a model to give the same outputs again, whatever else is in the batch.

    Args:
        model: The model.
        x: One example or more.
        outputs: What the first of them gave, alone.

    Raises:
        ValueError: If it draws random numbers that no module's mode tells of, or mixes the
            examples of a batch.
    """
    largest = float(outputs.abs().max())
    eps = max(coarsest_eps(model), torch.finfo(outputs.dtype).eps)

    def differ(others: Tensor, rtol: float, atol: float) -> bool:
        same_shape = others.shape == outputs.shape
        return not same_shape or not torch.allclose(outputs, others, rtol, atol * largest)

    with torch.no_grad():
        beside_another = call(shadow(model), x)[:1]
        if not differ(beside_another, 1e-3, 1e-5):
            return
        again = call(shadow(model), take(x, slice(0, 1)))
    if differ(again, 1e-3, 1e-5):
        raise ValueError(
            "Two forward passes give different outputs: the model draws random numbers "
            "(`F.dropout` without `training=self.training`, noise, ...), and curvature is that of "
            "a function. Make its forward pass deterministic in eval mode."
        )
    # Other sizes of a batch have other roundings.
    tolerance = max(1e-2, 16 * eps)
    if differ(beside_another, tolerance, tolerance):
        raise ValueError(
            "An example's outputs change when a second one is beside it: the model mixes the "
            "examples of a batch (statistics over the batch, attention along the wrong dimension, "
            "...), and curvature per example is not defined. Let every example have outputs of "
            "its own."
        )
