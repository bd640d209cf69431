"""Combinations of operators: functions that are chosen by the structure of their arguments.

The class of operators calls them, and a structure's file registers what it knows. So this module
lies below both, and its operators are typed as `Any`. Behind them stand functions of the parts of
operators: the fields of their dataclasses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor

Scalar = float | Tensor
Rule = Callable[[Any, Any], Any]


class Pairwise:
    """A function of two operators that is chosen by the types of both.

    Rules are tried from the most special type to the most general one. A rule that returns None
    leaves the pair to the next. A structure's file registers the rules that it knows; `algebra`
    registers the lazy ones for all others.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[type, type], Rule] = {}

    def register(
        self, left: type, right: type, commutative: bool = False
    ) -> Callable[[Rule], Rule]:
        """Decorate the rule for a pair of types, in either order if it is commutative."""

        def decorate(rule: Rule) -> Rule:
            self._rules[left, right] = rule
            if commutative and left is not right:
                self._rules[right, left] = lambda a, b: rule(b, a)
            return rule

        return decorate

    def __call__(self, left: Any, right: Any) -> Any:
        """Combine two operators whose shapes, dtypes and devices fit."""
        for left_type in type(left).__mro__:
            for right_type in type(right).__mro__:
                rule = self._rules.get((left_type, right_type))
                result = None if rule is None else rule(left, right)
                if result is not None:
                    return result
        raise NotImplementedError(f"{type(left).__name__} and {type(right).__name__}")


add = Pairwise()
multiply = Pairwise()


@singledispatch
def scale(operator: Any, scalar: Scalar) -> Any:
    """The operator times a number."""
    raise NotImplementedError


@singledispatch
def submatrix(operator: Any, rows: Tensor, columns: Tensor) -> Any:
    """The operator's rows and columns of the given indices, in their order."""
    raise NotImplementedError


@singledispatch
def shift(operator: Any, scalar: Scalar) -> Any:
    """The operator plus a multiple of the identity in its own structure, None if it has none."""
    return None


@singledispatch
def identity_multiple(operator: Any) -> Scalar | None:
    """The number c if the operator is c times the identity by its structure, else None."""
    return None


@singledispatch
def named_range(operator: Any, name: str) -> range:
    """The rows and columns that belong to the parameter, or the block, of this name."""
    if operator.layout is None:
        raise KeyError(
            f"{type(operator).__name__} does not know which entries belong to {name!r}: index it "
            "by numbers, or give it a ParameterLayout."
        )
    return operator.layout.range(name)


@singledispatch
def adopt(operator: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The operator itself or, if it was given no dtype or device, the one that has these."""
    return operator


def unify(operators: Sequence[Any]) -> list[Any]:
    """Give the operators that have no dtype or device of their own those of the others."""
    for reference in operators:
        dtype, device = reference.dtype, reference.device
        adopted = [adopt(operator, dtype, device) for operator in operators]
        if all(operator.dtype == dtype and operator.device == device for operator in adopted):
            return adopted
    kinds = ", ".join(f"{type(o).__name__} is {o.dtype} on {o.device}" for o in operators)
    raise ValueError(
        f"Operators must share one dtype and one device: {kinds}. Convert them with `.to(...)`."
    )


Operator = TypeVar("Operator")


def converted(operator: Operator, dtype: torch.dtype, device: torch.device) -> Operator:
    """The operator with every tensor in it, at any depth, converted; indices keep their dtype.

    Where it holds a dtype or a device of its own, that becomes the new one.
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
