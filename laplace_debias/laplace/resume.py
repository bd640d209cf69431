"""Checks of a fit that is gone on with, and how it is told from others."""

import hashlib
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_debias.curvature.fits.checkpoint import check_folder
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.curvature.network.shadow import unwrapped
from laplace_debias.laplace.file import likelihood_to_json
from laplace_debias.laplace.subject import Subject

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_resumable(
    folder: str | os.PathLike[str] | None,
    fisher: str,
    generator: torch.Generator | None,
    *data: Batches | None,
) -> None:
    """Require, before any work, that a fit can be gone on with: its order can be told again.

    Raises:
        ValueError: Without a generator where something is drawn, or where a loader draws from
            another one.
        OSError: If the folder cannot be written to.
    """
    if folder is None:
        return
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


def identity_of(
    problem: Problem, subject: Subject, generator: torch.Generator | None, **of_data: Any
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
        "backend": type(problem.stream).__name__,
        "device": problem.device.type,
        "dtype": str(problem.dtype),
        **of_data,
        "number of processes": problem.ranks.size,
        # Sums and eigenvectors are rounded in another way by others.
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "version of laplace-debias": own,
        "version of torch": torch.__version__,
    }
