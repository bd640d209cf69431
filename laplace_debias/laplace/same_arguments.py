"""Arguments of a call that several processes make together: they are the same on all of them.

Processes whose arguments differ would do different work, and wait for each other's sums for ever.
"""

import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.network.same_vectors import digest
from laplace_debias.laplace.files.likelihood_json import likelihood_to_json
from laplace_debias.laplace.schemes import Scheme

# What each process may have of its own. Rank 0's generator counts where all draw the same; inputs
# and N are compared where they are used, with messages of their own.
_OWN = ("x", "generator", "progress", "available", "num_data")
# Of these it counts alone that they are there.
_DATA = ("train_loader", "loader", "directions", "magnitudes", "scale", "ood")
_GIVEN = "given"
# Numbers that were calculated on other processors may differ by rounding.
_ROUNDING = 1e-9
# Characters of a description, and numbers of a tensor, that are told as they are.
_LONGEST, _MANY = 200, 20


def described_call(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a method that processes must agree on, by name, as plain data.

    Raises:
        TypeError: If these are no arguments of it.
    """
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    names = list(bound.arguments)[1:]  # The first one is the object.
    return {
        name: (_of_data if name in _DATA else _described)(bound.arguments[name])
        for name in names
        if name not in _OWN
    }


def check_same(what: str, of_ranks: list[dict[str, Any]]) -> None:
    """Require the same description of all processes.

    Args:
        what: What messages call the method.
        of_ranks: What `described_call` gave on each.

    Raises:
        ValueError: Otherwise, with the first argument that differs and the ranks.
    """
    for name, of_first in of_ranks[0].items():
        values = [of_rank.get(name) for of_rank in of_ranks]
        if all(_are_alike(value, of_first) for value in values):
            continue
        told: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            told.setdefault(_shown(value), []).append(rank)
        shown = ", ".join(
            f"{value} on rank{'s' if len(ranks) > 1 else ''} {_joined(ranks)}"
            for value, ranks in told.items()
        )
        raise ValueError(
            f"{name} differs between the ranks: {shown}. All of them make the call {what} "
            "together: pass the same on each."
        )


def options_of(laplace: Any) -> dict[str, Any]:
    """What an object of `Laplace` was made with, and its prior, as plain data."""
    subject, prior = laplace._subject, laplace._prior
    settings = subject.settings
    try:
        likelihood: Any = likelihood_to_json(subject.likelihood, own=True)
    except ValueError:
        likelihood = type(subject.likelihood).__qualname__
    found = {
        "likelihood": likelihood,
        "curvature": settings.kind.name,
        "rank of the curvature": settings.kind.rank,
        "params": subject.selection,
        "prior_precision": prior.precision,
        "backend": subject.backend,
        "fisher": settings.fisher.kind,
        "mc_samples": settings.fisher.mc_samples,
        "factor_dtype": settings.factor_dtype,
        "joint": settings.joint,
        "sharing": settings.sharing,
        "memory_bound of Laplace": settings.memory_bound,
        "class_dim": settings.class_dim,
        "temperature": prior.temperature,
        "prior_mean": prior.given_mean,
    }
    return {name: _described(value) for name, value in found.items()}


def _of_data(value: Any) -> Any:
    """Whether there are data, of which kind, and under which names."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Scheme):
        return [type(value).__name__, value.num_folds]
    return [str(name) for name in value] if isinstance(value, Mapping) else _GIVEN


def _described(value: Any) -> Any:
    """An option as plain data; of functions and the like that there is one."""
    if value is None or isinstance(value, (bool, int, str)):
        found: Any = value
    elif isinstance(value, float):
        found = value if math.isfinite(value) else str(value)
    elif isinstance(value, (torch.dtype, torch.device, os.PathLike)):
        found = str(value)
    elif isinstance(value, Tensor) and value.numel() > _MANY:
        found = f"a tensor {list(value.shape)} ({digest(value):x})"
    elif isinstance(value, Tensor):
        found = _described(value.tolist())
    elif isinstance(value, Mapping):
        found = {str(key): _described(of_key) for key, of_key in value.items()}
    elif isinstance(value, (list, tuple)):
        found = [_described(entry) for entry in value]
    else:
        return _GIVEN
    text = json.dumps(found)
    if len(text) <= _LONGEST:
        return found
    of_text = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: _LONGEST // 4]}... ({of_text})"


def _are_alike(one: Any, other: Any) -> bool:
    """Equal, and numbers up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        # In this order data are read.
        return list(one) == list(other) and all(_are_alike(one[key], other[key]) for key in one)
    return bool(one == other) and type(one) is type(other)


def _shown(value: Any) -> str:
    return value if value == _GIVEN else repr(value)


def _joined(ranks: list[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
