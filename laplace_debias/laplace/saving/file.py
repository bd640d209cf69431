"""A fitted posterior on disk: one safetensors file with a header, tensors and a checksum."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FactorScales
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.likelihoods import LIKELIHOODS, Likelihood
from laplace_debias.curvature.network.adapters import unused_prefixes
from laplace_debias.curvature.network.unwrapping import plain_names
from laplace_debias.curvature.structures import CurvatureStructure, curvature_structure
from laplace_debias.curvature.structures.base import CurvatureBlock
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.laplace.state.fitted import FittedPosterior, checked_setup, checked_temperature
from laplace_debias.laplace.state.fitted_model import FittedModel
from laplace_debias.laplace.state.model_spec import ModelSpec
from laplace_debias.laplace.state.parameter_blocks import ParameterBlocks
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.laplace.state.prior import Prior
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.files import read_sealed, write_sealed, written_atomically
from laplace_debias.system.ranks import process_group

FORMAT = "laplace-debias/5"
_FORMATS = ("laplace-debias/4", FORMAT)
_EARLIER = (
    "To convert a posterior that is in a folder, or was saved by an earlier version, load it with "
    "version 0.2.0 (Laplace.load), and save it to a file there (la.save)."
)
_USER_CLASS = "own"
_INPUTS = "inputs"
# Prefix of the tensor names that hold a prior's information.
_PRIOR = "prior."


@dataclass(frozen=True)
class Header:
    """The contents of a file apart from the tensors, with the JSON keys as field names.

    `nll` is the negative log-likelihood summed over the N examples, in nats. `rank` is the
    requested rank, a number or a fraction; there are fewer directions if the data has a lower rank.
    `others` is the fingerprint of the tensors that are not Bayesian. `noise`, for a regression,
    contains `FittedPosterior.num_targets` and the number 2, the power of 1/σ to which the curvature
    is proportional. `inducing` is the requested number of inputs, or `"inputs"` if the user passed
    the inputs that are in the file. With `independent_outputs`, the file contains the tensors of
    one block per output. Earlier versions did not save `fisher` and `mc_samples`.
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
    inducing: int | str | None = None
    prior_weight: float | None = None
    independent_outputs: bool = False
    fisher: str = "exact"
    mc_samples: int = 1

    @classmethod
    def from_fit(cls, fitted: FittedPosterior, own_likelihood: bool) -> "Header":
        """Build the header of a fit; for `own_likelihood`, see `likelihood_to_json`."""
        config = fitted.config
        parameters = fitted.parameters
        information = fitted.prior.information
        noise = None
        if fitted.num_targets is not None:
            noise = {"num_targets": fitted.num_targets, "power": 2}
        inducing = config.structure.inducing_mark
        if isinstance(inducing, str):
            inducing = _INPUTS
        return cls(
            likelihood=likelihood_to_json(fitted.likelihood, own_likelihood),
            curvature=config.structure.name,
            joint=bool(config.joint),
            sharing=config.sharing if isinstance(config.sharing, str) else dict(config.sharing),
            param_names=parameters.names,
            block_names=parameters.block_names,
            num_data=fitted.posterior.num_data,
            nll=fitted.nll,
            rank=config.structure.rank,
            others=fitted.fitted_model.frozen_fingerprint,
            class_dim=fitted.spec.class_dim,
            mode=fitted.mode,
            calls=dict(parameters.replay_modules),
            noise=noise,
            temperature=fitted.posterior.temperature,
            link=None if fitted.link is None else fitted.link.options(),
            thinned_at=None if fitted.thinned_at is None else list(fitted.thinned_at),
            inducing=inducing,
            prior_weight=None if information is None else float(information.weight),
            independent_outputs=config.structure.has_independent_outputs,
            fisher=config.fisher.kind,
            mc_samples=config.fisher.mc_samples,
        )

    def to_json(self) -> str:
        """Return the header as JSON; fields with their default value are omitted."""
        values = asdict(self)
        for header_field in fields(self):
            if values[header_field.name] == header_field.default:
                del values[header_field.name]
        return json.dumps(values, allow_nan=False)


def save(path: Path, fitted: FittedPosterior, own_likelihood: bool = False) -> None:
    """Write a posterior to a file, and replace an existing file only when the new one is complete.

    Equal posteriors give equal bytes. All processes must call this function, but only rank 0
    writes.
    """
    ranks = process_group()
    header = Header.from_fit(fitted, own_likelihood).to_json()
    if ranks.rank == 0:
        tensors = tensors_of(fitted.posterior, fitted.config.structure)
        with written_atomically(path, make_folders=False) as temporary:
            write_sealed(temporary, {"format": FORMAT, "header": header}, tensors)
    ranks.exchange(None)


