"""The metrics as torchmetrics classes, which accumulate examples over batches and processes.

Import a class from this module, as in `from laplace_debias.metrics.modules import NLL`. It is
separate from the other metrics, because torchmetrics takes seconds to import. Each class is named
after a function. Its `update` method expects a batch of the arguments of this function, such as
`low`, `high` and `targets` for `IntervalCoverage`. For OOD detection, it expects the scores of a
batch, and labels: 1 for each OOD example and 0 for all others. `compute` returns the value of the
function on all examples of all processes. In Lightning, the classes can be logged like any
torchmetrics metric. For the root mean squared error, use
`torchmetrics.regression.MeanSquaredError(squared=False)`.

All classes store the inputs of `update`. Metrics of probabilities, for example, need 4 · (classes +
2) bytes per example in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from laplace_debias.metrics import calibration, classification, ood, regression, selective
from laplace_debias.metrics.checks import check_classification, check_scores, check_tensor
from laplace_debias.metrics.definitions import METRICS
from laplace_debias.metrics.regression import Real, check_gaussian, check_intervals, check_pit
from laplace_debias.system.checks import whole
from laplace_debias.system.shown import counted

__all__ = [
    "AUPR",
    "AURC",
    "AUROC",
    "CRPS",
    "ECE",
    "FPR95",
    "MCE",
    "NLL",
    "Accuracy",
    "AuprIn",
    "Brier",
    "ClasswiseECE",
    "EqualMassECE",
    "GaussianNLL",
    "IntervalCoverage",
    "IntervalWidth",
    "QuantileCalibrationError",
    "SmoothECE",
]


class _BatchedMetric(Metric):
    """A metric that is computed from the stored tensors of all batches.

    Attributes:
        _function: The function that computes the metric from these tensors.
        _num_inputs: The number of these tensors.
        _option_defaults: Default values of the function's options, by name.
    """

    is_differentiable = False
    full_state_update = False
    _function: Callable[..., Tensor]
    _num_inputs: int
    _option_defaults: Mapping[str, int]

    def __init__(self, **options: Any) -> None:
        self._options = {
            name: whole(options.pop(name, default), name)
            for name, default in self._option_defaults.items()
        }
        super().__init__(**options)
        for number in range(self._num_inputs):
            self.add_state(f"given_{number}", [], dist_reduce_fx="cat")

    def _add(self, *batch: Tensor) -> None:
        for number, tensor in enumerate(batch):
            getattr(self, f"given_{number}").append(tensor.detach())

    def _examples(self) -> list[Tensor]:
        """Return the inputs of all batches; raise ValueError if there were no batches."""
        batches = [getattr(self, f"given_{number}") for number in range(self._num_inputs)]
        if isinstance(batches[0], list) and not batches[0]:
            raise ValueError(f"{type(self).__name__} has no examples. Call `update` first.")
        return [dim_zero_cat(batch) for batch in batches]

    def compute(self) -> Float[Tensor, ""]:
        """Compute the metric on the examples of all batches; raise ValueError without examples."""
        return self._function(*self._examples(), **self._options)


class _ProbabilityMetric(_BatchedMetric):
    _num_inputs = 2

    def update(self, probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]) -> None:
        """Add a batch of probabilities `[n, classes]` (or `[n]` of class 1) and class indices."""
        check_classification(probs, labels)
        self._add(probs, labels)


class _ScoreMetric(_BatchedMetric):
    _num_inputs = 2

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_in_forward = False

    def update(self, scores: Float[Tensor, " n"], is_ood: Integer[Tensor, " n"]) -> None:
        """Add a batch of scores and labels: 1 for each OOD example, and 0 for the others."""
        check_scores(scores, "scores")
        check_tensor(is_ood, "is_ood")
        if is_ood.shape != scores.shape:
            raise ValueError(
                f"`is_ood` has shape {list(is_ood.shape)}. Pass 0 or 1 for each of the "
                f"{counted(len(scores), 'score')}, in the shape {list(scores.shape)}."
            )
        if not ((is_ood == 0) | (is_ood == 1)).all():
            raise ValueError(
                "`is_ood` contains values other than 0 and 1. Pass 1 for each OOD example, and 0 "
                "for the others."
            )
        self._add(scores, is_ood)

    def forward(self, *batch: Tensor, **named: Tensor) -> Float[Tensor, ""]:
        """Add a batch and return the metric on it, or NaN if it lacks ID or OOD examples."""
        self._is_in_forward = True
        try:
            return super().forward(*batch, **named)
        finally:
            self._is_in_forward = False

    def compute(self) -> Float[Tensor, ""]:
        """Compute the metric on all batches; raise ValueError without both ID and OOD examples."""
        scores, is_ood = self._examples()
        if self._is_in_forward and len(is_ood.unique()) < 2:
            return torch.tensor(torch.nan, device=scores.device)
        return self._function(scores[is_ood == 0], scores[is_ood == 1])


class _GaussianMetric(_BatchedMetric):
    _num_inputs = 3

    def update(self, mean: Real, standard_deviation: Real, targets: Real) -> None:
        """Add a batch of Gaussian predictions (including the noise) and their targets."""
        check_gaussian(mean, standard_deviation, targets)
        self._add(mean, standard_deviation, targets)


class _IntervalAndTargetMetric(_BatchedMetric):
    _num_inputs = 3

    def update(self, low: Real, high: Real, targets: Real) -> None:
        """Add a batch of intervals (lower and upper ends) and their targets."""
        check_intervals(low, high, targets)
        self._add(low, high, targets)


class _IntervalMetric(_BatchedMetric):
    _num_inputs = 2

    def update(self, low: Real, high: Real) -> None:
        """Add a batch of intervals (lower and upper ends)."""
        check_intervals(low, high)
        self._add(low, high)


class _TransformMetric(_BatchedMetric):
    _num_inputs = 1

    def update(self, pit: Real) -> None:
        """Add a batch of probability integral transforms, such as those of `gaussian_pit`."""
        check_pit(pit)
        self._add(pit)


def _metric_class(
    kind: type[_BatchedMetric],
    metric: str,
    name: str,
    function: Callable[..., Tensor],
    **defaults: int,
) -> Any:
    """Make the torchmetrics class for one of the `METRICS`."""
    definition = METRICS[metric]
    return type(
        name,
        (kind,),
        {
            "__doc__": f"{definition.label} over batches. {definition.meaning}",
            "__module__": __name__,
            "_function": staticmethod(function),
            "_option_defaults": MappingProxyType(defaults),
            "higher_is_better": {"higher": True, "lower": False}.get(definition.better or ""),
        },
    )


_classification_class = partial(_metric_class, _ProbabilityMetric)
_ood_class = partial(_metric_class, _ScoreMetric)
_gaussian_class = partial(_metric_class, _GaussianMetric)

Accuracy = _classification_class("accuracy", "Accuracy", classification.accuracy)
NLL = _classification_class("nll", "NLL", classification.nll)
Brier = _classification_class("brier", "Brier", classification.brier)
ECE = _classification_class("ece", "ECE", calibration.ece, num_bins=15)
EqualMassECE = _classification_class(
    "ece_equal_mass", "EqualMassECE", calibration.ece_equal_mass, num_bins=15
)
MCE = _classification_class("mce", "MCE", calibration.mce, num_bins=15)
ClasswiseECE = _classification_class(
    "classwise_ece", "ClasswiseECE", calibration.classwise_ece, num_bins=15
)
SmoothECE = _classification_class("smooth_ece", "SmoothECE", calibration.smooth_ece)
AURC = _classification_class("aurc", "AURC", selective.aurc)

AUROC = _ood_class("auroc", "AUROC", ood.auroc)
AUPR = _ood_class("aupr_out", "AUPR", ood.aupr)
AuprIn = _ood_class("aupr_in", "AuprIn", ood.aupr_in)
FPR95 = _ood_class("fpr95", "FPR95", ood.fpr95)

GaussianNLL = _gaussian_class("nll", "GaussianNLL", regression.gaussian_nll)
CRPS = _gaussian_class("crps", "CRPS", regression.crps)
IntervalCoverage = _metric_class(
    _IntervalAndTargetMetric, "coverage", "IntervalCoverage", regression.interval_coverage
)
IntervalWidth = _metric_class(_IntervalMetric, "width", "IntervalWidth", regression.interval_width)
QuantileCalibrationError = _metric_class(
    _TransformMetric,
    "quantile_calibration_error",
    "QuantileCalibrationError",
    regression.quantile_calibration_error,
    num_levels=99,
)
