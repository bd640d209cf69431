"""Which experiments of the paper there are."""

from laplace_debias.experiments.bias.contours import CONTOURS
from laplace_debias.experiments.bias.directional_curvature import (
    DIRECTIONAL_CURVATURE,
    WIDE_RESNET,
)
from laplace_debias.experiments.bias.kfac_batch_size import KFAC_BATCH_SIZE
from laplace_debias.experiments.bias.kfac_error import KFAC_ERROR
from laplace_debias.experiments.bias.model_size import MODEL_SIZE
from laplace_debias.experiments.bias.over_training import OVER_TRAINING
from laplace_debias.experiments.bias.overlaps import OVERLAPS
from laplace_debias.experiments.cost.runtime import RUNTIME
from laplace_debias.experiments.debiasing.study import DEBIASING
from laplace_debias.experiments.optimisation.conjugate_gradients import CONJUGATE_GRADIENTS
from laplace_debias.experiments.optimisation.hessian_free import HESSIAN_FREE
from laplace_debias.experiments.posteriors.comparison_experiment import COMPARISON
from laplace_debias.experiments.posteriors.laplace_experiment import LAPLACE
from laplace_debias.experiments.shared.experiment import Experiment

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
    COMPARISON,
)
"""In the order of the paper's figures; then what is beyond the paper."""
