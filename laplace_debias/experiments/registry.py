"""What an experiment of the paper is, and which there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the paper: settings in; a table, pictures and sentences out.

    Attributes:
        name: What it is called on the command line.
        figure: The paper's figure, or figures, that it repeats.
        help: What it measures, in one line.
        settings: The dataclass of its settings, an `ExperimentSettings`.
        run: Runs it with an instance of these, and perhaps a console to print on.
    """

    name: str
    figure: str
    help: str
    settings: type
    run: Callable[..., Any]


def experiments() -> tuple[Experiment, ...]:
    """All experiments, in the order of the paper's figures."""
    # Here, since the experiments' files take `Experiment` from this one.
    from laplace_debias.experiments.conjugate_gradients import CONJUGATE_GRADIENTS
    from laplace_debias.experiments.contours import CONTOURS
    from laplace_debias.experiments.debiasing_study import DEBIASING
    from laplace_debias.experiments.directional_curvature import (
        DIRECTIONAL_CURVATURE,
        WIDE_RESNET,
    )
    from laplace_debias.experiments.hessian_free import HESSIAN_FREE
    from laplace_debias.experiments.kfac_batch_size import KFAC_BATCH_SIZE
    from laplace_debias.experiments.kfac_error import KFAC_ERROR
    from laplace_debias.experiments.laplace import LAPLACE
    from laplace_debias.experiments.model_size import MODEL_SIZE
    from laplace_debias.experiments.over_training import OVER_TRAINING
    from laplace_debias.experiments.overlaps import OVERLAPS
    from laplace_debias.experiments.runtime import RUNTIME

    return (
        CONTOURS,
        DIRECTIONAL_CURVATURE,
        OVERLAPS,
        CONJUGATE_GRADIENTS,
        LAPLACE,
        RUNTIME,
        HESSIAN_FREE,
        WIDE_RESNET,
        KFAC_BATCH_SIZE,
        OVER_TRAINING,
        MODEL_SIZE,
        DEBIASING,
        KFAC_ERROR,
    )
