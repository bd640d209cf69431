"""A fit from end to end: what it reads, what it finds, and the state that comes of it."""

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsIndex

import torch

from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches, Stream
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.shadow import check_no_autocast
from laplace_debias.curvature.network.shards import check_shared, place_of
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.anytime import Auto
from laplace_debias.laplace.data_size import (
    Expected,
    check_alike,
    expected_of_given,
    expected_of_loader,
)
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.plan import check_room
from laplace_debias.laplace.posterior import GaussianPosterior, scaled
from laplace_debias.laplace.prior import Prior
from laplace_debias.laplace.resume import check_resumable, identity_of
from laplace_debias.laplace.scale import check_scale, scale_of
from laplace_debias.laplace.schemes import (
    OF_FIRST_BATCHES,
    CrossFit,
    Full,
    Scheme,
    check_mode,
)
from laplace_debias.laplace.subject import Subject, usable
from laplace_debias.system.checks import check_generator, whole
from laplace_debias.system.ranks import current


@dataclass(frozen=True, eq=False)
class Request:
    """A fit that is asked for: on which data, in which way, with what N.

    Attributes:
        scheme: The way to fit, with its data.
        mode: Its name.
        expected: N.
        generator: Seeds what is drawn; torch's global one if None.
        resume: A folder for its state; None for a fit that is not gone on with.
        scale: Data whose curvature in the outputs the magnitudes are scaled to; None for none.
        is_shared: Whether `ShardedBatches` say that several processes share the data.
        progress: Whether to show a progress bar over a whole loader.
    """

    scheme: Scheme
    mode: str
    expected: Expected
    generator: torch.Generator | None
    resume: str | os.PathLike[str] | None
    scale: Batches | None
    is_shared: bool
    progress: bool = False


def of_loader(
    subject: Subject,
    loader: Batches,
    mode: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: str | os.PathLike[str] | None,
    *,
    scale: bool,
    folds: int | None,
    progress: bool,
) -> Request:
    """The request of `Laplace.fit`, whose arguments these are.

    Raises:
        ValueError: As `Laplace.fit`, for what can be told before the first batch is looked at.
        TypeError: Likewise.
    """
    check_generator(generator)
    check_mode(mode, folds)
    if scale and mode in ("full", "auto"):
        raise ValueError(f'mode="{mode}" needs no scale: leave out scale=True.')
    if mode == "auto":
        request = of_scheme(subject, Auto(loader), num_data, generator, resume)
        return replace(request, progress=progress)
    if scale:
        check_scale(loader)
    check_resumable(resume, subject.settings.fisher.kind, generator, loader)
    is_shared = check_shared(current(), loader)
    given = None if num_data is None else whole(num_data, "num_data")
    if mode == "full":
        all_data = Full(loader)
        all_data.check(subject.settings.kind)
        expected = expected_of_loader(loader, given, mode)
        return Request(all_data, mode, expected, generator, resume, None, is_shared, progress)
    num_batches = OF_FIRST_BATCHES[mode].num_batches
    expected = expected_of_loader(loader, given, mode)
    batches = list(itertools.islice(subject.stream(loader, generator).raw(), num_batches))
    most = max(current().exchange(len(batches)))
    if most < num_batches:
        raise ValueError(
            f'mode="{mode}" needs {num_batches} batch(es), the loader gave '
            f"{most}: use a smaller batch size or more data."
        )
    scheme = OF_FIRST_BATCHES[mode].scheme(batches)
    scheme = scheme if folds is None else CrossFit(batches, folds)
    of_scale = loader if scale else None
    return Request(scheme, mode, expected, generator, resume, of_scale, is_shared, progress)


def of_scheme(
    subject: Subject,
    scheme: Scheme,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: str | os.PathLike[str] | None,
    scale: Batches | None = None,
) -> Request:
    """The request of `Laplace.fit_batches`, whose arguments these are, with a way to fit.

    Raises:
        ValueError: As `check_resumable`, `check_shared` and `expected_of_given`.
    """
    check_generator(generator)
    if isinstance(scheme, Auto) and resume is not None:
        raise ValueError('mode="auto" saves no state: leave out resume, or use mode="full".')
    check_resumable(resume, subject.settings.fisher.kind, generator, *scheme.read)
    of_data = [check_shared(current(), data) for data in (*scheme.read, scale)]
    if isinstance(scheme, Auto):
        given = None if num_data is None else whole(num_data, "num_data")
        expected = expected_of_loader(scheme.data, given, scheme.mode)
    else:
        expected = expected_of_given(scheme.read, num_data)
    return Request(scheme, scheme.mode, expected, generator, resume, scale, of_data[0])


