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
    higher_is_better: bool | None = False
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


class Accuracy(_Mean):
    """`metrics.accuracy` over batches."""

    _of = staticmethod(classification.accuracy)
    higher_is_better = True


class NLL(_Mean):
    """`metrics.nll` over batches, in nats."""

    _of = staticmethod(classification.nll)


class Brier(_Mean):
    """`metrics.brier` over batches."""

    _of = staticmethod(classification.brier)


class _Kept(Metric):
    """A function of all predictions and targets at once."""

    is_differentiable = False
    full_state_update = False
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

    def _all(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.predictions, list) and not self.predictions:
            raise ValueError(f"{type(self).__name__} saw no example: call `update` first.")
        return dim_zero_cat(self.predictions), dim_zero_cat(self.targets)


class _KeptProbs(_Kept):
    _of: Callable[..., Tensor]
    higher_is_better = False

    def update(self, probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]) -> None:
        """Adds a batch of probabilities `[n, classes]` (or `[n]`) and class indices `[n]`."""
        check_classification(probs, labels)
        self._keep(probs, labels)

    def compute(self) -> Float[Tensor, ""]:
        """The function of the examples of all batches."""
        return self._function(*self._all())

    def _function(self, probs: Tensor, labels: Tensor) -> Tensor:
        return self._of(probs, labels)


class _Binned(_KeptProbs):
    def __init__(self, num_bins: int = 15, **options: Any) -> None:
        super().__init__(**options)
        calibration.check_num_bins(num_bins)
        self.num_bins = num_bins

    def _function(self, probs: Tensor, labels: Tensor) -> Tensor:
        return self._of(probs, labels, self.num_bins)


class ECE(_Binned):
    """`metrics.ece` over batches, with `num_bins` bins."""

    _of = staticmethod(calibration.ece)


class EqualMassECE(_Binned):
    """`metrics.ece_equal_mass` over batches, with `num_bins` bins."""

    _of = staticmethod(calibration.ece_equal_mass)


class MCE(_Binned):
    """`metrics.mce` over batches, with `num_bins` bins."""

    _of = staticmethod(calibration.mce)


class ClasswiseECE(_Binned):
    """`metrics.classwise_ece` over batches, with `num_bins` bins."""

    _of = staticmethod(calibration.classwise_ece)


class SmoothECE(_KeptProbs):
    """`metrics.smooth_ece` over batches."""

    _of = staticmethod(calibration.smooth_ece)


class AURC(_KeptProbs):
    """`metrics.aurc` over batches."""

    _of = staticmethod(selective.aurc)


class _KeptScores(_Kept):
    _of: Callable[..., Tensor]
    higher_is_better = True

    def update(self, scores: Float[Tensor, " n"], is_ood: Integer[Tensor, " n"]) -> None:
        """Adds a batch of scores `[n]`, and 1 where an example is OOD, 0 where not."""
        ood.check_scores(scores, "scores")
        if is_ood.shape != scores.shape or not ((is_ood == 0) | (is_ood == 1)).all():
            raise ValueError(
                f"`is_ood` must hold 0 or 1 for each of the {len(scores)} scores, with shape "
                f"{list(scores.shape)}; got shape {list(is_ood.shape)}."
            )
        self._keep(scores, is_ood)

    def compute(self) -> Float[Tensor, ""]:
        """The function of the scores of all batches; ValueError if one kind is missing."""
        scores, is_ood = self._all()
        return self._of(scores[is_ood == 0], scores[is_ood == 1])


class AUROC(_KeptScores):
    """`metrics.auroc` over batches."""

    _of = staticmethod(ood.auroc)


class AUPR(_KeptScores):
    """`metrics.aupr` over batches, OOD positive."""

    _of = staticmethod(ood.aupr)


class AuprIn(_KeptScores):
    """`metrics.aupr_in` over batches, ID positive."""

    _of = staticmethod(ood.aupr_in)


class FPR95(_KeptScores):
    """`metrics.fpr95` over batches."""

    _of = staticmethod(ood.fpr95)
    higher_is_better = False


class GaussianNLL(_Mean):
    """`metrics.gaussian_nll` over batches, in nats."""

    _of = staticmethod(regression.gaussian_nll)


class CRPS(_Mean):
    """`metrics.crps` over batches, in the units of the targets."""

    _of = staticmethod(regression.crps)


class _OfInterval(_Mean):
    def __init__(self, level: float = 0.95, **options: Any) -> None:
        super().__init__(**options)
        regression.check_level(level)
        self.level = level


class IntervalCoverage(_OfInterval):
    """`metrics.interval_coverage` of the central Gaussian intervals of probability `level`."""

    higher_is_better = None

    def _values(self, *arguments: Tensor) -> Tensor:
        mean, standard_deviation, targets = arguments
        ends = regression.gaussian_interval(mean, standard_deviation, self.level)
        return regression.interval_coverage(*ends, targets, reduction="none")


class IntervalWidth(_OfInterval):
    """`metrics.interval_width` of the central Gaussian intervals of probability `level`."""

    def _values(self, *arguments: Tensor) -> Tensor:
        mean, standard_deviation, targets = arguments
        regression.check_gaussian(mean, standard_deviation, targets)
        ends = regression.gaussian_interval(mean, standard_deviation, self.level)
        return regression.interval_width(*ends, reduction="none")


class QuantileCalibrationError(_Kept):
    """`metrics.quantile_calibration_error` of Gaussian predictives over batches."""

    higher_is_better = False

    def __init__(self, num_levels: int = 99, **options: Any) -> None:
        super().__init__(**options)
        if num_levels < 1:
            raise ValueError(f"`num_levels` is {num_levels}; expected at least 1, for example 99.")
        self.num_levels = num_levels

    def update(
        self,
        mean: Float[Tensor, "n *outputs"],
        standard_deviation: Float[Tensor, "n *outputs"],
        targets: Float[Tensor, "n *outputs"],
    ) -> None:
        """Adds a batch of means, standard deviations (noise included) and targets."""
        self._keep(regression.gaussian_pit(mean, standard_deviation, targets), targets)

    def compute(self) -> Float[Tensor, ""]:
        """The error over the targets of all batches."""
        pit, _ = self._all()
        return regression.quantile_calibration_error(pit, self.num_levels)
