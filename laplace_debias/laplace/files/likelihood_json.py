"""Likelihoods as plain data, for posterior files. No code is imported on the word of a file."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
)
from laplace_debias.curvature.losses.likelihoods.names import LIKELIHOODS
from laplace_debias.laplace.files.plain_data import (
    FINITE,
    MAPPING,
    POSITIVE,
    TEXT,
    Kind,
    check_fields,
    either,
    list_of,
    parsed_json,
    shown,
    whole_number,
)

_OWN = "own"
_NAMES = {likelihood: name for name, likelihood in LIKELIHOODS.items()}
_INT64 = whole_number(-(2**63), 2**63 - 1)
_WEIGHT = Kind("a finite number that is not negative", lambda v: FINITE.accepts(v) and v >= 0)
_SHARE = Kind("a number from 0 to 1", lambda v: FINITE.accepts(v) and 0 <= v <= 1)
# What each must say, and what it says where it is not as by default.
_REQUIRED: dict[str, dict[str, Kind]] = {
    "classification": {"ignore_index": _INT64},
    "binary": {},
    "multilabel": {"ignore_index": _INT64},
    "regression": {"sigma": either(POSITIVE, list_of(POSITIVE))},
    "heteroscedastic": {},
    _OWN: {"class": TEXT, "options": MAPPING},
}
_OPTIONAL: dict[str, dict[str, Kind]] = {
    "classification": {"class_weights": list_of(_WEIGHT), "label_smoothing": _SHARE},
    "binary": {"positive_weight": POSITIVE},
    "multilabel": {"label_weights": list_of(_WEIGHT), "positive_weights": list_of(_WEIGHT)},
}


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
        return {"name": name, **_given(likelihood)}
    if not own:
        raise ValueError(
            f"A {type(likelihood).__name__} cannot be written to a file: only "
            f"{', '.join(map(repr, LIKELIHOODS))} can. To write the import path of a "
            "class of your own, which `Laplace.load(..., likelihood=)` must then be given an "
            "instance of, use `save(path, own_likelihood=True)`."
        )
    return {"name": _OWN, "class": _path_of(likelihood), "options": _options_of(likelihood)}


def _given(likelihood: Likelihood) -> dict[str, Any]:
    """The arguments that make a likelihood of this package again."""
    if isinstance(likelihood, Gaussian):
        return {"sigma": likelihood.sigma.tolist()}
    given: dict[str, Any] = {}
    if isinstance(likelihood, (Categorical, MultiLabel)):
        given["ignore_index"] = likelihood.ignore_index
    if isinstance(likelihood, Categorical):
        given |= _listed(class_weights=likelihood.class_weights)
        if likelihood.label_smoothing:
            given["label_smoothing"] = likelihood.label_smoothing
    elif isinstance(likelihood, MultiLabel):
        given |= _listed(
            label_weights=likelihood.label_weights, positive_weights=likelihood.positive_weights
        )
    elif isinstance(likelihood, Bernoulli) and likelihood.positive_weight is not None:
        given["positive_weight"] = likelihood.positive_weight.item()
    return given


def _listed(**weights: Tensor | None) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in weights.items() if values is not None}


def likelihood_from_json(data: Mapping[str, Any], own: Likelihood | None = None) -> Likelihood:
    """The inverse of `likelihood_to_json`.

    Args:
        data: What it returned.
        own: The likelihood that the file names, if it is of a user's class.

    Raises:
        ValueError: For an unknown likelihood; if one is given where the file has its own, none is
            where the file names a user's, or another one.
    """
    name = data.get("name")
    if not isinstance(name, str) or name not in _REQUIRED:
        raise ValueError(f"The file's likelihood {shown(data)} is unknown: it is damaged.")
    options = {key: value for key, value in data.items() if key != "name"}
    optional = {key: k for key, k in _OPTIONAL.get(name, {}).items() if key in options}
    check_fields(options, _REQUIRED[name] | optional, "The file's likelihood")
    if name == _OWN:
        return _checked_own(options["class"], options["options"], own)
    if own is not None:
        raise ValueError(
            f"The file has a likelihood of its own, {name!r}: leave out "
            f"likelihood={type(own).__name__}(...)."
        )
    if name == "classification" and not any(options.get("class_weights", [1.0])):
        raise ValueError("The file's likelihood has class_weights that are all zero.")
    return LIKELIHOODS[name](**options)


def _checked_own(path: str, options: dict[str, Any], own: Likelihood | None) -> Likelihood:
    """The user's likelihood, if it is the one that the file names."""
    module, _, name = path.rpartition(":")
    if own is None:
        raise ValueError(
            f"The posterior was fitted with the likelihood {shown(path)}, which a file does not "
            f"hold: pass an instance, Laplace.load(path, model, likelihood={shown(name)[1:-1]}("
            "...))."
        )
    found_module, _, found_name = _path_of(own).rpartition(":")
    # A script's classes have another module where the script is imported.
    is_same_module = module == found_module or "__main__" in (module, found_module)
    if name != found_name or not is_same_module:
        raise ValueError(
            f"The posterior was fitted with the likelihood {shown(path)}, got "
            f"{shown(_path_of(own))}: pass an instance of the class of the fit."
        )
    found = _options_of(own)
    if found != options:
        raise ValueError(
            f"The posterior was fitted with {name} of options {shown(options)}, got one of "
            f"{shown(found)}: pass it with the arguments of the fit."
        )
    return own


def _path_of(likelihood: Likelihood) -> str:
    return f"{type(likelihood).__module__}:{type(likelihood).__qualname__}"


def _options_of(likelihood: Likelihood) -> dict[str, Any]:
    """The `options` as a file holds them.

    Raises:
        ValueError: If they are not plain data.
    """
    options = likelihood.options()
    try:
        plain = parsed_json(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The options of {type(likelihood).__name__} are {shown(options)}, which is not plain "
            f"data ({error}): return a mapping of texts, finite numbers, lists and None."
        ) from error
    if not isinstance(plain, dict):
        raise ValueError(f"The options of {type(likelihood).__name__} must be a mapping.")
    return plain
