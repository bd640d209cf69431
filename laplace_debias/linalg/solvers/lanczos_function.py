r"""Functions of an operator, as operators whose products are Lanczos runs.

With V the Krylov basis of the vector b and T the projection of A on it,
$f(A) b \approx \|b\|\, V f(T)\, e_1$.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.products import Products
from laplace_debias.operators.structures.wrapper import Wrapper
from laplace_debias.system.warn import warn

# From a basis: f(T) e₁ `[size]`, and its error relative to its norm.
Approximation = Callable[[KrylovBasis], tuple[Tensor, float]]


@dataclass(frozen=True, eq=False, repr=False)
class LanczosFunction(Wrapper):
    """A positive function of an operator whose products are Lanczos runs.

    Args:
        operator: What it is a function of.
        name: What warnings call it.
        approximation: The function of the projected operator.
        tol: Where a product stops: its error, relative to its norm.
        max_iter: Lanczos steps a column.
    """

    name: str
    approximation: Approximation
    tol: float
    max_iter: int

    is_symmetric = True

    is_positive_semidefinite = True

    @property
    def T(self) -> "LanczosFunction":  # noqa: N802
        """The operator itself: it is symmetric."""
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        with Products(self.operator) as products:
            columns = [self._times(products, column) for column in matrix.T]
        missed = max(error for _, error in columns)
        if missed > self.tol:
            warn(
                f"{self.name}: after {self.max_iter} Lanczos steps the relative error of a product "
                f"is about {missed:.2g}, above `tol` = {self.tol:.2g}: raise `max_iter` or `tol`, "
                "or add damping, `A + c * Identity(n)`.",
                RuntimeWarning,
            )
        return torch.stack([product for product, _ in columns], dim=1)

    def _times(self, products: Products, column: Tensor) -> tuple[Tensor, float]:
        """The product with a column, and its relative error."""
        length = column.norm()
        if length == 0:
            return torch.zeros_like(column), 0.0
        basis = KrylovBasis(self.operator, products, len(column), self.max_iter, None)
        basis.add(column / length)
        error, is_going_on = math.inf, True
        while is_going_on and basis.size < basis.capacity and error > self.tol:
            for _ in range(1 + basis.size // 10):
                is_going_on = is_going_on and basis.size < basis.capacity and basis.expand(0)
            coordinates, error = self.approximation(basis)
        if len(basis.coupling) == 0 or basis.size == len(column):
            # The Krylov space holds the product.
            error = 0.0
        return length * (coordinates.to(basis.vectors) @ basis.vectors), error
