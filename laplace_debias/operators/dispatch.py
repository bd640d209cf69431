"""Combinations of operators: functions that are chosen by the structure of their arguments.

`LinearOperator` calls these functions, and the file of each structure registers its own rules. All
of them import this module, so operators are typed as `Any` here. The functions at the end of the
module walk through the fields of operators, which are dataclasses.
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
    """A function of two operators that is chosen by the types of both operators.

    Rules are tried from the most special type to the most general one. If a rule returns None, the
    next rule is tried. The file of a structure registers the rules for this structure; `algebra`
    registers lazy sums and products for all other pairs.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[type, type], Rule] = {}

    def register(
        self, left: type, right: type, commutative: bool = False
    ) -> Callable[[Rule], Rule]:
        """Decorate the rule for a pair of types; register a commutative rule for both orders."""

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
    """Multiply an operator by a number."""
    raise NotImplementedError


@singledispatch
def submatrix(operator: Any, rows: Tensor, columns: Tensor) -> Any:
    """Select rows and columns of an operator in the order of the given indices."""
    raise NotImplementedError


@singledispatch
def shift(operator: Any, scalar: Scalar) -> Any:
    """Add a multiple of the identity if the operator's structure can include it, otherwise None."""
    return None


@singledispatch
def identity_multiple(operator: Any) -> Scalar | None:
    """Return c if the operator's structure is c times the identity, otherwise None."""
    return None


@singledispatch
def named_range(operator: Any, name: str) -> range:
    """Return the indices of the rows and columns of a parameter, or of a block, by name."""
    if operator.layout is None:
        raise KeyError(
            f"{type(operator).__name__} has no layout with names for the entries of "
            f"{name!r}. Index the operator by numbers, or pass a ParameterLayout."
        )
    return operator.layout.range(name)


def check_finite(operator: Any) -> None:
    """Require finite numbers in the fields of an operator.

    Closed forms call this function; all other functions check the operator's products instead.
    """
    for numbers in _floating_numbers(operator):
        if not bool(numbers.isfinite().all()):
            raise not_finite_error(type(operator).__name__)


def not_finite_error(name: str) -> ValueError:
    """Return the error for an operator or a result whose numbers are not all finite."""
    return ValueError(
        f"{name} contains NaN or Inf. Look for NaN in the data and the parameters, or for "
        "overflow, which float64 may avoid."
    )


def _floating_numbers(value: Any) -> Iterator[Tensor]:
    """Yield, as tensors, all floating-point tensors and numbers that an operator contains."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, Mapping):
        yield from _floating_numbers(tuple(value.values()))
    elif isinstance(value, tuple):
        for entry in value:
            yield from _floating_numbers(entry)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _floating_numbers(getattr(value, field.name))


def same(a: Any, b: Any) -> bool:
    """Whether two operators or fields are known to be equal without comparing their entries.

    Operators are the same if they have the same type and the same fields. Floating-point tensors
    are the same if they are views of the same memory. Only indices are compared by their entries.
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
