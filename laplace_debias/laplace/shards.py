"""Agreements of several processes before they work together."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprint import checksum
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.repeatable_data import mark_of
from laplace_debias.curvature.network.shards import check_shared, refuse_same
from laplace_debias.laplace.data_size import told_by
from laplace_debias.system.ranks import Ranks, current


def first_batch(ranks: Ranks, own: list[Any]) -> list[Any]:
    """The first batch of this process, in a list; without one that of the first rank with one.

    Args:
        ranks: The processes.
        own: A list of this process's first batch alone, or an empty one.
    """
    has_one = ranks.exchange(bool(own))
    if all(has_one) or not any(has_one):
        return own
    donated = ranks.from_rank(own, has_one.index(True))
    return own or donated


def check_alike(
    ranks: Ranks,
    model: nn.Module,
    block_names: list[str],
    first: Iterable[tuple[Inputs, Tensor]],
    is_shared: bool,
) -> None:
    """Require one model, and data of which no two processes have the same.

    Args:
        ranks: The processes.
        model: The model, without wrappers.
        block_names: Its curvature blocks, as this process found them.
        first: The first batch of this process, if it has one.
        is_shared: Whether `ShardedBatches` say that the data is shared.

    Raises:
        ValueError: If two processes begin with the same batch, or the models differ.
    """
    if ranks.size == 1:
        return
    ranks.require_same(model=lambda: checksum(model), blocks=lambda: block_names)
    marks = [mark_of(x, y) for x, y in first]
    own = marks[0] if marks and not is_shared else None
    refuse_same(ranks.exchange(own), "begins with the same batch")


def check_held_out(*data: Batches) -> None:
    """Require held-out data that the processes share, where there are several.

    Raises:
        ValueError: As `check_shared` and `told_by`.
    """
    ranks = current()
    if ranks.size > 1:
        for loader in data:
            check_shared(ranks, loader)
            told_by(loader)
