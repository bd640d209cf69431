"""Functions that build the fitting scheme for a mode or for given batches."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from laplace_debias.curvature.data.batches import Batches, check_batches, randomness
from laplace_debias.curvature.data.dataset_size import TrainingSize, training_size
from laplace_debias.laplace.fitting.auto import Auto
from laplace_debias.laplace.fitting.modes import MODES, check_mode
from laplace_debias.laplace.fitting.resuming import check_resumable
from laplace_debias.laplace.fitting.schemes import (
    FOLDS,
    CrossFit,
    Full,
    Scheme,
    Split,
    prior_needs_all_data,
)
from laplace_debias.laplace.state.fitted import FitSetup
from laplace_debias.system.ranks import process_group
from laplace_debias.system.shown import counted


def scheme_of_mode(
    setup: FitSetup,
    loader: Batches,
    name: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: Path | None,
    folds: int | None,
) -> tuple[Scheme, TrainingSize]:
    """Return the scheme of a mode with its data, and the number N of training examples."""
    check_batches(loader)
    check_mode(name, folds)
    mode = MODES[name]
    num_batches = mode.num_first_batches
    if num_batches is None:
        scheme = mode.make(loader, folds)
        size = training_size(loader, num_data, name, reads_whole_loader=scheme.reads_all)
        return scheme, size
    size = training_size(loader, num_data, name, reads_whole_loader=False)
    if setup.prior.information is not None:
        raise prior_needs_all_data(name)
    if resume is not None:
        check_resumable(resume, setup.config.fisher, generator, [loader])
    with randomness(loader, generator):
        batches = [_copy_batch(batch) for batch in itertools.islice(loader, num_batches)]
    num_read = max(process_group().exchange(len(batches)))
    if num_read < num_batches:
        raise ValueError(
            f'`mode="{name}"` needs {counted(num_batches, "batch", "batches")}, but the loader '
            f"has {num_read}. Use a smaller batch size or more data."
        )
    return mode.make(batches, folds), size


def scheme_of_batches(directions: Batches, magnitudes: Batches | None, folds: int | None) -> Scheme:
    """Return the scheme of a fit to lists of batches; see `Laplace.fit_batches`."""
    if folds is not None and magnitudes is not None:
        raise ValueError(
            "Cross-fitting computes the values of `magnitudes` from the folds. Remove "
            "`magnitudes=`."
        )
    if folds is not None:
        return CrossFit(directions, folds)
    if magnitudes is not None:
        return Split(directions, magnitudes)
    return Full(directions)


def full(loader: Batches, _: int | None) -> Full:
    """Make the scheme of `mode="full"` from a loader."""
    return Full(loader, label="full")


def mini(batches: Sequence[Any], _: int | None) -> Full:
    """Make the scheme of `mode="mini"` from a batch."""
    return Full(batches, label="mini")


def debiased(batches: Sequence[Any], _: int | None) -> Split:
    """Make the scheme of `mode="debiased"` from two batches."""
    return Split(batches[:1], batches[1:])


def crossfit(batches: Sequence[Any], folds: int | None) -> CrossFit:
    """Make the scheme of `mode="crossfit"` from a batch."""
    return CrossFit(batches, FOLDS if folds is None else folds)


def auto(loader: Batches, _: int | None) -> Auto:
    """Make the scheme of `mode="auto"` from a loader."""
    return Auto(loader)


def _copy_batch(batch: Any) -> Any:
    """Copy a batch, because a loader may write the next batch into the same memory."""
    return pytree.tree_map(_copy_leaf, batch)


def _copy_leaf(leaf: Any) -> Any:
    """Copy a tensor, or an object that may contain tensors, such as a graph batch."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    try:
        return copy.deepcopy(leaf)
    except (RuntimeError, TypeError):
        # An object that cannot be copied, such as an open file, stays as it is.
        return leaf
