"""A report on predictions: the metrics of a predictive over loaders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, MultivariateNormal, Normal

from laplace_debias import metrics
from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.dataset_size import check_sampler
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.outputs import targets_classes_last
from laplace_debias.curvature.network.shards import check_shared
from laplace_debias.metrics.checks import check_level
from laplace_debias.metrics.definitions import of_log_probs, of_rmse
from laplace_debias.metrics.evaluation import separation
from laplace_debias.metrics.report import report_of
from laplace_debias.system.ranks import current


def check_held_out(*data: Batches) -> None:
    """Require held-out data that the processes share, where there are several."""
    ranks = current()
    if ranks.size > 1:
        for loader in data:
            check_shared(ranks, loader)
            check_sampler(loader)


def joined(parts: Sequence[Sequence[Tensor]], what: str) -> list[Tensor]:
    """The columns of several batches in one, of all processes that share them."""
    of_all = current().on_all(list(map(torch.cat, zip(*parts, strict=True))) or None)
    if of_all is None:
        raise ValueError(f"The loader holds no batch: nothing to {what}.")
    if not len(of_all[0]):
        raise ValueError(
            f"Every target of the loader is ignored: nothing to {what}. Pass batches in which at "
            "least one target counts."
        )
    return of_all


def evaluate_predictions(
    predict: Callable[[Inputs], Distribution],
    likelihood: Likelihood,
    batches: Batches,
    ood: Mapping[str, Batches],
    class_dim: int | None = None,
    *,
    intervals: bool = True,
    level: float = 0.95,
    score_of: Callable[[Inputs], Tensor] | None = None,
) -> metrics.Report:
    """Metrics of a predictive on labelled data, and of its uncertainty on OOD data.

    The scores of `score_of` are larger for OOD data; by default the entropy, or the variance.
    """
    # Before the predictions, which may take long.
    check_level(level)
    if score_of is not None:
        of_sets = {name: _over(data, name, score_of).flatten() for name, data in ood.items()}
        separated = separation(_over(batches, "test", score_of).flatten(), of_sets)
        plain = evaluate_predictions(predict, likelihood, batches, {}, class_dim, level=level)
        statistics = plain._statistics | separated
        return report_of(statistics, plain._targets, level, intervals)
    parts, kinds = [], [False, False]
    for x, y in batches:
        predictive = predict(x)
        is_multilabel = isinstance(getattr(predictive, "base_dist", None), Bernoulli)
        kinds = [is_multilabel, is_multilabel or hasattr(predictive, "probs")]
        parts.append(score(likelihood, predictive, y, class_dim))
    values, log_probs, targets, *deviations = joined(parts, "evaluate")
    # A process without examples has not seen what is predicted.
    kinds = [any(of) for of in zip(*current().exchange(kinds), strict=True)]
    is_multilabel, has_probabilities = kinds
    if not has_probabilities:
        targets = targets.reshape(values.shape).to(values.dtype)
    if not has_probabilities and not deviations:
        if ood:
            raise ValueError(
                "OOD detection of a regression is by the variance of a normal predictive, which "
                "this likelihood does not give: leave out `ood`."
            )
        statistics = {"nll": of_log_probs(log_probs), "rmse": of_rmse(values, targets)}
        return report_of(statistics, targets, level, intervals)

    def of_inputs(x: Inputs) -> Tensor:
        predictive = predict(x)
        if has_probabilities:
            return values_of(predictive)
        return predictive.variance.flatten(0, len(predictive.batch_shape) - 1).sqrt()

    of_ood = {name: _over(data, name, of_inputs) for name, data in ood.items()}
    options: dict[str, Any] = {"intervals": intervals, "level": level}
    if not has_probabilities:
        of_targets = values, deviations[0], targets
        return metrics.evaluate_regression(*of_targets, of_ood, log_probs=log_probs, **options)
    if is_multilabel:
        of_labels = values, targets.long().reshape(values.shape), of_ood
        return metrics.evaluate_multilabel(*of_labels, log_probs=log_probs, **options)
    # A probability near 1 has no digits left for 1 − p; the predictive's logits have.
    of_single = log_probs if values.ndim == 1 else None
    of_classes = classified(values, targets)
    return metrics.evaluate(*of_classes, of_ood, log_probs=of_single, **options)


def _over(data: Batches, name: str, of_inputs: Callable[[Inputs], Tensor]) -> Tensor:
    """The predictions on an OOD set, of all processes."""
    found = [of_inputs(x) for x, _ in data]
    of_all = current().on_all([torch.cat(found)] if found else None)
    if of_all is None:
        raise ValueError(f"The OOD loader {name!r} holds no batch.")
    return of_all[0]


def targets_of(
    likelihood: Likelihood,
    predictive: Distribution,
    targets: Tensor,
    class_dim: int | None = None,
    leading: int = 0,
) -> tuple[Tensor, Bool[Tensor, " terms"], Tensor]:
    """Check a batch's targets beside a predictive of them.

    It may have `leading` dimensions in front of the batch's, of whose entries the first is seen.

    Returns:
        The targets with a row for each term; which of these count; and the targets that
        `predictive.log_prob` takes, zeros where they do not count.
    """
    shape = predictive.batch_shape[leading:]
    values = values_of(predictive)[: shape.numel()]
    outputs = values.unsqueeze(-1) if values.ndim == 1 else values
    outputs_in_shape = outputs.unflatten(0, shape)
    targets = targets_classes_last(targets, outputs_in_shape.ndim, class_dim)
    _, labels = flat_terms(outputs_in_shape, targets)
    likelihood.check_predicted(outputs, labels)
    counted = likelihood.counted(labels)
    if counted is None:
        counted = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    # What does not count still needs a target that has a density.
    safe = torch.where(counted.view(-1, *[1] * (labels.ndim - 1)), labels, 0)
    safe = safe.reshape(shape + predictive.event_shape)
    is_discrete = isinstance(predictive, torch.distributions.Categorical)
    return labels, counted, safe if is_discrete else safe.to(values.dtype)


def score(
    likelihood: Likelihood, predictive: Distribution, targets: Tensor, class_dim: int | None
) -> list[Tensor]:
    """Score a predictive on the targets that count, one row for each.

    Returns:
        Probabilities, `[n, C]` or for a single logit `[n]`, else means, `[n, C]`; log-probabilities
        `[n]`; labels. Of a normal also its standard deviations.
    """
    labels, counted, log_prob_of = targets_of(likelihood, predictive, targets, class_dim)
    values, log_probs = values_of(predictive), predictive.log_prob(log_prob_of).flatten()
    scores = [values[counted], log_probs[counted], labels[counted]]
    if isinstance(predictive, Normal | MultivariateNormal):
        scores.append(predictive.variance.reshape(values.shape)[counted].sqrt())
    return scores


def values_of(predictive: Distribution) -> Float[Tensor, "n *outputs"]:
    """Probabilities or means with a row for each term."""
    values = predictive.probs if hasattr(predictive, "probs") else predictive.mean
    return values.flatten(0, len(predictive.batch_shape) - 1)


def classified(
    values: Float[Tensor, "n *classes"], labels: Tensor
) -> tuple[Float[Tensor, "m *kept"], Integer[Tensor, " m"]]:
    """Class probabilities and labels as `metrics` has them; each of several labels a row."""
    if labels.numel() == values.numel():
        return values.flatten(), labels.flatten().long()
    return values, labels.long()
