"""Checks that the settings of several commands and experiments have in common."""

import math
from collections.abc import Sequence

from laplace_debias.system.checks import check_at_least

__all__ = [
    "check_at_least",
    "check_different",
    "check_even_batch",
    "check_folds",
    "check_prior_precisions",
    "check_severities",
]


def check_different(settings: object, name: str) -> None:
    """Refuse a setting with several values that has none, or the same one twice.

    Args:
        settings: The settings.
        name: Name of the attribute, a tuple.

    Raises:
        ValueError: If it is empty or holds equal values.
    """
    values = getattr(settings, name)
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} is {values}; expected at least one value, all of them different")


def check_even_batch(batch_size: int) -> None:
    """Refuse a mini-batch that cannot be halved.

    Raises:
        ValueError: If the number is odd or below 2.
    """
    if batch_size < 2 or batch_size % 2:
        raise ValueError(
            f"batch_size is {batch_size}; expected an even number, because debiasing splits the "
            "batch into two halves"
        )


def check_folds(folds: int, batch_size: int) -> None:
    """Refuse numbers of folds that the examples do not allow; 0 stands for no cross-fitting.

    Raises:
        ValueError: If there are fewer than 2 folds, or more than examples.
    """
    if folds and not 2 <= folds <= batch_size:
        raise ValueError(
            f"folds is {folds}; expected 2 … {batch_size} (batch_size), or 0 for no cross-fitted "
            "posterior"
        )


def check_prior_precisions(grid: Sequence[float]) -> None:
    """Refuse a grid of prior precisions that is empty, not positive or not ascending.

    Raises:
        ValueError: If the grid is one of these.
    """
    if not grid or not all(0 < delta < math.inf for delta in grid):
        raise ValueError(f"prior_precisions is {grid}; expected positive numbers")
    if list(grid) != sorted(set(grid)):
        raise ValueError(f"prior_precisions is {grid}; expected ascending numbers")


def check_severities(severities: Sequence[int]) -> None:
    """Refuse severities of corruptions outside of 1 … 5.

    Raises:
        ValueError: If one of them is outside.
    """
    if not set(severities) <= {1, 2, 3, 4, 5}:
        raise ValueError(f"severities is {severities}; expected numbers in 1 … 5")
