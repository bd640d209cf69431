"""The modes of `Laplace.fit`, and what each reads from a loader."""

import copy
import itertools
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from laplace_debias.curvature.network.batches import Batches, check_batches
from laplace_debias.curvature.network.dataset_size import TrainingSize, training_size
from laplace_debias.laplace.fitting.mode_names import MODES
from laplace_debias.laplace.fitting.resuming import check_resumable
from laplace_debias.laplace.fitting.schemes import Scheme
from laplace_debias.laplace.state.fitted import FittedPosterior, Unfitted
from laplace_debias.system.ranks import process_group


def check_mode(mode: str, folds: int | None) -> None:
    """Require a known mode, and folds only where they are used."""
    if mode not in MODES:
        raise ValueError(f"Unknown mode={mode!r}. Use one of {', '.join(MODES)}.")
    if folds is not None and not MODES[mode].takes_folds:
        names = " and ".join(f'"{name}"' for name, scheme in MODES.items() if scheme.takes_folds)
        raise ValueError(
            f'`folds={folds}` applies only to mode={names}, got `mode="{mode}"`. Remove `folds=`.'
        )


def scheme_of_mode(
    state: Unfitted | FittedPosterior,
    loader: Batches,
    mode: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: Path | None,
    folds: int | None,
) -> tuple[Scheme, TrainingSize]:
    """Return the scheme of a mode, with its data, and N."""
    check_batches(loader)
    check_mode(mode, folds)
    scheme = MODES[mode]
    num_batches = scheme.num_first_batches
    reads_whole_loader = num_batches is None and scheme.reads_all
    size = training_size(loader, num_data, mode, reads_whole_loader=reads_whole_loader)
    if num_batches is None:
        return scheme.from_batches(loader, folds), size
    if resume is not None:
        check_resumable(resume, state.config.fisher, generator, [loader])
    stream = state.spec.stream(loader, state.device, generator)
    with stream.randomness:
        batches = [_copied(batch) for batch in itertools.islice(stream.source, num_batches)]
    num_read = max(process_group().exchange(len(batches)))
    if num_read < num_batches:
        raise ValueError(
            f'`mode="{mode}"` needs {num_batches} batch(es), but the loader has {num_read}. Use '
            "a smaller batch size or more data."
        )
    return scheme.from_batches(batches, folds), size


def _copied(batch: Any) -> Any:
    """Copy a batch, since a loader may write the next one into the same memory."""
    return pytree.tree_map(_copied_leaf, batch)


def _copied_leaf(leaf: Any) -> Any:
    """Copy a tensor, or an object of a library that holds tensors."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    try:
        return copy.deepcopy(leaf)
    except (RuntimeError, TypeError):
        # An object that cannot be copied, such as an open file, stays as it is.
        return leaf
