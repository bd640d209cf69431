"""The folds that cross-fitting cuts its examples into."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.curvature.network.inputs import join, take
from laplace_debias.curvature.network.shards import Placed, first_places
from laplace_debias.system.ranks import Ranks


@dataclass(frozen=True)
class Fold:
    """Some of the examples.

    Attributes:
        pairs: Those that this process has.
        size: How many there are, of all processes.
        first: Position of the first one in all data of the fit, fold after fold.
    """

    pairs: Pairs
    size: int
    first: int


def split_folds(ranks: Ranks, data: Pairs, num_folds: int) -> list[Fold]:
    """Cut the examples into folds: example i of all processes belongs to fold i mod K.

    Args:
        ranks: The processes.
        data: This process's pairs.
        num_folds: K.

    Raises:
        ValueError: If there are fewer examples than folds, or fewer than two folds.
    """
    batches = list(data)
    places = first_places(ranks, [len(y) for _, y in batches])
    num_examples = sum(ranks.exchange(sum(len(y) for _, y in batches)))
    if not num_examples:
        raise ValueError("The data holds no example: pass at least one batch.")
    if not 2 <= num_folds <= num_examples:
        raise ValueError(
            f"Cross-fitting {num_examples} examples takes 2 to {num_examples} folds, got "
            f"{num_folds}."
        )
    if ranks.size == 1:
        # All batches make one.
        batches = [(join([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    sizes = [_before(num_examples, fold, num_folds) for fold in range(num_folds)]
    starts = accumulate(sizes, initial=0)
    folds = []
    for fold, (size, start) in enumerate(zip(sizes, starts, strict=False)):
        pairs, firsts = [], []
        for (x, y), place in zip(batches, places, strict=False):
            part = slice((fold - place) % num_folds, None, num_folds)
            if len(y[part]):
                pairs.append((take(x, part), y[part]))
                firsts.append(_before(place + part.start, fold, num_folds))
        folds.append(Fold(_placed(pairs, firsts), size, start))
    return folds


def together(folds: Sequence[Fold]) -> Placed:
    """The examples of all folds, one after the other."""
    pairs, firsts = [], []
    for fold in folds:
        for number, pair in enumerate(fold.pairs):
            assert isinstance(fold.pairs, Placed)
            pairs.append(pair)
            firsts.append(fold.first + fold.pairs.place(number, 0))
    return _placed(pairs, firsts)


def _placed(pairs: list, firsts: Sequence[int]) -> Placed:
    return Placed(pairs, lambda number, _: firsts[number])


def _before(place: int, fold: int, num_folds: int) -> int:
    """How many examples of a fold come before a place."""
    return (place - fold + num_folds - 1) // num_folds
