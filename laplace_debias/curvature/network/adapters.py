"""The active PEFT adapters of a model, which can be switched without changing any tensor."""

from dataclasses import dataclass
from typing import Any

from torch import nn

# The containers in which PEFT's modules keep the tensors of each adapter under its name.
_CONTAINERS_BY_ADAPTER = ("ModuleDict", "ParameterDict", "BufferDict")


@dataclass(frozen=True)
class AdapterState:
    """State of the adapters in a PEFT module.

    Attributes:
        active: The names of the active adapters.
        is_disabled: Whether the module is used without its adapters.
        merged: The names of the adapters that are merged into the weights.
        scales: The scale factors of the active adapters that have one.
    """

    active: tuple[str, ...]
    is_disabled: bool
    merged: tuple[str, ...]
    scales: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        if self.is_disabled:
            return "disabled adapters"
        if self.merged:
            return f"the merged adapters {list(self.merged)}"
        scales = f", scaled by {dict(self.scales)}" if self.scales else ""
        return f"the active adapters {list(self.active)}{scales}"


def adapter_states(model: nn.Module) -> dict[str, AdapterState]:
    """Return the state of each module that has PEFT adapters, by the module's path."""
    states = {}
    for path, module in model.named_modules():
        # Layers have the first attribute. The model itself has the second, which selects one of
        # several prompts.
        active = getattr(module, "_active_adapter", vars(module).get("active_adapter"))
        names = (active,) if isinstance(active, str) else active
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            continue  # Another library or the user may use this name for something else.
        is_disabled = getattr(module, "_disable_adapters", False)
        states[path] = AdapterState(
            active=tuple(names),
            is_disabled=bool(is_disabled or getattr(module, "_adapters_disabled", False)),
            merged=tuple(getattr(module, "merged_adapters", ())),
            scales=_scales(getattr(module, "scaling", None), tuple(names)),
        )
    return states


def unused_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes, with a final dot, of tensors on which the outputs do not depend.

    These are the tensors of adapters that are not active, and the originals of `modules_to_save`
    while a trained copy is active. Often, such an original is a new head with random weights, which
    differ each time the model is loaded.
    """
    states = adapter_states(model)
    prefixes = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path not in states:
            continue
        state = states[path]
        for container_name, container in module.named_children():
            if type(container).__name__ not in _CONTAINERS_BY_ADAPTER:
                continue
            for name in (*container._modules, *container._parameters, *container._buffers):
                if name not in state.active:
                    prefixes.append(f"{path}.{container_name}.{name}.".lstrip("."))
        copies = module._modules.get("modules_to_save")
        if copies is None or "original_module" not in module._modules or state.is_disabled:
            continue
        if state.active and all(name in copies._modules for name in state.active):
            prefixes.append(f"{path}.original_module.".lstrip("."))
    return tuple(prefixes)


def _scales(scaling: Any, names: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Return the scales of adapters that have one, as pairs of name and scale."""
    if not isinstance(scaling, dict):
        return ()
    return tuple(
        (name, float(scaling[name]))
        for name in names
        if isinstance(scaling.get(name), (int, float))
    )
