"""A fitted posterior on disk: one safetensors file with a header, tensors and a checksum."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import DENSE, WITH_FACTORS
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.losses.likelihoods.names import LIKELIHOODS
from laplace_debias.curvature.network.fingerprint import changed, fingerprint
from laplace_debias.curvature.network.wrappers import unwrapped
from laplace_debias.laplace.fitted import Fitted, Noise
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.laplace.subject import Subject
from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    LowRankPlusDiagonal,
)
from laplace_debias.system.atomic import check_target, written_atomically
from laplace_debias.system.ranks import current
from laplace_debias.system.sealed import read_sealed, write_sealed

FORMAT = "laplace-debias/5"
_FORMATS = ("laplace-debias/4", FORMAT)
_PARTS = ("U_G", "U_A", "U", "magnitudes")
_EARLIER = (
    "A posterior of an earlier version, or one in a folder, becomes such a file by Laplace.load "
    "and la.save(path) of version 0.2.0."
)
_OWN = "own"
_NAMES = {likelihood: name for name, likelihood in LIKELIHOODS.items()}


@dataclass(frozen=True)
class Header:
    """The facts that a file says besides its tensors.

    Attributes:
        likelihood: As `likelihood_to_json` gives it.
        curvature: The curvature's name.
        joint: Whether weight and bias make one block.
        sharing: `expand` or `reduce`, for all layers or by their paths.
        param_names: The Bayesian parameters.
        block_names: The curvature blocks.
        num_data: N.
        nll: Summed negative log-likelihood of the N examples, in nats.
        rank: How many directions a low-rank curvature is asked for. Data of lower rank give fewer.
        others: The `fingerprint` of what the model holds besides the Bayesian parameters.
        class_dim: Which dimension of the outputs has the classes; the last if None.
        mode: How the posterior was fitted, for `repr`.
        calls: Parameters that are measured at calls of modules, with the modules' paths.
        noise: Of a regression `Fitted.noise`; left out where there is none.
        temperature: T of the likelihood; left out where it is 1.
        link: Name and temperature of the link; left out where there is none.
    """

    likelihood: dict[str, Any]
    curvature: str
    joint: bool
    sharing: str | dict[str, str]
    param_names: list[str]
    block_names: list[str]
    num_data: int
    nll: float
    rank: int | None
    others: dict[str, int]
    class_dim: int | None
    mode: str | None
    calls: dict[str, list[str]] = field(default_factory=dict)
    noise: dict[str, Any] | None = None
    temperature: float = 1.0
    link: dict[str, Any] | None = None

    @classmethod
    def of(cls, fitted: Fitted, own_likelihood: bool) -> "Header":
        """The header of a fit; arguments and errors as `likelihood_to_json`."""
        settings, sharing = fitted.settings, fitted.settings.sharing
        return cls(
            likelihood_to_json(fitted.likelihood, own_likelihood),
            settings.kind.name,
            bool(settings.joint),
            sharing if isinstance(sharing, str) else dict(sharing),
            fitted.parameters.names,
            fitted.parameters.block_names,
            fitted.posterior.num_data,
            fitted.nll,
            settings.kind.rank,
            fitted.others,
            settings.class_dim,
            fitted.mode,
            {name: list(paths) for name, paths in fitted.parameters.calls.items()},
            None if fitted.noise is None else asdict(fitted.noise),
            fitted.posterior.temperature,
            None if fitted.subject.link is None else asdict(fitted.subject.link),
        )

    def as_json(self) -> str:
        """The text of a file; `noise`, `temperature`, `link` where they are not the defaults."""
        plain = asdict(self)
        for known in fields(self):
            if known.default is not MISSING and plain[known.name] == known.default:
                del plain[known.name]
        return json.dumps(plain, allow_nan=False)


def save(path: Path, fitted: Fitted, own_likelihood: bool = False) -> None:
    """Write a posterior; an existing file is replaced only once the new one is complete.

    The same posterior gives the same bytes. All processes call it, and rank 0 writes.

    Args:
        path: The file.
        fitted: The fit.
        own_likelihood: As `likelihood_to_json` takes it.

    Raises:
        ValueError: As `likelihood_to_json`, and if a number of the header is not finite.
        FileNotFoundError: If the folder does not exist.
        OSError: As `check_target`; if the disk is full or the file cannot be written.
    """
    ranks, posterior = current(), fitted.posterior
    texts = {"format": FORMAT, "header": Header.of(fitted, own_likelihood).as_json()}
    if ranks.rank == 0:
        check_target(path)
        with written_atomically(path, make_folders=False) as temporary:
            write_sealed(temporary, texts, tensors_of(posterior))
    ranks.exchange(None)


def tensors_of(posterior: GaussianPosterior) -> dict[str, Tensor]:
    """The tensors of a file; directions that are the axes are not in it."""
    tensors = {"prior_precision": posterior.prior_precision, "mean": posterior.mean}
    if posterior.prior_mean is not None:
        tensors["prior_mean"] = posterior.prior_mean
    for index, block in enumerate(posterior.curvature.blocks.values()):
        parts = {f"{index}.{part}": getattr(block, part, None) for part in _PARTS}
        tensors |= {name: part for name, part in parts.items() if part is not None}
    return tensors


@dataclass(frozen=True, eq=False)
class Saved:
    """A posterior as it was read.

    Attributes:
        header: What the file says besides the tensors.
        tensors: The tensors, on the CPU.
    """

    header: Header
    tensors: Mapping[str, Tensor]

    def choices(self) -> dict[str, Any]:
        """The arguments of `Laplace` that the posterior was fitted with."""
        header = self.header
        # Files of earlier versions may name what had no effect.
        return {
            "curvature": header.curvature,
            "params": header.param_names,
            "rank": header.rank,
            "joint": header.joint and header.curvature not in DENSE,
            "sharing": header.sharing if header.curvature in WITH_FACTORS else "expand",
            "class_dim": header.class_dim,
        }

    def check_parameters(self, model: nn.Module) -> None:
        """Require that a model has the file's parameters.

        Raises:
            ValueError: Otherwise: the file belongs to another model.
        """
        known = dict(model.named_parameters(remove_duplicate=False))
        if missing := [name for name in self.header.param_names if name not in known]:
            raise ValueError(
                f"The file's parameters {reprlib.repr(missing)} are not in the model: it was saved "
                "for another one."
            )

    def fitted(self, subject: Subject) -> Fitted:
        """The fit, of the model that it is the posterior of.

        Raises:
            ValueError: If the model is another one, or not as it was at the fit.
        """
        header, plain = self.header, unwrapped(subject.model)
        # It says how the entries are ordered, in one block of all parameters too.
        settings = replace(subject.settings, joint=header.joint)
        parameters = BayesianParameters.of(plain, header.param_names, settings, None, header.calls)
        posterior = self._posterior(parameters, plain)
        others = fingerprint(plain, parameters.names)
        if wrong := changed(header.others, others):
            raise ValueError(
                f"The model's {wrong[0]} is not that of the fit: load the checkpoint that the "
                "posterior was fitted on."
            )
        subject = replace(subject, settings=settings).changed(
            parameters=parameters,
            prior_precision=posterior.prior_precision,
            temperature=posterior.temperature,
            given_mean=0.0 if posterior.prior_mean is None else posterior.prior_mean,
            link=None if header.link is None else Link(**header.link),
        )
        noise = None if header.noise is None else Noise(**header.noise)
        return Fitted(subject, posterior, float(header.nll), others, header.mode, noise)

    def _posterior(self, parameters: BayesianParameters, model: nn.Module) -> GaussianPosterior:
        """Build the posterior on the model's device, of tensors that fit the model.

        Raises:
            ValueError: If they do not.
        """
        header, tensors, model_mean = self.header, self.tensors, parameters.flat(model)
        if header.block_names != parameters.block_names:
            raise ValueError(
                f"The file's curvature blocks {reprlib.repr(header.block_names)} are not the "
                f"model's {reprlib.repr(parameters.block_names)}: it was saved for another model. "
                f"{_EARLIER}"
            )
        if tensors["mean"].dtype != model_mean.dtype:
            raise ValueError(
                f"The file holds a posterior in {tensors['mean'].dtype}, the model is "
                f"{model_mean.dtype}: load it for the model in the dtype that it was fitted in."
            )
        if not torch.equal(tensors["mean"].to(model_mean.device), model_mean):
            raise ValueError(
                "The model's parameters are not those of the fit: load the checkpoint that the "
                "posterior was fitted on."
            )
        operators: dict[str, LinearOperator] = {}
        for index, name in enumerate(header.block_names):
            parts = {part: tensors.get(f"{index}.{part}") for part in _PARTS}
            here = {k: _placed(part, k, model_mean.device) for k, part in parts.items()}
            magnitudes = here["magnitudes"]
            assert magnitudes is not None
            if here["U"] is None:
                operators[name] = EigenKronecker(here["U_G"], here["U_A"], magnitudes)
            else:
                operators[name] = LowRankPlusDiagonal(here["U"], magnitudes, 0.0)
        prior_mean, order = tensors.get("prior_mean"), parameters.order
        return GaussianPosterior(
            model_mean,
            BlockDiagonal(operators),
            header.num_data,
            tensors["prior_precision"].to(model_mean.device),
            None if order is None else order.to(model_mean.device),
            None if prior_mean is None else prior_mean.to(model_mean.device),
            float(header.temperature),
        )


def load(path: Path) -> Saved:
    """Read a file.

    Raises:
        ValueError: If it is damaged, or not of this format.
        OSError: If it is not there, is a folder, or cannot be read.
    """
    try:
        texts, tensors = read_sealed(path)
        if texts.get("format") not in _FORMATS:
            raise ValueError(f"its format is {reprlib.repr(texts.get('format'))}")
        return Saved(Header(**json.loads(texts["header"])), tensors)
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
        told = f"{path} cannot be read ({error.strerror or error}): check its permissions."
        raise type(error)(told) from error


def _placed(part: Tensor | None, name: str, device: torch.device) -> Tensor | None:
    """A part of a block on a device, laid out in memory as a fit leaves it.

    Decompositions leave their vectors one after the other. In another layout, matrix products add
    in another order, and the last bit of a prediction changes.
    """
    if part is None or name == "magnitudes":
        return None if part is None else part.to(device)
    return part.to(device).mT.contiguous().mT


def likelihood_to_json(likelihood: Likelihood, own: bool = False) -> dict[str, Any]:
    """A likelihood as plain data: its name and arguments, or of a user's class its import path.

    Args:
        likelihood: The likelihood.
        own: Whether an import path will do.

    Raises:
        ValueError: For an instance of a class that is not this package's, unless `own`; with
            `own`, if its `options` are not plain data.
    """
    name = _NAMES.get(type(likelihood))
    if name is not None:
        return {"name": name, **_arguments_of(likelihood)}
    if not own:
        raise ValueError(
            f"A {type(likelihood).__name__} cannot be written to a file: only "
            f"{', '.join(map(repr, LIKELIHOODS))} can. To write the import path of a "
            "class of your own, which `Laplace.load(..., likelihood=)` must then be given an "
            "instance of, use `save(path, own_likelihood=True)`."
        )
    return {"name": _OWN, "class": _path_of(likelihood), "options": _options_of(likelihood)}


def _arguments_of(likelihood: Likelihood) -> dict[str, Any]:
    """The arguments that make a likelihood of this package again."""
    if isinstance(likelihood, Gaussian):
        # That it was never given steers `tune`.
        return {"sigma": None if likelihood.is_assumed else likelihood.sigma.tolist()}
    found: dict[str, Any] = {}
    if isinstance(likelihood, Categorical):
        found = {"class_weights": likelihood.class_weights}
        found |= {"label_smoothing": likelihood.label_smoothing or None}
    elif isinstance(likelihood, MultiLabel):
        found = {"label_weights": likelihood.label_weights}
        found |= {"positive_weights": likelihood.positive_weights}
    elif isinstance(likelihood, Bernoulli) and likelihood.positive_weight is not None:
        found = {"positive_weight": likelihood.positive_weight.item()}
    if isinstance(likelihood, (Categorical, MultiLabel)):
        found = {"ignore_index": likelihood.ignore_index, **found}
    given = {name: value for name, value in found.items() if value is not None}
    return {n: v.tolist() if isinstance(v, Tensor) else v for n, v in given.items()}


def likelihood_from_json(data: Mapping[str, Any], own: Likelihood | None = None) -> Likelihood:
    """The inverse of `likelihood_to_json`; no code is imported on the word of a file.

    Args:
        data: What it returned.
        own: The likelihood that the file names, if it is of a user's class.

    Raises:
        ValueError: If one is given where the file has its own, none is where the file names a
            user's, or another one.
    """
    options = dict(data)
    name = options.pop("name")
    if name != _OWN:
        if own is None:
            return LIKELIHOODS[name](**options)
        raise ValueError(
            f"The file has a likelihood of its own, {name!r}: leave out "
            f"likelihood={type(own).__name__}(...)."
        )
    module, _, of_class = options["class"].rpartition(":")
    given = None
    if own is not None:
        own_module, _, own_class = _path_of(own).rpartition(":")
        given = own_module, own_class, _options_of(own)
        # A script's classes have another module where the script is imported.
        is_script = "__main__" in (module, own_module)
        if given == (own_module if is_script else module, of_class, options["options"]):
            return own
    raise ValueError(
        f"The posterior was fitted with the likelihood {options['class']!r} of options "
        f"{reprlib.repr(options['options'])}, which a file does not hold; likelihood= is {given}. "
        "Pass an instance of that class with the arguments of the fit, "
        f"Laplace.load(path, model, likelihood={of_class}(...))."
    )


def _path_of(likelihood: Likelihood) -> str:
    return f"{type(likelihood).__module__}:{type(likelihood).__qualname__}"


def _options_of(likelihood: Likelihood) -> dict[str, Any]:
    """The `options` as a file holds them.

    Raises:
        ValueError: If they are not plain data.
    """
    options = likelihood.options()
    try:
        plain = json.loads(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The options of {type(likelihood).__name__} are {reprlib.repr(options)}, which is not "
            f"plain data ({error}): return a mapping of texts, finite numbers, lists and None."
        ) from error
    if not isinstance(plain, dict):
        raise ValueError(f"The options of {type(likelihood).__name__} must be a mapping.")
    return plain
