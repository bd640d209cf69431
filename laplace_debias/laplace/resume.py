"""What a fit must be so that another process can go on with it, and how it is told from others."""

import hashlib
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.fingerprint import fingerprint
from laplace_debias.laplace.files.fit_state import FitStates, check_folder
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.settings import FitSettings
from laplace_debias.system.ranks import Ranks

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_resumable(
    folder: str | os.PathLike[str] | None,
    ranks: Ranks,
    fisher: str,
    generator: torch.Generator | None,
    *data: Batches | None,
) -> None:
    """Require, before any work, that a fit can be gone on with.

    Args:
        folder: Where its state shall be; None for a fit that is not gone on with.
        ranks: The processes.
        fisher: What kind of Fisher it takes.
        generator: The fit's.
        data: What it reads.

    Raises:
        ValueError: In a process group; without a generator where something is drawn.
        OSError: If the folder cannot be written to.
    """
    if folder is None:
        return
    if ranks.size > 1:
        raise ValueError(
            f"resume= is for one process, and this is one of {ranks.size}: leave it out, or fit on "
            "one process alone, within `laplace_debias.alone()`."
        )
    check_folder(folder)
    if generator is not None:
        return
    seeded = "pass generator=torch.Generator().manual_seed(0), every time the same."
    if fisher == "mc":
        raise ValueError(f'resume= with fisher="mc" needs the same labels again: {seeded}')
    if any(_is_unseeded(one) for one in data):
        raise ValueError(
            f"resume= needs the same batches again, and this loader shuffles with no seed: {seeded}"
        )


def _is_unseeded(data: Batches | None) -> bool:
    if not isinstance(data, DataLoader):
        return False
    samplers = [data.sampler, getattr(data.batch_sampler, "sampler", None)]
    return any(isinstance(one, _RANDOM) and one.generator is None for one in samplers)


def states_of(
    folder: str | os.PathLike[str],
    problem: Problem,
    settings: FitSettings,
    likelihood: Likelihood,
    model: nn.Module,
    **of_data: Any,
) -> FitStates:
    """The states of one fit in a folder.

    Args:
        folder: The folder.
        problem: What is fitted, with its blocks.
        settings: Likewise.
        likelihood: The model's.
        model: The model, without wrappers.
        of_data: What is known of the data, as plain data.

    Raises:
        ValueError: If the folder holds the state of another fit, with what differs.
    """
    try:
        of_likelihood: Any = likelihood_to_json(likelihood, own=True)
    except ValueError:
        of_likelihood = type(likelihood).__qualname__
    # Objects without a text of their own show their address.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(model))
    fisher = problem.cotangents.fisher
    fit = {
        "model": hashlib.blake2b(structure.encode(), digest_size=8).hexdigest(),
        "parameters and buffers": fingerprint(model, ()),
        "blocks": {block.name: list(block.shape) for block in problem.blocks},
        "likelihood": of_likelihood,
        "curvature": settings.kind.name,
        "rank": settings.kind.rank,
        "fisher": [fisher.kind, fisher.mc_samples],
        "labels drawn (generator)": fisher.seed,
        "factor_dtype": str(settings.factor_dtype),
        "joint": settings.joint,
        "sharing": str(settings.sharing),
        "memory_bound": settings.memory_bound,
        "class_dim": settings.class_dim,
        "backend": problem.backend.__name__,
        "device": problem.device.type,
        "dtype": str(problem.dtype),
        **of_data,
        "version of laplace-debias": _version(),
        "version of torch": torch.__version__,
    }
    states = FitStates(Path(folder), fit)
    states.check()
    return states


def _version() -> str:
    try:
        return version("laplace-debias")
    except PackageNotFoundError:  # run from its source
        return "unknown"
