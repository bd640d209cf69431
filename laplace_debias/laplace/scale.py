"""The scale of a few examples' curvature, corrected by forward passes over many."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import call, move
from laplace_debias.curvature.network.outputs import Faults, check_outputs, targets_classes_last


def looked(problem: Problem, outputs: Tensor, y: Tensor) -> tuple[Float[Tensor, " batch"], Tensor]:
    """The curvature of each example's loss in the outputs, 1 − Σ p² for a softmax; the loss.

    A block's trace is the mean of squared output gradients times activations. What share of it an
    example has goes with its share of this, which takes no backward pass.

    Args:
        problem: The network; its loss is a likelihood's. Of `fisher="empirical"` it is ‖∇_f ℓ‖².
        outputs: The network's.
        y: Targets, on the model's device or the CPU.

    Raises:
        ValueError: If outputs or targets are not what they must be.
    """
    loss = problem.cotangents.loss
    assert isinstance(loss, NegativeLogLikelihood)
    check_outputs(outputs)
    targets = targets_classes_last(y, outputs.ndim, problem.cotangents.class_dim)
    loss.check(outputs, targets)
    labels = loss.labels(targets.to(outputs.device, non_blocking=True), outputs.ndim)
    if problem.cotangents.fisher.kind == "empirical":
        traces = loss.gradient(outputs, labels).double().square().flatten(1).sum(1)
    else:
        traces = loss.hessian_traces(outputs, labels)
    return traces, loss.value(outputs, labels)


def check_unweighed(weights: Sequence[Tensor]) -> None:
    """Require a batch without weights."""
    if weights:
        raise ValueError(
            'Neither scale=True nor mode="auto" takes weights of examples: leave them out.'
        )


def mean_output_curvature(problem: Problem, batches: Pairs) -> float:
    """Mean of the examples' curvatures in the outputs, over those of all processes.

    The ratio of its means over many and over few examples scales the curvature of the few (a ratio
    estimator).

    Raises:
        ValueError: If there is no example; as `looked`.
    """
    network, faults = problem.network, Faults()
    total: Tensor | float = 0.0
    num_examples = 0
    for number, (x, y, *weights) in enumerate(batches, start=1):
        check_unweighed(weights)
        with faults.of_batch(number):
            with torch.no_grad():
                outputs = call(network, move(x, problem.device, None))
            total = total + looked(problem, outputs, y)[0].sum()
        num_examples += len(y)
    faults.read()
    of_ranks = problem.ranks.exchange([float(total), num_examples])
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

    Raises:
        ValueError: If the examples measured have no curvature; as `mean_output_curvature`.
    """
    of_all, of_measured = (mean_output_curvature(problem, some) for some in (data, measured))
    if of_measured == 0:
        raise ValueError(
            "The loss of the examples at hand has no curvature in the outputs, all of which are "
            "certain. There is nothing to scale: use more examples."
        )
    return of_all / of_measured
