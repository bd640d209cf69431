"""What several processes must agree on before they work together."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.repeatable_data import mark_of
from laplace_debias.curvature.network.same_model import check_same_model
from laplace_debias.curvature.network.shards import check_shared, refuse_same
from laplace_debias.laplace.data_size import data_size, refuse_misleading
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
    options: Mapping[str, Any],
) -> None:
    """Require one model, and data of which no two processes have the same.

    Args:
        ranks: The processes.
        model: The model, without wrappers.
        block_names: Its curvature blocks, as this process found them.
        first: The first batch of this process, if it has one.
        is_shared: Whether `ShardedBatches` say that the data is shared.
        options: Arguments of the fit that must be the same, by name.

    Raises:
        ValueError: If two processes begin with the same batch, the models differ, or an option
            does.
    """
    if ranks.size == 1:
        return
    check_same_model(ranks, model)
    marks = [mark_of(x, y) for x, y in first]
    said = ranks.exchange(
        [block_names, marks[0] if marks and not is_shared else None, dict(options)]
    )
    refuse_same([mark for _, mark, _ in said], "begins with the same batch")
    for name, value in said[0][2].items():
        if any(of_rank[name] != value for _, _, of_rank in said):
            raise ValueError(f"{name} differs between the ranks: pass the same on all of them.")
    for rank, (names, _, _) in enumerate(said):
        if names != said[0][0]:
            raise ValueError(
                f"Rank {rank} finds the curvature blocks {names}, rank 0 {said[0][0]}: their first "
                "batches take different branches of the model. Name the parameters, params=[...]."
            )


def check_held_out(*data: Batches) -> None:
    """Require held-out data that the processes share, where there are several.

    Raises:
        ValueError: As `check_shared` and `refuse_misleading`.
    """
    ranks = current()
    if ranks.size > 1:
        for loader in data:
            check_shared(ranks, loader)
            refuse_misleading(data_size(loader))