def tensors_of(posterior: GaussianPosterior, structure: CurvatureStructure) -> dict[str, Tensor]:
    """Collect the tensors to write; directions that are the coordinate axes are left out."""
    tensors = {"prior_precision": posterior.prior_precision, "mean": posterior.mean}
    if posterior.prior_mean is not None:
        tensors["prior_mean"] = posterior.prior_mean
    curvatures = {"": tensors_by_block(structure, posterior.curvature, posterior.factor_scales)}
    information = posterior.prior.information
    if information is not None:
        curvatures[_PRIOR] = tensors_by_block(
            structure, information.curvature, information.factor_scales
        )
    for prefix, by_block in curvatures.items():
        for index, block_tensors in enumerate(by_block.values()):
            for key, tensor in block_tensors.items():
                tensors[f"{prefix}{index}.{key}"] = tensor
    return tensors


def tensors_by_block(
    structure: CurvatureStructure,
    curvature: BlockDiagonal[CurvatureBlock],
    factor_scales: Mapping[str, FactorScales],
) -> dict[str, dict[str, Tensor]]:
    """Collect the tensors of each block, including any known scales of its factors."""
    by_block: dict[str, dict[str, Tensor]] = {}
    for name, block in curvature.blocks.items():
        by_block[name] = dict(structure.tensors(block))
        if name in factor_scales:
            scales = factor_scales[name]
            by_block[name]["trace_A"] = scales.trace_A
            if scales.share_A != 1:
                by_block[name]["share_A"] = torch.tensor(scales.share_A, dtype=torch.float64)
    return by_block


def load(
    path: Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    backend: str,
    fisher: str | None,
    factor_dtype: torch.dtype,
    mc_samples: int | None,
    memory_bound: int | None,
    batch: BatchHook | None,
) -> FittedPosterior:
    """Read the fit that a file contains; see `Laplace.load`."""
    header, tensors = read(path)
    inducing = tensors["0.inputs"] if header.inducing == _INPUTS else header.inducing
    structure = curvature_structure(
        header.curvature, header.rank, inducing, header.independent_outputs
    )
    config = CurvatureConfig(
        structure=structure,
        fisher=_fisher_of_load(header, fisher, mc_samples),
        params=header.param_names,
        backend=backend,
        factor_dtype=factor_dtype,
        # `joint` also determines the order of the entries if all parameters form a single block.
        joint=header.joint,
        # For a curvature without factors, earlier versions also wrote `sharing`, which has no
        # effect.
        sharing=header.sharing if structure.has_factors else "expand",
        memory_bound=memory_bound,
    )
    likelihood = likelihood_from_json(header.likelihood, likelihood)
    spec = ModelSpec.checked(model, likelihood, batch, header.class_dim)
    _check_names(spec, header.param_names)
    setup = checked_setup(spec, config, replay_modules=header.calls)
    parameters = setup.parameters
    assert parameters is not None  # The file contains their names.
    _check_same_blocks(header.block_names, parameters.block_names)
    mean = parameters.flattened(spec.plain_model)
    fitted_model = FittedModel.record(spec, parameters, is_verified=False)
    _check_same_parameters(
        tensors["mean"],
        mean,
        _saved_fingerprint(header, spec.plain_model),
        fitted_model.frozen_fingerprint,
    )
    link = None
    if header.link is not None:
        link = Link(**header.link)
    thinned_at = None
    if header.thinned_at is not None:
        thinned_at = tuple(header.thinned_at)
    return FittedPosterior(
        fitted_model=fitted_model,
        config=setup.config,
        selected=parameters,
        posterior=_restore_posterior(header, tensors, config, spec, parameters, mean),
        nll=float(header.nll),
        mode=header.mode,
        num_targets=_num_targets(header),
        link=link,
        thinned_at=thinned_at,
    )


def _restore_posterior(
    header: Header,
    tensors: Mapping[str, Tensor],
    config: CurvatureConfig,
    spec: ModelSpec,
    parameters: ParameterBlocks,
    mean: Tensor,
) -> GaussianPosterior:
    """Rebuild the prior and the curvature from a file's tensors, on the device of the mean."""
    tensors = _as_after_fit(tensors, mean.device)
    network = spec.network(parameters.names)
    prior = Prior.checked(tensors["prior_precision"], tensors.get("prior_mean", 0.0), mean.device)
    if header.prior_weight is not None:
        prior_curvature, prior_scales = _restore_curvature(
            _split_by_block(tensors, _PRIOR), config, parameters, network
        )
        information = Information(prior_curvature, float(header.prior_weight), prior_scales)
        prior = replace(prior, information=information)
    curvature, factor_scales = _restore_curvature(
        _split_by_block(tensors, ""), config, parameters, network
    )
    order = parameters.order
    return GaussianPosterior(
        mean=mean,
        curvature=curvature,
        num_data=header.num_data,
        prior=prior.for_parameters(parameters),
        order=None if order is None else order.to(mean.device),
        temperature=checked_temperature(float(header.temperature)),
        layout=parameters.layout(spec.plain_model),
        factor_scales=factor_scales,
    )


