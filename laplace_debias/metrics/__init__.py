"""Metrics of predictives: accuracy, calibration, out-of-distribution detection, intervals."""

from laplace_debias.metrics.binned import classwise_ece, ece_equal_mass, mce
from laplace_debias.metrics.calibration import ReliabilityCurve, reliability_curve
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.descriptions import DESCRIPTIONS, Description, describe
from laplace_debias.metrics.evaluation import evaluate, evaluate_ood
from laplace_debias.metrics.intervals import Interval
from laplace_debias.metrics.multilabel import evaluate_multilabel
from laplace_debias.metrics.ood import aupr, aupr_in, aupr_out, auroc, entropy, fpr95
from laplace_debias.metrics.regression import (
    crps,
    crps_samples,
    gaussian_interval,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_width,
    quantile_calibration_error,
    rmse,
    sample_interval,
    sample_pit,
)
from laplace_debias.metrics.regression_evaluation import evaluate_regression
from laplace_debias.metrics.report import Report, compare
from laplace_debias.metrics.resampling import bootstrap, confidence_interval, paired_difference
from laplace_debias.metrics.selective import RiskCoverageCurve, aurc, risk_coverage_curve
from laplace_debias.metrics.smoothing import smooth_ece
from laplace_debias.metrics.uncertainties import (
    Uncertainty,
    logit_variance,
    max_probability,
    mutual_information,
    uncertainty,
)

__all__ = [
    "DESCRIPTIONS",
    "Description",
    "Interval",
    "ReliabilityCurve",
    "Report",
    "RiskCoverageCurve",
    "Uncertainty",
    "accuracy",
    "aupr",
    "aupr_in",
    "aupr_out",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "classwise_ece",
    "compare",
    "confidence_interval",
    "crps",
    "crps_samples",
    "describe",
    "ece",
    "ece_equal_mass",
    "entropy",
    "evaluate",
    "evaluate_multilabel",
    "evaluate_ood",
    "evaluate_regression",
    "fpr95",
    "gaussian_interval",
    "gaussian_nll",
    "gaussian_pit",
    "interval_coverage",
    "interval_width",
    "logit_variance",
    "max_probability",
    "mce",
    "mutual_information",
    "nll",
    "paired_difference",
    "quantile_calibration_error",
    "reliability_curve",
    "risk_coverage_curve",
    "rmse",
    "sample_interval",
    "sample_pit",
    "smooth_ece",
    "uncertainty",
]
