"""A fitted posterior on disk: one safetensors file with a header, tensors and a checksum."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS, Likelihood
from laplace_debias.curvature.network.batches import BatchHook
from laplace_debias.curvature.network.fingerprints import fingerprint
from laplace_debias.curvature.structures import CurvatureStructure, curvature_structure
from laplace_debias.curvature.structures.base import CurvatureBlock
from laplace_debias.laplace.curvature_config import CurvatureConfig
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.model_spec import ModelSpec
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.prior import Prior
from laplace_debias.laplace.state import FittedPosterior, checked_temperature, initial_state
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.files import read_sealed, write_sealed, written_atomically
from laplace_debias.system.ranks import current

FORMAT = "laplace-debias/5"
_FORMATS = ("laplace-debias/4", FORMAT)
_EARLIER = (
    "A posterior of an earlier version, or one in a folder, becomes such a file by Laplace.load "
    "and la.save(path) of version 0.2.0."
)
_OWN = "own"


@dataclass(frozen=True)
class Header:
    """The facts that a file says besides its tensors.

    The `nll` is summed over the N examples, in nats. The `rank` is the one asked for, a number or a
    share: data of lower rank give fewer directions. The `noise` of a regression are
    `FittedPosterior.num_targets` and 2, the power of 1/σ that the curvature goes with.
    """

    likelihood: dict[str, Any]
    curvature: str
    joint: bool
    sharing: str | dict[str, str]
    param_names: list[str]
    block_names: list[str]
    num_data: int
    nll: float
    rank: float | None
    others: dict[str, int]
    class_dim: int | None
    mode: str | None
    calls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    noise: dict[str, Any] | None = None
    temperature: float = 1.0
    link: dict[str, Any] | None = None
    thinned_at: list[float] | None = None

    @classmethod
    def of(cls, fitted: FittedPosterior, own_likelihood: bool) -> "Header":
        """The header of a fit; arguments and errors as `likelihood_to_json`."""
        config, sharing = fitted.config, fitted.config.sharing
        return cls(
            likelihood_to_json(fitted.likelihood, own_likelihood),
            config.structure.name,
            bool(config.joint),
            sharing if isinstance(sharing, str) else dict(sharing),
            fitted.parameters.names,
            fitted.parameters.block_names,
            fitted.posterior.num_data,
            fitted.nll,
            config.structure.rank,
            fitted.frozen_fingerprint,
            fitted.spec.class_dim,
            fitted.mode,
            dict(fitted.parameters.replay_modules),
            None if fitted.num_targets is None else {"num_targets": fitted.num_targets, "power": 2},
            fitted.posterior.temperature,
            None if fitted.link is None else asdict(fitted.link),
            None if fitted.thinned_at is None else list(fitted.thinned_at),
        )


def save(path: Path, fitted: FittedPosterior, own_likelihood: bool = False) -> None:
    """Write a posterior; an existing file is replaced only once the new one is complete.

    The same posterior gives the same bytes. All processes call it, and rank 0 writes.
    """
    ranks, posterior = current(), fitted.posterior
    told = asdict(Header.of(fitted, own_likelihood))
    for known in fields(Header):  # `noise`, `temperature` and `link` where they are no defaults
        if told[known.name] == known.default:
            del told[known.name]
    texts = {"format": FORMAT, "header": json.dumps(told, allow_nan=False)}
    if ranks.rank == 0:
        with written_atomically(path, make_folders=False) as temporary:
            write_sealed(temporary, texts, tensors_of(posterior, fitted.config.structure))
    ranks.exchange(None)


def tensors_of(posterior: GaussianPosterior, structure: CurvatureStructure) -> dict[str, Tensor]:
    """The tensors of a file; directions that are the axes are not in it."""
    tensors = {"prior_precision": posterior.prior_precision, "mean": posterior.mean}
    if posterior.prior_mean is not None:
        tensors["prior_mean"] = posterior.prior_mean
    for index, block in enumerate(posterior.curvature.blocks.values()):
        for part, values in structure.tensors(block).items():
            tensors[f"{index}.{part}"] = values
    return tensors


def load(
    path: Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    backend: str,
    fisher: FisherType,
    factor_dtype: torch.dtype,
    memory_bound: int | None,
    batch: BatchHook | None,
) -> FittedPosterior:
    """The fit that a file holds, as `Laplace.load` describes it."""
    header, tensors = read(path)
    # What an earlier version's file says of sharing without factors had no effect. That blocks are
    # joint says how the entries are ordered, in one block of all parameters too.
    structure = curvature_structure(header.curvature, header.rank)
    sharing = header.sharing if structure.has_factors else "expand"
    config = CurvatureConfig(
        structure=structure,
        fisher=fisher,
        params=header.param_names,
        backend=backend,
        factor_dtype=factor_dtype,
        joint=header.joint,
        sharing=sharing,
        memory_bound=memory_bound,
    )
    likelihood = likelihood_from_json(header.likelihood, likelihood)
    spec = ModelSpec.checked(model, likelihood, batch, header.class_dim)
    state = initial_state(spec, config, replay_modules=header.calls)
    parameters = state.parameters
    assert parameters is not None  # They are named.
    plain = spec.plain_model
    mean = parameters.flattened(plain)
    others = fingerprint(plain, parameters.names)
    if header.block_names != parameters.block_names:
        raise ValueError(
            f"The file's curvature blocks {reprlib.repr(header.block_names)} are not the "
            f"model's {reprlib.repr(parameters.block_names)}: it was saved for another model. "
            f"{_EARLIER}"
        )
    saved, differing = tensors["mean"], sorted(header.others.items() ^ others.items())
    if saved.numel() != mean.numel():
        raise ValueError(
            f"The file's posterior is over {saved.numel():,} parameters, but the model has "
            f"{mean.numel():,} of these names. Build the model with the layer sizes of the fit."
        )
    if saved.dtype != mean.dtype:
        raise ValueError(
            f"The file's posterior is of a model in {saved.dtype}, but the model is in "
            f"{mean.dtype}. Convert it: model.to({saved.dtype})."
        )
    wrong = f"{differing[0][0]} is not that" if differing else None
    if not torch.equal(saved.to(mean.device), mean):
        wrong = "parameters are not those"
    if wrong is not None:
        raise ValueError(
            f"The model's {wrong} of the fit: load the checkpoint that the posterior was fitted on."
        )
    # In another layout than a fit leaves, products add in another order.
    placed = {
        name: part.to(mean.device).mT.contiguous().mT if ".U" in name else part.to(mean.device)
        for name, part in tensors.items()
    }
    operators: dict[str, CurvatureBlock] = {}
    for index, name in enumerate(header.block_names):
        prefix = f"{index}."
        block_tensors = {
            key.removeprefix(prefix): tensor
            for key, tensor in placed.items()
            if key.startswith(prefix)
        }
        operators[name] = structure.from_tensors(block_tensors)
    prior = Prior.checked(placed["prior_precision"], placed.get("prior_mean", 0.0), mean.device)
    posterior = GaussianPosterior(
        mean=mean,
        curvature=BlockDiagonal(operators),
        num_data=header.num_data,
        prior=prior.fitting(len(parameters.block_names), parameters.size),
        order=None if parameters.order is None else parameters.order.to(mean.device),
        temperature=checked_temperature(float(header.temperature)),
    )
    # Earlier versions wrote another power for the empirical Fisher.
    noise = header.noise or {}
    num_targets = noise["num_targets"] if noise.get("power") == 2 else None
    return FittedPosterior(
        spec=spec,
        config=state.config,
        parameters=parameters,
        posterior=posterior,
        nll=float(header.nll),
        frozen_fingerprint=others,
        mode=header.mode,
        num_targets=num_targets,
        link=None if header.link is None else Link(**header.link),
        thinned_at=None if header.thinned_at is None else tuple(header.thinned_at),
    )


def read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """The header of a file, and its tensors, on the CPU."""
    try:
        texts, tensors = read_sealed(path)
        if texts.get("format") not in _FORMATS:
            raise ValueError(f"its format is {reprlib.repr(texts.get('format'))}")
        return Header(**json.loads(texts["header"])), tensors
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a folder: name a file. {_EARLIER}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"There is no file {path}: check the path.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or no posterior file of this version ({str(error)[:300]}): save "
            f"the posterior again. {_EARLIER}"
        ) from error
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror or error}): check its permissions."
        ) from error


def likelihood_to_json(likelihood: Likelihood, own: bool = False) -> dict[str, Any]:
    """A likelihood as plain data: its name and arguments, or of a user's class its import path."""
    if likelihood.name in LIKELIHOODS:
        return {"name": likelihood.name, **likelihood.options()}
    if not own:
        raise ValueError(
            f"A {type(likelihood).__name__} cannot be written to a file: only "
            f"{', '.join(map(repr, LIKELIHOODS))} can. To write the import path of a "
            "class of your own, which `Laplace.load(..., likelihood=)` must then be given an "
            "instance of, use `save(path, own_likelihood=True)`."
        )
    of_class = f"{type(likelihood).__module__}:{type(likelihood).__qualname__}"
    return {"name": _OWN, "class": of_class, "options": _options_of(likelihood)}


