"""Parameters that are not plain tensors, because they are quantised or offloaded.

A copy of the network keeps these parameters in their original form, with their class and
attributes. They can be used in passes, but cannot be Bayesian.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.checkpoints import recomputed
from laplace_debias.system.gathering import is_sharded


def is_quantised(tensor: Tensor) -> bool:
    """Return whether a parameter or buffer is quantised."""
    if hasattr(tensor, "__tensor_flatten__"):
        return True
    is_subclass = isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter
    return is_subclass and not tensor.is_floating_point()


def is_never_copied(tensor: Tensor) -> bool:
    """Whether copies of a network share a tensor, because it is quantised or has no values."""
    return tensor.is_meta or is_quantised(tensor)


def can_require_grad(parameter: Tensor) -> bool:
    """Return whether a parameter of a working copy can require a gradient."""
    return not is_never_copied(parameter) and parameter.is_floating_point()


def shared_parameter(parameter: nn.Parameter) -> Tensor:
    """Make a frozen parameter with shared values, and keep a quantised parameter's attributes.

    A parameter that wraps other tensors, or has no values here, is returned unchanged.
    """
    if parameter.is_meta or hasattr(parameter, "__tensor_flatten__"):
        return parameter
    if not is_quantised(parameter):
        values = parameter.detach()
        # No gradients are computed through tensors that were created in inference mode.
        if values.is_inference():
            values = values.clone()
        return nn.Parameter(values, requires_grad=False)
    shared = Tensor._make_subclass(type(parameter), parameter.data, False)
    # The attributes are copied, because forward passes change them and the user's parameter must
    # not change.
    for name, value in vars(parameter).items():
        vars(shared)[name] = value if isinstance(value, Tensor) else copy.copy(value)
    return shared


def keep_differentiable(network: nn.Module) -> None:
    """Make the quantised layers of a working copy differentiable.

    On some processors, bitsandbytes packs 4-bit weights at the first inference into a form that
    cannot be differentiated with respect to the inputs. `state_dict` unpacks these weights.
    """
    for module in network.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        quant_state = getattr(module.weight, "quant_state", None)
        if getattr(quant_state, "packing_format_for_cpu", False):
            module.state_dict()


def recompute_weights(network: nn.Module) -> None:
    """Make the quantised layers of a working copy dequantise again in backward passes.

    Otherwise, the graph of a forward pass would keep the dequantised weights of torchao's layers.
    The layers of bitsandbytes need no change, because their graph keeps only the quantised weights.
    """
    for module in network.modules():
        is_copy_of_copy = isinstance(vars(module).get("forward"), _RecomputedForward)
        has_children = next(module.children(), None) is not None
        if is_copy_of_copy or has_children:
            continue
        for parameter in module.parameters():
            if hasattr(parameter, "__tensor_flatten__") and not is_sharded(parameter):
                vars(module)["forward"] = _RecomputedForward(module, module.forward)
                break


class _RecomputedForward:
    """A layer's forward pass whose graph keeps only the inputs.

    Args:
        module: The layer.
        forward: The layer's own forward pass.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_recomputable((*args, *kwargs.values())):
            return self._forward(*args, **kwargs)
        return recomputed(self._forward, *args, **kwargs)

    def _is_recomputable(self, inputs: tuple[Any, ...]) -> bool:
        """Whether a call may be recomputed in the backward pass instead of keeping its tensors."""
        if not torch.is_grad_enabled():
            return False
        if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return False
        # `functional_call` replaces a Bayesian bias only during the forward pass, so a call that is
        # recomputed in the backward pass would not use the replacement.
        if any(parameter.requires_grad for parameter in self._module.parameters()):
            return False
        # Transforms of torch.func forbid the hooks that recompute a pass.
        functorch: Any = torch._C._functorch
        return functorch.peek_interpreter_stack() is None


def quantised_state(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a quantised layer stores inside attributes that are not tensors."""
    if not any(is_quantised(tensor) for _, tensor in _own_tensors(module)):
        return
    for value in vars(module).values():
        if isinstance(value, (Tensor, nn.Module)) or not hasattr(value, "__dict__"):
            continue
        for inner in vars(value).values():
            if isinstance(inner, Tensor):
                yield inner


_LOADING_THE_WHOLE = (
    "get the full state dict with "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)), build the model "
    "on each process, and load this state dict. In both cases, the data "
    "may still be divided among the processes."
)


def check_can_be_bayesian(name: str, parameter: nn.Parameter) -> None:
    """Require a Bayesian parameter that is not quantised, offloaded or sharded.

    Raises:
        NotImplementedError: If the parameter is quantised, offloaded or sharded. The message names
            the parameter and a remedy.
    """
    if is_sharded(parameter):
        raise split_over_processes(name)
    if parameter.is_meta:
        raise NotImplementedError(
            f"{name} is offloaded, so it cannot be Bayesian. Keep it on a device (device_map=), "
            "or freeze it with requires_grad_(False)."
        )
    if is_quantised(parameter):
        raise NotImplementedError(
            f"{name} is quantised ({type(parameter).__name__}), so it cannot be Bayesian. Freeze "
            "it with requires_grad_(False), select other parameters (`params=[...]`), or use the "
            "model as it was before quantisation."
        )


def split_over_processes(name: str) -> NotImplementedError:
    """Return the error for a Bayesian parameter that is a distributed tensor."""
    return NotImplementedError(
        f"{name} is a distributed tensor (fully_shard, replicate_with_fsdp), but each process "
        "needs every Bayesian parameter as a plain tensor. Exclude the Bayesian layers (with "
        "ignored_params=, or by calling fully_shard only on the other layers), and select these "
        f'layers with params=[...] or params="last_layer". Or {_LOADING_THE_WHOLE}'
    )


def split_without_fully_shard(name: str) -> NotImplementedError:
    """Return the error for a parameter, Bayesian or not, or a wrapper that is not supported."""
    return NotImplementedError(
        f"{name} is split over processes by tensor parallelism or FullyShardedDataParallel, but "
        "only fully_shard is supported, for parameters that are not Bayesian. Use fully_shard "
        f"instead. Or {_LOADING_THE_WHOLE}"
    )


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is not offloaded, by default the CPU."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.device("cpu")


def offloaded_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that accelerate's hooks load on demand."""
    names = set[str]()
    for path, module in model.named_modules():
        if not hasattr(module, "_hf_hook"):
            continue
        for key, tensor in _own_tensors(module):
            if tensor.is_meta:
                names.add(f"{path}.{key}".lstrip("."))
    return names


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of which a tensor consists: itself, or the parts of a subclass."""
    detached: Any = tensor.detach()
    if is_sharded(detached):
        # Each process yields only its own part.
        yield detached.to_local()
        return
    if detached.is_meta:
        return
    if type(detached) is not nn.Parameter and hasattr(detached, "__tensor_flatten__"):
        names, _ = detached.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(detached, name))
    elif detached.layout is torch.strided:
        yield detached
    else:
        yield detached.to_dense()
