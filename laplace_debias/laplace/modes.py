"""The modes of `Laplace.fit`: what each reads of a loader."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from laplace_debias.curvature.network.batches import Batches, check_batches
from laplace_debias.curvature.network.dataset_size import TrainingSize, training_size
from laplace_debias.laplace.auto import Auto
from laplace_debias.laplace.resuming import check_resumable
from laplace_debias.laplace.schemes import CrossFit, Full, Scheme, Split
from laplace_debias.laplace.state import FittedPosterior, Unfitted
from laplace_debias.system.ranks import current


def _split(batches: Sequence[Any]) -> Split:
    return Split(batches[:1], batches[1:])


# How many of a loader's first batches a mode reads, and the scheme of these batches.
_FIRST_BATCHES: dict[str, tuple[int, Callable[[Sequence[Any]], Scheme]]] = {
    "mini": (1, Full),
    "debiased": (2, _split),
    "crossfit": (1, CrossFit),
}
MODES = ("full", *_FIRST_BATCHES, "auto")


def check_mode(mode: str, folds: int | None) -> None:
    """Require a known mode, and folds only where they are used."""
    if mode not in MODES:
        raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
    if folds is not None and mode != "crossfit":
        raise ValueError(f'folds={folds} belongs to mode="crossfit", not to mode="{mode}".')


def scheme_of_mode(
    state: Unfitted | FittedPosterior,
    loader: Batches,
    mode: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: Path | None,
    folds: int | None,
) -> tuple[Scheme, TrainingSize]:
    """Return the scheme that a mode stands for, with the data that it reads, and N."""
    check_batches(loader)
    check_mode(mode, folds)
    size = training_size(loader, num_data, mode, reads_all=mode == "full")
    if mode == "full":
        return Full(loader), size
    if mode == "auto":
        return Auto(loader), size
    if resume is not None:
        check_resumable(resume, state.config.fisher.kind, generator, [loader])
    num_batches, scheme_of_batches = _FIRST_BATCHES[mode]
    stream = state.spec.stream(loader, state.device, generator)
    with stream.randomness:
        batches = list(itertools.islice(stream.source, num_batches))
    num_read = max(current().exchange(len(batches)))
    if num_read < num_batches:
        raise ValueError(
            f'mode="{mode}" needs {num_batches} batch(es), the loader gave {num_read}: use a '
            "smaller batch size or more data."
        )
    if folds is not None:
        return CrossFit(batches, folds), size
    return scheme_of_batches(batches), size
