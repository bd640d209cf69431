"""A fitted posterior on disk: one safetensors file, no pickle."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from laplace_debias.curvature.whole import WHOLE, WHOLE_CURVATURES
from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    LowRankPlusDiagonal,
)
from laplace_debias.posterior import GaussianPosterior

FORMAT = "laplace-debias/3"
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
        class_dim: Which dimension of the outputs has the classes; the last if None.
        mode: How the posterior was fitted, for `repr`; None if it is not known.
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
    if curvature in WHOLE_CURVATURES:
        return [whole_block(WHOLE, sum(block.size for block in blocks), rank)]
    if curvature == "diag":
        return [kronecker_block(block.name, block.shape, ("U_G", "U_A")) for block in blocks]
    return [
        kronecker_block(block.name, block.shape, ("U_A",) if block.role == "table" else ())
        for block in blocks
    ]


def rank_of(header: Header, tensors: Mapping[str, Tensor]) -> int | None:
    """How many directions a file's low-rank curvature has, None for others."""
    if header.curvature != "lowrank":
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
    if type(likelihood) is Gaussian:
        return {"name": "regression", "sigma": likelihood.sigma.tolist()}
    raise ValueError(
        f"A {type(likelihood).__name__} cannot be written to a file: only 'classification', "
        "'binary' and 'regression' can."
    )


def likelihood_from_json(data: Mapping[str, Any]) -> Likelihood:
    """The inverse of `likelihood_to_json`.

    Raises:
        ValueError: For an unknown likelihood.
    """
    if data.get("name") == "regression" and "sigma" in data:
        return Gaussian(data["sigma"])
    kinds = {"classification": Categorical, "binary": Bernoulli}
    if data.get("name") not in kinds:
        raise ValueError(f"The file's likelihood {dict(data)} is unknown: it is damaged.")
    options = {key: value for key, value in data.items() if key != "name"}
    return kinds[data["name"]](**options)


def save(path: Path, posterior: GaussianPosterior, header: Header) -> None:
    """Write a posterior; an existing file is replaced only once the new one is complete.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the file cannot be written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}: make it first.")
    tensors = {"mean": posterior.mean, "prior_precision": posterior.prior_precision}
    for index, block in enumerate(posterior.curvature.blocks.values()):
        parts = {f"{index}.{part}": getattr(block, part, None) for part in _PARTS}
        # Directions that are the coordinate axes are None.
        tensors.update({key: part for key, part in parts.items() if part is not None})
    metadata = {"format": FORMAT, "header": json.dumps(asdict(header))}
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        # safetensors makes files that their owner alone may read, instead of what the umask says.
        partial.touch()
        mode = partial.stat().st_mode
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata)
        partial.chmod(mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Read a file's header and tensors (on the CPU).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, truncated, or not of this format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or no safetensors file ({error}): save the posterior again."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} is of format {metadata.get('format')!r}, expected {FORMAT!r}: it was not "
            "written by Laplace.save of this version."
        )
    try:
        data = json.loads(metadata["header"])
        # Files of an earlier version do not hold what has a default.
        names = [f.name for f in fields(Header) if f.default is MISSING or f.name in data]
        header = Header(**{name: data[name] for name in names})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"The header of {path} is damaged ({error!r}).") from error
    for name, kind in (("class_dim", int), ("mode", str)):
        value = getattr(header, name)
        if value is not None and type(value) is not kind:
            raise ValueError(f"The header of {path} is damaged: its {name} is {value!r}.")
    return header, tensors


def posterior_from(
    header: Header,
    tensors: Mapping[str, Tensor],
    model_mean: Tensor,
    blocks: Sequence[SavedBlock],
    order: Tensor | None,
) -> GaussianPosterior:
    """Check a file's tensors against the model and build the posterior on the model's device.

    Args:
        header: The file's header.
        tensors: The file's tensors.
        model_mean: The model's Bayesian parameters, `[D]`.
        blocks: What the file must hold of the model's curvature blocks.
        order: As `GaussianPosterior` has it.

    Raises:
        ValueError: If the file belongs to another model, or to other parameters of this one.
    """
    if not isinstance(header.num_data, int) or header.num_data < 1:
        raise ValueError(f"The file's num_data is {header.num_data!r}: it is damaged.")
    if header.block_names != [block.name for block in blocks]:
        raise ValueError(
            f"The file's curvature blocks {header.block_names} are not the model's "
            f"{[block.name for block in blocks]}: it was saved for another model."
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
            f"The file's tensors do not fit the model: {wrong or ['prior_precision']} are missing, "
            "superfluous or of another shape."
        )
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
        order,
    )
