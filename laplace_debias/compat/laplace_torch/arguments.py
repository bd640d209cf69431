"""Translation of laplace-torch's arguments into options of this package."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.network.inputs import OneArgument
from laplace_debias.laplace.links import BRIDGES

LIKELIHOODS_BY_NAME = {
    "classification": "classification",
    "regression": "regression",
    "reward_modeling": "binary",
}
CURVATURES_BY_NAME = {
    "kron": "kfac",
    "full": "full",
    "diag": "diag",
    "lowrank": "lowrank",
    "gp": "gp",
}
SUBSETS = ("last_layer", "all", "subnetwork")
LINKS = ("probit", "mc", *BRIDGES)


def checked_name(argument: str, value: str, names: Collection[str]) -> str:
    """Return the supported name that a string or a member of an enumeration is equal to.

    A plain string is returned, because `torch.load` rejects the members of laplace-torch's
    enumerations.
    """
    for name in names:
        if value == name:
            return name
    raise ValueError(
        f"`{argument}={value!r}` is not supported. Use one of {', '.join(map(repr, names))}."
    )


def check_applies(argument: str, option: str, required: str, value: str) -> None:
    """Require that an option has the only value with which an argument can be used."""
    if value != required:
        raise ValueError(
            f'`{argument}` applies only to {option}="{required}", got {value!r}. Remove '
            f"`{argument}=`."
        )


def check_has_layers(structure: str) -> None:
    """Require a structure in which each layer can have its own prior precision."""
    if structure not in ("kron", "diag"):
        raise NotImplementedError(
            '`prior_structure="layerwise"` requires hessian_structure="kron" or "diag", got '
            f'{structure!r}. Use `prior_structure="scalar"`.'
        )


def fisher_of_backend(backend: type | str | None, backend_kwargs: Mapping[str, Any]) -> str:
    """Infer the type of Fisher matrix from the name of a laplace-torch backend."""
    name = getattr(backend, "__name__", str(backend))
    unknown = sorted(backend_kwargs.keys() - {"stochastic"})
    if unknown:
        raise NotImplementedError(
            f"`backend_kwargs` has {unknown}, but only 'stochastic' is supported. Remove the "
            "other entries."
        )
    is_stochastic = bool(backend_kwargs.get("stochastic", False))
    if backend is None or name.endswith("GGN"):
        return "mc" if is_stochastic else "exact"
    if name.endswith("EF"):
        return "empirical"
    raise NotImplementedError(
        f"The backend {name} is not supported. Use a backend whose name ends with GGN or EF."
    )


def names_in_layer(layer: nn.Module, network: nn.Module) -> list[str]:
    """Return the names of the parameters of a layer within a network."""
    layer_parameters = set(layer.parameters())
    return [name for name, p in network.named_parameters() if p in layer_parameters]


def batch_hook(likelihood: str, dict_key_x: str | None, dict_key_y: str | None) -> BatchHook | None:
    """Return the function that reads batches, or None for the default one.

    Raises:
        NotImplementedError: If keys of a mapping are passed for a reward model.
    """
    takes_mappings = dict_key_x is not None or dict_key_y is not None
    if likelihood == "reward_modeling":
        if takes_mappings:
            raise NotImplementedError(
                "Reward models cannot be fitted to mappings. Remove `dict_key_x=` and "
                "`dict_key_y=`, and fit to batches (pairs, preferred)."
            )
        return _first_is_preferred
    if takes_mappings:
        return partial(_mapping_and_targets, dict_key_x or "input_ids", dict_key_y or "labels")
    return None


def _mapping_and_targets(dict_key_x: str, dict_key_y: str, batch: Any) -> Any:
    """Read a mapping as one argument of the model, and leave other batches unchanged."""
    if not isinstance(batch, Mapping):
        return batch
    for argument, key in (("dict_key_x", dict_key_x), ("dict_key_y", dict_key_y)):
        if key not in batch:
            raise ValueError(
                f"A batch has the entries {list(batch)}, but `{argument}` is {key!r}. Pass the "
                "name of one of its entries."
            )
    return OneArgument(batch), batch[dict_key_y]


def _first_is_preferred(batch: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Read pairs `[B, 2, ...]` and the indices of the preferred inputs."""
    pairs, preferred = batch
    if pairs.ndim < 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"The inputs for reward_modeling have shape {tuple(pairs.shape)}. Pass pairs, [B, 2, "
            "...]."
        )
    return (pairs[:, 0], pairs[:, 1]), (preferred == 0).long()


def scalar_or_vector(value: float | Tensor) -> float | Tensor:
    """Convert a tensor with a single entry to a scalar, and return other values unchanged."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    return value
