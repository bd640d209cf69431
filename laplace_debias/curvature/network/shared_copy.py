"""A copy of the user's model that can be hooked, extended and differentiated freely."""

import copy
import inspect
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.quantised import (
    is_never_copied,
    keep_differentiable,
    quantised_state,
    recompute_weights,
    shared_parameter,
)
from laplace_debias.system.memory import is_out_of_memory


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model's module tree while sharing the storage of its parameters.

    Changes to the copy (hooks, attributes, `requires_grad`, gradients, modes) never affect the
    original, even if an exception occurs. Because the storage is shared, the copy needs little
    memory, and its parameters are never out of date.

    The copy is in eval mode, and its parameters require no gradient. Gradients of embeddings are
    dense, and are not divided by the tokens' frequencies in the batch. If accelerate runs forward
    passes in half precision for training, the copy runs them in the precision of the parameters.
    """
    memo = _replacements_for_copy(model)
    try:
        copied_model = copy.deepcopy(model, memo)
    # Copying attributes of a module may raise any error.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}), but curvature is computed on a "
            "copy, so that your model is not changed. Remove non-leaf tensors, locks and open "
            "files from the module's attributes, or implement `__deepcopy__`."
        ) from error
    # A module's own `__deepcopy__` may leave out submodules, so modules are matched by name.
    originals = dict(model.named_modules(remove_duplicate=False))
    for name, copied in copied_model.named_modules():
        if name in originals:
            _adapt_copy(originals[name], copied, memo)
    keep_differentiable(copied_model)
    recompute_weights(copied_model)
    return copied_model.eval()


def _replacements_for_copy(model: nn.Module) -> dict[int, object]:
    """Return replacements for the objects that `deepcopy` must not copy, by the objects' `id`."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for attribute in vars(module).values():
            if type(attribute) in (OrderedDict, dict, set) and not attribute:
                # Every module has a dozen empty containers for hooks, and copying them would take
                # most of the time.
                memo[id(attribute)] = type(attribute)()
            for tensor in _tensors_in(attribute):
                if not tensor.is_leaf:
                    # The tensor is computed from other tensors, like a weight under weight
                    # normalisation.
                    memo[id(tensor)] = tensor.detach()
    for parameter in model.parameters():
        memo[id(parameter)] = shared_parameter(parameter)
    for buffer in model.buffers():
        # Buffers are small, and some forward passes write to them.
        memo[id(buffer)] = buffer if is_never_copied(buffer) else buffer.detach().clone()
    for module in model.modules():
        for tensor in quantised_state(module):
            memo[id(tensor)] = tensor
        if hasattr(module, "_hf_hook"):
            # The hook holds the values of offloaded parameters, which would otherwise be copied.
            memo[id(module._hf_hook)] = module._hf_hook
    return memo


def _adapt_copy(module: nn.Module, copied: nn.Module, memo: dict[int, object]) -> None:
    """Give a copy dense gradients and methods of its own; remove caches and mixed precision.

    Args:
        module: The original module.
        copied: Its copy.
        memo: The copies of all objects, by the `id` of the objects.
    """
    layer_rule(copied).use_dense_gradients(copied)
    for name, attribute in vars(module).items():
        if _is_of_compiler(attribute) and name in vars(copied):
            _bind_to_copy(copied, name, attribute, memo)
        if type(attribute) is dict and not name.startswith("_"):
            for key, value in attribute.items():
                if isinstance(value, Tensor) and not value.is_leaf:
                    # A cache that a module keeps between passes is emptied, so that the copy
                    # computes it again.
                    vars(copied)[name].pop(key, None)
    if _is_in_mixed_precision(module):
        _set_method(copied, "forward", vars(copied).pop("_original_forward"))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (dict, list, tuple):
        for entry in value.values() if type(value) is dict else value:
            yield from _tensors_in(entry)


def _is_of_compiler(function: Any) -> bool:
    """Whether a function is a wrapper made by `torch.compile`."""
    is_function = type(function) is types.FunctionType
    return is_function and function.__globals__.get("__name__", "").startswith("torch._dynamo")


def _bind_to_copy(
    copied: nn.Module, name: str, compiled: Callable[..., Any], memo: dict[int, object]
) -> None:
    """Replace a compiled method by the method itself, bound to the copy.

    The compiled function would still call the modules for which it was compiled. If it has already
    been traced, it does not run global hooks, so `refuse_calls` would not notice.

    Args:
        copied: The copied module.
        name: The attribute that holds the compiled function.
        compiled: The compiled function.
        memo: The copies of the model's modules, by the `id` of the modules.
    """
    method = inspect.unwrap(compiled, stop=lambda function: not _is_of_compiler(function))
    if id(getattr(method, "__self__", None)) in memo:
        method = copy.deepcopy(method, memo)
    elif name != "forward":
        return
    _set_method(copied, name, method)


