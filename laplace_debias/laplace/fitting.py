"""A fit from end to end: what it reads, what it finds, and the state that comes of it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from laplace_debias.curvature.fits.checkpoint import Checkpoint
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.losses.likelihoods.names import look_at_shapes
from laplace_debias.curvature.network.batches import (
    Batches,
    Counted,
    Pairs,
    source_of,
)
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.shadow import check_no_autocast
from laplace_debias.curvature.network.shards import Placed, place_of
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace import shards
from laplace_debias.laplace.fit_request import FitRequest
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.plan import check_room
from laplace_debias.laplace.posterior import GaussianPosterior, scaled
from laplace_debias.laplace.prior import Prior
from laplace_debias.laplace.resume import identity_of
from laplace_debias.laplace.scale import check_scale, scale_of
from laplace_debias.laplace.subject import Subject, usable
from laplace_debias.system.ranks import current


def fit(subject: Subject, prior: Prior, request: FitRequest) -> Fitted:
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
    execution = request.execution
    scheme.check(kind)
    if scale is not None:
        check_scale(scale, scheme.measured[0])
    usable(subject.model)
    check_no_autocast(subject.first_parameter.device)
    ranks = current()
    request = replace(request, expected=request.expected.over(ranks))
    with torch.inference_mode(False):
        problem, parameters, known = subject.problem(scheme.first_read, execution.generator, prior)
        shards.check_alike(
            *(ranks, unwrapped(subject.model), parameters.block_names),
            *(subject.read(known.first), request.is_shared),
        )
        x = next((x for x, _ in subject.on_device(known.first)), None)
        check_room(unwrapped(subject.model), problem, kind, x)
        checkpoint = None if execution.resume is None else _checkpoint(subject, request, problem)
        if checkpoint is not None:
            problem = replace(problem, checkpoint=checkpoint)
        scheme = scheme.reading_first(known)
        read = partial(_read, subject, execution.generator)
        ratio = None if scale is None else scale_of(problem, scheme, scale, read)
        found = scheme.fit(kind, problem, read)
        if ratio is not None:
            curvature = found.curvature.map(lambda _, block: scaled(block, ratio))
            found = CurvatureFit(curvature, found.seen)
        fitted = _fitted(subject, prior, request, parameters, found)
    if checkpoint is not None:
        checkpoint.remove()
    return fitted


def _checkpoint(subject: Subject, request: FitRequest, problem: Problem) -> Checkpoint:
    """Where the fit is saved; raises as `Checkpoint`."""
    execution = request.execution
    assert execution.resume is not None
    identity = identity_of(
        *(problem, subject.settings, subject.likelihood, unwrapped(subject.model)),
        execution.generator,
        mode=request.mode,
        num_data=request.expected.num_data,
        folds=request.scheme.num_folds,
    )
    return Checkpoint(Path(execution.resume), identity, problem.device, problem.ranks)


def _read(
    subject: Subject, generator: torch.Generator | None, batches: Batches, what: str
) -> Pairs:
    """Batches of a fit, of which at least one target must count.

    Where labels are drawn it matters where the examples of one process are among those of all.

    Questions about numbers that still lie on the CPU are asked there: a fit moves them.
    """
    ranks, likelihood = current(), subject.likelihood
    ignored = getattr(likelihood, "ignore_index", None)
    of_targets = None if look_at_shapes(likelihood) else subject.first_parameter.device
    checked = subject.read(batches, generator, None, of_targets)
    counted = Counted(
        checked,
        likelihood.counts_any,
        "" if ignored is None else f"ignore_index={ignored}",
        what,
        ranks,
    )
    if ranks.size == 1 or subject.settings.fisher.kind != "mc":
        return counted
    source = source_of(batches)
    return Placed(counted, place_of(ranks, source, lambda: [len(y) for _, y in checked]))


def _fitted(
    subject: Subject,
    prior: Prior,
    request: FitRequest,
    parameters: BayesianParameters,
    found: CurvatureFit,
) -> Fitted:
    """The state of a fit, of the curvature that was found.

    Raises:
        ValueError: As `GaussianPosterior` and `Fitted`.
    """
    plain = unwrapped(subject.model)
    num_data = request.expected.given(found.seen.num_examples)
    others = fingerprint(plain, parameters.names)
    mean = parameters.flat(plain)
    order = None if parameters.order is None else parameters.order.to(mean.device)
    prior = prior.of(plain, parameters)
    per_seen = num_data / found.seen.num_examples
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
