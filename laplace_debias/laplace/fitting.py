"""A fit from end to end: what it reads, what it finds, and the state that comes of it."""

from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import torch

from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.fits.saved_passes import SavedPasses
from laplace_debias.curvature.fits.tracked import TrackedMemory
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.losses.likelihoods.names import look_at_shapes
from laplace_debias.curvature.network.batches import (
    Batches,
    Counted,
    FirstBatchKnown,
    Pairs,
    source_of,
)
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.shadow import check_no_autocast
from laplace_debias.curvature.network.shards import Placed, place_of
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace import shards
from laplace_debias.laplace.data_size import Known, Supposed, data_size
from laplace_debias.laplace.files import stored
from laplace_debias.laplace.files.fit_state import FitStates
from laplace_debias.laplace.fit_request import FitRequest, check_mode
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.grouping import (
    agreed,
    check_fit_bound,
    check_rereadable,
    fit_grouped,
    grouped,
    plan_within,
)
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.plan import Plan
from laplace_debias.laplace.planned import Planned
from laplace_debias.laplace.planning import is_too_large, posterior_bytes, too_large
from laplace_debias.laplace.posterior import GaussianPosterior, scaled
from laplace_debias.laplace.prior import Prior
from laplace_debias.laplace.resume import states_of
from laplace_debias.laplace.scale import check_scale, scale_of
from laplace_debias.laplace.subject import Subject, usable
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.available import check_available
from laplace_debias.system.randomness import seeded
from laplace_debias.system.ranks import Ranks, current

LOOK = "a look at two examples"
"""The stage of a fit in which its blocks are held against automatic differentiation."""


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
    room, generator = execution.room, execution.generator
    scheme.check(kind)
    if room.memory_bound is not None:
        check_rereadable(scheme)
    if scale is not None:
        check_scale(scale, scheme.measured[0])
    usable(subject.model)
    check_no_autocast(subject.first_parameter.device)
    ranks = current()
    request = replace(request, expected=request.expected.over(ranks))
    with torch.inference_mode(False), ExitStack() as stack:
        problem, parameters, known = subject.problem(
            scheme.first_read, generator, prior, room.replicate
        )
        _check_alike(subject, request, parameters, known, ranks)
        if room.store is None and is_too_large(problem, kind):
            x = next((x for x, _ in subject.on_device(known.first)), None)
            raise too_large(unwrapped(subject.model), problem, kind, x)
        keep: stored.StoredFit | None = None
        if room.store is not None:
            # Those of all processes together, which write to one disk.
            needed = posterior_bytes(replace(problem, replicate=True), kind)
            stored.check_store(room.store, subject.likelihood, problem.device, needed)
            keep = stack.enter_context(stored.StoredFit(room.store, ranks))
        problem, sizes = _in_groups(subject, request, problem, parameters, known)
        states = None
        if execution.resume is not None:
            states = _states(subject, request, problem, sizes)
            problem = replace(problem, passes=SavedPasses(states, problem.device, ranks))
        scheme, is_saved = scheme.reading_first(known), states is not None

        read = partial(_read, subject, is_saved)
        ratio = 1.0
        if scale is not None:
            ratio = scale_of(problem, scheme, scale, partial(read, generator))

        def finished(curvature: BlockDiagonal) -> BlockDiagonal:
            if scale is not None:
                curvature = curvature.map(lambda _, block: scaled(block, ratio))
            return curvature if keep is None else keep.stored(curvature)

        found = fit_grouped(scheme, known, problem, kind, sizes, generator, read, finished)
        fitted = _fitted(subject, prior, request, parameters, found)
        fitted = fitted if keep is None else keep.finish(fitted)
    if states is not None:
        ranks.exchange(None)
        states.remove()
    return fitted


