"""Lazy sums, multiples, products and adjoints of operators."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import Composed, Joined, LinearOperator
from laplace_debias.operators.dispatch import (
    Scalar,
    add,
    identity_multiple,
    multiply,
    same,
    scale,
    shift,
)
from laplace_debias.operators.layout import ParameterLayout
from laplace_debias.operators.structures.wrappers import Wrapper


@dataclass(eq=False, repr=False)
class Sum(Joined):
    """The sum of operators.

    Args:
        terms: One or more operators, all of the same shape, dtype and device.

    Raises:
        ValueError: If the terms have named parameters in different orders.
    """

    terms: tuple[LinearOperator, ...]

    def __post_init__(self) -> None:
        layouts = {term.layout for term in self.terms if term.layout is not None}
        if len(layouts) > 1:
            raise ValueError(
                "Operators on different parameters cannot be added. Their parameters are "
                f"{' and '.join(str(list(layout.names)) for layout in layouts)}. Build them "
                "for the same parameters in the same order."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape that all terms share."""
        return self.terms[0].shape

    @property
    def layout(self) -> ParameterLayout | None:
        """The layout that all terms share, or None if no term has a layout."""
        return next((term.layout for term in self.terms if term.layout is not None), None)

    @property
    def T(self) -> "Sum":  # noqa: N802
        """The sum of the adjoints."""
        return Sum(tuple(term.T for term in self.terms))

    def _matmat(self, matrix: Tensor) -> Tensor:
        return reduce(torch.add, (term @ matrix for term in self.terms))


@dataclass(eq=False, repr=False)
class Scaled(Wrapper):
    """A multiple of an operator.

    Args:
        operator: The operator.
        scalar: A number or a 0-d tensor. Gradients flow through the tensor.
    """

    scalar: float | Float[Tensor, ""]

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the scaled operator is known to be positive semi-definite."""
        return bool(self.scalar >= 0) and self.operator.is_positive_semidefinite

    @property
    def T(self) -> "Scaled":  # noqa: N802
        """The adjoint of the operator, multiplied by the same number."""
        return Scaled(self.operator.T, self.scalar)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.scalar * (self.operator @ matrix)

    def adopted(self, dtype: torch.dtype, device: torch.device) -> LinearOperator:
        """Return the operator; if its dtype or device is open, it adopts the given one."""
        return Scaled(self.operator.adopted(dtype, device), self.scalar)


@dataclass(eq=False, repr=False)
class Product(Composed):
    """The product of operators, of which the last one is applied first.

    Args:
        factors: One or more operators whose inner sizes match, all of the same dtype and device.
    """

    factors: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows of the first factor and the number of columns of the last one."""
        return self.factors[0].shape[0], self.factors[-1].shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether the product is known to have the form XᵀX, or XᵀMX with a symmetric M."""
        pairs = zip(self.factors, reversed(self.factors), strict=True)
        return all(_adjoint(a, b) for a, b in pairs)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known to have the form XᵀX, or XᵀMX with a positive semi-definite M."""
        middle = self.factors[len(self.factors) // 2]
        even = len(self.factors) % 2 == 0
        return (even or middle.is_positive_semidefinite) and self.is_symmetric

    @property
    def layout(self) -> ParameterLayout | None:
        """The layout of the last factor, because its columns are those of the product."""
        return self.factors[-1].layout

    @property
    def T(self) -> "Product":  # noqa: N802
        """The product of the adjoints in reverse order."""
        return Product(tuple(factor.T for factor in reversed(self.factors)))

    def _matmat(self, matrix: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            matrix = factor @ matrix
        return matrix


@dataclass(eq=False, repr=False)
class Transpose(Wrapper):
    """The adjoint of an operator, whose products are computed by a given function.

    Args:
        operator: The operator, `[m, n]`.
        product: A function that multiplies the adjoint with a matrix: `[m, k]` to `[n, k]`.
        layout: How the operator's rows (the columns of the adjoint) correspond to named parameters;
            None if they do not.
    """

    # Exclude `product` from comparisons, because an operator has only one adjoint, no matter which
    # function computes its products.
    product: Callable[[Tensor], Tensor] = field(compare=False)
    layout: ParameterLayout | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the operator, reversed."""
        return self.operator.shape[1], self.operator.shape[0]

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The operator itself."""
        return self.operator

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the adjoint, converted to another dtype or device."""
        # `product` is bound to the unconverted operator. Therefore, convert the operator and take
        # the adjoint of the result.
        return self.operator.to(*args, **kwargs).T

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.product(matrix)


def _adjoint(a: LinearOperator, b: LinearOperator) -> bool:
    """Whether a is known to be the adjoint of b, without comparing any entries."""
    if isinstance(a, Transpose):
        return same(a.operator, b)
    if isinstance(b, Transpose):
        return same(a, b.operator)
    return (a.is_symmetric and same(a, b)) or same(a, b.T)


@add.register(LinearOperator, LinearOperator)
def _(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    for a, b in ((left, right), (right, left)):
        multiple = identity_multiple(b)
        shifted = None if multiple is None else shift(a, multiple)
        if shifted is not None:
            return shifted
    return Sum((left, right))


@add.register(Sum, LinearOperator, commutative=True)
def _(left: Sum, right: LinearOperator) -> LinearOperator:
    if isinstance(right, Sum):
        return reduce(add, right.terms, cast(LinearOperator, left))
    # An existing term may absorb the new one, as a multiple of the identity absorbs another
    # multiple.
    for i, term in enumerate(left.terms):
        joint = add(term, right)
        if not isinstance(joint, Sum):
            return Sum((*left.terms[:i], joint, *left.terms[i + 1 :]))
    return Sum((*left.terms, right))


@multiply.register(LinearOperator, LinearOperator)
def _(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    factors = [
        factor
        for side in (left, right)
        for factor in (side.factors if isinstance(side, Product) else (side,))
    ]
    return Product(tuple(factors))


@multiply.register(Scaled, LinearOperator)
def _(left: Scaled, right: LinearOperator) -> LinearOperator:
    return scale(multiply(left.operator, right), left.scalar)


@multiply.register(LinearOperator, Scaled)
def _(left: LinearOperator, right: Scaled) -> LinearOperator:
    return scale(multiply(left, right.operator), right.scalar)


@scale.register
def _(operator: LinearOperator, scalar: Scalar) -> LinearOperator:
    return Scaled(operator, scalar)


@scale.register
def _(operator: Scaled, scalar: Scalar) -> LinearOperator:
    return scale(operator.operator, operator.scalar * scalar)


@identity_multiple.register
def _(operator: Scaled) -> Scalar | None:
    multiple = identity_multiple(operator.operator)
    return None if multiple is None else operator.scalar * multiple


@shift.register
def _(operator: Scaled, scalar: Scalar) -> LinearOperator | None:
    multiple = identity_multiple(operator)
    return None if multiple is None else scale(operator.operator, operator.scalar + scalar)