def _saved_fingerprint(header: Header, model: nn.Module) -> dict[str, int]:
    """Return the fingerprint of the tensors that were not Bayesian when the file was saved."""
    # Earlier versions also recorded tensors of PEFT that the outputs do not depend on.
    unused = unused_prefixes(model)
    fingerprint = {}
    for name, number in header.others.items():
        if not f"{name}.".startswith(unused):
            fingerprint[name] = number
    return fingerprint


def _num_targets(header: Header) -> float | None:
    """Return the number of target values of a regression, or None if its noise cannot be scaled."""
    # Earlier versions wrote a different power for the empirical Fisher.
    if header.noise is None or header.noise.get("power") != 2:
        return None
    return header.noise["num_targets"]


def _fisher_of_load(header: Header, fisher: str | None, mc_samples: int | None) -> FisherType:
    """Return the type of Fisher matrix that the user chose, or else the type of the saved fit."""
    if fisher is None:
        fisher = header.fisher
        mc_samples = header.mc_samples if mc_samples is None else mc_samples
    return FisherType(fisher, 1 if mc_samples is None else mc_samples)


def _as_after_fit(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device, and give eigenvectors the memory layout they have after a fit.

    In a different layout, products would be summed in a different order.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(device)
        converted[name] = tensor.mT.contiguous().mT if ".U" in name else tensor
    return converted


def _split_by_block(tensors: Mapping[str, Tensor], prefix: str) -> list[dict[str, Tensor]]:
    """Collect the tensors of each block, whose names are `{prefix}{index of the block}.{key}`."""
    by_index: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and index.isdecimal():
            by_index.setdefault(int(index), {})[key] = tensor
    return [by_index[index] for index in sorted(by_index)]


def _restore_curvature(
    block_tensors: Sequence[Mapping[str, Tensor]],
    config: CurvatureConfig,
    parameters: ParameterBlocks,
    network: nn.Module,
) -> tuple[BlockDiagonal[CurvatureBlock], dict[str, FactorScales]]:
    """Rebuild the blocks, and any known scales of their factors, from each block's tensors.

    This is the inverse of `tensors_by_block`.
    """
    blocks = config.structure.restore_all(
        block_tensors, parameters.block_names, network, parameters.blocks, config.memory_bound
    )
    factor_scales: dict[str, FactorScales] = {}
    for name, tensors in zip(blocks, block_tensors, strict=True):
        if "trace_A" in tensors:
            share_A = float(tensors.get("share_A", 1.0))
            factor_scales[name] = FactorScales(tensors["trace_A"], share_A)
    return BlockDiagonal(blocks), factor_scales


def _check_same_blocks(saved_names: Sequence[str], names: Sequence[str]) -> None:
    """Require that the model and the file have the same curvature blocks in the same order."""
    if saved_names != names:
        raise ValueError(
            f"The file has the curvature blocks {reprlib.repr(saved_names)}, but the "
            f"model has {reprlib.repr(names)}, so the file was saved for a "
            f"different model. Pass the model that it was saved for. {_EARLIER}"
        )


def _check_names(spec: ModelSpec, names: Sequence[str]) -> None:
    """Require that the model has all parameters that the file names, and that none is frozen."""
    parameters = dict(spec.plain_model.named_parameters())
    # A shared parameter may have been saved under one of its aliases.
    names = plain_names(spec.model, names)
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"The posterior in the file is over the parameters {reprlib.repr(missing)}, but the "
            f"model does not have them. Its parameters are {reprlib.repr(list(parameters))}. Pass "
            "the model that the posterior was fitted to, with the same names of its layers, "
            "without another module around it."
        )
    frozen = [name for name in names if not parameters[name].requires_grad]
    if frozen:
        raise ValueError(
            f"The posterior in the file is over the parameters {reprlib.repr(frozen)}, but they "
            "are frozen in the model. Unfreeze them with requires_grad_(True)."
        )


