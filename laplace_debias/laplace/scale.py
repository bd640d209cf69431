"""The scale of a few examples' curvature, corrected by forward passes over many."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.class_dim import targets_classes_last
from laplace_debias.curvature.network.faults import Faults
from laplace_debias.curvature.network.inputs import call, move
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.ranks import ALONE, Ranks


def mean_output_curvature(
    model: nn.Module,
    loss: NegativeLogLikelihood,
    batches: Pairs,
    empirical: bool = False,
    class_dim: int | None = None,
    ranks: Ranks = ALONE,
) -> float:
    """Mean over examples of tr ∇²_f ℓ, summed over an example's terms; 1 − Σ p² for a softmax.

    A block's trace is the mean of squared output gradients times activations. How much of it a few
    examples hold goes with their share of this, which takes no backward pass: the ratio of its
    means over many and over few examples scales the curvature of the few (a ratio estimator).

    Args:
        model: The trained network, with outputs `[B, ..., C]`.
        loss: Its loss.
        batches: `(x, y)`, on the model's device or the CPU.
        empirical: ‖∇_f ℓ‖² instead, the trace of the empirical Fisher's part.
        class_dim: As `Cotangents`.
        ranks: The processes that share the examples.

    Raises:
        ValueError: If there is no example, or outputs or targets are not what they must be.
    """
    network = shadow(model)
    device = next(model.parameters()).device
    total: Tensor | float = 0.0
    num_examples, faults = 0, Faults()
    for number, (x, y) in enumerate(batches, start=1):
        with faults.of_batch(number):
            x = move(x, device, None)
            with torch.no_grad():
                outputs = call(network, x)
            check_outputs(outputs)
            targets = targets_classes_last(y, outputs.ndim, class_dim)
            loss.check(outputs, targets)
            targets = targets.to(device, non_blocking=True)
            labels = loss.labels(targets, outputs.ndim)
            if empirical:
                total = total + loss.gradient(outputs, labels).double().square().sum()
            else:
                total = total + loss.hessian_trace(outputs, labels).double()
            num_examples += len(y)
    faults.read()
    of_ranks = ranks.exchange([float(total), num_examples])
    num_of_all = sum(seen for _, seen in of_ranks)
    if num_of_all == 0:
        raise ValueError("The data of the scale holds no example: pass at least one batch.")
    return sum(of_rank for of_rank, _ in of_ranks) / num_of_all


def check_scale(*data: Any) -> None:
    """Require data that can be read again.

    Raises:
        TypeError: For an iterator.
    """
    if any(isinstance(batches, Iterator) for batches in data):
        raise TypeError(
            "The scale takes another pass over the data, but an iterator can be read only once: "
            "pass a DataLoader or a list of batches."
        )


def scale_of(problem: Problem, measured: Pairs, data: Pairs) -> float:
    """The loss's mean curvature in the outputs over `data`, to that over the examples measured.

    Args:
        problem: The network; its loss is a likelihood's.
        measured: The examples that the magnitudes are measured on.
        data: The examples that have the right scale.

    Raises:
        ValueError: If the examples measured have no curvature; as `mean_output_curvature`.
    """
    cotangents = problem.cotangents
    assert isinstance(cotangents.loss, NegativeLogLikelihood)
    is_empirical = cotangents.fisher.kind == "empirical"
    of_all, of_measured = (
        mean_output_curvature(
            problem.model,
            cotangents.loss,
            some,
            is_empirical,
            cotangents.class_dim,
            problem.ranks,
        )
        for some in (data, measured)
    )
    if of_measured == 0:
        raise ValueError(
            "The loss of the examples at hand has no curvature in the outputs, all of which are "
            "certain. There is nothing to scale: use more examples."
        )
    return of_all / of_measured
