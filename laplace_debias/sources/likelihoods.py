"""Determine the likelihood of a network's outputs from `--task` or from the data."""

import numpy as np
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
    Ordinal,
)
from laplace_debias.sources.imports import call_function, import_object
from laplace_debias.sources.settings import SourceSettings


def task_name(likelihood: Likelihood) -> str:
    """Return the name of a likelihood that run folders and messages use.

    For a user-defined likelihood, it is the name of the class.
    """
    return likelihood.name or type(likelihood).__qualname__


def likelihood_from_settings(settings: SourceSettings) -> Likelihood | None:
    """Return the likelihood that `--task` specifies, or None if the option is not set.

    Raises:
        ValueError: If the object at an import path is not a likelihood, or if `task` is `ordinal`,
            which has no default thresholds.
    """
    task = settings.task
    if task is None:
        return None
    if task == Ordinal.name:
        raise ValueError(
            "`task=ordinal` needs the thresholds that the network was trained with. Pass the "
            "import path of a likelihood, such as --task=my_pkg.likelihoods:grades, where "
            "my_pkg/likelihoods.py defines `grades = laplace_debias.Ordinal([-1.0, 0.5, 1.5])`."
        )
    if task in LIKELIHOODS:
        return LIKELIHOODS[task]()
    likelihood = import_object(task, "task")
    if not isinstance(likelihood, Likelihood):
        likelihood = call_function(task, likelihood, {}, "task")
    if not isinstance(likelihood, Likelihood):
        raise ValueError(
            f"The task {task} is of type {type(likelihood).__name__}, which is not a "
            "likelihood. Pass the import path of a Likelihood, of a likelihood class "
            "that needs no arguments, or of a function that returns a likelihood."
        )
    return likelihood


def likelihood_of_array(targets: np.ndarray) -> Likelihood:
    """Infer the likelihood of targets from their type and shape.

    Integers `[N]` are classes, zeros and ones `[N, K]` are labels, and floating-point numbers are
    the targets of a regression.

    Raises:
        ValueError: If the targets are other integers.
    """
    if targets.dtype.kind == "f":
        return Gaussian()
    if targets.ndim == 1 and not (targets.dtype.kind == "i" and (targets < 0).any()):
        return Categorical()
    if targets.ndim > 1 and np.isin(targets, (0, 1)).all():
        return MultiLabel()
    raise ValueError(
        f"The targets are integers of shape {list(targets.shape)} from {targets.min()} to "
        f"{targets.max()}, so the task cannot be inferred. Pass --task=regression or "
        "--task=poisson (counts). Class numbers are 0, 1, 2, … and have the shape [N]."
    )


def likelihood_of_batch(targets: Tensor, outputs: Tensor | None) -> Likelihood:
    """Infer the likelihood from the targets, and from the shapes of the targets and the outputs.

    Raises:
        ValueError: If the likelihood cannot be inferred.
    """
    if targets.is_floating_point():
        return Gaussian()
    if targets.ndim == 1:
        has_one_output = outputs is not None and outputs.shape[-1] == 1
        return Bernoulli() if has_one_output else Categorical()
    if targets.ndim == 2 and outputs is not None and targets.shape == outputs.shape:
        return MultiLabel()
    raise ValueError(
        f"The task cannot be inferred from targets of shape {list(targets.shape)} and dtype "
        f"{targets.dtype}. Pass --task."
    )
