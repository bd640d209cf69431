"""Estimation of a regression's noise, before the curvature is computed."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import move, take
from laplace_debias.curvature.network.outputs import (
    DeferredChecks,
    check_outputs,
    targets_classes_last,
)
from laplace_debias.system.shown import warn

# The number of examples that are passed through the network at once.
_CHUNK = 64
# Residuals of at most this many units of rounding are treated as zero.
_ROUNDINGS = 8
# The number of outputs that a warning lists.
_LISTED = 8
_HOW_TO_CHOOSE = (
    "Pass `sigma=` (command line: --sigma) in the units of the targets, or tune it after the fit "
    "with la.tune(validation_loader) or la.tune_evidence(sigma=True) (command line: "
    "laplace-debias tune)."
)


def estimate_noise(context: FitContext, first: Batch | None, batches: Iterable[Batch]) -> Gaussian:
    r"""Estimate the noise of each output from its residuals, and issue a warning.

    $\sigma_c^2 = \sum_n w_n (y_{nc} - f_{nc})^2 / \sum_n w_n$ is the maximum-likelihood noise of
    output c at the trained parameters, with the example weights w and over all positions. Tuning
    can later multiply the noise of all outputs by a common factor, because this divides the
    curvature by the square of the factor. The ratio between the noise levels of two outputs has no
    such simple effect, so it must be right before the fit. For a single output, or if all residuals
    of an output are zero, $\sigma = 1$ is kept.

    Args:
        context: The network and its loss.
        first: A batch that determines the number of outputs; None if this process has no examples.
        batches: The batches for which the residuals are computed.
    """
    sigma = None
    if _num_outputs(context, first) > 1:
        sigma = _residual_deviations(context, batches)
    if sigma is None:
        warn(
            "The noise of the regression was not specified, so sigma=1.0 is assumed. "
            f"{_HOW_TO_CHOOSE}"
        )
        return Gaussian()
    numbers = ", ".join(f"{number:.3g}" for number in sigma[:_LISTED].tolist())
    if len(sigma) > _LISTED:
        numbers += ", …"
    warn(
        "The noise of the regression was not specified, so it is estimated from the residuals of "
        f"each output: sigma=[{numbers}]. {_HOW_TO_CHOOSE}"
    )
    return Gaussian.estimated(sigma)


def _num_outputs(context: FitContext, batch: Batch | None) -> int:
    """Return the size of the last dimension of the outputs, computed from one example."""
    size = 0
    if batch is not None:
        with torch.no_grad():
            example = move(take(batch.inputs, slice(0, 1)), context.device, None)
            size = call(context.network, example).shape[-1]
    return max(context.ranks.exchange(size))


def _residual_deviations(
    context: FitContext, batches: Iterable[Batch]
) -> Float[Tensor, " outputs"] | None:
    """Compute RMS residuals per output, or None if all residuals or weights of an output are zero.

    The residuals of all processes are used.
    """
    checks = DeferredChecks()
    sums: Tensor | None = None
    for number, batch in enumerate(batches, start=1):
        with checks.during_batch(number):
            for start in range(0, batch.num_examples, _CHUNK):
                chunk_sums = _chunk_sums(context, batch.take(slice(start, start + _CHUNK)))
                sums = chunk_sums if sums is None else sums + chunk_sums
    checks.read()
    sums_by_rank = context.ranks.exchange(None if sums is None else sums.tolist())
    # A process without examples has no sums.
    numbers = [rank_sums for rank_sums in sums_by_rank if rank_sums is not None]
    totals = torch.tensor(numbers, dtype=torch.float64).sum(0)
    residual_squares, output_squares, weights = totals
    # Residuals this small result from rounding of outputs and targets, so they count as zero.
    rounding = _ROUNDINGS * torch.finfo(context.dtype).eps
    is_zero = residual_squares <= rounding**2 * output_squares
    if not weights.all() or is_zero.any():
        return None
    return (residual_squares / weights).sqrt()


def _chunk_sums(context: FitContext, chunk: Batch) -> Float[Tensor, "3 outputs"]:
    """Sum the squared residuals, squared outputs and weights for each output."""
    with torch.no_grad():
        outputs = call(context.network, move(chunk.inputs, context.device, None))
    check_outputs(outputs)
    targets = targets_classes_last(chunk.targets, outputs.ndim, context.cotangents.class_dim)
    context.cotangents.loss.check(outputs, targets)
    targets = targets.to(outputs.device, non_blocking=True)
    terms, labels = flat_terms(outputs, targets)
    terms = terms.double()
    residuals = labels.double() - terms
    weights = chunk.weights_or_ones.to(outputs.device, non_blocking=True).double()
    weights = weights.repeat_interleave(len(terms) // len(outputs))
    counts = weights.sum().expand(terms.shape[1])
    return torch.stack([weights @ residuals.square(), weights @ terms.square(), counts])