def plan(
    subject: Subject,
    prior: Prior,
    loader: Batches,
    mode: str,
    folds: int | None,
    *,
    replicate: bool,
    timed: bool,
    available: SupportsIndex | None,
    memory_bound: SupportsIndex | None,
    is_stored: bool,
) -> Plan:
    """What a fit would take; nothing is fitted.

    Args:
        subject: What would be fitted.
        prior: As `fit` takes it.
        loader: As `Laplace.plan` takes it; so are the others.
        mode: The mode.
        folds: Of `"crossfit"`.
        replicate: Whether each process would end with all blocks.
        timed: Whether to estimate seconds.
        available: Bytes that the fit may take; None for those that the device has left.
        memory_bound: Bytes that the fit may hold; None for no bound.
        is_stored: Whether the posterior would be kept in a folder.

    Raises:
        ValueError: As `Laplace.plan`.
        TypeError: For an iterator.
    """
    check_mode(mode, folds)
    if isinstance(loader, Iterator):
        raise TypeError(
            "A plan reads the first batch, which this iterator would lose for the fit: pass a "
            "DataLoader or a list of batches."
        )
    limit = None if available is None else check_available(available)
    bound = check_fit_bound(memory_bound)
    # The loader's order, and labels that a fit draws, are drawn anew by the fit.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        # The first batch is read here: it is the data's, and not counted.
        first, looked = FirstBatchKnown(seeded(loader, None)), TrackedMemory()
        with looked:
            problem, parameters, known = subject.problem(first, None, prior, replicate)
        # A process without examples plans with those of the first one that has some.
        batch = next(iter(subject.on_device(shards.first_batch(problem.ranks, known.first))))
    size = data_size(loader)
    planned = Planned(
        *(unwrapped(subject.model), problem, subject.settings, mode, folds, batch),
        len(loader) if isinstance(loader, Sized) else None,
        size.num_examples if isinstance(size, (Known, Supposed)) else None,
        parameters.order_bytes,
    )
    with torch.inference_mode(False):
        found = plan_within(planned, timed, limit, bound, is_stored)
    return replace(found, stages={LOOK: looked.peak, **found.stages})


def _check_alike(
    subject: Subject,
    request: FitRequest,
    parameters: BayesianParameters,
    known: FirstBatchKnown,
    ranks: Ranks,
) -> None:
    """Require what several processes must agree on; raises as `shards.check_alike`."""
    room = request.execution.room
    shards.check_alike(
        ranks,
        unwrapped(subject.model),
        parameters.block_names,
        subject.read(known.first),
        request.is_shared,
        {
            "replicate": room.replicate,
            "memory_bound": room.memory_bound,
            "store": room.store is not None,
        },
    )


def _in_groups(
    subject: Subject,
    request: FitRequest,
    problem: Problem,
    parameters: BayesianParameters,
    known: FirstBatchKnown,
) -> tuple[Problem, Sequence[int]]:
    """The problem at the pace of its groups of blocks, and how many blocks each group has.

    Raises:
        ValueError: As `grouped`.
    """
    room, scheme = request.execution.room, request.scheme
    if room.memory_bound is None:
        return problem, [len(problem.blocks)]
    batch = next(iter(subject.on_device(shards.first_batch(problem.ranks, known.first))))
    planned = Planned(
        *(unwrapped(subject.model), problem, subject.settings),
        *(scheme.mode, scheme.num_folds, batch),
        *(None, request.expected.num_data, parameters.order_bytes),
    )
    return agreed(grouped(planned, room.memory_bound, room.store is not None))


def _states(
    subject: Subject, request: FitRequest, problem: Problem, sizes: Sequence[int]
) -> FitStates:
    """Where the state of the fit is; raises as `states_of`."""
    execution = request.execution
    assert execution.resume is not None
    of_data: dict[str, Any] = {
        "mode": request.mode,
        "num_data": request.expected.num_data,
        "folds": request.scheme.num_folds,
    }
    if execution.room.memory_bound is not None:
        of_data |= {"memory_bound of the fit": execution.room.memory_bound, "groups": list(sizes)}
    plain = unwrapped(subject.model)
    return states_of(
        execution.resume, problem, subject.settings, subject.likelihood, plain, **of_data
    )


def _read(
    subject: Subject,
    is_saved: bool,
    generator: torch.Generator | None,
    batches: Batches,
    what: str,
) -> Pairs:
    """Batches of a fit, of which at least one target must count.

    Where labels are drawn, or sums are saved, it matters where the examples of one process are
    among those of all.

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
    if ranks.size == 1 or not (is_saved or subject.settings.fisher.kind == "mc"):
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
