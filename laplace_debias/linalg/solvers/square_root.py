"""Inverse roots of operators, and samples of a Gaussian from products with its precision matrix."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_operator, check_right_side, check_square
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import exact_inverse, exact_sqrt, least_eigenvalue_bound
from laplace_debias.operators.structures.wrappers import SelfAdjoint
from laplace_debias.system.checks import whole
from laplace_debias.system.shown import warn

_MAX_ITER = 200


def sample_gaussian(
    mean: Float[Tensor, " n"],
    precision: LinearOperator,
    num_samples: int = 1,
    *,
    tol: float = 1e-3,
    max_iter: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n"]:
    r"""Draw samples of the normal distribution $\mathcal N(\mu, P^{-1})$.

    For a **matrix-free posterior**, use $P = N \cdot \mathrm{GGN} + \delta I$, where N is the
    number of training examples and δ is the prior precision. Only products with P are needed, so no
    D × D matrix is stored or factorised, and the curvature is not approximated by a structure. See
    `inverse_sqrt` for the method.

    Args:
        mean: μ, `[n]`.
        precision: P, a symmetric positive definite operator `[n, n]`.
        num_samples: Number of samples.
        tol: Largest allowed error of a sample, relative to the norm of the exact $P^{-1/2} z$.
        max_iter: Largest number of Lanczos steps, and of products with P, per sample. Default: 200,
            or n if n is smaller.
        generator: Source of randomness, on the operator's device.

    Raises:
        TypeError: If P is not an operator, or μ is not a tensor.
        ValueError: If P is not square or not positive definite, μ does not match P, a product is
            not finite, a number is out of range, or the generator is on a different device.

    Warns:
        RuntimeWarning: If the error of a sample is above `tol`. The message names a remedy.

    Reference:
        Chow, Saad. Preconditioned Krylov subspace methods for sampling multivariate Gaussian
        distributions. SIAM Journal on Scientific Computing, 2014.
    """
    check_operator(precision, generator)
    root = inverse_sqrt(precision, tol=tol, max_iter=max_iter)
    check_right_side(precision, mean, "mean")
    if mean.ndim != 1:
        raise ValueError(
            f"`mean` has shape {tuple(mean.shape)}. Pass a tensor of shape ({len(mean)},)."
        )
    whole(num_samples, "num_samples")
    return mean + (root @ draw(precision, num_samples, "gaussian", generator)).T


def inverse_sqrt(
    A: LinearOperator, *, tol: float = 1e-6, max_iter: int | None = None
) -> LinearOperator:
    r"""Return $A^{-1/2}$ of a **symmetric positive definite** operator, as an operator.

    For a structured operator, the result R is in closed form, and structured again. For any other
    operator, a product with a vector b is computed by Lanczos, starting from b:
    $R b \approx \|b\|\, V T^{-1/2} e_1$. This needs only products with A, and no linear equations
    are solved. If b is standard normal, $R b$ is a sample of $\mathcal N(0, A^{-1})$.

    Except for rounding errors, the error can be bounded. Because
    $x^{-1/2} = \frac2\pi \int_0^\infty (x + t^2)^{-1}\, \mathrm dt$, the error is an integral of
    the errors of shifted linear equations. The residuals of these equations are known:
    $\rho_t = \|b\| \sum_i s_{1i} r_i / (\theta_i + t^2)$, where $\theta_i, s_i$ are the Ritz pairs
    and $r_i$ is the last entry of $s_i$ times the coupling. If ℓ is a lower bound on the
    eigenvalues, it follows that

    $$\|A^{-1/2} b - \|b\| V T^{-1/2} e_1\| \le \frac2\pi \int_0^\infty
    \frac{\rho_t}{\ell + t^2}\, \mathrm dt = \|b\| \sum_i
    \frac{s_{1i}\, r_i}{\sqrt{\ell \theta_i}\, (\sqrt\ell + \sqrt{\theta_i})}.$$

    ℓ is known if A is the sum of a positive semi-definite G and a multiple of the identity,
    `G + c * Identity(n)`, or a positive diagonal. Otherwise, ℓ is replaced by the smallest Ritz
    value. The bound is then only an estimate, which is too low until Lanczos has found the smallest
    eigenvalue.

    Args:
        A: Symmetric positive definite operator `[n, n]`. An error is raised if it is not symmetric.
        tol: The computation of a product stops when its relative error bound is at most `tol`. The
            error decreases as $e^{-2 j / \sqrt\kappa}$ with the number of steps j.
        max_iter: Largest number of Lanczos steps, and of products with A, per column. This is also
            the largest number of vectors of length n in memory. Default: 200, or n if n is smaller.

    Raises:
        TypeError: If A is not an operator.
        ValueError: If A is not square or is known not to be positive definite; if, during a
            product, a Ritz value is not positive or is below ℓ; if a part of A or a product is not
            finite; if a number is out of range.

    Warns:
        RuntimeWarning: When a product is computed, if its error is above `tol`. The message names a
            remedy.

    Reference:
        Chow, Saad. Preconditioned Krylov subspace methods for sampling multivariate Gaussian
        distributions. SIAM Journal on Scientific Computing, 2014. For the bound:
        Chen, Greenbaum, Musco, Musco. Error bounds for Lanczos-based matrix function approximation.
        SIAM Journal on Matrix Analysis and Applications, 2022.

    Example:
        >>> import torch
        >>> from laplace_debias.linalg import inverse_sqrt
        >>> from laplace_debias.operators import Diagonal
        >>> inverse_sqrt(Diagonal(torch.tensor([4.0, 16.0]))) @ torch.ones(2)
        tensor([0.5000, 0.2500])
    """
    n = check_square(A, "inverse square root")
    if not tol > 0:
        raise ValueError(f"`tol` is {tol}. Pass a positive relative error.")
    if max_iter is not None:
        whole(max_iter, "max_iter")
    inverse = exact_inverse(A)
    closed_form = None if inverse is None else exact_sqrt(inverse)
    if closed_form is not None:
        return closed_form
    bound = least_eigenvalue_bound(A)
    least = bound if bound is not None and bound > 0 else None
    return InverseRoot(A, least, tol, min(n, _MAX_ITER if max_iter is None else max_iter))


@dataclass(eq=False, repr=False)
class InverseRoot(SelfAdjoint):
    """The inverse root of an operator, with one Lanczos run per product; see `inverse_sqrt`.

    `least` is a lower bound on the eigenvalues. If it is None, the smallest Ritz value is used.
    """

    least: float | None
    tol: float
    max_iter: int

    is_positive_semidefinite = True

    def _matmat(self, matrix: Tensor) -> Tensor:
        with Products(self.operator) as products:
            columns = [self._times(products, column) for column in matrix.T]
        missed = max(error for _, error in columns)
        if missed > self.tol:
            warn(
                f"inverse_sqrt: after {self.max_iter} Lanczos steps, the relative error of a "
                f"product is about {missed:.2g}, above `tol` = {self.tol:.2g}. Raise `max_iter` "
                "or `tol`, or add damping, `A + c * Identity(n)`.",
                RuntimeWarning,
            )
        return torch.stack([product for product, _ in columns], dim=1)

    def _times(self, products: Products, column: Tensor) -> tuple[Tensor, float]:
        """Compute the product with one column, and a bound on its relative error.

        The bound is computed after every few steps, because it needs a decomposition of T.
        """
        length = column_norms(column)
        if length == 0:
            return torch.zeros_like(column), 0.0
        basis = KrylovBasis(
            self.operator, products, size=len(column), capacity=self.max_iter, generator=None
        )
        basis.add(column / length)
        error = math.inf
        has_residual = True
        while has_residual and basis.size < basis.capacity and error > self.tol:
            for _ in range(1 + basis.size // 10):
                if not has_residual or basis.size == basis.capacity:
                    break
                has_residual = basis.expand(0)
            coordinates, error = self._coordinates(basis)
        if len(basis.coupling) == 0 or basis.size == len(column):
            # The Krylov space contains the product, so the result is exact.
            error = 0.0
        return length * (coordinates.to(basis.vectors) @ basis.vectors), error

    def _coordinates(self, basis: KrylovBasis) -> tuple[Tensor, float]:
        """Compute T^-½ e₁ and its error bound, in which ℓ is `least` or the smallest Ritz value."""
        values, vectors = eigh(basis.projected, "the projected operator")
        smallest = float(values[0])
        rounding = 100 * torch.finfo(basis.vectors.dtype).eps
        name = type(self.operator).__name__
        if smallest < -rounding * basis.scale or (self.least is None and smallest <= 0):
            raise ValueError(
                f"{name} has the Ritz value {smallest:.4g}, but must be positive definite. Add "
                "damping, `A + c * Identity(n)`, or use the GGN instead of the Hessian."
            )
        least = smallest if self.least is None else self.least
        if smallest < least - rounding * basis.scale:
            raise ValueError(
                f"{name} has the Ritz value {smallest:.4g}, but no eigenvalue can be below "
                f"{least:.4g} if its parts are positive semi-definite as declared. So at least one "
                "of these declarations is wrong. Remove it, or add damping."
            )
        roots = values.clamp(min=least).sqrt()
        low = math.sqrt(least)
        coordinates = vectors / roots @ vectors[0]
        residuals = (basis.coupling @ vectors) * vectors[0]
        error = (residuals / (roots * low * (roots + low))).sum(dim=1).norm()
        return coordinates, float(error / coordinates.norm())
