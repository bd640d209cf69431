"""Where parameters are used: the modules whose calls read them."""

from collections.abc import Sequence
from itertools import takewhile

from torch import nn

_PARAMETRIZATIONS = "parametrizations"


def owners_of_parameters(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Paths of the modules that hold a parameter and can be called, by the parameter's `id`.

    A parameter in a container (`nn.ParameterList`, `nn.ModuleList`, …) or in a parametrisation
    belongs to the nearest module around it that has a forward pass. A module that stands in the
    model twice counts once.

    Args:
        model: The model.
    """
    owners: dict[int, dict[str, None]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), {})[_callable(model, path)] = None
    return {key: tuple(paths) for key, paths in owners.items()}


def around(model: nn.Module, paths: Sequence[str]) -> str | None:
    """The path of the nearest module around all of some; None around the model itself.

    Args:
        model: The model.
        paths: Paths of modules, at least one.
    """
    if len(paths) > 1:
        steps = zip(*(path.split(".") for path in paths), strict=False)
        shared = takewhile(lambda names: len(set(names)) == 1, steps)
        return _callable(model, ".".join(names[0] for names in shared))
    return _callable(model, paths[0].rpartition(".")[0]) if paths[0] else None


def _callable(model: nn.Module, path: str) -> str:
    before, is_inside, _ = f".{path}.".partition(f".{_PARAMETRIZATIONS}.")
    path = before.strip(".") if is_inside else path
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path
