"""A fitted posterior on disk: one safetensors file, no pickle.

Format 4 has a checksum over the whole file (see `sealed`): a file that differs in any byte from
what was saved is refused. Files of format 3, which has none, are read with all other checks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.fits.kinds import CURVATURES, DENSE
from laplace_debias.curvature.layers.blocks import SHARINGS, Block
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.laplace.files.orthonormality import check_orthonormal
from laplace_debias.laplace.files.plain_data import (
    FINITE,
    FLAG,
    MAPPING,
    NOTHING,
    POSITIVE,
    TEXT,
    check_fields,
    either,
    list_of,
    mapping_to,
    one_of,
    parsed_json,
    shown,
    whole_number,
)
from laplace_debias.laplace.files.sealed import (
    DamagedFileError,
    UnknownFormatError,
    read_sealed,
    write_sealed,
)
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.laplace.parameters import BayesianParameters
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    LowRankPlusDiagonal,
)
from laplace_debias.system.atomic import check_target, written_atomically

FORMAT = "laplace-debias/4"
_HAS_CHECKSUM = {FORMAT: True, "laplace-debias/3": False}
_PARTS = ("U_G", "U_A", "U", "magnitudes")


@dataclass(frozen=True)
class Header:
    """What a file says besides its tensors.

    Attributes:
        likelihood: As `likelihood_to_json` gives it.
        curvature: The curvature's name.
        joint: Whether weight and bias make one block.
        sharing: `expand` or `reduce`, for all layers or by their paths.
        param_names: The Bayesian parameters.
        block_names: The curvature blocks.
        num_data: N.
        nll: Summed negative log-likelihood of the N examples, in nats.
        rank: How many directions a low-rank curvature is asked for, as `Laplace` takes it. Data of
            lower rank give fewer.
        others: The `fingerprint` of what the model holds besides the Bayesian parameters.
        class_dim: Which dimension of the outputs has the classes; the last if None, as in format 3.
        mode: How the posterior was fitted, for `repr`; None if it is not known, as in format 3.
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
    class_dim: int | None = None
    mode: str | None = None


_INT64 = whole_number(-(2**63), 2**63 - 1)
_FIELDS = {
    "likelihood": MAPPING,
    "curvature": one_of(CURVATURES),
    "joint": FLAG,
    "sharing": either(one_of(SHARINGS), mapping_to(one_of(SHARINGS))),
    "param_names": list_of(TEXT, distinct=True),
    "block_names": list_of(TEXT, distinct=True),
    "num_data": whole_number(1),
    "nll": FINITE,
    "rank": either(NOTHING, whole_number(1)),
    "others": mapping_to(_INT64),
    "class_dim": either(NOTHING, whole_number(1), whole_number(-(2**53), -1)),
    "mode": either(NOTHING, TEXT),
}
_SINCE_FORMAT_4 = ("class_dim", "mode")
_LIKELIHOODS = {
    "classification": {"ignore_index": _INT64},
    "binary": {},
    "multilabel": {"ignore_index": _INT64},
    "regression": {"sigma": either(POSITIVE, list_of(POSITIVE))},
}


@dataclass(frozen=True)
class SavedBlock:
    """A curvature block on disk.

    Attributes:
        name: The block's name.
        parts: Shapes of its tensors by the fields of `EigenKronecker` or `LowRankPlusDiagonal`.
    """

    name: str
    parts: dict[str, tuple[int, ...]]


def kronecker_block(name: str, shape: tuple[int, int], without: Sequence[str] = ()) -> SavedBlock:
    """What is saved of an `EigenKronecker`.

    Args:
        name: The block's name.
        shape: `(d_out, d_in)`.
        without: Directions that are the coordinate axes.
    """
    d_out, d_in = shape
    parts: dict[str, tuple[int, ...]] = {"U_G": (d_out, d_out), "U_A": (d_in, d_in)}
    kept = {part: size for part, size in parts.items() if part not in without}
    return SavedBlock(name, {**kept, "magnitudes": shape})


def whole_block(name: str, size: int, rank: int | None) -> SavedBlock:
    """What is saved of one block of all parameters, low-rank or (`rank=None`) full."""
    if rank is None:
        return kronecker_block(name, (size, 1), ("U_A",))
    return SavedBlock(name, {"U": (size, rank), "magnitudes": (rank,)})


