"""Models whose parameters `fully_shard` (FSDP2) splits over processes: what they are without it.

Such a model cannot be copied, and its forward pass gathers parameters, which all processes have to
do together. A twin of it has the same modules without `fully_shard`, and other parameters in place
of the split ones.
"""

import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.computed import computed, drop_caches
from laplace_debias.curvature.network.inner_module import FSDP, inner, is_of_fsdp
from laplace_debias.system.out_of_memory import is_out_of_memory

PLAIN_INSTEAD = (
    "build the plain model and load the full state into it, torch.distributed.checkpoint."
    "state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
)


def is_split(model: object) -> bool:
    """Whether `fully_shard` was called on a model or on parts of it."""
    return isinstance(model, nn.Module) and any(True for _ in split_modules(model))


def split_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that `fully_shard` was called on, with their paths."""
    # By what is imported: to import it for a model that knows nothing of it takes a second.
    kind = getattr(sys.modules.get(FSDP), "FSDPModule", None)
    if kind is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, kind):
            yield path, module


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its shard, or all of one that is not split."""
    shard: Any = tensor
    with torch.no_grad():
        return shard.to_local() if is_shard(tensor) else tensor.detach()


def bring_to_rest(model: nn.Module) -> None:
    """Split what a forward pass has left whole, as torch does before it makes a state_dict.

    What is whole between a forward pass and the next is stale after a step of the optimiser; the
    shards are what counts. All processes have to do it: the next forward pass gathers it again.
    """
    for _, module in split_modules(model):
        module.reshard()


def marks(model: nn.Module) -> list[tuple[int, ...]]:
    """Where this process's shards lie and how often they were changed, at rest or not."""
    found = []
    for _, module in split_modules(model):
        for group in _groups(module):
            for parameter in group.fsdp_params:
                shard = parameter.sharded_param
                local = local_part(shard)
                # torch counts some changes of a DTensor itself, and some of what it wraps.
                # Of tensors that were made under inference mode it counts none.
                versions = [0 if x.is_inference() else x._version for x in (local, shard)]
                found.append((local.data_ptr(), *versions))
    return found


def check_gatherable(model: nn.Module, num_ranks: int) -> None:
    """Refuse split models whose whole parameters are not those that they compute with.

    Args:
        model: A split model.
        num_ranks: How many processes work together.

    Raises:
        NotImplementedError: For mixed precision, parameters that are offloaded, a mesh of several
            dimensions or of another size than the process group, buffers that are split,
            parameters that are not floating point or of a class of their own; within `alone()`.
    """
    bring_to_rest(model)
    for path, module in split_modules(model):
        if why := _unfit_policy(module):
            raise _refused(path or "The model", why)
    for name, buffer in model.named_buffers():
        if is_shard(buffer):
            raise _refused(name, "is a buffer that is split over processes")
    for name, parameter in model.named_parameters():
        if is_shard(parameter) and (why := _unfit_shard(parameter, num_ranks)):
            raise _refused(name, why)


def twin(model: nn.Module, of: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    """The model without `fully_shard` and without wrappers, with other parameters.

    Modules, their attributes, modes and hooks of the user's are copied. Buffers and parameters that
    are not split are the model's own. Nothing of the model is touched.

    Args:
        model: A split model.
        of: The parameter in place of a split one.

    Raises:
        TypeError: If what the modules hold cannot be copied.
    """
    memo: dict[int, Any] = {id(value): value.detach() for value in computed(model)}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = of(parameter) if is_shard(parameter) else parameter
    modules = list(model.modules())
    copied = [module for module in modules if inner(module) is None]
    for module in copied:
        memo[id(module)] = object.__new__(_own_class(module))
    for module in modules:
        memo[id(module)] = memo[id(_innermost(module))]
    try:
        for module in copied:
            state = copy.deepcopy(_without_fsdp(module.__getstate__()), memo)
            memo[id(module)].__setstate__(state)
            drop_caches(module, memo[id(module)])
    # Whatever a module's attributes raise when they are copied.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}). Curvature is computed on a copy "
            "so that your model stays untouched: keep non-leaf tensors, locks, open files and "
            "modules that are not registered out of the modules' attributes."
        ) from error
    return memo[id(model)]


