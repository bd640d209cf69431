"""Metrics of predictive distributions: accuracy, calibration, OOD detection and intervals."""

from laplace_debias.metrics.calibration import (
    ReliabilityCurve,
    classwise_ece,
    ece,
    ece_equal_mass,
    mce,
    reliability_curve,
    smooth_ece,
)
from laplace_debias.metrics.classification import accuracy, brier, nll, overconfidence
from laplace_debias.metrics.definitions import METRICS
from laplace_debias.metrics.evaluation import (
    evaluate,
    evaluate_multilabel,
    evaluate_numbers,
    evaluate_ood,
    evaluate_regression,
)
from laplace_debias.metrics.intervals import Interval
from laplace_debias.metrics.metric import Metric
from laplace_debias.metrics.ood import aupr, aupr_in, auroc, entropy, fpr95
from laplace_debias.metrics.regression import (
    crps,
    gaussian_interval,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_score,
    interval_width,
    pinball,
    quantile_calibration_error,
    rmse,
)
from laplace_debias.metrics.report import Report, compare
from laplace_debias.metrics.selective import RiskCoverageCurve, aurc, risk_coverage_curve
from laplace_debias.metrics.uncertainties import (
    Uncertainty,
    energy,
    instability,
    logit_variance,
    max_logit,
    max_probability,
    uncertainty,
)

__all__ = [
    "METRICS",
    "Interval",
    "Metric",
    "ReliabilityCurve",
    "Report",
    "RiskCoverageCurve",
    "Uncertainty",
    "accuracy",
    "aupr",
    "aupr_in",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "compare",
    "crps",
    "ece",
    "ece_equal_mass",
    "energy",
    "entropy",
    "evaluate",
    "evaluate_multilabel",
    "evaluate_numbers",
    "evaluate_ood",
    "evaluate_regression",
    "fpr95",
    "gaussian_interval",
    "gaussian_nll",
    "gaussian_pit",
    "instability",
    "interval_coverage",
    "interval_score",
    "interval_width",
    "logit_variance",
    "max_logit",
    "max_probability",
    "mce",
    "nll",
    "overconfidence",
    "pinball",
    "quantile_calibration_error",
    "reliability_curve",
    "risk_coverage_curve",
    "rmse",
    "smooth_ece",
    "uncertainty",
]