def likelihood_from_json(data: Mapping[str, Any], own: Likelihood | None = None) -> Likelihood:
    """The inverse of `likelihood_to_json`; no code is imported on the word of a file."""
    options = dict(data)
    name = options.pop("name")
    if name != _OWN:
        if own is None:
            return LIKELIHOODS[name].from_options(options)
        raise ValueError(
            f"The file has a likelihood of its own, {name!r}: leave out "
            f"likelihood={type(own).__name__}(...)."
        )
    # The module is not compared: a script's classes have another one where it is imported.
    of_class = options["class"].rpartition(":")[2]
    given = None if own is None else (type(own).__qualname__, _options_of(own))
    if own is not None and given is not None and given[0] == of_class:
        own_options = given[1]
        # An earlier version's file has no options of a class that inherits them.
        has_same = [own_options.get(key) == value for key, value in options["options"].items()]
        if all(has_same):
            return own
    raise ValueError(
        f"The posterior was fitted with the likelihood {options['class']!r} of options "
        f"{reprlib.repr(options['options'])}, which a file does not hold; likelihood= is {given}. "
        "Pass an instance of that class with the arguments of the fit, "
        f"Laplace.load(path, model, likelihood={of_class}(...))."
    )


def _options_of(likelihood: Likelihood) -> dict[str, Any]:
    """The `options` as a file holds them."""
    options = likelihood.options()
    try:
        return dict(json.loads(json.dumps(options, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The options of {type(likelihood).__name__} are {reprlib.repr(options)}, which is not "
            f"plain data ({error}): return a mapping of texts, finite numbers, lists and None."
        ) from error
