"""Examples with several rows, such as positions: only the examples are independent draws."""

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor

from laplace_debias.metrics.intervals import student_quantile


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


def num_independent_rows(
    influence: Shaped[Tensor, " n"], examples: Integer[Tensor, " n"] | None
) -> float:
    """Estimate the number of independent rows whose mean would have the same variance.

    The number is that of the examples if all rows of an example are equal, and that of the rows if
    the rows of an example do not depend on each other.

    Args:
        influence: The influence of each row on a mean over rows.
        examples: The example of each row; None if each row is an example.
    """
    if examples is None:
        return len(influence)
    influence_of_examples = by_example(influence, examples).double()
    num_examples = len(influence_of_examples)
    variance_of_mean = influence_of_examples.var(correction=0) / num_examples
    if variance_of_mean == 0:
        return num_examples
    variance = influence.double().var(correction=0)
    return min((variance / variance_of_mean).item(), len(influence))


def effective_size(
    values: Shaped[Tensor, " n"], examples: Integer[Tensor, " n"] | None, level: float
) -> float:
    r"""Compute the number of independent rows that give a fraction the same confidence interval.

    With the variance $s^2$ of the n rows and the variance $v$ of their mean, which is computed from
    the k examples, the number is $(s^2/v)\,(t_{n-1}/t_{k-1})^2$, but at most n. The quantiles t of
    Student's distribution account for the uncertainty of $v$ if there are few examples. If each
    example has one row, the number is n.

    If all values are equal, the number is that of the examples. It is 1 for a single example,
    because its rows do not show how much examples differ.

    Args:
        values: The value of each row.
        examples: The example of each row; None if each row is an example.
        level: Nominal coverage of the confidence interval.

    Reference:
        Korn, Graubard. Confidence intervals for proportions with small expected number of positive
        counts estimated from survey data. Survey Methodology, 1998. For Wilson's interval: Franco,
        Little, Louis, Slud. Comparative study of confidence intervals for proportions in complex
        sample surveys. Journal of Survey Statistics and Methodology, 2019.
    """
    num_rows = len(values)
    if examples is None:
        return num_rows
    influence_of_examples = by_example(values, examples)
    num_examples = len(influence_of_examples)
    if num_examples == 1:
        return 1
    variance = values.double().var()
    if variance == 0:
        return num_examples
    variance_of_mean = influence_of_examples.double().var() / num_examples
    ratio_of_quantiles = student_quantile(level, num_rows - 1) / student_quantile(
        level, num_examples - 1
    )
    return min((variance / variance_of_mean).item() * ratio_of_quantiles**2, num_rows)
