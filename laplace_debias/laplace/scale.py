"""The scale of a few examples' curvature, corrected by forward passes over many."""

from collections.abc import Iterator
from typing import Any

from laplace_debias.curvature.fits.output_curvature import mean_output_curvature
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.laplace.schemes import Read, Scheme


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


def scale_of(problem: Problem, scheme: Scheme, data: Batches, read: Read) -> float:
    """The loss's mean curvature in the outputs over `data`, to that over the examples measured.

    Args:
        problem: The network; its loss is a likelihood's.
        scheme: Which examples the magnitudes are measured on.
        data: The examples that have the right scale.
        read: As the scheme's `fit` takes it.

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
            read(*some),
            is_empirical,
            cotangents.class_dim,
            problem.ranks,
        )
        for some in ((data, "data of the scale"), scheme.measured)
    )
    if of_measured == 0:
        raise ValueError(
            "The loss of the examples at hand has no curvature in the outputs, all of which are "
            "certain. There is nothing to scale: take more examples."
        )
    return of_all / of_measured
