"""Which experiments of the paper there are."""

from laplace_debias.experiments.conjugate_gradients import CONJUGATE_GRADIENTS
from laplace_debias.experiments.contours import CONTOURS
from laplace_debias.experiments.debiasing_study import DEBIASING
from laplace_debias.experiments.directional_curvature import (
    DIRECTIONAL_CURVATURE,
    WIDE_RESNET,
)
from laplace_debias.experiments.experiment import Experiment
from laplace_debias.experiments.hessian_free import HESSIAN_FREE
from laplace_debias.experiments.kfac_batch_size import KFAC_BATCH_SIZE
from laplace_debias.experiments.kfac_error import KFAC_ERROR
from laplace_debias.experiments.laplace import LAPLACE
from laplace_debias.experiments.model_size import MODEL_SIZE
from laplace_debias.experiments.over_training import OVER_TRAINING
from laplace_debias.experiments.overlaps import OVERLAPS
from laplace_debias.experiments.runtime import RUNTIME

EXPERIMENTS: tuple[Experiment, ...] = (
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
"""In the order of the paper's figures; then what is beyond the paper."""
