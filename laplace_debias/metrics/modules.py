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
    """A function of what all batches hold."""

    is_differentiable = False
    full_state_update = False
    _of: Callable[..., Tensor]
    _check: Callable[..., object]
    _num_inputs: int
    _own: Mapping[str, Any]

    def __init__(self, **options: Any) -> None:
        self._options = {name: options.pop(name, self._own[name]) for name in self._own}
        for name, value in self._options.items():
            check_level(value) if name == "level" else whole(value, name)
        super().__init__(**options)
        for number in range(self._num_inputs):
            self.add_state(f"given_{number}", [], dist_reduce_fx="cat")

    def update(self, *batch: Tensor) -> None:
        """Adds a batch of what the function takes; of scores `[n]` and 1 where OOD, 0 where not."""
        self._check(*batch)
        for number, part in enumerate(batch):
            getattr(self, f"given_{number}").append(part.detach())

    def compute(self) -> Float[Tensor, ""]:
        """The function of the examples of all batches; ValueError if there were none."""
        given = [getattr(self, f"given_{number}") for number in range(self._num_inputs)]
        if isinstance(given[0], list) and not given[0]:
            raise ValueError(f"{type(self).__name__} saw no example: call `update` first.")
        return self._of(*map(dim_zero_cat, given), **self._options)


def _check_both(scores: Float[Tensor, " n"], is_ood: Integer[Tensor, " n"]) -> None:
    check_scores(scores, "scores")
    if is_ood.shape != scores.shape or not ((is_ood == 0) | (is_ood == 1)).all():
        raise ValueError(
            f"`is_ood` must hold 0 or 1 for each of the {len(scores)} scores, with shape "
            f"{list(scores.shape)}; got shape {list(is_ood.shape)}."
        )


def _class_of(
    check: Callable[..., object],
    metric: str,
    name: str,
    function: Callable[..., Tensor],
    **defaults: Any,
) -> Any:
    """The class of one of `METRICS`: its function over batches."""
    definition = METRICS[metric]
    return type(
        name,
        (_OverBatches,),
        {
            "__doc__": f"{definition.label} over batches. {definition.meaning}",
            "__module__": __name__,
            "_of": staticmethod(function),
            "_check": staticmethod(check),
            "_num_inputs": 3 if check is regression.check_gaussian else 2,
            "_own": MappingProxyType(defaults),
            "higher_is_better": {"higher": True, "lower": False}.get(definition.better or ""),
        },
    )


def _of_scores(metric: str, name: str, function: Callable[..., Tensor]) -> Any:
    def of_both(scores: Tensor, is_ood: Tensor) -> Tensor:
        return function(scores[is_ood == 0], scores[is_ood == 1])

    return _class_of(_check_both, metric, name, of_both)


_of_probs = partial(_class_of, check_classification)
_of_gaussians = partial(_class_of, regression.check_gaussian)

Accuracy = _of_probs("accuracy", "Accuracy", classification.accuracy)
NLL = _of_probs("nll", "NLL", classification.nll)
Brier = _of_probs("brier", "Brier", classification.brier)
ECE = _of_probs("ece", "ECE", calibration.ece, num_bins=15)
EqualMassECE = _of_probs("ece_equal_mass", "EqualMassECE", calibration.ece_equal_mass, num_bins=15)
MCE = _of_probs("mce", "MCE", calibration.mce, num_bins=15)
ClasswiseECE = _of_probs("classwise_ece", "ClasswiseECE", calibration.classwise_ece, num_bins=15)
SmoothECE = _of_probs("smooth_ece", "SmoothECE", calibration.smooth_ece)
AURC = _of_probs("aurc", "AURC", selective.aurc)

AUROC = _of_scores("auroc", "AUROC", ood.auroc)
AUPR = _of_scores("aupr_out", "AUPR", ood.aupr)
AuprIn = _of_scores("aupr_in", "AuprIn", ood.aupr_in)
FPR95 = _of_scores("fpr95", "FPR95", ood.fpr95)

GaussianNLL = _of_gaussians("nll", "GaussianNLL", regression.gaussian_nll)
CRPS = _of_gaussians("crps", "CRPS", regression.crps)
IntervalCoverage = _of_gaussians(
    "coverage",
    "IntervalCoverage",
    lambda m, sd, y, level: covered(m, sd, y, level).mean(),
    level=0.95,
)
IntervalWidth = _of_gaussians(
    "width", "IntervalWidth", lambda m, sd, y, level: widths(m, sd, y, level).mean(), level=0.95
)
QuantileCalibrationError = _of_gaussians(
    "quantile_calibration_error",
    "QuantileCalibrationError",
    lambda *given, num_levels: regression.quantile_calibration_error(
        regression.gaussian_pit(*given), num_levels
    ),
    num_levels=99,
)
