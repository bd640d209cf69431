"""A fit from end to end: what it reads, what it finds, and the state that comes of it."""

import hashlib
import itertools
import os
import re
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from laplace_debias.curvature.fits.checkpoint import Checkpoint, check_folder
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.inputs import mark_of
from laplace_debias.curvature.network.shadow import (
    check_no_autocast,
    checksum,
    fingerprint,
    unwrapped,
)
from laplace_debias.curvature.network.shards import place_of, refuse_same
from laplace_debias.laplace.anytime import Auto
from laplace_debias.laplace.file import likelihood_to_json
from laplace_debias.laplace.plan import available_memory, check_room, posterior_bytes
from laplace_debias.laplace.posterior import Fitted
from laplace_debias.laplace.schemes import (
    OF_FIRST_BATCHES,
    CrossFit,
    Expected,
    Full,
    Scheme,
    check_mode,
    expected_of_loader,
)
from laplace_debias.laplace.subject import Subject
from laplace_debias.system.checks import check_generator
from laplace_debias.system.ranks import current

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def scheme_of_mode(
    subject: Subject,
    loader: Batches,
    mode: str,
    num_data: SupportsIndex | None,
    generator: torch.Generator | None,
    resume: str | os.PathLike[str] | None,
    folds: int | None,
) -> tuple[Scheme, Expected]:
    """The way to fit that a mode names, with the data that it reads of a loader; and N."""
    check_mode(mode, folds)
    expected = expected_of_loader(loader, num_data, mode)
    if mode not in OF_FIRST_BATCHES:
        return Full(loader) if mode == "full" else Auto(loader), expected
    if resume is not None:
        _check_resumable(resume, subject.settings.fisher.kind, generator, loader)
    needed, of_batches = OF_FIRST_BATCHES[mode]
    stream = subject.stream(loader, generator)
    with stream.randomness:
        batches = list(itertools.islice(stream.source, needed))
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
    progress: bool = False,
) -> Fitted:
    """Fit a posterior's curvature."""
    kind, ranks = subject.settings.kind, current()
    check_generator(generator)
    if resume is not None:
        if not scheme.saves:
            raise ValueError(f'mode="{scheme.mode}" saves no state: leave out resume.')
        _check_resumable(resume, subject.settings.fisher.kind, generator, *scheme.read)
    scheme.check(kind)
    device = subject.first_parameter.device
    check_no_autocast(device)
    # torch 2.8 does not have the precision.
    if (
        device.type == "cuda"
        and getattr(torch.backends.cuda.matmul, "fp32_precision", None) == "tf32"
    ):
        raise RuntimeError(
            "Matrix products are rounded to TF32, and what they sum has no eigendecomposition to "
            "single precision: call torch.set_float32_matmul_precision('highest') before the fit."
        )
    if ranks.size > 1 and expected.is_told:
        # Each process's loader tells of its own examples.
        sizes = ranks.exchange(expected.num_data)
        expected = replace(expected, num_data=None if None in sizes else sum(sizes))
    bar = "fit" if progress else None
    with torch.inference_mode(False):
        # The labels' seed is drawn before the order of what is still to be read.
        fisher, streams = subject.settings.fisher.seeded(generator, ranks), {}
        for field, what in scheme.fields.items():
            streams[field] = subject.of_fit(getattr(scheme, field), generator, what, bar)
        stream = next(iter(streams.values()))
        subject, problem = subject.problem(stream, fisher)
        if ranks.size > 1:
            if subject.settings.fisher.kind == "mc":
                # It matters where examples are among those of all processes.
                for one in streams.values():
                    one.place = place_of(ranks, one)
            model, blocks = checksum(unwrapped(subject.model)), subject.known.block_names
            ranks.require_same(model=model, blocks=blocks)
            marks = [] if expected.is_shared else [mark_of(x, y) for x, y, *_ in stream.first]
            refuse_same(ranks.exchange(marks[0] if marks else None), "begins with the same batch")
        what = f"Nothing was fitted: the posterior of curvature={kind.name!r} takes"
        check_room(posterior_bytes(problem, kind), available_memory(problem.device), what)
        if resume is not None:
            identity = _identity_of(problem, subject, generator) | {
                "mode": mode,
                "num_data": expected.num_data,
                "folds": getattr(scheme, "folds", None),
            }
            checkpoint = Checkpoint(Path(resume), identity, problem.device, ranks)
            problem = replace(problem, checkpoint=checkpoint)
        scheme = replace(scheme, **streams)
        state = scheme.fit(kind, problem, partial(_finish, subject, expected, mode))
    if resume is not None:
        checkpoint.remove()
    return state