def _set_method(module: nn.Module, name: str, method: Any) -> None:
    """Set a method of one module, unless its class has this method."""
    vars(module).pop(name, None)
    if getattr(module, name, None) != method:
        vars(module)[name] = method


def _is_in_mixed_precision(module: nn.Module) -> bool:
    """Whether accelerate has wrapped the module's forward pass in `torch.autocast`.

    Hugging Face's Trainer with `bf16=True` wraps the forward pass, and does not unwrap it after
    training.
    """
    original = vars(module).get("_original_forward")
    if original is None:
        return False
    function = module.forward
    while hasattr(function, "__wrapped__") and function.__wrapped__ is not function:
        function = function.__wrapped__
        if getattr(function, "__func__", function) is getattr(original, "__func__", original):
            return True
    return False


@contextmanager
def refuse_calls(model: nn.Module, names: Iterable[str], copied_model: nn.Module) -> Iterator[None]:
    """Raise an error if a copy calls the user's own modules.

    A function that refers to a module, such as a lambda in an attribute, is not copied deeply. The
    copy then calls the original module, and no derivatives with respect to its parameters are
    computed.

    Args:
        model: The user's model.
        names: The parameters with respect to which derivatives are computed.
        copied_model: The copy that is run in this thread.

    Raises:
        NotImplementedError: If the copy calls one of the user's modules that has such parameters.
    """
    thread = threading.get_ident()
    copies = set(map(id, copied_model.modules()))
    names_by_module: dict[int, str] = {}
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        if id(module) not in copies:
            names_by_module[id(module)] = name

    def refuse(module: nn.Module, _: object) -> None:
        name = names_by_module.get(id(module))
        if name is not None and threading.get_ident() == thread:
            raise NotImplementedError(
                f"The model calls {name}, a {type(module).__name__}, which is not one of its "
                "submodules (it may be in a lambda, in a list, or in a function that replaces a "
                "`forward`). Derivatives with respect to its parameters cannot be computed. Make "
                "it an attribute of the module that calls it, or exclude its parameters."
            )

    # The hook is global, because a copy that another thread makes in the meantime would include any
    # hooks of the user's own modules.
    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def requiring_grad(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Make parameters of a shared copy require gradients within the context."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


@contextmanager
def preserve_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo the changes that a forward pass makes to modules' attributes and hooks.

    The next pass would otherwise use caches of other examples, or add its hooks again.
    """
    saved = SavedAttributes(modules)
    try:
        yield
    finally:
        saved.restore()


# A forward pass in eval mode does not change the modules defined in these files, unless they have
# hooks. Instance normalisation is not in the list, because in torch 2.8, it writes to its running
# statistics even in eval mode.
_CONSTANT_MODULES = {
    f"torch.nn.modules.{name}"
    for name in (
        "activation",
        "batchnorm",
        "container",
        "conv",
        "dropout",
        "flatten",
        "linear",
        "normalization",
        "padding",
        "pooling",
    )
}


def are_constant(modules: Iterable[nn.Module]) -> bool:
    """Whether forward passes cannot change the modules' attributes, as with most torch modules."""
    for module in modules:
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        if has_hooks or "forward" in vars(module):
            return False
        if type(module).__module__ not in _CONSTANT_MODULES:
            return False
    return True


class SavedAttributes:
    """The saved attributes of modules, which can be restored.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # The modules, with the names and the values of their attributes.
        self._saved: list[tuple[nn.Module, tuple[str, ...], tuple[Any, ...]]] = []
        # Every module has about a dozen containers for hooks. Most of them are empty, and are
        # cleared without comparison.
        self._empty: list[Any] = []
        # The other containers, with a copy of their entries.
        self._filled: list[tuple[Any, Any]] = []
        for module in modules:
            attributes = vars(module)
            values = tuple(attributes.values())
            self._saved.append((module, tuple(attributes), values))
            for value in values:
                if type(value) not in (dict, list, OrderedDict):
                    continue
                if value:
                    self._filled.append((value, value.copy()))
                else:
                    self._empty.append(value)

    def restore(self) -> None:
        """Restore the attributes, the entries of dictionaries and lists, and the hooks."""
        for module, names, values in self._saved:
            attributes = vars(module)
            if tuple(attributes) != names or not all(map(is_, attributes.values(), values)):
                module.__dict__ = dict(zip(names, values, strict=True))
        for container in self._empty:
            container.clear()
        for container, entries in self._filled:
            if not _has_entries(container, entries):
                container.clear()
                extend = container.extend if type(container) is list else container.update
                extend(entries)


def _has_entries(container: Any, entries: Any) -> bool:
    """Whether a dictionary or list has the same objects as another in the same order."""
    if len(container) != len(entries):
        return False
    if type(container) is list:
        return all(map(is_, container, entries))
    is_same = all(map(is_, container.values(), entries.values()))
    return is_same and tuple(container) == tuple(entries)
