"""A fitted posterior on disk: one safetensors file, no pickle.

Since format 4 a file has a checksum over the whole of it (see `sealed`): one that differs in any
byte from what was saved is refused. Files of format 3, which has none, are read with all other
checks, and so are those with a block for every group of a convolution (see `groups_apart`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_debias.curvature.fits.kinds import DENSE
from laplace_debias.curvature.fits.sharded_blocks import ShardedBlocks
from laplace_debias.laplace.files.groups_apart import blocks_apart, has_groups, joined
from laplace_debias.laplace.files.header import (
    LATER_FIELDS,
    Header,
    check_header,
    header_of,
)
from laplace_debias.laplace.files.orthonormality import check_orthonormal
from laplace_debias.laplace.files.plain_data import parsed_json, shown
from laplace_debias.laplace.files.saved_blocks import SavedBlock, expected_blocks, rank_of
from laplace_debias.laplace.files.sealed import (
    DamagedFileError,
    UnknownFormatError,
    read_sealed,
    write_sealed,
)
from laplace_debias.laplace.files.sent_tensors import SentTensors
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

_NAME = "laplace-debias/"
FORMAT = f"{_NAME}{max(LATER_FIELDS)}"
_HAS_CHECKSUM = {f"{_NAME}{number}": number >= 4 for number in LATER_FIELDS}
_PARTS = ("U_G", "U_A", "U", "magnitudes")


def save(path: Path, fitted: Fitted, own_likelihood: bool = False) -> None:
    """Write a posterior; an existing file is replaced only once the new one is complete.

    The same posterior gives the same bytes. All processes that share the blocks of a sharded
    posterior call it: rank 0 writes, and gets from the others one tensor after the other. See
    `atomic` for links, permissions, and what a process leaves that is killed.

    Args:
        path: The file.
        fitted: The fit.
        own_likelihood: As `likelihood_to_json` takes it.

    Raises:
        ValueError: If a number of the header is out of range.
        FileNotFoundError: If the folder does not exist.
        OSError: As `atomic.check_target`; if the disk is full or the file cannot be written.
    """
    header = header_of(fitted, own_likelihood)
    posterior, curvature = fitted.posterior, fitted.posterior.curvature
    writes = not isinstance(curvature, ShardedBlocks) or curvature.rank == 0
    if writes:
        check_target(path)
    plain = header.as_plain()
    check_header(plain, "The posterior cannot be saved: it")
    tensors = {"prior_precision": posterior.prior_precision, **tensors_of_fit(posterior)}
    texts = {"format": FORMAT, "header": json.dumps(plain, allow_nan=False)}
    sent = sent_tensors(fitted, header, tensors)
    if sent is not None and not writes:
        sent.send(tensors=sent.tensors)
        return
    with written_atomically(path, make_folders=False) as temporary:
        if sent is None:
            write_sealed(temporary, texts, tensors)
        else:
            write_sealed(temporary, texts, sent.tensors, sent.fetch)


def sent_tensors(
    fitted: Fitted, header: Header, tensors: Mapping[str, Tensor]
) -> SentTensors | None:
    """All tensors of a sharded posterior, where they are; None of a whole one.

    Args:
        fitted: The fit.
        header: Its header.
        tensors: Those of this process, by their names in a file.

    Raises:
        RuntimeError: As `SentTensors.of`.
    """
    curvature = fitted.posterior.curvature
    if not isinstance(curvature, ShardedBlocks):
        return None
    blocks = expected_blocks(fitted.parameters.blocks, header.curvature, None)
    return SentTensors.of(curvature, blocks, tensors)


def tensors_of_fit(posterior: GaussianPosterior) -> dict[str, Tensor]:
    """What a fit has found, by the names in its file: all but the prior precision."""
    tensors = of_mean(posterior)
    for index, block in enumerate(posterior.curvature.blocks.values()):
        tensors.update(of_block(index, block))
    return tensors


def of_mean(posterior: GaussianPosterior) -> dict[str, Tensor]:
    """The tensors that a file holds of the mean, and of the prior's if it is not zero."""
    of_prior = {} if posterior.prior_mean is None else {"prior_mean": posterior.prior_mean}
    return {"mean": posterior.mean, **of_prior}


def of_prior_and_mean(posterior: GaussianPosterior) -> dict[str, Tensor]:
    """The tensors that a file holds besides the blocks'."""
    return {"prior_precision": posterior.prior_precision, **of_mean(posterior)}


