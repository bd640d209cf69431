"""The metrics as classes of torchmetrics: they gather over batches and over processes.

`from laplace_debias.metrics.modules import NLL`: not with the other metrics, because torchmetrics
takes seconds to import. A class takes what its function of the same name takes, batch by batch;
`compute` gives the function's value on all examples of all processes. They are logged in
Lightning as any metric of torchmetrics. `torchmetrics.regression.MeanSquaredError(squared=False)`
is the root mean squared error.

All keep the predictions, 4 · (classes + 2) bytes an example in float32.
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
from laplace_debias.metrics.checks import check_classification, check_level, check_scores
from laplace_debias.metrics.definitions import METRICS, covered, widths
from laplace_debias.system.checks import whole

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


class _OverBatches(Metric):
    """A function of the tensors of all batches.

    Attributes:
        _function: The metric as a function of these tensors.
        _check: Checks a batch of them.
        _num_inputs: Their number.
        _option_defaults: Options of the function, by name.
    """

    is_differentiable = False
    full_state_update = False
    _function: Callable[..., Tensor]
    _check: Callable[..., object]
    _num_inputs: int
    # Whether a value needs both ID and OOD examples.
    _needs_both_kinds: bool
    _option_defaults: Mapping[str, Any]

    def __init__(self, **options: Any) -> None:
        self._options = {
            name: options.pop(name, self._option_defaults[name]) for name in self._option_defaults
        }
        for name, value in self._options.items():
            if name == "level":
                check_level(value)
            else:
                whole(value, name)
        super().__init__(**options)
        self._is_in_forward = False
        for number in range(self._num_inputs):
            self.add_state(f"given_{number}", [], dist_reduce_fx="cat")

    def forward(self, *batch: Tensor) -> Float[Tensor, ""]:
        """Add a batch, and return its value; NaN if a kind of examples is missing in it."""
        self._is_in_forward = True
        try:
            return super().forward(*batch)
        finally:
            self._is_in_forward = False

    def update(self, *batch: Tensor) -> None:
        """Add a batch of the function's arguments; of scores `[n]` and 1 if OOD, else 0."""
        if len(batch) != self._num_inputs:
            arguments = "probabilities and labels"
            if self._needs_both_kinds:
                arguments = "scores, and 1 for OOD examples and 0 for the others"
            elif self._num_inputs == 3:
                arguments = "means, standard deviations and targets"
            raise TypeError(
                f"{type(self).__name__}.update takes {self._num_inputs} tensors, got {len(batch)}. "
                f"Pass {arguments}."
            )
        self._check(*batch)
        for number, tensor in enumerate(batch):
            getattr(self, f"given_{number}").append(tensor.detach())

    def compute(self) -> Float[Tensor, ""]:
        """The function of the examples of all batches; ValueError if there were none."""
        batches = [getattr(self, f"given_{number}") for number in range(self._num_inputs)]
        if isinstance(batches[0], list) and not batches[0]:
            raise ValueError(f"{type(self).__name__} has no examples. Call `update` first.")
        examples = [dim_zero_cat(batch) for batch in batches]
        if self._is_in_forward and self._needs_both_kinds and len(examples[1].unique()) < 2:
            return torch.tensor(torch.nan, device=examples[0].device)
        return self._function(*examples, **self._options)


def _check_labelled_scores(scores: Float[Tensor, " n"], is_ood: Integer[Tensor, " n"]) -> None:
    check_scores(scores, "scores")
    if is_ood.shape != scores.shape or not ((is_ood == 0) | (is_ood == 1)).all():
        raise ValueError(
            f"`is_ood` has shape {list(is_ood.shape)}. Pass 0 or 1 for each of the {len(scores)} "
            f"scores, in the shape {list(scores.shape)}."
        )


def _metric_class(
    check: Callable[..., object],
    metric: str,
    name: str,
    function: Callable[..., Tensor],
    **defaults: Any,
) -> Any:
    """The class of a metric of `METRICS`: its function over batches."""
    definition = METRICS[metric]
    return type(
        name,
        (_OverBatches,),
        {
            "__doc__": f"{definition.label} over batches. {definition.meaning}",
            "__module__": __name__,
            "_function": staticmethod(function),
            "_check": staticmethod(check),
            "_needs_both_kinds": check is _check_labelled_scores,
            "_num_inputs": 3 if check is regression.check_gaussian else 2,
            "_option_defaults": MappingProxyType(defaults),
            "higher_is_better": {"higher": True, "lower": False}.get(definition.better or ""),
        },
    )


def _ood_class(metric: str, name: str, function: Callable[..., Tensor]) -> Any:
    """The class of a function of the scores of ID and of OOD examples."""

    def by_label(scores: Tensor, is_ood: Tensor) -> Tensor:
        return function(scores[is_ood == 0], scores[is_ood == 1])

    return _metric_class(_check_labelled_scores, metric, name, by_label)


def _calibration_error_of_quantiles(
    mean: Tensor, standard_deviation: Tensor, targets: Tensor, num_levels: int
) -> Tensor:
    pit = regression.gaussian_pit(mean, standard_deviation, targets)
    return regression.quantile_calibration_error(pit, num_levels)


_classification_class = partial(_metric_class, check_classification)
_regression_class = partial(_metric_class, regression.check_gaussian)

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

GaussianNLL = _regression_class("nll", "GaussianNLL", regression.gaussian_nll)
CRPS = _regression_class("crps", "CRPS", regression.crps)
IntervalCoverage = _regression_class(
    "coverage",
    "IntervalCoverage",
    lambda m, sd, y, level: covered(m, sd, y, level).mean(),
    level=0.95,
)
IntervalWidth = _regression_class(
    "width", "IntervalWidth", lambda m, sd, y, level: widths(m, sd, y, level).mean(), level=0.95
)
QuantileCalibrationError = _regression_class(
    "quantile_calibration_error",
    "QuantileCalibrationError",
    _calibration_error_of_quantiles,
    num_levels=99,
)
