"""Confidence intervals of metrics over the examples of a test set."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from laplace_debias.metrics.checks import check_same_device, check_same_length

Metric = Callable[[Tensor, Tensor], Tensor]
"""A function of predictions `[n, ...]` and targets `[n, ...]` that returns a scalar tensor."""


@dataclass(frozen=True)
class Interval:
    """A metric with its confidence interval, in the units of the metric.

    Attributes:
        value: The metric on all examples.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float


def bootstrap(
    metric: Metric,
    probs: Float[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """Percentile bootstrap over examples.

    The metric is computed on `num_resamples` draws of n examples with replacement; the interval is
    between the `(1 - level)/2` and the `(1 + level)/2` quantile. It tells how far another test set
    of this size might lead, not another training run or another batch for the curvature. A metric
    that is biased on small sets, as `ece` is, has its interval shifted by that bias.

    Args:
        metric: Function of `(probs, labels)`, for example `nll`.
        probs: Predictions `[n, ...]`.
        labels: Labels or targets `[n, ...]`.
        num_resamples: Number of draws.
        level: Coverage aimed at, between 0 and 1.
        generator: Source of the draws, on any device; torch's default if None.

    Returns:
        The metric of all examples, and the ends of its interval.

    Raises:
        ValueError: `probs` is empty, lengths or devices differ, `num_resamples` < 1 or `level` is
            not between 0 and 1; and whatever `metric` raises on all examples.

    Reference:
        Efron. Bootstrap methods: another look at the jackknife. Annals of Statistics, 1979.
    """
    if num_resamples < 1:
        raise ValueError(
            f"`num_resamples` is {num_resamples}; expected at least 1, for example 1000."
        )
    if not 0 < level < 1:
        raise ValueError(
            f"`level` is {level}; expected a fraction between 0 and 1, for example 0.95."
        )
    if probs.numel() == 0:
        raise ValueError(
            f"`probs` is empty, of shape {list(probs.shape)}; expected at least one example."
        )
    check_same_length(probs, labels, "probs", "labels")
    check_same_device(probs, labels, "probs", "labels")
    value = metric(probs, labels)
    device = probs.device if generator is None else generator.device
    num_examples = len(probs)
    draws = []
    for _ in range(num_resamples):
        chosen = torch.randint(num_examples, (num_examples,), generator=generator, device=device)
        chosen = chosen.to(probs.device)
        draws.append(metric(probs[chosen], labels[chosen]))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.stack(draws).double().cpu().quantile(tails).tolist()
    return Interval(value=value.item(), low=low, high=high)