def fit(subject: Subject, prior: Prior, request: Request) -> Fitted:
    """Fit a posterior's curvature.

    Args:
        subject: What is fitted.
        prior: What the posterior is made with.
        request: On which data, and how.

    Raises:
        ValueError: As `Laplace.fit`.
        TypeError: Likewise.
        NotImplementedError: Likewise.
        RuntimeError: Under autocast.
        OSError: As `Laplace.fit`.
    """
    kind, scheme, scale = subject.settings.kind, request.scheme, request.scale
    scheme.check(kind)
    if scale is not None:
        check_scale(scale, scheme.read[-1])
    usable(subject.model)
    check_no_autocast(subject.first_parameter.device)
    ranks = current()
    request = replace(request, expected=request.expected.over(ranks))
    with torch.inference_mode(False):
        streams, of_scale, problem, parameters = _opened(subject, prior, request)
        first = next(iter(streams.values())).first
        check_alike(
            *(ranks, unwrapped(subject.model), parameters.block_names, first, request.is_shared)
        )
        check_room(problem, kind)
        checkpoint = None if request.resume is None else _checkpoint(subject, request, problem)
        if checkpoint is not None:
            problem = replace(problem, checkpoint=checkpoint)
        scheme = replace(scheme, **streams)
        ratio = None if of_scale is None else scale_of(problem, scheme.read[-1], of_scale)

        def fitted(found: CurvatureFit) -> Fitted:
            if ratio is not None:
                curvature = found.curvature.map(lambda _, block: scaled(block, ratio))
                found = CurvatureFit(curvature, found.seen)
            return _fitted(subject, prior, request, parameters, found)

        state = scheme.fit(kind, problem, fitted)
    if checkpoint is not None:
        checkpoint.remove()
    return state


def _checkpoint(subject: Subject, request: Request, problem: Problem) -> Checkpoint:
    """Where the fit is saved; raises as `Checkpoint`."""
    assert request.resume is not None
    identity = identity_of(
        *(problem, subject.settings, subject.likelihood, unwrapped(subject.model)),
        request.generator,
        mode=request.mode,
        num_data=request.expected.num_data,
        folds=request.scheme.num_folds,
    )
    return Checkpoint(Path(request.resume), identity, problem.device, problem.ranks)


def _opened(
    subject: Subject, prior: Prior, request: Request
) -> tuple[dict[str, Stream], Stream | None, Problem, BayesianParameters]:
    """The data of a fit as streams, by the scheme's fields, and what the first batch tells.

    Where labels are drawn it matters where the examples of one process are among those of all.

    Returns:
        The streams, that of the scale, the problem, the Bayesian parameters.
    """
    scheme, generator, ranks = request.scheme, request.generator, current()
    (first, what), *others = scheme.fields.items()
    whole, of_scale = ("fit", "scale") if request.progress else (None, None)
    progress = whole if request.mode in ("full", "auto") else None
    problem, parameters, stream = subject.problem(scheme.read[0], generator, prior, what, progress)
    scale = None
    if request.scale is not None:
        scale = subject.of_fit(request.scale, generator, "data of the scale", of_scale)
    streams = {first: stream}
    for field, called in others:
        streams[field] = subject.of_fit(getattr(scheme, field), generator, called, None)
    if ranks.size > 1 and subject.settings.fisher.kind == "mc":
        for one in streams.values():
            one.place = place_of(ranks, one)
    return streams, scale, problem, parameters


def _fitted(
    subject: Subject,
    prior: Prior,
    request: Request,
    parameters: BayesianParameters,
    found: CurvatureFit,
) -> Fitted:
    """The state of a fit, of the curvature that was found.

    Raises:
        ValueError: As `GaussianPosterior` and `Fitted`.
    """
    plain = unwrapped(subject.model)
    num_data = request.expected.given(found.seen.weight)
    others = fingerprint(plain, parameters.names)
    mean = parameters.flat(plain)
    order = None if parameters.order is None else parameters.order.to(mean.device)
    prior = prior.of(plain, parameters)
    per_seen = num_data / found.seen.weight
    of_noise = None
    if type(subject.likelihood) is Gaussian:
        power = 4 if subject.settings.fisher.kind == "empirical" else 2
        of_noise = Noise(found.seen.num_outputs * per_seen, power)
    return Fitted(
        subject.model,
        subject.likelihood,
        subject.settings,
        parameters,
        GaussianPosterior(
            mean, found.curvature, num_data, prior.precision, order, prior.mean, prior.temperature
        ),
        found.seen.nll * per_seen,
        others,
        request.mode if request.scale is None else f"{request.mode}, scaled",
        of_noise,
    )
