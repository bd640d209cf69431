"""Measures of a method on the data sets of a problem."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from examples.study.methods import Method
from examples.study.problems import Problem
from laplace_debias import metrics


def measured(method: Method, problem: Problem) -> dict[str, Any]:
    """Compute NLL, Brier score (CRPS), calibration (smooth ECE, quantile error) and AUROC by score.

    `seconds` is the time from the end of the training to the end of the test predictions.
    """
    start = time.perf_counter()
    predictives = {"test": method.predict(problem.sets["test"][0])}
    seconds = method.seconds + time.perf_counter() - start
    predictives |= {of: method.predict(problem.sets[of][0]) for of in ("shifted", "foreign")}
    found = {**calibration(predictives["test"], problem.sets["test"][1]), "seconds": seconds}
    shifted = calibration(predictives["shifted"], problem.sets["shifted"][1])
    found["nll shifted"] = shifted["nll"]
    inside, outside = (
        scores(method, problem.sets[of][0], predictives[of]) for of in ("test", "foreign")
    )
    aurocs = {name: float(metrics.auroc(inside[name], outside[name])) for name in inside}
    rounded = [{name: round(float(of), 5) for name, of in some.items()} for some in (found, aurocs)]
    return {**rounded[0], "auroc": rounded[1], "chosen": method.chosen}


def scores(method: Method, x: Tensor, predictive: Distribution) -> dict[str, Tensor]:
    """Compute scores of the posterior and of the predictive, which are larger if less certain."""
    found: dict[str, Tensor] = {}
    if method.posterior is not None:
        uncertainty = method.posterior.uncertainty(x, generator=torch.Generator().manual_seed(0))
        found = dict(uncertainty.scores) or {"epistemic": uncertainty.epistemic}
    if isinstance(predictive, Categorical):
        found["entropy"] = predictive.entropy()
    else:
        found["variance"] = predictive.variance
    return {name: score.reshape(len(x)) for name, score in found.items()}


def calibration(predictive: Distribution, y: Tensor) -> dict[str, Any]:
    """Compute the measures that need targets."""
    if isinstance(predictive, Categorical):
        probs = predictive.probs
        return {
            "nll": -predictive.log_prob(y).mean(),
            "brier": metrics.brier(probs, y),
            "calibration": metrics.smooth_ece(probs, y),
            "accuracy": metrics.accuracy(probs, y),
        }
    normal = predictive.mean.double(), predictive.variance.double().sqrt(), y.double()
    return {
        "nll": metrics.gaussian_nll(*normal),
        "brier": metrics.crps(*normal),
        "calibration": metrics.quantile_calibration_error(metrics.gaussian_pit(*normal)),
    }
