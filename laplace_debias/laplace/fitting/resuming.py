"""Checks that a fit can be resumed, and that a checkpoint was written by the same fit."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.checkpoint import check_folder
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.fingerprints import digest_of, digests
from laplace_debias.laplace.fitting.prepared import PreparedFit
from laplace_debias.laplace.saving.file import likelihood_to_json, tensors_by_block
from laplace_debias.system.version import __version__

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_resumable(
    folder: Path,
    fisher: FisherType,
    generator: torch.Generator | None,
    sources: Sequence[Batches],
) -> None:
    """Require that a repeated fit reads the same batches in the same order."""
    check_folder(folder)
    seed_advice = "pass the same generator=torch.Generator().manual_seed(0) every time"
    if generator is None and fisher.is_random:
        labels_or_signs = "labels" if fisher.kind == "mc" else "signs"
        raise ValueError(
            f'With `fisher="{fisher.kind}"`, a resumed fit must draw the same random '
            f"{labels_or_signs} as the interrupted fit. To draw the same "
            f"{labels_or_signs}, {seed_advice}."
        )
    for source in sources:
        random_samplers = random_samplers_of(source)
        has_own_generator = any(s.generator is not None for s in random_samplers)
        if random_samplers and (generator is None or has_own_generator):
            raise ValueError(
                "`resume=` needs the same batches again, but this loader shuffles with its own "
                f"generator. Remove `generator=` from the loader, and {seed_advice}."
            )


def random_samplers_of(data: Batches) -> list[Any]:
    """Return those samplers of a `DataLoader` that draw a random order."""
    if not isinstance(data, DataLoader):
        return []
    samplers = [data.sampler, getattr(data.batch_sampler, "sampler", None)]
    return [sampler for sampler in samplers if isinstance(sampler, _RANDOM_SAMPLERS)]


def fit_identity(
    prepared: PreparedFit,
    generator: torch.Generator | None,
    num_folds: int | None,
    information: Information | None,
) -> dict[str, Any]:
    """Collect everything, apart from the data, on which the sums of a fit depend.

    Args:
        prepared: The fit.
        generator: The generator that was passed to the fit.
        num_folds: The number of folds of cross-fitting; None for other fits.
        information: The information of earlier data, to which the fit adds new data.
    """
    spec = prepared.setup.spec
    config = prepared.config
    context = prepared.context
    state = b"" if generator is None else generator.get_state().numpy().tobytes()
    # The default `__repr__` of an object contains its memory address, which differs in every
    # process.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(spec.plain_model))
    return {
        "model": hashlib.blake2b(structure.encode(), digest_size=8).hexdigest(),
        "parameters and buffers": digests(spec.plain_model),
        "likelihood": likelihood_identity(spec.likelihood),
        "blocks": {block.name: list(block.shape) for block in context.blocks},
        "curvature": config.structure.name,
        "rank": config.structure.rank,
        "inducing": config.structure.inducing_mark,
        "independent outputs": config.structure.has_independent_outputs,
        "fisher": str(config.fisher),
        "factor_dtype": str(config.factor_dtype),
        "joint": str(config.joint),
        "sharing": str(config.sharing),
        "memory_bound": str(config.memory_bound),
        "class_dim": str(spec.class_dim),
        "generator": hashlib.blake2b(state, digest_size=8).hexdigest(),
        "backend": type(context.backend).__name__,
        "device": context.device.type,
        "dtype": str(context.dtype),
        "number of processes": context.ranks.size,
        # The rounding of sums and eigenvectors depends on the number of threads and the processor,
        # so a resumed fit needs the same values.
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "version of laplace-debias": __version__,
        "version of torch": torch.__version__,
        "mode": prepared.mode,
        "num_data": prepared.size.num_data,
        "folds": num_folds,
        "earlier data": _earlier_data_identity(prepared, information),
    }


def _earlier_data_identity(
    prepared: PreparedFit, information: Information | None
) -> dict[str, Any] | None:
    """Describe the earlier data to which a fit adds new data, or return None if there is none."""
    if information is None:
        return None
    structure = prepared.config.structure
    identity: dict[str, Any] = {"number of examples": information.weight}
    by_block = tensors_by_block(structure, information.curvature, information.factor_scales)
    for name, tensors in by_block.items():
        identity[name] = {key: digest_of([tensor]) for key, tensor in tensors.items()}
    return identity


def likelihood_identity(likelihood: Likelihood) -> Any:
    """Return plain data that identifies a likelihood and its options."""
    try:
        return likelihood_to_json(likelihood, may_be_own=True)
    except ValueError:
        return type(likelihood).__qualname__
