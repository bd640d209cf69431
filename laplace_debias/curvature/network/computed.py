"""What a forward pass has computed and left in a module's attributes: it cannot be copied as is."""

from collections.abc import Iterator

from torch import Tensor, nn


def computed(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of this kind, such as the weight of a weight norm."""
    for module in model.modules():
        for kept in vars(module).values():
            values = kept.values() if type(kept) is dict else (kept,)
            yield from (value for value in values if _is_computed(value))


def drop_caches(original: nn.Module, copied: nn.Module) -> None:
    """Take out of a copy what the original keeps from one pass to the next: it is computed anew."""
    for name, kept in vars(original).items():
        is_cache = type(kept) is dict and not name.startswith("_")
        if is_cache and any(map(_is_computed, kept.values())):
            vars(copied)[name] = {k: v for k, v in kept.items() if not _is_computed(v)}


def _is_computed(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf
