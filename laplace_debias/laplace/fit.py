"""A fit from end to end: what it reads, what it finds, and the state that comes of it."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import SupportsIndex

import torch

from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.fits.problem import CurvatureFit
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.shadow import check_no_autocast, unwrapped
from laplace_debias.curvature.network.shards import check_shared, place_of
from laplace_debias.laplace.anytime import Auto
from laplace_debias.laplace.data_size import Expected, check_alike, expected_of_loader
from laplace_debias.laplace.fitted import Fitted, posterior_of
from laplace_debias.laplace.plan import check_room
from laplace_debias.laplace.posterior import scaled
from laplace_debias.laplace.resume import check_resumable, identity_of
from laplace_debias.laplace.scale import check_scale, scale_of
from laplace_debias.laplace.schemes import OF_FIRST_BATCHES, CrossFit, Full, Scheme, check_mode
from laplace_debias.laplace.subject import Subject
from laplace_debias.system.checks import check_generator
from laplace_debias.system.ranks import current


def scheme_of_mode(
    subject: Subject,
    loader: Batches,
    mode: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: str | os.PathLike[str] | None,
    *,
    scale: bool,
    folds: int | None,
) -> tuple[Scheme, Expected]:
    """The way to fit that a mode names, with the data that it reads of a loader; and N.

    Raises:
        ValueError: For what can be told before the first batch is looked at.
        TypeError: Likewise.
    """
    check_mode(mode, folds)
    if scale and mode in ("full", "auto"):
        raise ValueError(f'mode="{mode}" needs no scale: leave out scale=True.')
    if scale:
        check_scale(loader)
    expected = expected_of_loader(loader, num_data, mode)
    if mode not in OF_FIRST_BATCHES:
        return Full(loader) if mode == "full" else Auto(loader), expected
    check_generator(generator)
    check_resumable(resume, subject.settings.fisher.kind, generator, loader)
    needed, of_batches = OF_FIRST_BATCHES[mode]
    batches = list(itertools.islice(subject.stream(loader, generator).raw(), needed))
    most = max(current().exchange(len(batches)))
    if most < needed:
        raise ValueError(
            f'mode="{mode}" needs {needed} batch(es), the loader gave {most}: use a smaller batch '
            "size or more data."
        )
    return of_batches(batches) if folds is None else CrossFit(batches, folds), expected


def fit(
    subject: Subject,
    scheme: Scheme,
    mode: str,
    expected: Expected,
    generator: torch.Generator | None,
    resume: str | os.PathLike[str] | None,
    scale: Batches | None = None,
    progress: bool = False,
) -> Fitted:
    """Fit a posterior's curvature.

    Args:
        subject: What is fitted.
        scheme: The way to fit, with its data.
        mode: Its name.
        expected: N.
        generator: Seeds what is drawn; torch's global one if None.
        resume: A folder for its state; None for a fit that is not gone on with.
        scale: Data whose curvature in the outputs the magnitudes are scaled to; None for none.
        progress: Whether to show a progress bar over a whole loader.

    Raises:
        ValueError: As `Laplace.fit`.
        TypeError: Likewise.
        NotImplementedError: Likewise.
        RuntimeError: Under autocast.
        OSError: As `Laplace.fit`.
    """
    kind, ranks = subject.settings.kind, current()
    check_generator(generator)
    if not scheme.saves and resume is not None:
        raise ValueError(f'mode="{scheme.mode}" saves no state: leave out resume.')
    check_resumable(resume, subject.settings.fisher.kind, generator, *scheme.read)
    scheme.check(kind)
    if scale is not None:
        check_shared(ranks, scale)
        check_scale(scale, scheme.read[-1])
    check_no_autocast(subject.first_parameter.device)
    expected = expected.over(ranks)
    bar = "fit" if progress and mode in ("full", "auto") else None
    with torch.inference_mode(False):
        (first, what), *others = scheme.fields.items()
        subject, problem, stream = subject.problem(scheme.read[0], generator, what, bar)
        streams, of_scale = {first: stream}, None
        if scale is not None:
            bar = "scale" if progress else None
            of_scale = subject.of_fit(scale, generator, "data of the scale", bar)
        for field, called in others:
            streams[field] = subject.of_fit(getattr(scheme, field), generator, called, None)
        if ranks.size > 1 and subject.settings.fisher.kind == "mc":
            # Where labels are drawn it matters where examples are among those of all processes.
            for one in streams.values():
                one.place = place_of(ranks, one)
        plain, names = unwrapped(subject.model), subject.known.block_names
        check_alike(ranks, plain, names, stream.first, expected.is_shared)
        check_room(problem, kind)
        if resume is not None:
            of_data = {
                "mode": mode,
                "num_data": expected.num_data,
                "folds": getattr(scheme, "folds", None),
            }
            identity = identity_of(problem, subject, generator, **of_data)
            checkpoint = Checkpoint(Path(resume), identity, problem.device, ranks)
            problem = replace(problem, checkpoint=checkpoint)
        scheme = replace(scheme, **streams)
        ratio = None if of_scale is None else scale_of(problem, scheme.read[-1], of_scale)
        told = mode if scale is None else f"{mode}, scaled"

        def fitted(found: CurvatureFit) -> Fitted:
            if ratio is not None:
                curvature = found.curvature.map(lambda _, block: scaled(block, ratio))
                found = CurvatureFit(curvature, found.seen)
            return _fitted(subject, found, expected.given(found.seen.weight), told)

        state = scheme.fit(kind, problem, fitted)
    if resume is not None:
        checkpoint.remove()
    return state


def _fitted(subject: Subject, found: CurvatureFit, num_data: int, mode: str) -> Fitted:
    """The state of a fit, of the curvature that was found."""
    seen, num_targets = found.seen, None
    per_seen = num_data / seen.weight
    if type(subject.likelihood) is Gaussian and subject.settings.fisher.kind != "empirical":
        num_targets = seen.num_outputs * per_seen
    others = fingerprint(unwrapped(subject.model), subject.known.names)
    posterior = posterior_of(subject, found.curvature, num_data)
    return Fitted(subject, posterior, seen.nll * per_seen, others, mode, num_targets)
