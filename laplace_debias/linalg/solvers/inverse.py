"""Inverses of operators, as operators: in closed form, or else by iterative solvers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_choice, check_right_side, check_square
from laplace_debias.linalg.solvers.conjugate_gradient import Preconditioner, cg
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.differentiable_product import DifferentiableProduct
from laplace_debias.operators.dispatch import not_finite_error
from laplace_debias.operators.exact import exact_inverse
from laplace_debias.operators.structures.wrappers import SelfAdjoint, Wrapper
from laplace_debias.system.checks import real, whole
from laplace_debias.system.shown import warn


def inverse(
    A: LinearOperator,
    method: str = "cg",
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    preconditioner: Preconditioner | None = None,
) -> LinearOperator:
    r"""Return the inverse of an operator as an operator.

    For a structured operator, the inverse is in closed form, and structured again. For any other
    operator, each product with the inverse is computed by an iterative method:

    - `"cg"`: conjugate gradients. The operator must be declared **positive semi-definite** (see
      `assume`).
    - `"lsmr"`: least squares by SciPy's LSMR, for any operator, one right-hand side after the
      other. If the operator is singular, the solution is the one with the smallest norm, so the
      result is the pseudo-inverse. Each step needs a product with the operator and one with its
      adjoint. The number of steps grows with the condition number (for `"cg"`, with its square
      root).

    To damp an operator, invert `A + damping * Identity(n)`. For a structured A, such as `KFAC`, the
    sum is structured too.

    Args:
        A: Operator `[n, n]`.
        method: `"cg"` or `"lsmr"`. If there is a closed form, the method and all options are
            ignored.
        tol: The relative residual at which a solve ends. With `"cg"` it is relative to the
            right-hand side b, and with `"lsmr"` to `‖b‖ + ‖A‖ ‖x‖`, where x is the solution. LSMR
            also ends if the relative residual of the normal equations is below `tol`, which is how
            it ends if the operator is singular.
        max_iter: The largest number of steps. Default: 10 n.
        preconditioner: For `"cg"`: an approximate inverse, as an operator or a function.

    Raises:
        ValueError: If A is not square; if A has a closed form and is singular; if the method is
            `"cg"` and A is not declared positive semi-definite; if `method` is unknown, or does not
            accept an option that was given.

    Warns:
        RuntimeWarning: When a product is computed, if its solve does not converge. The message
            names a remedy.

    Reference:
        Fong, Saunders. LSMR: an iterative algorithm for sparse least-squares problems. SISC, 2011.
    """
    check_square(A, "inverse")
    check_choice(method, ("cg", "lsmr"), "method")
    if method == "lsmr" and preconditioner is not None:
        raise ValueError(
            '`preconditioner` has no effect with `method="lsmr"`. Remove it, or use `method="cg"`.'
        )
    closed_form = exact_inverse(A)
    if closed_form is not None:
        return closed_form
    if method == "lsmr":
        if not 0 < real(tol, "tol") < 1:
            raise ValueError(
                f"`tol` is {tol}. Pass the largest relative residual to accept, a number "
                "between 0 and 1."
            )
        if max_iter is not None:
            whole(max_iter, "max_iter")
        return LeastSquaresInverse(A, tol, max_iter)
    if not A.is_positive_semidefinite:
        raise ValueError(
            f"{type(A).__name__} has no inverse in closed form and is not declared positive "
            "semi-definite. If it is positive semi-definite, pass `assume(A, "
            'positive_semidefinite=True)`. If not, pass `method="lsmr"`.'
        )
    return Inverse(A, tol, max_iter, preconditioner)


@dataclass(eq=False)
class Inverse(SelfAdjoint):
    """An inverse whose products are computed by conjugate gradients; see `inverse`."""

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


@dataclass(eq=False)
class LeastSquaresInverse(Wrapper):
    """An inverse whose products are computed by LSMR, a least-squares solver; see `inverse`."""

    tol: float
    max_iter: int | None

    is_positive_semidefinite = False

    @property
    def T(self) -> "LeastSquaresInverse":  # noqa: N802
        """The inverse of the adjoint."""
        return LeastSquaresInverse(self.operator.T, self.tol, self.max_iter)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return DifferentiableProduct.apply(matrix, self._solve, self.T)

    def _solve(self, matrix: Tensor) -> Tensor:
        """Solve for every column by SciPy, whose results autograd cannot differentiate."""
        # Import SciPy only here, because its import is slow.
        from scipy.sparse.linalg import lsmr

        check_right_side(self.operator, matrix, "b")
        operator = self.operator.to_scipy()
        max_iter = 10 * len(matrix) if self.max_iter is None else self.max_iter

        def solve(right_side: np.ndarray) -> tuple[np.ndarray, bool]:
            """Return the solution for one column, and whether the solver converged."""
            norm = np.linalg.norm(right_side.astype(np.float64))
            unit = right_side / norm if norm > 0 else right_side
            # SciPy may stop because of its estimate of the condition number, which is right only if
            # the norm of the operator is about 1. Therefore, scale the operator.
            scale = np.linalg.norm(operator.rmatvec(unit).astype(np.float64))
            name = type(self.operator).__name__
            if not np.isfinite(scale):
                raise not_finite_error(f"A product with the adjoint of {name}")
            if scale == 0:
                return np.zeros(self.operator.shape[1], right_side.dtype), True
            scaled_operator = operator * (1 / scale)
            # Do not limit the condition number, because a limit would end solves too early. In
            # single precision, SciPy's initial value of 1e100 overflows, which does no harm.
            with np.errstate(over="ignore"):
                solution, status, *_ = lsmr(
                    scaled_operator, unit, atol=self.tol, btol=self.tol, conlim=0, maxiter=max_iter
                )
            if not np.isfinite(solution).all():
                raise not_finite_error(f"A product with {name}")
            return solution * (norm / scale), status not in _UNSOLVED

        columns = []
        num_unsolved = 0
        for right_side in matrix.T.detach().cpu().numpy():
            solution, is_solved = solve(right_side)
            columns.append(solution)
            if not is_solved:
                num_unsolved += 1
        if num_unsolved:
            warn(
                f"inverse by lsmr: {num_unsolved} of {len(columns)} solves did not converge within "
                f"{max_iter} steps, or the operator is too ill-conditioned for {matrix.dtype}. "
                "Raise `max_iter` or `tol`, or add damping to the operator.",
                RuntimeWarning,
            )
        return torch.from_numpy(np.stack(columns, axis=1)).to(matrix)


_UNSOLVED = (6, 7)
"""The statuses of LSMR for a condition number beyond the dtype's precision, and for reaching the
largest number of steps."""
