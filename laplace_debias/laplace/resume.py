"""What a fit or a tuning must be to be gone on with, and how it is told from others."""

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
from laplace_debias.curvature.network.fingerprint import fingerprint, sum_of_bits
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.files.fit_state import FitStates, check_folder
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.files.posterior_file import tensors_of_fit
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.settings import FitSettings
from laplace_debias.system.ranks import Ranks

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_resumable(
    folder: str | os.PathLike[str] | None,
    fisher: str,
    generator: torch.Generator | None,
    *data: Batches | None,
) -> None:
    """Require, before any work, that a fit or a tuning can be gone on with.

    Args:
        folder: Where its state shall be; None for a fit that is not gone on with.
        fisher: What kind of Fisher it takes.
        generator: The fit's.
        data: What it reads.

    Raises:
        ValueError: Without a generator where something is drawn.
        OSError: If the folder cannot be written to.
    """
    if folder is None:
        return
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
    fisher = problem.cotangents.fisher
    fit = {
        **_of_model(model, likelihood),
        "blocks": {block.name: list(block.shape) for block in problem.blocks},
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
        **_versions(),
    }
    states = FitStates(Path(folder), fit, problem.ranks.rank, problem.ranks.size)
    states.check()
    return states


def states_of_tuning(
    folder: str | os.PathLike[str], fitted: Fitted, ranks: Ranks, **asked: Any
) -> FitStates:
    """The states of one search for a prior precision in a folder.

    Args:
        folder: The folder.
        fitted: What is tuned.
        ranks: The processes. The order of all examples, by which two passes are compared, depends
            on their number.
        asked: What is looked for, as plain data.

    Raises:
        ValueError: If the folder holds the state of another one, with what differs.
    """
    posterior, settings = fitted.posterior, fitted.settings
    tuning = {
        **_of_model(unwrapped(fitted.model), fitted.likelihood),
        "curvature": settings.kind.name,
        "posterior": {
            name: sum_of_bits(value) for name, value in tensors_of_fit(posterior).items()
        },
        "num_data": posterior.num_data,
        "temperature": posterior.temperature,
        "loss of the fit": fitted.nll.hex(),
        "memory_bound": settings.memory_bound,
        "class_dim": settings.class_dim,
        "device": posterior.mean.device.type,
        **asked,
        "number of processes": ranks.size,
        **_versions(),
    }
    states = FitStates(Path(folder), tuning, ranks.rank, ranks.size, "tuning")
    states.check()
    return states


def _of_model(model: nn.Module, likelihood: Likelihood) -> dict[str, Any]:
    try:
        of_likelihood: Any = likelihood_to_json(likelihood, own=True)
    except ValueError:
        of_likelihood = type(likelihood).__qualname__
    # Objects without a text of their own show their address.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(model))
    return {
        "model": hashlib.blake2b(structure.encode(), digest_size=8).hexdigest(),
        "parameters and buffers": fingerprint(model, ()),
        "likelihood": of_likelihood,
    }


def _versions() -> dict[str, str]:
    try:
        own = version("laplace-debias")
    except PackageNotFoundError:  # run from its source
        own = "unknown"
    return {"version of laplace-debias": own, "version of torch": torch.__version__}
