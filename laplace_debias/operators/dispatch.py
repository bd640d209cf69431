"""Functions of operators that are chosen by the structure of their arguments.

`LinearOperator` calls these functions, and the file of each structure registers its own rules.
Because all of these files import this module, operators have the type `Any` here. The functions at
the end of the module go through the fields of operators, which are dataclasses.
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

    Rules are tried from the most specific types to the most general ones, until one returns a
    result other than None. The file of a structure registers the rules for this structure;
    `algebra` registers lazy sums and products for all other pairs.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[type, type], Rule] = {}

    def register(
        self, left: type, right: type, commutative: bool = False
    ) -> Callable[[Rule], Rule]:
        """Return a decorator for the rule of a pair of types; if `commutative`, for both orders."""

        def decorate(rule: Rule) -> Rule:
            self._rules[left, right] = rule
            if commutative and left is not right:
                self._rules[right, left] = lambda a, b: rule(b, a)
            return rule

        return decorate

    def __call__(self, left: Any, right: Any) -> Any:
        """Combine two operators, whose shapes, dtypes and devices must match."""
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
    """Select rows and columns of an operator, in the order of the indices."""
    raise NotImplementedError


@singledispatch
def shift(operator: Any, scalar: Scalar) -> Any:
    """Add a multiple of the identity, or return None if the structure cannot include it."""
    return None


@singledispatch
def identity_multiple(operator: Any) -> Scalar | None:
    """Return c if the operator is c times the identity by its structure, otherwise None."""
    return None


@singledispatch
def named_range(operator: Any, name: str) -> range:
    """Return the indices of the rows and columns of a named parameter or block."""
    if operator.layout is None:
        raise KeyError(
            f"{type(operator).__name__} has no layout with names for the entries of "
            f"{name!r}. Index the operator by numbers, or pass a ParameterLayout."
        )
    return operator.layout.range(name)


def check_finite(operator: Any) -> None:
    """Raise an error if the fields of an operator contain NaN or Inf.

    Closed forms need this check; all other functions check the products of an operator instead.
    """
    for numbers in _floating_numbers(operator):
        if not bool(numbers.isfinite().all()):
            raise not_finite_error(type(operator).__name__)


def not_finite_error(name: str) -> ValueError:
    """Return the error to raise if an operator or a result contains NaN or Inf."""
    return ValueError(
        f"{name} contains NaN or Inf. Look for NaN in the data and the parameters, or for "
        "overflow, which float64 may avoid."
    )


def _floating_numbers(value: Any) -> Iterator[Tensor]:
    """Yield all floating-point tensors and numbers that an operator contains, as tensors."""
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
    """Whether two operators or fields are known to be equal, without comparing their entries.

    Operators are the same if their types and all of their fields are the same, and floating-point
    tensors if they are identical views of the same memory. Only indices are compared by their
    entries.
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
