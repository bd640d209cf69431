"""The user's model without wrappers, and the parameters' names in this plain model."""

import copy
from collections.abc import Sequence

from torch import nn

from laplace_debias.curvature.network.sharded import (
    is_replicated,
    is_unit,
    with_gathering,
    without_communication,
)

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# The attributes that hold the module inside a compiled module, and inside torch's wrapper for
# activation checkpointing. The wrappers are recognised by these attributes, because importing the
# compiler takes a second.
_INSIDE = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(model: nn.Module, plain_modules: dict[int, nn.Module] | None = None) -> nn.Module:
    """Remove the wrappers around a model and around its submodules.

    The parameters of the result are the user's own tensors, under their names in the plain model. A
    wrapper computes the same as the model inside it, but hooks and derivatives may not work through
    a wrapper. If submodules are wrapped, the result is a copy of the modules around them, and modes
    that are set later have no effect on it. Therefore, call this function where the plain model is
    needed, and do not keep the result. `plain_modules` contains the submodules that were unwrapped
    before, by their `id`.
    """
    plain_modules = {} if plain_modules is None else plain_modules
    model = without_outer_wrappers(model)
    if id(model) in plain_modules:
        return plain_modules[id(model)]
    inside = model
    if is_replicated(model):
        inside = without_outer_wrappers(without_communication(model))
    plain = inside
    if is_unit(model):
        # The result is a new module, so its submodules may be replaced.
        plain = with_gathering(without_outer_wrappers(without_communication(model)))
    for name, child in list(plain._modules.items()):
        plain_child = None if child is None else unwrapped(child, plain_modules)
        if plain_child is not child:
            if plain is inside:
                # Do not change the user's own module.
                plain = copy.copy(inside)
                plain.__dict__["_modules"] = inside._modules.copy()
            plain._modules[name] = plain_child
    plain_modules[id(model)] = plain
    return plain


def without_outer_wrappers(model: nn.Module) -> nn.Module:
    """Remove the wrappers around a model, but not the wrappers around its submodules."""
    inside: nn.Module | None = model
    while inside is not None:
        model = inside
        inside = None
        if isinstance(model, _PARALLEL):
            inside = model._modules["module"]
        elif not is_unit(model) and not is_replicated(model):
            # The hooks of `fully_shard` have to stay around the module whose parameters they
            # gather. The hooks of `replicate` are removed later, by `without_communication`.
            inside = next(filter(None, map(model._modules.get, _INSIDE)), None)
        if inside is not None and (model._forward_hooks or model._forward_pre_hooks):
            raise ValueError(
                f"The {type(model).__name__} around {type(inside).__name__} has forward hooks, "
                "which would be lost because only the module inside is used. Register them on "
                "the module inside."
            )
    return model


def plain_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return names in the plain model (`0.weight` for `module.0.weight`); keep unknown names."""
    plain = dict(unwrapped(model).named_parameters())
    own_names = {id(parameter): name for name, parameter in plain.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False)) | plain
    return [own_names.get(id(parameters.get(name)), name) for name in names]
