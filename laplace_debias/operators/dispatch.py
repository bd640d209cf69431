"""Functions of two operators that are chosen by the structure of both."""

from collections.abc import Callable
from typing import Any

Rule = Callable[[Any, Any], Any]


class Pairwise:
    """A function of two operators that is chosen by the types of both.

    Rules are tried from the most special type to the most general one; a rule that returns None
    leaves the pair to the next. A structure's file registers the rules that it knows, `compose`
    the lazy ones for all others.
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
        raise TypeError(
            f"{self.name} knows no rule for {type(left).__name__} and {type(right).__name__}: both "
            "must be LinearOperators."
        )
