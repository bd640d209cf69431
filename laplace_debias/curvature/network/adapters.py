"""The active PEFT adapters of a model, which can be switched without changing any tensor."""

from dataclasses import dataclass
from typing import Any

from torch import nn


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


def unused_originals(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of modules that PEFT replaces by trained copies.

    These are the originals of `modules_to_save`. The outputs do not depend on them while the copy
    is active. Often, such an original is a new head with random weights, which differ each time the
    model is loaded.
    """
    prefixes = []
    for path, module in model.named_modules(remove_duplicate=False):
        copies = module._modules.get("modules_to_save")
        if copies is None or "original_module" not in module._modules:
            continue
        active = getattr(module, "_active_adapter", None) or ()
        names = (active,) if isinstance(active, str) else active
        if getattr(module, "_disable_adapters", False) or not names:
            continue
        if all(name in copies._modules for name in names):
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