def outline(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, dtype and device that takes no memory and is all NaN."""
    local = local_part(parameter)
    nothing = torch.full((), torch.nan, dtype=local.dtype, device=local.device)
    return nn.Parameter(nothing.expand(parameter.shape), requires_grad=parameter.requires_grad)


def own_shard(parameter: nn.Parameter) -> nn.Parameter:
    """The part of a parameter that this process has."""
    return nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)


def whole(parameter: nn.Parameter) -> nn.Parameter:
    """The whole of a parameter in memory of its own; all processes call it together."""
    with torch.no_grad(), torch.inference_mode(False):
        shards: Any = parameter.detach()
        found = shards.full_tensor().contiguous()
        # One process alone gets its own shard back.
        if found.untyped_storage().data_ptr() == shards.to_local().untyped_storage().data_ptr():
            found = found.clone()
        return nn.Parameter(found, requires_grad=parameter.requires_grad)


def _innermost(module: nn.Module) -> nn.Module:
    while (inside := inner(module)) is not None:
        module = inside
    return module


def _own_class(module: nn.Module) -> type:
    """The class that the user gave a module: `fully_shard` derives one from it."""
    kind = type(module)
    is_derived = kind.__bases__[0].__module__.startswith(FSDP) and len(kind.__bases__) > 1
    return kind.__bases__[1] if is_derived else kind


def _without_fsdp(state: dict[str, Any]) -> dict[str, Any]:
    """What a module holds, but for what `fully_shard` has put there."""
    kept = {}
    for key, value in state.items():
        if key.startswith(("__composable_api_state_key", "_is_fsdp_", "_fsdp_")):
            continue
        if isinstance(value, types.MethodType) and is_of_fsdp(value):
            continue
        if "hooks" in key and isinstance(value, dict):
            value = type(value)((k, hook) for k, hook in value.items() if not is_of_fsdp(hook))
        kept[key] = value
    return kept


def _groups(module: Any) -> list[Any]:
    """What torch knows of the parameters that it gathers for a module, and has no public name."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.15
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def _unfit_policy(module: Any) -> str | None:
    """Why whole parameters are not what a module computes with; None if they are."""
    for group in _groups(module):
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            return "is offloaded to the CPU (offload_policy=CPUOffloadPolicy())"
        for parameter in group.fsdp_params:
            dtype = parameter.sharded_param.dtype
            policy = parameter.mp_policy
            for cast in (policy.param_dtype, policy.output_dtype):
                if cast not in (None, dtype):
                    return (
                        f"computes in {cast} with parameters in {dtype} "
                        "(mp_policy=MixedPrecisionPolicy(...))"
                    )
    return None


def _unfit_shard(parameter: Any, num_ranks: int) -> str | None:
    """Why a parameter cannot be gathered; None if it can."""
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        return f"lies on a mesh of {mesh.ndim} dimensions (hybrid or tensor parallelism)"
    if mesh.size() != num_ranks:
        return (
            f"is split over {mesh.size()} processes, and {num_ranks} work together here "
            "(the default process group, or one within `laplace_debias.alone()`)"
        )
    if not parameter.is_floating_point() or type(local_part(parameter)) is not Tensor:
        return f"is not an ordinary floating-point tensor ({parameter.dtype})"
    return None


def _refused(name: str, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} {why}, which a Laplace approximation of a model that fully_shard split does not "
        "do. Call fully_shard over one mesh of all processes, without mixed precision of "
        f"parameters or outputs and without offloading; or {PLAIN_INSTEAD}."
    )
