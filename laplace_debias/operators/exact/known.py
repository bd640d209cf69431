"""How closed forms that do not exist are told: by an exception inside, by None outside."""

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, TypeVar

from laplace_debias.operators.base import LinearOperator

Value = TypeVar("Value")


class NoClosedFormError(Exception):
    """There is no closed form."""


def or_none(function: Callable[..., Value], *arguments: Any) -> Value | None:
    """The value that the function returns, None if it finds no closed form."""
    try:
        return function(*arguments)
    except NoClosedFormError:
        return None


def known(value: Value | None) -> Value:
    """The value, which is None where there is no closed form.

    Raises:
        NoClosedFormError: If it is None.
    """
    if value is None:
        raise NoClosedFormError
    return value


def squares(operators: Collection[LinearOperator]) -> Collection[LinearOperator]:
    """The operators.

    Raises:
        NoClosedFormError: If one is not square.
    """
    if any(operator.shape[0] != operator.shape[1] for operator in operators):
        raise NoClosedFormError
    return operators


def pass_on(
    rule: Any, wrapper: type, inner: Callable[[Any], LinearOperator] = attrgetter("operator")
) -> None:
    """Register that a wrapper has the closed form of what it wraps.

    Args:
        rule: A function that is dispatched by the operator's type (`functools.singledispatch`).
        wrapper: The wrapper's type.
        inner: Gives the wrapped operator.
    """
    rule.register(wrapper, lambda operator, *rest: rule(inner(operator), *rest))