def of_block(index: int, block: LinearOperator) -> dict[str, Tensor]:
    """The tensors that a file holds of a block; directions that are the axes are not saved."""
    parts = {f"{index}.{part}": getattr(block, part, None) for part in _PARTS}
    return {key: part for key, part in parts.items() if part is not None}


def operator_from(parts: Mapping[str, Tensor]) -> LinearOperator:
    """A block, from its tensors by their fields."""
    magnitudes = parts["magnitudes"]
    if "U" in parts:
        return LowRankPlusDiagonal(parts["U"], magnitudes, 0.0)
    return EigenKronecker(parts.get("U_G"), parts.get("U_A"), magnitudes)


def load(path: Path, mapped: bool = False) -> tuple[Header, dict[str, Tensor]]:
    """Read a file's header and tensors (on the CPU).

    Args:
        path: The file.
        mapped: As `read_sealed` takes it.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        ValueError: If it is damaged, truncated, or not of this format.
        OSError: If it cannot be read.
    """
    try:
        texts, tensors = read_sealed(path, _HAS_CHECKSUM, mapped=mapped)
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
        without = LATER_FIELDS[int(texts["format"].removeprefix(_NAME))]
        check_header(plain, "it", without)
    except ValueError as error:
        raise ValueError(f"The header of {path} is damaged ({error}).") from error
    numbers = {name: float(plain[name]) for name in ("nll", "temperature") if name in plain}
    return Header(**{**plain, **numbers}), tensors


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


def check_calls(header: Header, model: nn.Module) -> None:
    """Require that each parameter is inside of the modules whose calls are to be differentiated.

    Raises:
        ValueError: Otherwise: the file belongs to another model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, paths in header.calls.items():
        inside = [path for path in paths if path in modules]
        parameter = dict(model.named_parameters()).get(name)
        holds = [any(p is parameter for p in modules[path].parameters()) for path in inside]
        if (
            name not in header.param_names
            or len(inside) < len(paths)
            or not all(holds)
            or not paths
        ):
            raise ValueError(
                f"The file measures {shown(name)} at calls of {shown(paths)}, where the model does "
                "not have it: it was saved for another model."
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
    if header.curvature not in DENSE and has_groups(parameters.blocks):
        apart = blocks_apart(parameters.blocks, header.curvature)
        if header.block_names == [block.name for block in apart]:
            _check_shapes(tensors, apart, model_mean)
            tensors = joined(tensors, parameters.blocks)
            header = replace(header, block_names=[block.name for block in blocks])
    if header.block_names != [block.name for block in blocks]:
        raise ValueError(
            f"The file's curvature blocks {shown(header.block_names)} are not the model's "
            f"{shown([block.name for block in blocks])}: it was saved for another model."
        )
    _check_shapes(tensors, blocks, model_mean)
    prior_mean = tensors.get("prior_mean")
    odd = [key for key, value in tensors.items() if value.dtype != _dtype_of(key, tensors["mean"])]
    if odd:
        raise ValueError(f"The dtypes of {shown(odd)} are not as `save` writes them.")
    if prior_mean is not None and not bool(prior_mean.isfinite().all()):
        raise ValueError("The prior's mean in the file holds NaN or Inf.")
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
        operators[block.name] = operator_from(parts)
    return GaussianPosterior(
        mean,
        BlockDiagonal(operators),
        header.num_data,
        tensors["prior_precision"].to(model_mean.device),
        None if order is None else order.to(model_mean.device),
        None if prior_mean is None else prior_mean.to(model_mean.device),
        header.temperature,
    )


def _check_shapes(
    tensors: Mapping[str, Tensor], blocks: Sequence[SavedBlock], mean: Tensor
) -> None:
    """Require the tensors of these blocks, and none else.

    Raises:
        ValueError: Otherwise.
    """
    shapes = {"mean": tuple(mean.shape)}
    for index, block in enumerate(blocks):
        shapes.update({f"{index}.{part}": shape for part, shape in block.parts.items()})
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    has_prior = found.pop("prior_precision", None) is not None
    if found.get("prior_mean") == ():
        found.pop("prior_mean")
    elif "prior_mean" in found:
        shapes["prior_mean"] = shapes["mean"]
    if not has_prior or found != shapes:
        wrong = sorted(k for k in {*found, *shapes} if found.get(k) != shapes.get(k))
        raise ValueError(
            f"The file's tensors do not fit the model: {shown(wrong or ['prior_precision'])} are "
            "missing, superfluous or of another shape."
        )


def _dtype_of(name: str, mean: Tensor) -> torch.dtype:
    return torch.float64 if name.startswith("prior_") else mean.dtype
