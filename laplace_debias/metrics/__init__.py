"""Metrics of predictives: accuracy, calibration, out-of-distribution detection, intervals."""

from laplace_debias.metrics.calibration import ReliabilityCurve, reliability_curve
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.evaluation import evaluate
from laplace_debias.metrics.intervals import Interval, bootstrap
from laplace_debias.metrics.multilabel import evaluate_multilabel
from laplace_debias.metrics.ood import aupr, auroc, entropy, fpr95

__all__ = [
    "Interval",
    "ReliabilityCurve",
    "accuracy",
    "aupr",
    "auroc",
    "bootstrap",
    "brier",
    "ece",
    "entropy",
    "evaluate",
    "evaluate_multilabel",
    "fpr95",
    "nll",
    "reliability_curve",
]
