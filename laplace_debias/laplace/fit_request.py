"""The request for a fit: on which data, in which way, with what N, carried out how."""

import itertools
import os
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from laplace_debias.curvature.network.batches import Batches, with_progress
from laplace_debias.curvature.network.shards import check_shared
from laplace_debias.laplace.data_size import (
    Expected,
    expected_of_all,
    expected_of_given,
    expected_of_some,
)
from laplace_debias.laplace.resume import check_resumable
from laplace_debias.laplace.scale import check_scale
from laplace_debias.laplace.schemes import MODES, OF_FIRST_BATCHES, CrossFit, Full, Scheme
from laplace_debias.laplace.subject import Subject
from laplace_debias.system.checks import check_generator, whole
from laplace_debias.system.randomness import seeded
from laplace_debias.system.ranks import current


@dataclass(frozen=True, eq=False)
class Execution:
    """How a fit is carried out, whatever its data; as `Laplace.fit` takes it.

    Attributes:
        generator: Seeds what is drawn; torch's global one if None.
        resume: A folder for its state; None for a fit that is not gone on with.
    """

    generator: torch.Generator | None
    resume: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        check_generator(self.generator)


@dataclass(frozen=True, eq=False)
class FitRequest:
    """A fit that is asked for: what it reads, and how.

    Attributes:
        scheme: The way to fit, with its data.
        mode: Its name.
        expected: N.
        execution: How it is carried out.
        scale: Data whose curvature in the outputs the magnitudes are scaled to; None for none.
        is_shared: Whether `ShardedBatches` say that several processes share the data.
    """

    scheme: Scheme
    mode: str
    expected: Expected
    execution: Execution
    scale: Batches | None = None
    is_shared: bool = False

    @classmethod
    def of_scheme(
        cls,
        subject: Subject,
        scheme: Scheme,
        num_data: SupportsIndex | None,
        scale: Batches | None,
        execution: Execution,
    ) -> "FitRequest":
        """As `Laplace.fit_batches` is called: with the data of a way to fit.

        Args:
            subject: What is fitted.
            scheme: The way to fit.
            num_data: N; None for the number of examples that are seen.
            scale: As `FitRequest` has it.
            execution: How it is carried out.

        Raises:
            ValueError: As `check_resumable`, `check_shared` and `expected_of_given`.
        """
        measured = scheme.measured[0]
        _check_resumable(subject, execution, scheme.first_read, measured)
        others = () if measured is scheme.first_read else (measured,)
        of_data = [check_shared(current(), data) for data in (scheme.first_read, *others, scale)]
        expected = expected_of_given((scheme.first_read, measured), num_data)
        return cls(scheme, scheme.mode, expected, execution, scale, of_data[0])

    @classmethod
    def of_loader(
        cls,
        subject: Subject,
        loader: Batches,
        mode: str,
        num_data: SupportsIndex | None,
        execution: Execution,
        *,
        scale: bool,
        folds: int | None,
        progress: bool,
    ) -> "FitRequest":
        """As `Laplace.fit` is called: with a loader and a mode.

        Args:
            subject: What is fitted.
            loader: Training data.
            mode: As `Laplace.fit` takes it; so are `num_data`, `folds` and `progress`.
            num_data: N; None for what the loader tells.
            execution: How it is carried out.
            scale: Whether to scale by the whole loader.
            folds: Of `"crossfit"`.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: As `Laplace.fit`, for what can be told before the first batch is looked at.
            TypeError: Likewise.
        """
        check_mode(mode, folds)
        if scale and mode == "full":
            raise ValueError('mode="full" sees all data and needs no scale: leave out scale=True.')
        if scale:
            check_scale(loader)
        _check_resumable(subject, execution, loader)
        is_shared = check_shared(current(), loader)
        given = None if num_data is None else whole(num_data, "num_data")
        if mode == "full":
            Full(loader).check(subject.settings.kind)
            expected = expected_of_all(loader, given)
            all_data = Full(with_progress(loader, progress, "fit"))
            return cls(all_data, mode, expected, execution, None, is_shared)
        num_batches = OF_FIRST_BATCHES[mode].num_batches
        expected = expected_of_some(loader, given, mode)
        batches = list(itertools.islice(seeded(loader, execution.generator), num_batches))
        most = max(current().exchange(len(batches)))
        if most < num_batches:
            raise ValueError(
                f'mode="{mode}" needs {num_batches} batch(es), the loader gave '
                f"{most}: use a smaller batch size or more data."
            )
        scheme = OF_FIRST_BATCHES[mode].scheme(batches)
        scheme = scheme if folds is None else CrossFit(batches, folds)
        of_scale = with_progress(loader, progress, "scale") if scale else None
        return cls(scheme, mode, expected, execution, of_scale, is_shared)


def check_mode(mode: str, folds: int | None) -> None:
    """Require a mode, and folds where there are some.

    Raises:
        ValueError: Otherwise.
    """
    if mode not in MODES:
        raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
    if folds is not None and mode != "crossfit":
        raise ValueError(f'folds={folds} belongs to mode="crossfit", not to mode="{mode}".')


def _check_resumable(subject: Subject, execution: Execution, *data: Batches) -> None:
    check_resumable(execution.resume, subject.settings.fisher.kind, execution.generator, *data)
