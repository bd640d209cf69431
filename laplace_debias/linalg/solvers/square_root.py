"""The square root of an operator, as an operator: in closed form or by Lanczos."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_at_least, check_finite, check_square
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.products import Products
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import exact_sqrt
from laplace_debias.operators.structures.wrapper import Wrapper

_EARLIER = 0.8
"""Steps of the earlier approximation, relative to all: where errors fall as the inverse of the
number of steps, the error is four times the change from the one to the other."""


def sqrt(A: LinearOperator, *, tol: float = 1e-6, max_iter: int | None = None) -> LinearOperator:
    r"""The **symmetric positive semi-definite** root R of such an operator, $R R = A$.

    In closed form for structured operators; the result is structured again. For any other, an
    operator whose products are computed by Lanczos from the vector b itself,
    $R b \approx \|b\|\, V \sqrt{T}\, e_1$, with V fully reorthogonalised. With a standard normal
    b, $R b$ is a sample of $\mathcal N(0, A)$.

    Args:
        A: Symmetric positive semi-definite operator `[n, n]`. Asymmetry is noticed.
        tol: Where a product stops: its estimated error, relative to its norm. The error falls as
            $e^{-2 j / \sqrt\kappa}$ with the steps j, and as 1/j where A is singular.
        max_iter: Lanczos steps, and products with A, for each column; at most so many vectors of
            length n are held. By default 200, or n if that is less.

    Returns:
        An operator `[n, n]`.

    Raises:
        TypeError: A is no operator.
        ValueError: A is not square; it is known to have a negative eigenvalue, or upon a product a
            Ritz value is negative; a part or a product is not finite; a number is out of range.

    Warns:
        RuntimeWarning: Upon a product that did not come to `tol`; with the remedy.

    Reference:
        Chow, Saad. Preconditioned Krylov subspace methods for sampling multivariate Gaussian
        distributions. SIAM Journal on Scientific Computing, 2014.

    Example:
        >>> import torch
        >>> from laplace_debias.linalg import sqrt
        >>> from laplace_debias.operators import Diagonal
        >>> sqrt(Diagonal(torch.tensor([4.0, 9.0]))) @ torch.ones(2)
        tensor([2., 3.])
    """
    n = check_square(A, "square root")
    if not tol > 0:
        raise ValueError(f"`tol` is {tol}; expected a positive relative error.")
    if max_iter is not None:
        check_at_least(max_iter, 1, "max_iter")
    check_finite(A)
    closed_form = exact_sqrt(A)
    if closed_form is not None:
        return closed_form
    return SquareRoot(A, tol, min(n, 200 if max_iter is None else max_iter))


@dataclass(frozen=True, eq=False, repr=False)
class SquareRoot(Wrapper):
    """A root whose products are Lanczos runs; made by `sqrt`.

    Args:
        operator: What the root is of.
        tol: Where a product stops, relative to its norm.
        max_iter: Lanczos steps a column.
    """

    tol: float
    max_iter: int

    @property
    def is_symmetric(self) -> bool:
        """True."""
        return True

    @property
    def is_positive_semidefinite(self) -> bool:
        """True."""
        return True

    @property
    def T(self) -> "SquareRoot":  # noqa: N802
        """The operator itself: it is symmetric."""
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        with Products(self.operator) as products:
            columns = [self._times(products, column) for column in matrix.T]
        missed = max(error for _, error in columns)
        if missed > self.tol:
            warnings.warn(
                f"sqrt: after {self.max_iter} Lanczos steps the relative error of a product is "
                f"about {missed:.2g}, above `tol` = {self.tol:.2g}: raise `max_iter` or `tol`, or "
                "add damping, `A + c * Identity(n)`.",
                RuntimeWarning,
                stacklevel=4,
            )
        return torch.stack([product for product, _ in columns], dim=1)

    def _times(self, products: Products, column: Tensor) -> tuple[Tensor, float]:
        """The product with a column, and its estimated relative error."""
        length = column.norm()
        if length == 0:
            return torch.zeros_like(column), 0.0
        basis = KrylovBasis(self.operator, products, len(column), self.max_iter, None)
        basis.add(column / length)
        error, is_going_on = math.inf, True
        while is_going_on and basis.size < basis.capacity and error > self.tol:
            for _ in range(1 + basis.size // 10):
                is_going_on = is_going_on and basis.size < basis.capacity and basis.expand(0)
            coordinates = self._first_column(basis)
            earlier = self._first_column(basis, max(1, int(_EARLIER * basis.size)))
            change = coordinates.clone()
            change[: len(earlier)] -= earlier
            norm = float(coordinates.norm())
            # One step has nothing to be compared with.
            error = 4 * float(change.norm()) / norm if basis.size > 1 and norm > 0 else math.inf
        if len(basis.coupling) == 0 or basis.size == len(column):
            # The Krylov space holds the product.
            error = 0.0
        return length * (coordinates.to(basis.vectors) @ basis.vectors), error

    def _first_column(self, basis: KrylovBasis, steps: int | None = None) -> Tensor:
        """√T e₁ for the first steps."""
        values, vectors = eigh(basis.projected[:steps, :steps], "the projected operator")
        rounding = 100 * torch.finfo(self.dtype).eps * basis.scale
        if float(values[0]) < -rounding:
            raise ValueError(
                f"{type(self.operator).__name__} has the Ritz value {float(values[0]):.4g}; "
                "expected a positive semi-definite operator, which alone has a square root. Add "
                "damping, `A + c * Identity(n)`, or use the GGN instead of the Hessian."
            )
        return vectors * values.clamp(min=0).sqrt() @ vectors[0]
