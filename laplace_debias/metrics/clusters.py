"""Examples with several rows, such as positions: only the examples are independent draws."""

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor


def by_example(
    influence: Shaped[Tensor, " n"], examples: Integer[Tensor, " n"] | None
) -> Shaped[Tensor, " k"]:
    r"""Compute the influence of each example on a mean over rows.

    With n rows, k examples and the mean $\bar f$ of the rows' influences $f_i$, the influence of
    example e is $\bar f + (k/n) \sum_{i \in e} (f_i - \bar f)$. The standard error of the mean of
    these influences is that of a ratio of two sums over examples, because examples may differ in
    their numbers of rows.

    Args:
        influence: The influence of each row.
        examples: The example of each row; None if each row is an example.

    Reference:
        Cochran. Sampling techniques. 1977, chapter 6.
    """
    if examples is None:
        return influence
    mean = influence.double().mean()
    names, index = examples.unique(return_inverse=True)
    sums = torch.zeros(len(names), dtype=torch.float64, device=influence.device)
    sums.index_add_(0, index, influence.double() - mean)
    return mean + sums * (len(names) / len(influence))


def effective_size(values: Shaped[Tensor, " n"], examples: Integer[Tensor, " n"] | None) -> float:
    """Compute how many independent rows would give the mean of `values` the same variance.

    The number is at most n, even if the rows of an example are negatively dependent. If all values
    are equal, it is the number of examples. It is 1 for a single example, because its rows do not
    show how much examples differ. With fewer than ten examples, the number is uncertain, and
    intervals that are based on it are too narrow.

    Reference:
        Franco, Little, Louis, Slud. Comparative study of confidence intervals for proportions in
        complex sample surveys. Journal of Survey Statistics and Methodology, 2019.
    """
    if examples is None:
        return len(values)
    influence_of_examples = by_example(values, examples)
    variance = values.double().var(correction=0)
    if variance == 0 or len(influence_of_examples) == 1:
        return len(influence_of_examples)
    variance_of_mean = influence_of_examples.var(correction=0) / len(influence_of_examples)
    return min((variance / variance_of_mean).item(), len(values))
