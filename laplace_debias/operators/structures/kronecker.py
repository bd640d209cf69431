"""Kronecker products of operators."""

import math
from dataclasses import dataclass

from torch import Tensor

from laplace_debias.operators.base import Joined, LinearOperator, unify
from laplace_debias.operators.dispatch import Scalar, multiply, scale
from laplace_debias.operators.structures.dense import Dense


@dataclass(eq=False, repr=False, init=False)
class Kronecker(Joined):
    r"""The Kronecker product $A \otimes B \otimes \cdots$.

    For a matrix $V$, flattened row-major,
    $(A \otimes B)\,\mathrm{vec}\,V = \mathrm{vec}(A V B^\top)$.

    Args:
        factors: Operators or matrices of any shape.

    Raises:
        ValueError: If there are no factors, or their dtypes or devices differ.
    """

    factors: tuple[LinearOperator, ...]

    def __init__(self, *factors: LinearOperator | Tensor) -> None:
        if not factors:
            raise ValueError(
                "A Kronecker product needs at least one factor. Pass one or more operators or "
                "matrices, such as Kronecker(A, B)."
            )
        operators = [Dense(factor) if isinstance(factor, Tensor) else factor for factor in factors]
        self.factors = tuple(unify(operators))

    @property
    def shape(self) -> tuple[int, int]:
        """The products of the factors' numbers of rows and of their numbers of columns."""
        rows, columns = zip(*(factor.shape for factor in self.factors), strict=True)
        return math.prod(rows), math.prod(columns)

    @property
    def T(self) -> "Kronecker":  # noqa: N802
        """The Kronecker product of the factors' adjoints."""
        return Kronecker(*(factor.T for factor in self.factors))

    def _matmat(self, matrix: Tensor) -> Tensor:
        columns = [factor.shape[1] for factor in self.factors]
        result = matrix.unflatten(0, columns)
        for axis, factor in enumerate(self.factors):
            front = result.movedim(axis, 0)
            product = factor @ front.flatten(1)
            result = product.unflatten(1, front.shape[1:]).movedim(0, axis)
        return result.flatten(0, -2)


@multiply.register(Kronecker, Kronecker)
def _(left: Kronecker, right: Kronecker) -> LinearOperator | None:
    if len(left.factors) != len(right.factors):
        return None
    pairs = list(zip(left.factors, right.factors, strict=True))
    if any(a.shape[1] != b.shape[0] for a, b in pairs):
        return None
    return Kronecker(*(multiply(a, b) for a, b in pairs))


@scale.register
def _(operator: Kronecker, scalar: Scalar) -> LinearOperator:
    return Kronecker(scale(operator.factors[0], scalar), *operator.factors[1:])
