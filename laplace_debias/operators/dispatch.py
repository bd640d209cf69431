"""Combinations of operators: functions that are chosen by the structure of their arguments.

The class of operators calls them, and a structure's file registers what it knows. So this module
lies below both, and its operators are typed as `Any`. Behind them stand functions of the parts of
operators: the fields of their dataclasses.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any

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


def check_finite(operator: Any) -> None:
    """Check the numbers that an operator is made of: a closed form takes no product to check."""
    for part in _numbers(operator):
        if not bool(part.isfinite().all()):
            raise not_finite_error(type(operator).__name__)


def not_finite_error(what: str) -> ValueError:
    """The error for numbers that are not finite."""
    return ValueError(
        f"{what} holds NaN or Inf; expected finite values. Look for NaN in the data and the "
        "parameters, or for overflow, which float64 may avoid."
    )


def _numbers(part: Any) -> Iterator[Tensor]:
    """The floating-point tensors and numbers in an operator, at any depth, as tensors."""
    if isinstance(part, Tensor):
        if part.is_floating_point():
            yield part
    elif isinstance(part, float):
        yield torch.tensor(part)
    elif isinstance(part, Mapping | tuple):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _numbers(inner)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _numbers(getattr(part, field.name))


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
