"""The inverse of an operator, as an operator: in closed form if there is one, else by solves."""

from dataclasses import dataclass

from torch import Tensor

from laplace_debias.linalg.checks import check_square
from laplace_debias.linalg.solvers.conjugate_gradient import Preconditioner, cg
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_inverse
from laplace_debias.operators.structures.wrappers import SelfAdjoint
from laplace_debias.system.shown import warn


def inverse(
    A: LinearOperator,
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    preconditioner: Preconditioner | None = None,
) -> LinearOperator:
    r"""The inverse of an operator, as an operator: it multiplies, transposes and goes to SciPy.

    The inverse of a structured operator is in closed form and structured again. Any other operator
    must claim to be **positive semi-definite** (`assume`); each product is then a solution by
    conjugate gradients.

    Args:
        A: Operator `[n, n]`.
        tol: As for `cg`; a closed form uses none of the three.
        max_iter: As for `cg`.
        preconditioner: As for `cg`.

    Raises:
        ValueError: A is not square, or without a closed form, and does not claim to be positive
            semi-definite; or it is known to be singular.

    Warns:
        RuntimeWarning: Upon a product, if its solve did not converge; with the remedy.
    """
    check_square(A, "inverse")
    closed_form = exact_inverse(A)
    if closed_form is not None:
        return closed_form
    if not A.is_positive_semidefinite:
        raise ValueError(
            f"{type(A).__name__} has no inverse in closed form and does not claim to be positive "
            "semi-definite: if it is, pass `assume(A, positive_semidefinite=True)`; if not, solve "
            "by `scipy.sparse.linalg.lsmr(A.to_scipy(), b)`, for a NumPy vector b."
        )
    return Inverse(A, tol, max_iter, preconditioner)


@dataclass(frozen=True, eq=False)
class Inverse(SelfAdjoint):
    """An inverse whose products are solutions by conjugate gradients; made by `inverse`."""

    tol: float
    max_iter: int | None
    preconditioner: Preconditioner | None

    def _matmat(self, matrix: Tensor) -> Tensor:
        solution = cg(
            self.operator,
            matrix,
            tol=self.tol,
            max_iter=self.max_iter,
            preconditioner=self.preconditioner,
        )
        if not solution.converged:
            warn(f"inverse by cg: {solution.message}", RuntimeWarning)
        return solution.x
