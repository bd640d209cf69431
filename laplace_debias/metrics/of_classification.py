"""The metrics of class probabilities with what their intervals need."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.binned import (
    classwise_cells,
    classwise_ece,
    confidence_and_right,
    ece_equal_mass,
    equal_mass_bins,
    equal_width_bins,
    mce,
)
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.selective import aurc, mean_of_equals
from laplace_debias.metrics.smoothing import on_grid, smooth_ece, smoothed_error
from laplace_debias.metrics.statistics import Mean, Proportion, Resampled, Statistic

_NUM_BINS = 15
_POINTS_WHEN_RESAMPLED = 256
_CELLS_AT_ONCE = 2**24

Reduce = Callable[[Float[Tensor, "draws cells"]], Float[Tensor, " draws"]]


def accuracy_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`accuracy`, a proportion."""
    holds = accuracy(probs, labels, reduction="none")
    return Proportion(accuracy(probs, labels).item(), holds)


def nll_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`nll`, a mean over examples."""
    return Mean(nll(probs, labels).item(), nll(probs, labels, reduction="none"), lowest=0)


def brier_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`brier`, a mean over examples."""
    return Mean(brier(probs, labels).item(), brier(probs, labels, reduction="none"), lowest=0)


def ece_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`ece`, by resampling."""
    confidences, right = confidence_and_right(probs, labels)
    bins = equal_width_bins(confidences, _NUM_BINS)
    return by_cells(ece(probs, labels).item(), bins, right - confidences, _NUM_BINS)


def ece_equal_mass_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`ece_equal_mass`, by resampling; its bins stay."""
    confidences, right = confidence_and_right(probs, labels)
    bins = equal_mass_bins(confidences, _NUM_BINS)
    return by_cells(ece_equal_mass(probs, labels).item(), bins, right - confidences, _NUM_BINS)


def mce_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`mce`, by resampling."""
    confidences, right = confidence_and_right(probs, labels)
    bins = equal_width_bins(confidences, _NUM_BINS)
    gaps = table_of(bins[:, None], (right - confidences)[:, None], _NUM_BINS)
    ones = table_of(bins[:, None], torch.ones_like(gaps[:, :1]), _NUM_BINS)

    def resample(counts: Tensor) -> Tensor:
        # A bin without an example has no gap: 0 / 1.
        return (counts @ gaps / (counts @ ones).clamp(min=1)).abs().amax(1)

    return Resampled(mce(probs, labels).item(), (len(bins),), resample, gaps.device)


def classwise_ece_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`classwise_ece`, by resampling."""
    value = classwise_ece(probs, labels).item()
    if probs.ndim == 1:
        probs = torch.stack([1 - probs, probs], 1)
    cells, gaps = classwise_cells(probs, labels.long(), _NUM_BINS)
    num_classes = probs.shape[1]
    # Many classes are taken in groups, so that a group's table fits into memory.
    group = max(1, _CELLS_AT_ONCE // (len(cells) * _NUM_BINS))

    def resample(counts: Tensor) -> Tensor:
        total = counts.new_zeros(len(counts))
        for start in range(0, num_classes, group):
            chosen = slice(start, start + group)
            within = cells[:, chosen] - start * _NUM_BINS
            table = table_of(within, gaps[:, chosen], within.shape[1] * _NUM_BINS)
            total += (counts @ table).abs().sum(1)
        return total / cells.numel()

    return Resampled(value, (len(cells),), resample, cells.device)


def smooth_ece_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`smooth_ece`, by resampling on a coarser grid."""
    confidences, right = confidence_and_right(probs, labels)
    cells, weights = on_grid(confidences, _POINTS_WHEN_RESAMPLED)
    residuals = (right - confidences)[:, None] * weights / len(cells)
    table = table_of(cells, residuals, _POINTS_WHEN_RESAMPLED + 1)
    return Resampled(
        smooth_ece(probs, labels).item(),
        (len(cells),),
        lambda counts: smoothed_error(counts @ table),
        table.device,
    )


def aurc_statistic(probs: Tensor, labels: Tensor) -> Statistic:
    """`aurc`, a mean to first order.

    With the risk R and the coverage S at each example's confidence, an example with error e adds
    `R + mean over those that are at most as confident of (e - R)/S`: the influence function of
    `E[R]`.
    """
    confidences, right = confidence_and_right(probs, labels)
    order = confidences.argsort(descending=True)
    errors = mean_of_equals(confidences, 1 - right)[order]
    n = len(errors)
    answered = torch.arange(1, n + 1, dtype=errors.dtype, device=errors.device)
    risks = errors.cumsum(0) / answered
    # Sums over the less confident ones and the example itself.
    weights = (1 / answered).flip(0).cumsum(0).flip(0)
    others = risks - (risks / answered).flip(0).cumsum(0).flip(0)

    def of_examples(ordered: Tensor) -> Tensor:
        values = torch.empty_like(ordered)
        values[order] = ordered
        # Equally confident examples are exchangeable.
        return mean_of_equals(confidences, values)

    influence = of_examples(others) + (1 - right) * of_examples(weights)
    return Mean(aurc(probs, labels).item(), influence, lowest=0)


def by_cells(
    value: float, cells: Integer[Tensor, " n"], gaps: Float[Tensor, " n"], num_cells: int
) -> Statistic:
    """`(1/n) Σ_cell |Σ gaps|` by resampling."""
    table = table_of(cells[:, None], gaps[:, None] / len(cells), num_cells)
    return Resampled(
        value, (len(cells),), lambda counts: (counts @ table).abs().sum(1), table.device
    )


def table_of(
    cells: Integer[Tensor, "n k"], values: Float[Tensor, "n k"], num_cells: int
) -> Float[Tensor, "n cells"]:
    """Each example's values in the columns of their cells, float32 as counts are."""
    table = torch.zeros(len(cells), num_cells, dtype=torch.float32, device=cells.device)
    return table.scatter_add_(1, cells, values.float())


CLASSIFICATION: dict[Callable[..., Tensor], Callable[[Tensor, Tensor], Statistic]] = {
    accuracy: accuracy_statistic,
    nll: nll_statistic,
    brier: brier_statistic,
    ece: ece_statistic,
    ece_equal_mass: ece_equal_mass_statistic,
    smooth_ece: smooth_ece_statistic,
    mce: mce_statistic,
    classwise_ece: classwise_ece_statistic,
    aurc: aurc_statistic,
}
"""What makes the statistic of each metric of `(probs, labels)`."""
