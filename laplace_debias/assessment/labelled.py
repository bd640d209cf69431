"""Metrics and OOD scores, computed from one table of predictions."""

from collections.abc import Mapping

from torch import Tensor

from laplace_debias import metrics
from laplace_debias.assessment.predictions import SCORES
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.metrics.definitions import per_example

Columns = Mapping[str, Tensor]
"""The columns of a table of predictions."""


def labelled_report(table: Columns, likelihood: Likelihood) -> metrics.Report:
    """Compute the metrics of predictions for labelled examples."""
    if likelihood.targets == "class":
        return metrics.evaluate(table["probs"], table["label"].long())
    if likelihood.targets == "labels":
        return metrics.evaluate_multilabel(table["probs"], table["label"].long())
    moments = table["mean"], table["standard_deviation"], table["target"]
    if "log_prob" not in table:
        return metrics.evaluate_regression(*moments)
    interval = (table["lower"], table["upper"]) if "lower" in table else None
    return metrics.evaluate_numbers(
        *moments, table["log_prob"], levels=table.get("interval_level"), interval=interval
    )


def scores_of(table: Columns, likelihood: Likelihood) -> dict[str, Tensor]:
    """Compute OOD scores, which are higher for inputs unlike the training data.

    If examples have several labels, there is no score for the largest probability. For a
    regression, the only score is the variance without the noise.
    """
    if likelihood.predicts_numbers:
        variance = per_example(table["epistemic"].square())
        return {"variance": variance} if bool((variance > 0).any()) else {}
    scores = {"entropy": table["entropy"]}
    if likelihood.targets == "class":
        scores["max_probability"] = metrics.max_probability(table["probs"])
    for name in SCORES:
        if not bool(table[name].isnan().any()):
            scores[name] = table[name]
    return scores