def _finish(subject: Subject, expected: Expected, mode: str, found: CurvatureFit) -> Fitted:
    """The state of a fit, of the curvature that was found."""
    seen, num_targets, num_data = found.totals, None, expected.num_data
    if num_data is None:
        num_data = int(seen.weight)
        if num_data != seen.weight:
            raise ValueError(
                f"The weights of the examples sum to {seen.weight:.10g}: pass num_data=, the "
                "number of training examples that they stand for."
            )
    elif expected.is_told and mode == "full" and num_data != seen.weight:
        raise ValueError(
            f"The loader tells of {num_data} training examples, but the fit saw "
            f"{seen.weight:.10g}: pass num_data=, the number of training examples. Nothing was "
            "fitted."
        )
    per_seen = num_data / seen.weight
    if type(subject.likelihood) is Gaussian and subject.settings.fisher.kind != "empirical":
        num_targets = seen.num_outputs * per_seen
    return Fitted.of(
        subject,
        found.curvature,
        num_data,
        seen.nll * per_seen,
        fingerprint(unwrapped(subject.model), subject.known.names),
        mode,
        num_targets,
    )


def _check_resumable(
    folder: str | os.PathLike[str],
    fisher: str,
    generator: torch.Generator | None,
    *data: Batches | None,
) -> None:
    """Require, before any work, that a fit can be gone on with: its order can be told again."""
    check_folder(Path(folder))
    seeded = "pass generator=torch.Generator().manual_seed(0), every time the same."
    if generator is None and fisher == "mc":
        raise ValueError(f'resume= with fisher="mc" needs the same labels again: {seeded}')
    for loader in data:
        if not isinstance(loader, DataLoader):
            continue
        found = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
        samplers = [sampler for sampler in found if isinstance(sampler, _RANDOM)]
        if samplers and (generator is None or any(s.generator is not None for s in samplers)):
            raise ValueError(
                "resume= needs the same batches again, and this loader shuffles by itself: leave "
                f"generator= out of the loader, and {seeded}"
            )


def _identity_of(
    problem: FitContext, subject: Subject, generator: torch.Generator | None
) -> dict[str, Any]:
    """The identity of a fit, which makes two the same, as plain data."""
    model, likelihood = unwrapped(subject.model), subject.likelihood
    try:
        of_likelihood: Any = likelihood_to_json(likelihood, own=True)
    except ValueError:
        of_likelihood = type(likelihood).__qualname__
    try:
        own = version("laplace-debias")
    except PackageNotFoundError:  # run from its source
        own = "unknown"
    state = b"" if generator is None else generator.get_state().numpy().tobytes()
    # Objects without a text of their own show their address.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(model))
    settings = {name: str(value) for name, value in vars(subject.settings).items()}
    kind = subject.settings.kind
    del settings["kind"]
    return {
        "model": hashlib.blake2b(structure.encode(), digest_size=8).hexdigest(),
        "parameters and buffers": fingerprint(model, ()),
        "likelihood": of_likelihood,
        "blocks": {block.name: list(block.shape) for block in problem.blocks},
        "curvature": kind.name,
        "rank": kind.rank,
        **settings,
        "generator": hashlib.blake2b(state, digest_size=8).hexdigest(),
        "backend": type(problem.backend).__name__,
        "device": problem.device.type,
        "dtype": str(problem.dtype),
        "number of processes": problem.ranks.size,
        # Sums and eigenvectors are rounded in another way by others.
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "version of laplace-debias": own,
        "version of torch": torch.__version__,
    }
