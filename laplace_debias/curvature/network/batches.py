"""Data: batches of inputs and targets, from anything that can be iterated over."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from laplace_debias.curvature.network.inputs import Inputs, move, tensors_of
from laplace_debias.curvature.network.reader import BatchReader
from laplace_debias.system.randomness import SeededBatches
from laplace_debias.system.ranks import ALONE, Ranks

# Batches as `BatchReader` reads them: pairs (inputs, targets), or mappings and dataclasses.
Batches = Iterable[Any]
# The same, checked, and on the model's device or on their way there.
Pairs = Iterable[tuple[Inputs, Tensor]]


class Checked:
    """Batches `(x, y)` as tensors that the model takes, re-iterable if the source is.

    Args:
        batches: The source.
        device: Where inputs are moved, the model's device; None to leave them where they are.
        dtypes: The dtypes of the model's parameters, one of which floating-point inputs must have.
        read: Function that makes pairs of batches.
        of_targets: Where targets are moved; None to leave them where they are.
    """

    def __init__(
        self,
        batches: Batches,
        device: torch.device | None,
        dtypes: Collection[torch.dtype],
        read: BatchReader,
        of_targets: torch.device | None,
    ) -> None:
        self._batches = batches
        self._read = read
        self._device = device
        self._dtypes = dtypes
        self._of_targets = of_targets

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The pairs.

        Raises:
            ValueError: If several workers of a loader read all of a stream each.
        """
        num_workers, begins = _workers_on_a_stream(self._batches), list[Sequence[Tensor]]()
        for batch in self._batches:
            x, y = self._read(batch)
            if len(begins) < num_workers:
                begins.append([*tensors_of(x), y])
                _check_shared_out(begins, num_workers)
            x = move(x, self._device, self._dtypes)
            yield x, y if self._of_targets is None else y.to(self._of_targets, non_blocking=True)


class Counted:
    """The same batches, of which at least one target must count.

    The check goes with the pass over the data, and raises at its end, before anything is made of
    the data.

    Args:
        batches: The source.
        counts_any: Whether any target of a batch counts.
        ignored: What targets are called that do not, such as `"ignore_index=-100"`; "" for no name.
        what: Name of the batches in error messages.
        ranks: The processes, of which any may have a target that counts.
    """

    def __init__(
        self,
        batches: Pairs,
        counts_any: Callable[[Tensor], bool],
        ignored: str,
        what: str,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._batches = batches
        self._counts_any = counts_any
        self._ignored = ignored
        self._what = what

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        num_batches, counts = 0, False
        for x, y in self._batches:
            num_batches += 1
            counts = counts or self._counts_any(y)
            yield x, y
        of_ranks = self._ranks.exchange([num_batches, counts])
        if any(some for some, _ in of_ranks) and not any(found for _, found in of_ranks):
            kind = f" ({self._ignored})" if self._ignored else ""
            raise ValueError(
                f"Every target of the {self._what} is ignored{kind}. They have no curvature: "
                "pass batches in which at least one target counts."
            )


class FirstBatchKnown:
    """Batches as the source has them, the first of which is fetched at once.

    The first pass goes on with the iterator that gave it: a loader that shuffles is not begun
    twice, and an iterator loses nothing.

    Args:
        batches: The source.

    Attributes:
        source: The source.
        first: The first batch, a list of it alone; empty if there is none.
    """

    def __init__(self, batches: Batches) -> None:
        self.source = self._batches = batches
        self._begun: Iterator[Any] | None = iter(batches)
        self.first = list(islice(self._begun, 1))

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return iter(self._batches) if begun is None else chain(self.first, begun)


def with_progress(batches: Batches, progress: bool, what: str) -> Batches:
    """The same batches, with a progress bar on each pass if wanted."""
    return _Progress(batches, what) if progress else batches


def _workers_on_a_stream(batches: Batches) -> int:
    """How many workers read one stream; 0 of other data, and of a stream that one reads."""
    loader = source_of(batches)
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return 0
    return loader.num_workers if loader.num_workers > 1 else 0


def _check_shared_out(begins: Sequence[Sequence[Tensor]], num_workers: int) -> None:
    """Require that the workers' first batches, which come in turn, are not all the same."""
    if len(begins) < num_workers:
        return
    first, *others = begins
    if all(len(of) == len(first) and all(map(torch.equal, first, of)) for of in others):
        raise ValueError(
            f"Each of the {num_workers} workers that read the stream begins with the same "
            "examples, so that every example would count several times: let each yield a part of "
            "them, by torch.utils.data.get_worker_info(), or set num_workers=1."
        )


def source_of(batches: Batches) -> Batches:
    """The user's own batches, below what is made of them here."""
    while isinstance(batches, (FirstBatchKnown, SeededBatches, _Progress)):
        batches = batches.source
    return batches


class _Progress:
    def __init__(self, batches: Batches, what: str) -> None:
        self.source = self._batches = batches
        self._what = what

    def __iter__(self) -> Iterator[Any]:
        return iter(tqdm(self._batches, desc=self._what, unit="batch", leave=False))
