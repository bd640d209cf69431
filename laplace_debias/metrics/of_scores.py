"""The metrics of scores that tell OOD examples from ID ones, with what their intervals need."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.ood import aupr, aupr_in, auroc, fpr95
from laplace_debias.metrics.statistics import Area, Resampled, Statistic


def auroc_statistic(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`auroc` with DeLong's placement values.

    Reference:
        DeLong, DeLong, Clarke-Pearson. Comparing the areas under two or more correlated receiver
        operating characteristic curves. Biometrics, 1988.
    """
    value = auroc(scores_id, scores_ood).item()
    above_id = (_share_below(scores_id, scores_ood) + _share_upto(scores_id, scores_ood)) / 2
    below = (_share_below(scores_ood, scores_id) + _share_upto(scores_ood, scores_id)) / 2
    return Area(value, (1 - below, above_id))


def aupr_statistic(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`aupr`, OOD positive, with its influence function."""
    return _average_precision(aupr(scores_id, scores_ood).item(), scores_ood, scores_id, False)


def aupr_in_statistic(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`aupr_in`, ID positive, with its influence function."""
    value = aupr_in(scores_id, scores_ood).item()
    return _average_precision(value, -scores_id, -scores_ood, True)


def _average_precision(
    value: float, positive: Tensor, negative: Tensor, positive_first: bool
) -> Statistic:
    """The mean precision at the thresholds of the positive examples.

    With A and B the shares of positive and negative examples at or above a threshold and λ how many
    negative ones there are for a positive one, the precision is `A / (A + λB)`. A positive example
    adds the precision at its own score, and each example what it changes in A or B of the others'.
    """
    ratio = len(negative) / len(positive)
    at_least = 1 - _share_below(positive, positive)
    false = ratio * (1 - _share_below(negative, positive))
    precision = at_least / (at_least + false)
    by_true = false / (at_least + false).square()
    by_false = -ratio * at_least / (at_least + false).square()
    of_positive = precision + _sum_upto(positive, by_true, positive) / len(positive)
    of_negative = _sum_upto(positive, by_false, negative) / len(positive)
    influences = (of_positive, of_negative) if positive_first else (of_negative, of_positive)
    return Area(value, influences)


def fpr95_statistic(scores_id: Tensor, scores_ood: Tensor) -> Statistic:
    """`fpr95`, by resampling."""
    order_id, order_ood = scores_id.argsort(descending=True), scores_ood.argsort(descending=True)
    sorted_id, sorted_ood = scores_id[order_id], scores_ood[order_ood]
    # How many ID examples are at or above each OOD score, in its order.
    detected = torch.searchsorted(-sorted_id, -sorted_ood, right=True)
    needed = 0.95 * len(scores_ood) * (1 - 1e-6)

    def resample(counts_id: Tensor, counts_ood: Tensor) -> Tensor:
        seen = counts_ood[:, order_ood].cumsum(1)
        first = (seen < needed).sum(1)
        alarms = torch.nn.functional.pad(counts_id[:, order_id].cumsum(1), (1, 0))
        return alarms.gather(1, detected[first][:, None])[:, 0] / len(order_id)

    sizes = (len(scores_id), len(scores_ood))
    value = fpr95(scores_id, scores_ood).item()
    return Resampled(value, sizes, resample, scores_id.device, share_of=len(scores_id))


def _share_below(
    reference: Float[Tensor, " m"], values: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """The share of a set that lies below each value."""
    return _rank(reference, values, right=False)


def _share_upto(reference: Float[Tensor, " m"], values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The share of a set that lies below each value or at it."""
    return _rank(reference, values, right=True)


def _rank(reference: Tensor, values: Tensor, *, right: bool) -> Float[Tensor, " n"]:
    found = torch.searchsorted(reference.sort().values, values.contiguous(), right=right)
    return found.double() / len(reference)


def _sum_upto(keys: Tensor, weights: Tensor, values: Tensor) -> Float[Tensor, " n"]:
    """For each value the sum of the weights whose keys are at most it."""
    ordered, order = keys.sort()
    sums = torch.nn.functional.pad(weights[order].cumsum(0), (1, 0))
    return sums[torch.searchsorted(ordered, values.contiguous(), right=True)]


SCORES: dict[Callable[..., Tensor], Callable[[Tensor, Tensor], Statistic]] = {
    auroc: auroc_statistic,
    aupr: aupr_statistic,
    aupr_in: aupr_in_statistic,
    fpr95: fpr95_statistic,
}
"""What makes the statistic of each metric of `(scores_id, scores_ood)`."""