def expected_blocks(blocks: Sequence[Block], curvature: str, rank: int | None) -> list[SavedBlock]:
    """What a file of a curvature holds.

    Args:
        blocks: The blocks of the Bayesian parameters.
        curvature: The curvature's name.
        rank: Of a low-rank one.
    """
    if curvature in DENSE:
        return [whole_block(DENSE_BLOCK, sum(block.size for block in blocks), rank)]
    if curvature == "diag":
        return [kronecker_block(block.name, block.shape, ("U_G", "U_A")) for block in blocks]
    return [
        kronecker_block(block.name, block.shape, ("U_A",) if block.role == "table" else ())
        for block in blocks
    ]


def rank_of(header: Header, tensors: Mapping[str, Tensor]) -> int | None:
    """How many directions a file's low-rank curvature has, None for others.

    A full curvature that was cross-fitted on fewer Jacobian rows than parameters is low-rank, too.
    """
    if header.curvature != "lowrank" and not (header.curvature == "full" and "0.U" in tensors):
        return None
    magnitudes = tensors.get("0.magnitudes")
    return 0 if magnitudes is None else magnitudes.numel()


def likelihood_to_json(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood of this package as plain data.

    Raises:
        ValueError: For an instance of any other class.
    """
    if type(likelihood) is Categorical:
        return {"name": "classification", "ignore_index": likelihood.ignore_index}
    if type(likelihood) is Bernoulli:
        return {"name": "binary"}
    if type(likelihood) is MultiLabel:
        return {"name": "multilabel", "ignore_index": likelihood.ignore_index}
    if type(likelihood) is Gaussian:
        return {"name": "regression", "sigma": likelihood.sigma.tolist()}
    raise ValueError(
        f"A {type(likelihood).__name__} cannot be written to a file: only 'classification', "
        "'binary', 'multilabel' and 'regression' can."
    )


def likelihood_from_json(data: Mapping[str, Any]) -> Likelihood:
    """The inverse of `likelihood_to_json`.

    Raises:
        ValueError: For an unknown likelihood.
    """
    name = data.get("name")
    if not isinstance(name, str) or name not in _LIKELIHOODS:
        raise ValueError(f"The file's likelihood {shown(data)} is unknown: it is damaged.")
    options = {key: value for key, value in data.items() if key != "name"}
    check_fields(options, _LIKELIHOODS[name], "The file's likelihood")
    kinds: dict[str, type[Likelihood]] = {
        "classification": Categorical,
        "binary": Bernoulli,
        "multilabel": MultiLabel,
        "regression": Gaussian,
    }
    return kinds[name](**options)


def save(path: Path, fitted: Fitted) -> None:
    """Write a posterior; an existing file is replaced only once the new one is complete.

    The same posterior gives the same bytes. See `atomic` for links, permissions, and what a process
    leaves that is killed.

    Raises:
        ValueError: If a number of the header is out of range.
        FileNotFoundError: If the folder does not exist.
        OSError: As `atomic.check_target`; if the disk is full or the file cannot be written.
    """
    header = _header_of(fitted)
    posterior = fitted.posterior
    check_target(path)
    plain = asdict(header)
    check_fields(plain, _FIELDS, "The posterior cannot be saved: it")
    tensors = {"mean": posterior.mean, "prior_precision": posterior.prior_precision}
    for index, block in enumerate(posterior.curvature.blocks.values()):
        parts = {f"{index}.{part}": getattr(block, part, None) for part in _PARTS}
        # Directions that are the coordinate axes are None.
        tensors.update({key: part for key, part in parts.items() if part is not None})
    texts = {"format": FORMAT, "header": json.dumps(plain, allow_nan=False)}
    with written_atomically(path, make_folders=False) as temporary:
        write_sealed(temporary, texts, tensors)


def _header_of(fitted: Fitted) -> Header:
    """What a file says besides its tensors.

    Raises:
        ValueError: As `likelihood_to_json`.
    """
    settings, sharing = fitted.settings, fitted.settings.sharing
    return Header(
        likelihood=likelihood_to_json(fitted.likelihood),
        curvature=settings.kind.name,
        joint=bool(settings.joint),
        sharing=sharing if isinstance(sharing, str) else dict(sharing),
        param_names=fitted.parameters.names,
        block_names=fitted.parameters.block_names,
        num_data=fitted.posterior.num_data,
        nll=fitted.nll,
        rank=settings.kind.rank,
        others=fitted.others,
        class_dim=settings.class_dim,
        mode=fitted.mode,
    )


def load(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Read a file's header and tensors (on the CPU).

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        ValueError: If it is damaged, truncated, or not of this format.
        OSError: If it cannot be read.
    """
    try:
        texts, tensors = read_sealed(path, _HAS_CHECKSUM)
    except UnknownFormatError as error:
        raise ValueError(
            f"{path} is of format {shown(error.args[0])}, expected {FORMAT!r}: it was not written "
            "by Laplace.save of this version."
        ) from error
    except DamagedFileError as error:
        raise ValueError(
            f"{path} is damaged or not a safetensors file ({error}): save the posterior again."
        ) from error
    try:
        if set(texts) != {"format", "header"}:
            raise ValueError(f"its metadata are {shown(sorted(texts))}")
        plain = parsed_json(texts["header"])
        without = () if texts["format"] == FORMAT else _SINCE_FORMAT_4
        check_fields(plain, {n: kind for n, kind in _FIELDS.items() if n not in without}, "it")
    except ValueError as error:
        raise ValueError(f"The header of {path} is damaged ({error}).") from error
    return Header(**{**plain, "nll": float(plain["nll"])}), tensors


def check_names(header: Header, known: Collection[str]) -> None:
    """Require that the model has the file's parameters.

    Args:
        header: The file's header.
        known: Names of the model's parameters.

    Raises:
        ValueError: If it lacks one: the file belongs to another model.
    """
    missing = [name for name in header.param_names if name not in known]
    if missing:
        raise ValueError(
            f"The file's parameters {shown(missing)} are not in the model: it was saved for "
            "another model."
        )


def posterior_from(
    header: Header,
    tensors: Mapping[str, Tensor],
    parameters: BayesianParameters,
    model: nn.Module,
) -> GaussianPosterior:
    """Check a file's tensors against the model and build the posterior on the model's device.

    Args:
        header: The file's header.
        tensors: The file's tensors.
        parameters: The model's Bayesian parameters.
        model: The model.

    Raises:
        ValueError: If the file belongs to another model, or to other parameters of this one.
    """
    model_mean, order = parameters.flat(model), parameters.order
    blocks = expected_blocks(parameters.blocks, header.curvature, rank_of(header, tensors))
    if header.block_names != [block.name for block in blocks]:
        raise ValueError(
            f"The file's curvature blocks {shown(header.block_names)} are not the model's "
            f"{shown([block.name for block in blocks])}: it was saved for another model."
        )
    shapes = {"mean": tuple(model_mean.shape)}
    for index, block in enumerate(blocks):
        shapes.update({f"{index}.{part}": shape for part, shape in block.parts.items()})
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    prior_precision = tensors.get("prior_precision")
    found.pop("prior_precision", None)
    if prior_precision is None or found != shapes:
        wrong = sorted(k for k in {*found, *shapes} if found.get(k) != shapes.get(k))
        raise ValueError(
            f"The file's tensors do not fit the model: {shown(wrong or ['prior_precision'])} are "
            "missing, superfluous or of another shape."
        )
    odd = [key for key, value in tensors.items() if value.dtype != _dtype_of(key, tensors["mean"])]
    if odd:
        raise ValueError(f"The dtypes of {shown(odd)} are not as `save` writes them.")
    mean = tensors["mean"].to(model_mean.device)
    if mean.dtype != model_mean.dtype:
        raise ValueError(
            f"The file holds a posterior in {mean.dtype}, the model is {model_mean.dtype}: load it "
            "for the model in the dtype that it was fitted in."
        )
    if not mean.equal(model_mean):
        raise ValueError(
            "The model's parameters are not those of the fit: load the checkpoint that the "
            "posterior was fitted on."
        )
    operators: dict[str, LinearOperator] = {}
    for index, block in enumerate(blocks):
        parts = {part: tensors[f"{index}.{part}"].to(model_mean) for part in block.parts}
        if not all(bool(part.isfinite().all()) for part in parts.values()):
            raise ValueError(f"The curvature of {block.name} in the file holds NaN or Inf.")
        if not bool((parts["magnitudes"] >= 0).all()):
            raise ValueError(f"The curvature of {block.name} in the file has negative magnitudes.")
        for part, U in parts.items():
            if part != "magnitudes":
                check_orthonormal(U, f"The directions {part} of {block.name} in the file")
        magnitudes = parts["magnitudes"]
        operators[block.name] = (
            LowRankPlusDiagonal(parts["U"], magnitudes, 0.0)
            if "U" in parts
            else EigenKronecker(parts.get("U_G"), parts.get("U_A"), magnitudes)
        )
    return GaussianPosterior(
        mean,
        BlockDiagonal(operators),
        header.num_data,
        prior_precision.to(model_mean.device),
        None if order is None else order.to(model_mean.device),
    )


def _dtype_of(name: str, mean: Tensor) -> torch.dtype:
    return torch.float64 if name == "prior_precision" else mean.dtype
