r"""The square root of an operator and its inverse: in closed form, or by Lanczos from a vector.

Both are functions of A. With V the Krylov basis of the vector b and T the projection of A on it,
$f(A) b \approx \|b\|\, V f(T)\, e_1$.
"""

import math
from functools import partial

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_at_least, check_finite, check_square
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.solvers.lanczos_function import LanczosFunction
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import exact_inverse, exact_sqrt, least_eigenvalue_bound

_EARLIER = 0.8
"""Steps of the earlier approximation of the root, relative to all: where errors fall as the inverse
of the number of steps, the error is four times the change from the one to the other."""

_MAX_ITER = 200


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
        TypeError: A is not an operator.
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
    max_iter = _checked(A, "square root", tol, max_iter)
    closed_form = exact_sqrt(A)
    if closed_form is not None:
        return closed_form
    return LanczosFunction(A, "sqrt", partial(_root, A), tol, max_iter)


def inverse_sqrt(
    A: LinearOperator, *, tol: float = 1e-6, max_iter: int | None = None
) -> LinearOperator:
    r"""The **symmetric positive definite** root of the inverse, $R A R = I$, of such an operator.

    In closed form for structured operators; the result is structured again. For any other, an
    operator whose products are computed by Lanczos from the vector b itself,
    $R b \approx \|b\|\, V T^{-1/2} e_1$: products with A alone, and no linear equations. With a
    standard normal b, $R b$ is a sample of $\mathcal N(0, A^{-1})$.

    The error is bounded, but for rounding. From
    $x^{-1/2} = \frac2\pi \int_0^\infty (x + t^2)^{-1}\, \mathrm dt$ it is an integral of errors of
    shifted linear equations. Their residuals are known, $\rho_t = \|b\| \sum_i s_{1i} r_i /
    (\theta_i + t^2)$ with Ritz pairs $\theta_i, s_i$ and $r_i$ the last entry of $s_i$ times the
    coupling, and with a lower bound ℓ of the eigenvalues

    $$\|A^{-1/2} b - \|b\| V T^{-1/2} e_1\| \le \frac2\pi \int_0^\infty
    \frac{\rho_t}{\ell + t^2}\, \mathrm dt = \|b\| \sum_i
    \frac{s_{1i}\, r_i}{\sqrt{\ell \theta_i}\, (\sqrt\ell + \sqrt{\theta_i})}.$$

    A sum with a multiple of the identity, `G + c * Identity(n)` with G positive semi-definite, or
    with a positive diagonal, shows its ℓ. Of an operator that does not, the least Ritz value stands
    in: the bound is then an estimate, too low until Lanczos has found the least eigenvalue.

    Args:
        A: Symmetric positive definite operator `[n, n]`. Asymmetry is noticed.
        tol: Where a product stops: the bound of its error, relative to its norm. The error falls as
            $e^{-2 j / \sqrt\kappa}$ with the steps j.
        max_iter: As for `sqrt`.

    Returns:
        An operator `[n, n]`.

    Raises:
        TypeError: A is not an operator.
        ValueError: A is not square; it is known not to be positive definite, or upon a product a
            Ritz value is not positive, or below ℓ; a part or a product is not finite; a number is
            out of range.

    Warns:
        RuntimeWarning: Upon a product that did not come to `tol`; with the remedy.

    Reference:
        Chow, Saad (2014), as for `sqrt`. For the bound: Chen, Greenbaum, Musco, Musco. Error bounds
        for Lanczos-based matrix function approximation. SIAM Journal on Matrix Analysis and
        Applications, 2022.

    Example:
        >>> import torch
        >>> from laplace_debias.linalg import inverse_sqrt
        >>> from laplace_debias.operators import Diagonal
        >>> inverse_sqrt(Diagonal(torch.tensor([4.0, 16.0]))) @ torch.ones(2)
        tensor([0.5000, 0.2500])
    """
    max_iter = _checked(A, "inverse square root", tol, max_iter)
    inverse = exact_inverse(A)
    closed_form = None if inverse is None else exact_sqrt(inverse)
    if closed_form is not None:
        return closed_form
    bound = least_eigenvalue_bound(A)
    least = bound if bound is not None and bound > 0 else None
    return LanczosFunction(A, "inverse_sqrt", partial(_inverse_root, A, least), tol, max_iter)


def _root(A: LinearOperator, basis: KrylovBasis) -> tuple[Tensor, float]:
    """√T e₁; its error by the change from fewer steps: the bound of A^-½ is useless for κ = ∞."""
    coordinates = _first_column_of_root(A, basis, basis.size)
    earlier = _first_column_of_root(A, basis, max(1, int(_EARLIER * basis.size)))
    change = coordinates.clone()
    change[: len(earlier)] -= earlier
    norm = float(coordinates.norm())
    # One step has nothing to be compared with.
    error = 4 * float(change.norm()) / norm if basis.size > 1 and norm > 0 else math.inf
    return coordinates, error


def _first_column_of_root(A: LinearOperator, basis: KrylovBasis, steps: int) -> Tensor:
    values, vectors = eigh(basis.projected[:steps, :steps], "the projected operator")
    _check_ritz_value(A, basis, float(values[0]), least=0.0)
    return vectors * values.clamp(min=0).sqrt() @ vectors[0]


def _inverse_root(
    A: LinearOperator, least: float | None, basis: KrylovBasis
) -> tuple[Tensor, float]:
    """T^-½ e₁ and the bound of its error, with ℓ = `least` or the least Ritz value."""
    values, vectors = eigh(basis.projected, "the projected operator")
    smallest = float(values[0])
    _check_ritz_value(A, basis, smallest, least or 0.0)
    if least is None:
        if smallest <= 0:
            raise _not_positive(A, smallest, "definite")
        least = smallest
    roots, low = values.clamp(min=least).sqrt(), math.sqrt(least)
    coordinates = vectors / roots @ vectors[0]
    residuals = (basis.coupling @ vectors) * vectors[0]
    error = (residuals / (roots * low * (roots + low))).sum(dim=1).norm()
    return coordinates, float(error / coordinates.norm())


def _check_ritz_value(A: LinearOperator, basis: KrylovBasis, value: float, least: float) -> None:
    rounding = 100 * torch.finfo(A.dtype).eps * basis.scale
    if value < -rounding:
        raise _not_positive(A, value, "semi-definite")
    if value < least - rounding:
        raise ValueError(
            f"{type(A).__name__} has the Ritz value {value:.4g}, but its parts claim that no "
            f"eigenvalue is below {least:.4g}: one of them is not positive semi-definite."
        )


def _not_positive(A: LinearOperator, value: float, what: str) -> ValueError:
    return ValueError(
        f"{type(A).__name__} has the Ritz value {value:.4g}; expected a positive {what} operator. "
        "Add damping, `A + c * Identity(n)`, or use the GGN instead of the Hessian."
    )


def _checked(A: LinearOperator, what: str, tol: float, max_iter: int | None) -> int:
    """Checks what both are given; the greatest number of steps."""
    n = check_square(A, what)
    if not tol > 0:
        raise ValueError(f"`tol` is {tol}; expected a positive relative error.")
    if max_iter is not None:
        check_at_least(max_iter, 1, "max_iter")
    check_finite(A)
    return min(n, _MAX_ITER if max_iter is None else max_iter)
