"""Measures of a method on the examples of a problem."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from examples.study.methods import Method
from examples.study.problems import Problem
from laplace_debias import metrics


def measure(method: Method, problem: Problem) -> dict[str, Any]:
    """Evaluate a method on test examples, shifted examples and foreign inputs.

    Returns:
        The measures of `measure_predictive` for the test examples; `nll shifted`; `seconds`, from
        the end of the training to the end of the test predictions; `auroc`, a dictionary of the
        AUROC of foreign inputs by each score of uncertainty; and `chosen`, the tuned values.
    """
    x_test, y_test = problem.test
    x_shifted, y_shifted = problem.shifted
    start = time.perf_counter()
    test_predictive = method.predict(x_test)
    seconds = method.seconds + time.perf_counter() - start
    shifted_predictive = method.predict(x_shifted)
    foreign_predictive = method.predict(problem.foreign)

    measures = measure_predictive(test_predictive, y_test)
    measures["seconds"] = seconds
    measures["nll shifted"] = measure_predictive(shifted_predictive, y_shifted)["nll"]
    test_scores = uncertainty_scores(method, x_test, test_predictive)
    foreign_scores = uncertainty_scores(method, problem.foreign, foreign_predictive)
    aurocs = {name: metrics.auroc(test_scores[name], foreign_scores[name]) for name in test_scores}
    return {**rounded(measures), "auroc": rounded(aurocs), "chosen": method.tuned}


def measure_predictive(predictive: Distribution, y: Tensor) -> dict[str, Any]:
    """Compute the measures that need targets.

    Returns:
        `nll`, `brier` (regression: CRPS), `calibration` (smooth ECE; regression: the error of
        quantiles) and, for a classification, `accuracy`.
    """
    if isinstance(predictive, Categorical):
        probs = predictive.probs
        return {
            "nll": -predictive.log_prob(y).mean(),
            "brier": metrics.brier(probs, y),
            "calibration": metrics.smooth_ece(probs, y),
            "accuracy": metrics.accuracy(probs, y),
        }
    mean = predictive.mean.double()
    std = predictive.variance.double().sqrt()
    y = y.double()
    return {
        "nll": metrics.gaussian_nll(mean, std, y),
        "brier": metrics.crps(mean, std, y),
        "calibration": metrics.quantile_calibration_error(metrics.gaussian_pit(mean, std, y)),
    }


def uncertainty_scores(method: Method, x: Tensor, predictive: Distribution) -> dict[str, Tensor]:
    """Compute scores `[N]` of the posterior and of the predictive, larger if less certain."""
    scores: dict[str, Tensor] = {}
    if method.posterior is not None:
        uncertainty = method.posterior.uncertainty(x, generator=torch.Generator().manual_seed(0))
        scores = dict(uncertainty.scores) or {"epistemic": uncertainty.epistemic}
    if isinstance(predictive, Categorical):
        scores["entropy"] = predictive.entropy()
    else:
        scores["variance"] = predictive.variance
    return {name: score.reshape(len(x)) for name, score in scores.items()}


def rounded(measures: Mapping[str, Any]) -> dict[str, float]:
    """Round numbers to five decimals."""
    return {name: round(float(value), 5) for name, value in measures.items()}
