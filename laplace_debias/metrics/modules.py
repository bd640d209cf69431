"""The metrics as classes of torchmetrics: they gather over batches and over processes.

`from laplace_debias.metrics.modules import NLL`: not with the other metrics, because torchmetrics
takes seconds to import. A class takes what its function of the same name takes, batch by batch;
`compute` gives the function's value on all examples of all processes. They are logged in
Lightning as any metric of torchmetrics. `torchmetrics.regression.MeanSquaredError(squared=False)`
is the root mean squared error.

Metrics that are means keep a sum and a count. The others keep the predictions, because examples of
all batches are ranked or binned together: 4 · (classes + 2) bytes an example in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from laplace_debias.metrics import calibration, classification, ood, regression, selective
from laplace_debias.metrics.checks import check_classification
from laplace_debias.metrics.definitions import METRICS, covered, widths

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


class _Mean(Metric):
    """The mean of values that each example has on its own."""

    is_differentiable = False
    full_state_update = False
    _of: Callable[..., Tensor]
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, *arguments: Tensor) -> None:
        """Adds a batch of what the function takes."""
        values = self._values(*arguments)
        self.total += values.sum(dtype=torch.float64)
        self.count += values.numel()

    def _values(self, *arguments: Tensor) -> Tensor:
        return self._of(*arguments, reduction="none")

    def compute(self) -> Float[Tensor, ""]:
        """The mean over all examples, float64; ValueError if there were none."""
        if self.count == 0:
            raise ValueError(f"{type(self).__name__} saw no example: call `update` first.")
        return self.total / self.count


class _OfInterval(_Mean):
    """The mean of what central Gaussian intervals of probability `level` have."""

    def __init__(self, level: float = 0.95, **options: Any) -> None:
        super().__init__(**options)
        regression.check_level(level)
        self.level = level

    def _values(self, *arguments: Tensor) -> Tensor:
        mean, standard_deviation, targets = arguments
        regression.check_gaussian(mean, standard_deviation, targets)
        return self._of(mean, standard_deviation, targets, self.level)


class _Kept(Metric):
    """A function of all predictions and targets at once."""

    is_differentiable = False
    full_state_update = False
    _of: Callable[..., Tensor]
    predictions: list[Tensor] | Tensor
    targets: list[Tensor] | Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("predictions", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def _keep(self, predictions: Tensor, targets: Tensor) -> None:
        if not isinstance(self.predictions, list) or not isinstance(self.targets, list):
            raise RuntimeError("The metric is synchronised: call `unsync` before `update`.")
        self.predictions.append(predictions.detach())
        self.targets.append(targets)

    def compute(self) -> Float[Tensor, ""]:
        """The function of the examples of all batches; ValueError if there were none."""
        if isinstance(self.predictions, list) and not self.predictions:
            raise ValueError(f"{type(self).__name__} saw no example: call `update` first.")
        return self._function(dim_zero_cat(self.predictions), dim_zero_cat(self.targets))

    def _function(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self._of(predictions, targets)


class _KeptProbs(_Kept):
    def update(self, probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]) -> None:
        """Adds a batch of probabilities `[n, classes]` (or `[n]`) and class indices `[n]`."""
        check_classification(probs, labels)
        self._keep(probs, labels)


class _Binned(_KeptProbs):
    def __init__(self, num_bins: int = 15, **options: Any) -> None:
        super().__init__(**options)
        calibration.check_num_bins(num_bins)
        self.num_bins = num_bins

    def _function(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self._of(predictions, targets, self.num_bins)


class _KeptScores(_Kept):
    def update(self, scores: Float[Tensor, " n"], is_ood: Integer[Tensor, " n"]) -> None:
        """Adds a batch of scores `[n]`, and 1 where an example is OOD, 0 where not."""
        ood.check_scores(scores, "scores")
        if is_ood.shape != scores.shape or not ((is_ood == 0) | (is_ood == 1)).all():
            raise ValueError(
                f"`is_ood` must hold 0 or 1 for each of the {len(scores)} scores, with shape "
                f"{list(scores.shape)}; got shape {list(is_ood.shape)}."
            )
        self._keep(scores, is_ood)

    def _function(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self._of(predictions[targets == 0], predictions[targets == 1])


class _KeptQuantiles(_Kept):
    """A function of the probability integral transforms of targets, at `num_levels` levels."""

    def __init__(self, num_levels: int = 99, **options: Any) -> None:
        super().__init__(**options)
        if num_levels < 1:
            raise ValueError(f"`num_levels` is {num_levels}; expected at least 1, for example 99.")
        self.num_levels = num_levels

    def update(
        self,
        mean: regression.Real,
        standard_deviation: regression.Real,
        targets: regression.Real,
    ) -> None:
        """Adds a batch of means, standard deviations (noise included) and targets."""
        self._keep(regression.gaussian_pit(mean, standard_deviation, targets), targets)

    def _function(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return self._of(predictions, self.num_levels)


def _class_of(metric: str, name: str, base: type[Metric], function: Callable[..., Tensor]) -> Any:
    """The class of one of `METRICS`: its function over batches."""
    definition = METRICS[metric]
    return type(
        name,
        (base,),
        {
            "__doc__": f"{definition.label} over batches. {definition.meaning}",
            "__module__": __name__,
            "_of": staticmethod(function),
            "higher_is_better": {"higher": True, "lower": False}.get(definition.better or ""),
        },
    )


Accuracy = _class_of("accuracy", "Accuracy", _Mean, classification.accuracy)
NLL = _class_of("nll", "NLL", _Mean, classification.nll)
Brier = _class_of("brier", "Brier", _Mean, classification.brier)
GaussianNLL = _class_of("nll", "GaussianNLL", _Mean, regression.gaussian_nll)
CRPS = _class_of("crps", "CRPS", _Mean, regression.crps)
IntervalCoverage = _class_of("coverage", "IntervalCoverage", _OfInterval, covered)
IntervalWidth = _class_of("width", "IntervalWidth", _OfInterval, widths)
ECE = _class_of("ece", "ECE", _Binned, calibration.ece)
EqualMassECE = _class_of("ece_equal_mass", "EqualMassECE", _Binned, calibration.ece_equal_mass)
MCE = _class_of("mce", "MCE", _Binned, calibration.mce)
ClasswiseECE = _class_of("classwise_ece", "ClasswiseECE", _Binned, calibration.classwise_ece)
SmoothECE = _class_of("smooth_ece", "SmoothECE", _KeptProbs, calibration.smooth_ece)
AURC = _class_of("aurc", "AURC", _KeptProbs, selective.aurc)
AUROC = _class_of("auroc", "AUROC", _KeptScores, ood.auroc)
AUPR = _class_of("aupr_out", "AUPR", _KeptScores, ood.aupr)
AuprIn = _class_of("aupr_in", "AuprIn", _KeptScores, ood.aupr_in)
FPR95 = _class_of("fpr95", "FPR95", _KeptScores, ood.fpr95)
QuantileCalibrationError = _class_of(
    "quantile_calibration_error",
    "QuantileCalibrationError",
    _KeptQuantiles,
    regression.quantile_calibration_error,
)