def _check_same_parameters(
    saved_mean: Tensor,
    mean: Tensor,
    saved_fingerprint: Mapping[str, int],
    frozen_fingerprint: Mapping[str, int],
) -> None:
    """Require that the model has the parameter values at which the posterior was fitted."""
    if saved_mean.numel() != mean.numel():
        raise ValueError(
            f"The posterior in the file has {saved_mean.numel():,} parameters, but the "
            f"corresponding parameters of the model have {mean.numel():,} entries. "
            "Build the model with the layer sizes that it had when the posterior was "
            "fitted."
        )
    if saved_mean.dtype != mean.dtype:
        raise ValueError(
            f"The file contains a posterior in {saved_mean.dtype}, but the model is in "
            f"{mean.dtype}. Convert the model with model.to({saved_mean.dtype})."
        )
    differing = sorted(saved_fingerprint.items() ^ frozen_fingerprint.items())
    if not torch.equal(saved_mean.to(mean.device), mean):
        difference = "its parameters differ"
    elif differing:
        difference = f"{differing[0][0]} differs"
    else:
        return
    raise ValueError(
        f"The model has changed since the fit: {difference}. Load the checkpoint that the "
        "posterior was fitted on."
    )


def read(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Read the header and the tensors of a file into CPU memory."""
    try:
        texts, tensors = read_sealed(path)
        if texts.get("format") not in _FORMATS:
            raise ValueError(f"its format is {reprlib.repr(texts.get('format'))}")
        return Header(**json.loads(texts["header"])), tensors
    except IsADirectoryError as error:
        raise IsADirectoryError(
            f"{path} is a folder. Pass the path of a file. {_EARLIER}"
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"The file {path} does not exist. Check the path.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or is not a posterior file of this version "
            f"({str(error)[:300]}). Save the posterior again. {_EARLIER}"
        ) from error
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror or error}). Check its permissions."
        ) from error


def likelihood_to_json(likelihood: Likelihood, may_be_own: bool = False) -> dict[str, Any]:
    """Describe a likelihood by its name and options, or a user's class by its import path.

    Args:
        likelihood: The likelihood.
        may_be_own: Whether a user's class is allowed.
    """
    if likelihood.name in LIKELIHOODS:
        return {"name": likelihood.name, **likelihood.options()}
    if not may_be_own:
        raise ValueError(
            f"A {type(likelihood).__name__} cannot be written to a file. Only "
            f"{', '.join(map(repr, LIKELIHOODS))} can. To save the import path of your own class, "
            "use `save(path, own_likelihood=True)`, and pass an instance of the class to "
            "`Laplace.load(..., likelihood=)`."
        )
    class_path = f"{type(likelihood).__module__}:{type(likelihood).__qualname__}"
    return {"name": _USER_CLASS, "class": class_path, "options": _json_options(likelihood)}


def likelihood_from_json(
    data: Mapping[str, Any], user_likelihood: Likelihood | None = None
) -> Likelihood:
    """Build the likelihood that `likelihood_to_json` describes, without importing code.

    Args:
        data: The description.
        user_likelihood: An instance of the user's class, if the description names one.
    """
    options = dict(data)
    name = options.pop("name")
    if name != _USER_CLASS:
        if user_likelihood is None:
            return LIKELIHOODS[name].from_options(options)
        raise ValueError(
            f"The file already contains the likelihood {name!r}. Remove "
            f"`likelihood={type(user_likelihood).__name__}(...)`."
        )
    # Only the class name is compared, because a script's classes have another module name if the
    # script is imported.
    class_name = options["class"].rpartition(":")[2]
    description = None
    if user_likelihood is not None:
        user_options = _json_options(user_likelihood)
        description = type(user_likelihood).__qualname__, user_options
        has_same_class = type(user_likelihood).__qualname__ == class_name
        if has_same_class and user_options == options["options"]:
            return user_likelihood
    raise ValueError(
        f"The posterior was fitted with the likelihood {options['class']!r} and the "
        f"options {reprlib.repr(options['options'])}. The file does not contain "
        f"the likelihood itself, and `likelihood=` is {description}. Pass an "
        "instance of that class created with the same arguments as for the fit: "
        f"Laplace.load(path, model, likelihood={class_name}(...))."
    )


def _json_options(likelihood: Likelihood) -> dict[str, Any]:
    """Return the `options` of a likelihood as they are stored in a file."""
    options = likelihood.options()
    try:
        return dict(json.loads(json.dumps(options, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The options of {type(likelihood).__name__} are {reprlib.repr(options)}, "
            f"which cannot be saved ({error}). Its method `options()` must return a "
            "dict whose values are strings, finite numbers, lists or None."
        ) from error
