"""Stochastic Lanczos quadrature: integrals over the spectrum of a symmetric operator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_square, check_symmetric
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.linalg.estimators.quadratic_forms import QuadraticForms
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.operators.exact import eigenvalues
from laplace_debias.system.checks import whole

_BASIS_ELEMENTS = 2**28
"""Largest number of entries of Lanczos vectors, or of a dense matrix, in memory: 1 GiB in
float32."""


@dataclass(frozen=True, eq=False)
class Quadrature:
    r"""One rule per probe: nodes (Ritz values) and weights `[probes, steps]`, which sum to 1.

    `alphas` and `betas` are the diagonals and off-diagonals of the tridiagonal matrices, in
    float64. They are empty if all eigenvalues are known (`is_exact`). If a function f was passed,
    `forms` are the $\omega^\top f(A)\,\omega$ of the probes.
    """

    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    alphas: Float[Tensor, "probes steps_made"]
    betas: Float[Tensor, "probes steps_between"]
    num_matvecs: int
    is_exact: bool
    forms: QuadraticForms | None = None

    def shorter(self, steps: int) -> tuple[Tensor, Tensor]:
        """Compute the nodes and weights that fewer steps would give, without new products."""
        return _gauss(self.alphas[:, :steps], self.betas[:, : steps - 1], self.nodes.dtype)

    def averaged_rule(self, steps: int) -> tuple[Tensor, Tensor]:
        """Compute nodes and weights that are about as precise as a Gauss rule with twice the steps.

        The rule is the mean of the Gauss rule with one step fewer and the anti-Gaussian rule. The
        errors of these two rules are about equal, but of opposite sign.

        Reference:
            Laurie. Anti-Gaussian quadrature formulas. Mathematics of Computation, 1996.
        """
        betas = self.betas[:, : steps - 1].clone()
        betas[:, -1] *= 2**0.5
        gauss_nodes, gauss_weights = self.shorter(steps - 1)
        anti_nodes, anti_weights = _gauss(self.alphas[:, :steps], betas, self.nodes.dtype)
        nodes = torch.cat([gauss_nodes, anti_nodes], dim=1)
        return nodes, torch.cat([gauss_weights, anti_weights], dim=1) / 2


def lanczos_quadrature(
    A: LinearOperator,
    num_probes: int,
    num_steps: int,
    *,
    function: Callable[[Tensor], Tensor] | None = None,
    floor: float = 0.0,
    generator: torch.Generator | None = None,
    progress: bool = False,
    label: str = "Lanczos quadrature",
) -> Quadrature:
    r"""Compute Gauss quadratures of an operator's spectral measure, one per Rademacher probe.

    For a probe $\omega$ of length $\sqrt n$, $\omega^\top f(A)\,\omega / n \approx \sum_j w_j
    f(\theta_j)$, with equality for polynomials of degree below `2 * num_steps`. Here, θ are the
    eigenvalues of the tridiagonal matrix of the Lanczos process, and w are the squares of the first
    entries of its eigenvectors. Lanczos vectors are fully reorthogonalised, and as many probes as
    memory allows are processed together. The result contains all eigenvalues if they have a closed
    form (without any products), or if `num_probes * num_steps` is at least n and n is at most
    16,384 (with n products). Eigenvalues up to `floor` do not matter, so the check of symmetry
    tolerates differences up to `floor`.

    Reference:
        Golub, Meurant. Matrices, moments and quadrature with applications. 2010. Ubaru, Chen, Saad.
        Fast estimation of tr(f(A)) via stochastic Lanczos quadrature. SIMAX, 2017.
    """
    n = check_square(A, "spectrum", generator)
    whole(num_probes, "num_probes")
    whole(num_steps, "num_steps", minimum=2)
    values = eigenvalues(A)
    if values is not None:
        return _exact_quadrature(values, 0)
    total = num_probes * num_steps
    is_small = n <= total and n**2 <= _BASIS_ELEMENTS
    with Products(A, progress=progress, total=n if is_small else total, label=label) as products:
        if is_small:
            return _exact_quadrature(_dense_eigenvalues(products, floor), products.count)
        chunk = max(1, _BASIS_ELEMENTS // (n * num_steps))
        diagonals = []
        off_diagonals = []
        forms = None
        if function is not None:
            forms = QuadraticForms(is_symmetric=True, dtype=A.dtype)
        for start in range(0, num_probes, chunk):
            probes = draw(A, min(chunk, num_probes - start), "rademacher", generator)
            alphas, betas, basis = _tridiagonal(products, probes / n**0.5, num_steps, floor)
            diagonals.append(alphas)
            off_diagonals.append(betas)
            if forms is not None and function is not None:
                forms.add(probes, n**0.5 * _images(function, alphas, betas, basis))
            del basis
        alphas = torch.cat(diagonals)
        betas = torch.cat(off_diagonals)
    nodes, weights = _gauss(alphas, betas, A.dtype)
    return Quadrature(
        nodes=nodes,
        weights=weights,
        alphas=alphas,
        betas=betas,
        num_matvecs=products.count,
        is_exact=False,
        forms=forms,
    )


def _dense_eigenvalues(products: Products, floor: float) -> Float[Tensor, " n"]:
    """Compute all eigenvalues by decomposing the operator as a dense matrix."""
    matrix = torch.cat([columns for _, columns in products.columns()], dim=1)
    scale = float(column_norms(matrix).max())
    check_symmetric(products.operator, (matrix - matrix.T).abs(), scale, floor)
    values, _ = eigh((matrix + matrix.T) / 2, "the operator")
    return values


def _images(
    function: Callable[[Tensor], Tensor],
    alphas: Float[Tensor, "probes steps"],
    betas: Float[Tensor, "probes off_diagonal"],
    basis: Float[Tensor, "probes steps n"],
) -> Float[Tensor, "n probes"]:
    """Approximate f(A) ω / ‖ω‖ by V f(T) e₁, for each probe ω that a Lanczos process started from.

    T is the tridiagonal matrix and V the basis of the process, and e₁ are the coordinates of
    ω / ‖ω‖ in this basis.
    """
    nodes, vectors = _decompose_tridiagonal(alphas, betas, basis.dtype)
    first_entries = vectors[:, 0]
    values = values_at(nodes, first_entries**2, function) * first_entries
    coordinates = vectors @ values[:, :, None]
    return (coordinates.mT @ basis)[:, 0].T


def values_at(nodes: Tensor, weights: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Evaluate a function at the nodes with a positive weight; return 0 at all other nodes."""
    # Nodes without weight come from steps after the Krylov space was exhausted.
    is_weighty = weights > 0
    values = function(nodes[is_weighty])
    if not values.isfinite().all():
        worst = float(nodes[is_weighty][~values.isfinite()][0])
        raise ValueError(
            f"The function is not finite at the Ritz value {worst:.4g}, but must be finite "
            "between the smallest and the largest eigenvalue. Add damping, `A + c * "
            "Identity(n)`, or clamp within the function."
        )
    return torch.zeros_like(nodes).masked_scatter(is_weighty, values)


