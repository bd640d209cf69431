"""A stand-in for the user's model that can be hooked, extended and differentiated freely."""

import copy

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.computed import computed, drop_caches
from laplace_debias.curvature.network.split_model import (
    PLAIN_INSTEAD,
    check_gatherable,
    is_shard,
    is_split,
)
from laplace_debias.system.out_of_memory import is_out_of_memory
from laplace_debias.system.ranks import current

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_DROPOUT = nn.modules.dropout._DropoutNd


def shadow(model: nn.Module) -> nn.Module:
    """Copy a model's module tree while sharing the storage of its parameters.

    Whatever is done to the copy (hooks, attributes, `requires_grad`, gradients, modes) never
    reaches the original, also when an exception cuts the work short; and since the storage is
    shared, the copy costs little memory and is never out of date.

    The copy is in eval mode, its parameters require no gradient, and modules that would work in
    place (`nn.ReLU(inplace=True)`) do not, so that a layer's output stays what the layer computed.

    Args:
        model: Any module; see `check_deterministic` for the mode it has to be in.

    Returns:
        The copy.

    Raises:
        TypeError: If the module tree cannot be copied.
    """
    memo: dict[int, Tensor] = {}
    for value in computed(model):
        memo[id(value)] = value.detach()
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        # Buffers are small, and some forward passes write to them.
        memo[id(buffer)] = buffer.detach().clone()
    try:
        twin = copy.deepcopy(model, memo)
    # Whatever a module's attributes raise when they are copied.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}). Curvature is computed on a copy "
            "so that your model stays untouched: keep non-leaf tensors, locks and open files out "
            "of the module's attributes, or implement `__deepcopy__`."
        ) from error
    for original, module in zip(model.modules(), twin.modules(), strict=False):
        drop_caches(original, module)
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return twin.eval()


def check_usable(model: nn.Module) -> None:
    """Refuse what cannot be copied, hooked and differentiated at all.

    Raises:
        TypeError: For anything but a `torch.nn.Module`, and for TorchScript.
        ValueError: If parameters or buffers lie on the device `meta`, where they have no values.
        NotImplementedError: If the parameters are split over processes in another way than
            `fully_shard` over one mesh of all of them (see `gathered`).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or 'The model'} is TorchScript (torch.jit.script, torch.jit.trace), whose "
                "layers cannot be looked into: pass the Python module that it was made from, with "
                "the same state_dict."
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if is_split(model):
        check_gatherable(model, current().size)
    else:
        # By their attributes: to import the classes takes a second.
        split = [name for name, tensor in tensors if is_shard(tensor)]
        if split or any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise NotImplementedError(
                f"{split[0] if split else 'The model'} is split over processes, and not by "
                "torch.distributed.fsdp.fully_shard, while curvature needs whole parameters on "
                f"each: use fully_shard; or {PLAIN_INSTEAD}. The data may be shared by processes."
            )
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ValueError(
            f"{empty[0]} and {len(empty) - 1} other tensors of the model lie on the device 'meta', "
            "where they have no values: load the checkpoint first, for example "
            "model.to_empty(device='cpu') and then model.load_state_dict(...)."
        )


def check_deterministic(model: nn.Module) -> None:
    """Refuse a model whose outputs are random or depend on the other examples of the batch.

    Raises:
        ValueError: If dropout is active, or batch normalisation uses the batch's own statistics.
    """
    for path, module in model.named_modules():
        name = f"{path or 'model'} ({type(module).__name__})"
        if isinstance(module, _BATCH_NORM) and module.running_mean is None:
            raise ValueError(
                f"{name} keeps no running statistics, so an example's output depends on the rest "
                "of its batch, and curvature per example is not defined: train it with "
                "track_running_stats=True."
            )
        if not module.training:
            continue
        if isinstance(module, _DROPOUT) and module.p > 0:
            raise ValueError(
                f"{name} is active: dropout makes the outputs random. Curvature is computed in "
                "eval mode: call `model.eval()` first."
            )
        if isinstance(module, _BATCH_NORM):
            raise ValueError(
                f"{name} is in training mode and would mix the examples of a batch. Curvature is "
                "computed in eval mode: call `model.eval()` first."
            )


def check_finite(model: nn.Module) -> None:
    """Refuse a model that holds NaN or Inf; a buffer may hold −Inf, as a mask of attention does.

    Raises:
        ValueError: Naming the first parameter or buffer with such an entry.
    """
    wrong = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    wrong += [
        name
        for name, buffer in model.named_buffers()
        if (buffer.isnan() | (buffer == torch.inf)).any()
    ]
    if wrong:
        raise ValueError(
            f"{wrong[0]} holds NaN or Inf: the model has diverged or its checkpoint is damaged."
        )


def check_no_autocast(device: torch.device) -> None:
    """Refuse to work under autocast, which would round factors and rotations to half precision.

    Raises:
        RuntimeError: If it is on for the device.
    """
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            f"torch.autocast({device.type!r}) is on: curvature and predictives are computed in the "
            "model's dtype. Leave the context, or turn it off here with "
            f"torch.autocast({device.type!r}, enabled=False)."
        )
