"""A report on predictions: the metrics of a predictive over loaders."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias import metrics
from laplace_debias.batches import Batches
from laplace_debias.curvature.likelihood import Likelihood

Predict = Callable[[Tensor], Distribution]


def evaluate_predictions(
    predict: Predict, likelihood: Likelihood, batches: Batches, ood: Mapping[str, Batches]
) -> dict[str, float]:
    """Metrics of a predictive on labelled data, and of its entropy on OOD data.

    Args:
        predict: From inputs `[B, ...]` to a distribution of batch shape `[B]`.
        likelihood: What targets must fit.
        batches: Labelled batches.
        ood: Out-of-distribution batches by name; labels are ignored.

    Returns:
        For class probabilities what `metrics.evaluate` gives; for regression `nll` and `rmse`.

    Raises:
        ValueError: For an empty loader, or OOD data with a regression likelihood.
    """
    predictives, targets = [], []
    for x, y in batches:
        predictives.append(predict(x))
        check_targets(likelihood, predictives[-1], y)
        targets.append(y)
    if not targets:
        raise ValueError("The loader holds no batch: nothing to evaluate.")
    labels = torch.cat(targets)
    if not hasattr(predictives[0], "probs"):
        if ood:
            raise ValueError("OOD detection by the entropy needs class probabilities.")
        return _regression(predictives, targets)
    ood_probs = {}
    for name, data in ood.items():
        parts = [_probabilities(predict(x)) for x, _ in data]
        if not parts:
            raise ValueError(f"The OOD loader {name!r} holds no batch.")
        ood_probs[name] = torch.cat(parts)
    probs = torch.cat([_probabilities(p) for p in predictives])
    return metrics.evaluate(probs, labels.reshape(len(probs)).long(), ood_probs)


def check_targets(likelihood: Likelihood, predictive: Distribution, targets: Tensor) -> None:
    """Require targets that fit the likelihood, as a fit does.

    Raises:
        ValueError: Otherwise.
        TypeError: Otherwise.
    """
    values = predictive.probs if hasattr(predictive, "probs") else predictive.mean
    likelihood.check(values.reshape(values.shape[0], -1), targets)


def _probabilities(predictive: Distribution) -> Tensor:
    return predictive.probs  # type: ignore[attr-defined]


def _regression(predictives: list[Distribution], targets: list[Tensor]) -> dict[str, float]:
    log_probs = [p.log_prob(y) for p, y in zip(predictives, targets, strict=True)]
    squares = [(p.mean - y).square() for p, y in zip(predictives, targets, strict=True)]
    return {
        "nll": -torch.cat(log_probs).double().mean().item(),
        "rmse": torch.cat(squares).double().mean().sqrt().item(),
    }
