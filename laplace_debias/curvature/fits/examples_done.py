"""Which examples of a pass are in what several processes have saved of it."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laplace_debias.curvature.fits.pass_state import PassState
from laplace_debias.system.ranks import Ranks


class ExamplesDone:
    """The examples that are in saved sums, by their places, and their marks.

    Args:
        spans: The places of neighbours, first and number, `[k, 2]`.
        marks: The examples' marks, in this order, `[n]`.
    """

    def __init__(self, spans: Int[Tensor, "k 2"], marks: Int[Tensor, " n"]) -> None:
        places = _places(spans)
        order = places.argsort()
        self._places, self._marks = places[order], marks[order]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    def among(self, place: int, marks: Int[Tensor, " n"]) -> Bool[Tensor, " n"] | None:
        """Which examples of a batch are among them.

        Args:
            place: That of the batch's first example.
            marks: The marks of its examples.

        Returns:
            `[n]`; None if an example at one of the places is another one than that of the sums.
        """
        first, end = torch.searchsorted(self._places, torch.tensor([place, place + len(marks)]))
        found = self._places[first:end] - place
        if not marks[found].equal(self._marks[first:end]):
            return None
        mask = torch.zeros(len(marks), dtype=torch.bool)
        mask[found] = True
        return mask


def runs_of(mask: Bool[Tensor, " n"]) -> list[slice]:
    """The neighbours for which a mask is true, as slices."""
    edges = torch.diff(torch.nn.functional.pad(mask.to(torch.int8), (1, 1)))
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]


def chosen(
    ranks: Ranks, own: Mapping[int, PassState], device: torch.device
) -> tuple[list[int], ExamplesDone]:
    """The saved states that are gone on with: no two of them hold the same example.

    A process that goes on with the states of several saves one in their place, and then removes
    the others. Where it was killed in between, the larger one is taken.

    Args:
        ranks: The processes.
        own: The states that fall to this one, by the processes that saved them.
        device: Where tensors can travel.

    Returns:
        Which of its own this process takes; the examples in those of all processes.
    """
    rows = [
        torch.cat([torch.full((len(state.spans), 1), saver), state.spans], 1)
        for saver, state in own.items()
    ]
    marks = [state.marks for state in own.values()]
    mine = [torch.cat(rows).to(device), torch.cat(marks).to(device)] if rows else None
    of_all = ranks.on_all(mine)
    if of_all is None:
        nothing = torch.zeros(0, dtype=torch.int64)
        return [], ExamplesDone(nothing.view(0, 2), nothing)
    spans, all_marks = (part.cpu() for part in of_all)
    saver_of_each = spans[:, 0].repeat_interleave(spans[:, 2])
    places = _places(spans[:, 1:])
    sizes = saver_of_each.bincount()
    taken: list[int] = []
    done = places[:0]
    for saver in sizes.argsort(descending=True, stable=True).tolist():
        of_saver = places[saver_of_each == saver]
        if len(of_saver) and not torch.isin(of_saver, done).any():
            taken.append(saver)
            done = torch.cat([done, of_saver])
    is_taken = torch.isin(spans[:, 0], torch.tensor(taken))
    marks_taken = all_marks[torch.isin(saver_of_each, torch.tensor(taken))]
    return [saver for saver in own if saver in taken], ExamplesDone(
        spans[is_taken, 1:], marks_taken
    )


def joined_spans(spans: Sequence[Tensor]) -> Int[Tensor, "m 2"]:
    """Spans one after the other, those that continue the one before made one with it."""
    together = torch.cat([torch.zeros(0, 2, dtype=torch.int64), *spans])
    if len(together) < 2:
        return together
    ends = together.sum(1)
    begins = torch.cat([torch.ones(1, dtype=torch.bool), together[1:, 0] != ends[:-1]])
    first = begins.nonzero().flatten()
    last = torch.cat([first[1:], torch.tensor([len(together)])]) - 1
    return torch.stack([together[first, 0], ends[last] - together[first, 0]], 1)


def _places(spans: Int[Tensor, "k 2"]) -> Int[Tensor, " n"]:
    starts, sizes = spans.unbind(1)
    before = sizes.cumsum(0) - sizes
    return (starts - before).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
