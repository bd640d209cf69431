"""The parts of operators: the fields of their dataclasses."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Operator = TypeVar("Operator")


def converted(operator: Operator, dtype: torch.dtype, device: torch.device) -> Operator:
    """The operator with every tensor in it, at any depth, converted; indices keep their dtype.

    Where it holds a dtype or a device of its own, that becomes the new one.

    Raises:
        TypeError: If it is not a dataclass.
    """
    if not is_dataclass(operator):
        raise TypeError(
            f"{type(operator).__name__} is not made of tensors: convert what it was built from, "
            "such as the model, and build it again."
        )
    # The parts fit each other before and after: no constructor has to check them again.
    result = object.__new__(type(operator))
    for field in fields(operator):
        part = _converted_part(getattr(operator, field.name), dtype, device)
        object.__setattr__(result, field.name, part)
    return result


def _converted_part(part: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(part, Tensor):
        return part.to(device, dtype) if part.is_floating_point() else part.to(device)
    if isinstance(part, torch.dtype):
        return dtype
    if isinstance(part, torch.device):
        return device
    if isinstance(part, Mapping):
        return {key: _converted_part(value, dtype, device) for key, value in part.items()}
    if isinstance(part, tuple) and not isinstance(part, torch.Size):
        return tuple(_converted_part(value, dtype, device) for value in part)
    return part.to(dtype=dtype, device=device) if hasattr(part, "to") else part


def numbers(part: Any) -> Iterator[Tensor]:
    """The floating-point tensors and numbers in an operator, at any depth, as tensors."""
    if isinstance(part, Tensor):
        if part.is_floating_point():
            yield part
    elif isinstance(part, float):
        yield torch.tensor(part)
    elif isinstance(part, Mapping | tuple):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from numbers(inner)
    elif is_dataclass(part):
        for field in fields(part):
            yield from numbers(getattr(part, field.name))


def same(a: Any, b: Any) -> bool:
    """Whether two parts are known to be equal without comparing entries.

    Operators are the same if they are of one type and made of the same parts, tensors if they are
    views of the same memory; indices are compared.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.is_set_to(b) or (not a.is_floating_point() and a.equal(b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    if isinstance(a, int | float | str | torch.dtype | torch.device):
        return a == b
    return False
