"""The likelihood of a network's outputs: from the option `--task`, or inferred from the data."""

import numpy as np
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.sources.imports import called, imported
from laplace_debias.sources.settings import SourceSettings


def task_name(likelihood: Likelihood) -> str:
    """The name of a likelihood in run folders and messages; its class for a user's own."""
    return likelihood.name or type(likelihood).__qualname__


def likelihood_from_settings(settings: SourceSettings) -> Likelihood | None:
    """The likelihood that `--task` names; None without the option.

    Raises:
        ValueError: If an import path leads to no likelihood.
    """
    task = settings.task
    if task is None:
        return None
    if task in LIKELIHOODS:
        return LIKELIHOODS[task]()
    likelihood = imported(task, "task")
    if not isinstance(likelihood, Likelihood):
        likelihood = called(task, likelihood, {}, "task")
    if not isinstance(likelihood, Likelihood):
        raise ValueError(
            f"task {task} is a {type(likelihood).__name__}. Name a Likelihood, a class of one "
            "without arguments, or a function that returns one."
        )
    return likelihood


def likelihood_of_array(targets: np.ndarray) -> Likelihood:
    """The likelihood of targets by their type and shape.

    Whole numbers `[N]` are classes, whole numbers `[N, K]` labels, other numbers a regression's
    targets.
    """
    if targets.dtype.kind == "f":
        return Gaussian()
    return Categorical() if targets.ndim == 1 else MultiLabel()


def likelihood_of_batch(targets: Tensor, outputs: Tensor | None) -> Likelihood:
    """The likelihood of targets by their type and shape, and by those of a network's outputs.

    Raises:
        ValueError: If it cannot be inferred.
    """
    if targets.is_floating_point():
        return Gaussian()
    if targets.ndim == 1:
        has_one_output = outputs is not None and outputs.shape[-1] == 1
        return Bernoulli() if has_one_output else Categorical()
    if targets.ndim == 2 and outputs is not None and targets.shape == outputs.shape:
        return MultiLabel()
    raise ValueError(
        f"the task cannot be inferred from targets of shape {list(targets.shape)} and dtype "
        f"{targets.dtype}: give --task"
    )
