"""Checks that curvature is defined for a user's model."""

import torch
from torch import nn

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.quantised import (
    is_never_copied,
    offloaded_parameters,
    split_without_fully_shard,
)
from laplace_debias.curvature.network.sharded import is_unit
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.system.gathering import is_sharded, number_parameter


def validate_model(model: nn.Module) -> nn.Module:
    """Check that curvature is defined for a model, and return the model without wrappers.

    Parameters must be finite, and the outputs must not be random or depend on the whole batch. A
    buffer may contain Inf, as an attention mask does. If this affects the outputs, they are not
    finite, and are rejected later.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}. Pass a torch.nn.Module.")
    _check_tensors(model, _sharded_parameters(model))
    plain = unwrapped(model)
    for path, module in plain.named_modules():
        _check_layer(path, module)
    return plain


def _sharded_parameters(model: nn.Module) -> set[int]:
    """Reshard the modules of `fully_shard`, and collect the `id`s of their split parameters.

    Raises:
        TypeError: If a module is TorchScript.
        NotImplementedError: If a module is wrapped in `FullyShardedDataParallel`.
    """
    sharded = set[int]()
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or 'The model'} is TorchScript (torch.jit.script, torch.jit.trace), "
                "whose layers are not accessible. Pass the Python module that it was made from, "
                "with the same state_dict."
            )
        # FSDP's classes are recognised by attributes, because importing them takes a second.
        if hasattr(module, "summon_full_params"):
            raise split_without_fully_shard(path or "The model")
        if is_unit(module):
            module.reshard()
            sharded.update(map(id, filter(is_sharded, module.parameters())))
    return sharded


def _check_tensors(model: nn.Module, sharded: set[int]) -> None:
    """Require parameters and buffers that have values on this process, and finite parameters.

    Parameters with the `sharded` ids may be split over processes.
    """
    offloaded = offloaded_parameters(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_sharded(tensor):
            if id(tensor) not in sharded:
                raise split_without_fully_shard(name)
            number_parameter(tensor)
        if tensor.is_nested:
            raise NotImplementedError(
                f"{name} is a nested tensor, for which curvature is not supported. Store its "
                "parts as separate parameters or buffers, for example in an nn.ParameterList."
            )
        if tensor.is_meta and name not in offloaded:
            raise ValueError(
                f"{name} is on the device 'meta', where it has no values. Load the checkpoint "
                "first, for example with model.to_empty(device='cpu') and then "
                "model.load_state_dict(...)."
            )
        if tensor.device.type == "mps":
            raise NotImplementedError(
                f"{name} is on the device 'mps', which has no double precision, but posteriors and "
                "operators compute some of their numbers in it. Call `model.cpu()` first."
            )
        # The tensor is detached because threads that use it under autograd can block each other.
        is_checked = isinstance(tensor, nn.Parameter) and not is_never_copied(tensor)
        if is_checked and not tensor.detach().isfinite().all():
            raise ValueError(
                f"{name} contains NaN or Inf, so the model has diverged or its checkpoint is "
                "damaged. Load a checkpoint with finite values."
            )


def _check_layer(path: str, module: nn.Module) -> None:
    """Require a layer whose outputs are not random and do not depend on the whole batch."""
    name = f"{path or 'model'} ({type(module).__name__})"
    # The classes are recognised by their module, because importing them is slow.
    if ".quantized.dynamic." in type(module).__module__:
        raise ValueError(
            f"{name} is dynamically quantised. It rounds according to the largest input of "
            "the batch, so the output of an example depends on the other examples. Use the "
            "model as it was before quantize_dynamic."
        )
    problem = layer_rule(module).problem(module)
    if problem:
        raise ValueError(f"{name} {problem}")
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    if module.training and is_dropout:
        raise ValueError(
            f"{name} is active, and dropout makes the outputs random. Curvature is computed "
            "in eval mode. Call `model.eval()` first."
        )