def _exact_quadrature(eigenvalues: Tensor, num_matvecs: int) -> Quadrature:
    """Return the rule that has all eigenvalues as nodes, with equal weights."""
    nodes = eigenvalues[None]
    return Quadrature(
        nodes=nodes,
        weights=torch.ones_like(nodes) / eigenvalues.numel(),
        alphas=nodes[:, :0],
        betas=nodes[:, :0],
        num_matvecs=num_matvecs,
        is_exact=True,
    )


def _tridiagonal(
    products: Products, start: Tensor, num_steps: int, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Lanczos from p starting vectors, unit columns `[n, p]`, with p separate bases.

    Once a Krylov space is exhausted, its next vectors and all further entries of its tridiagonal
    matrix are zero.

    Returns:
        The diagonals `[p, steps]` and the off-diagonals `[p, steps - 1]`, both in float64, and the
        bases `[p, steps, n]`.
    """
    current = start.T  # The last vector of each basis, `[p, n]`.
    basis = start.new_zeros(len(current), num_steps, current.shape[1])
    alphas = start.new_zeros(len(current), num_steps, dtype=torch.float64)
    betas = start.new_zeros(len(current), num_steps - 1, dtype=torch.float64)
    scale = 0.0
    eps = torch.finfo(start.dtype).eps
    for step in range(num_steps):
        basis[:, step] = current
        basis_so_far = basis[:, : step + 1]
        images = products(current.T).T
        scale = max(scale, float(column_norms(images.T).max()))
        coordinates = (basis_so_far @ images[:, :, None])[:, :, 0]
        if step:
            # By symmetry, the coordinate along the previous vector is the last off-diagonal entry.
            difference = coordinates[:, step - 1] - betas[:, step - 1]
            check_symmetric(products.operator, difference.abs(), scale, floor)
        alphas[:, step] = _rayleigh_quotients(current, images)
        if step == num_steps - 1:
            break
        residuals = _outside_basis(images, coordinates, basis_so_far)
        norms = column_norms(residuals.T).to(residuals)
        norms = torch.where(norms > 10 * eps * scale, norms, torch.zeros_like(norms))
        betas[:, step] = norms
        unit = residuals / norms[:, None]
        current = torch.where(norms[:, None] > 0, unit, torch.zeros_like(unit))
    return alphas, betas, basis


def _rayleigh_quotients(
    vectors: Float[Tensor, "probes n"], images: Float[Tensor, "probes n"]
) -> Float[Tensor, " probes"]:
    """Compute vᵀAv / vᵀv for each vector v and its image Av, and 0 for v = 0.

    The sums are in double precision. If the eigenvalues are similar, all terms have the same sign,
    so in single precision, their rounding errors would accumulate in one direction.
    """
    precise = vectors.double()
    squared_lengths = torch.linalg.vecdot(precise, precise)
    quotients = torch.linalg.vecdot(precise, images.double()) / squared_lengths
    return torch.where(squared_lengths > 0, quotients, 0)


def _outside_basis(
    vectors: Float[Tensor, "probes n"],
    coordinates: Float[Tensor, "probes steps"],
    basis: Float[Tensor, "probes steps n"],
) -> Float[Tensor, "probes n"]:
    """Subtract from each vector its part in the span of its basis, given its coordinates."""
    residuals = vectors - (coordinates[:, None] @ basis)[:, 0]
    # Project twice more, because rounding errors leave components along the basis.
    for _ in range(2):
        remaining_coordinates = basis @ residuals[:, :, None]
        residuals = residuals - (remaining_coordinates.mT @ basis)[:, 0]
    return residuals


def _decompose_tridiagonal(
    alphas: Tensor, betas: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Decompose the symmetric tridiagonal matrices with these diagonals and off-diagonals.

    Returns:
        The eigenvalues and eigenvectors, converted to `dtype`.
    """
    matrices = alphas.diag_embed() + betas.diag_embed(1) + betas.diag_embed(-1)
    nodes, vectors = eigh(matrices, "the Lanczos matrices")
    return nodes.to(dtype), vectors.to(dtype)


def _gauss(alphas: Tensor, betas: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the nodes and weights of the Gauss rules with these tridiagonal matrices."""
    nodes, vectors = _decompose_tridiagonal(alphas, betas, dtype)
    weights = vectors[:, 0] ** 2
    return nodes, weights / weights.sum(dim=1, keepdim=True)
