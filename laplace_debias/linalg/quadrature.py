"""Stochastic Lanczos quadrature: what a symmetric operator's spectrum does under an integral."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimate import Estimate, mean_of
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import (
    Products,
    asymmetry_error,
    asymmetry_tolerance,
    check_at_least,
    check_finite,
    check_generator,
    check_square,
)
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh, eigvalsh
from laplace_debias.operators.exact.spectrum import eigenvalues

_BASIS_ELEMENTS = 2**28
"""Entries of all Lanczos vectors, or of a whole matrix, held at once: 1 GiB in float32."""

_FEWER_STEPS = 0.5
"""Steps of the shorter rule, relative to the full one: where errors fall as the inverse of the
number of steps, the change from one to the other is the error of the full one."""


@dataclass(frozen=True, eq=False)
class Quadrature:
    """Nodes and weights, one rule a probe, whose weights sum to 1.

    Args:
        nodes: `[probes, steps]`, Ritz values.
        weights: `[probes, steps]`.
        fewer_nodes: `[probes, fewer]`, those of a shorter rule from the same products.
        fewer_weights: `[probes, fewer]`.
        num_matvecs: How many products they took.
        is_exact: Whether these are all eigenvalues, each with weight 1/n.
    """

    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    fewer_nodes: Float[Tensor, "probes fewer"]
    fewer_weights: Float[Tensor, "probes fewer"]
    num_matvecs: int
    is_exact: bool


def lanczos_quadrature(
    A: LinearOperator,
    num_probes: int,
    num_steps: int,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    label: str = "Lanczos quadrature",
) -> Quadrature:
    r"""Gauss quadratures of a symmetric operator's spectral measure, one a Rademacher probe.

    For a probe $\omega$ of length $\sqrt n$, $\omega^\top f(A)\,\omega / n \approx \sum_j w_j
    f(\theta_j)$, exactly for polynomials of degree below `2 * num_steps`: θ are the eigenvalues of
    the Lanczos process's tridiagonal matrix and w the squares of its eigenvectors' first entries.
    Lanczos vectors are fully reorthogonalised; several probes run side by side, as many as memory
    allows.

    Args:
        A: Symmetric operator `[n, n]`. Asymmetry is noticed.
        num_probes: Probes.
        num_steps: Lanczos steps, and products, a probe; at least 2.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.
        label: What the progress bar says.

    Returns:
        Nodes and weights; all eigenvalues where they have a closed form (no products) or where
        `num_probes * num_steps` is at least n (n products) and n at most 16,384.

    Raises:
        ValueError: The operator is not square or not symmetric, a product not finite, a number too
            small, or the generator on another device.

    Reference:
        Golub, Meurant. Matrices, moments and quadrature with applications. 2010. Ubaru, Chen, Saad.
        Fast estimation of tr(f(A)) via stochastic Lanczos quadrature. SIMAX, 2017.
    """
    n = check_square(A, "spectrum")
    check_at_least(num_probes, 1, "num_probes")
    check_at_least(num_steps, 2, "num_steps", "one node says nothing of the spread")
    check_generator(generator, A)
    check_finite(A)
    known = eigenvalues(A)
    if known is not None:
        return _of_eigenvalues(known, 0)
    total = num_probes * num_steps
    if total >= n and n**2 <= _BASIS_ELEMENTS:
        total = n
    with Products(A, progress=progress, total=total, label=label) as products:
        if total == n and n**2 <= _BASIS_ELEMENTS:
            matrix = torch.cat([columns for _, columns in products.columns()], dim=1)
            scale = float(matrix.norm(dim=0).max())
            _check_symmetric(A, matrix - matrix.T, scale)
            return _of_eigenvalues(
                eigvalsh((matrix + matrix.T) / 2, "the operator"), products.count
            )
        together = max(1, _BASIS_ELEMENTS // (n * num_steps))
        parts = []
        for start in range(0, num_probes, together):
            probes = draw(A, min(together, num_probes - start), "rademacher", generator)
            parts.append(_tridiagonal(products, probes / n**0.5, num_steps))
        alphas, betas = (torch.cat(part) for part in zip(*parts, strict=True))
    fewer = max(1, int(_FEWER_STEPS * num_steps))
    nodes, weights = _gauss(alphas, betas)
    fewer_nodes, fewer_weights = _gauss(alphas[:, :fewer], betas[:, : fewer - 1])
    return Quadrature(nodes, weights, fewer_nodes, fewer_weights, products.count, is_exact=False)


def matrix_function_trace(
    A: LinearOperator,
    function: Callable[[Tensor], Tensor],
    num_probes: int = 10,
    num_steps: int = 30,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""The trace of a function of a symmetric operator, $\mathrm{tr} f(A) = \sum_i f(\lambda_i)$.

    By stochastic Lanczos quadrature. The standard error joins, in squares, that of the mean over
    probes and the bias of the quadrature, for which stands its change from half of the steps to
    all of them.

    Args:
        A: Symmetric operator `[n, n]`. Asymmetry is noticed.
        function: f, on a tensor of eigenvalues, entry by entry.
        num_probes: Probes; the standard error falls as the root of their number.
        num_steps: Lanczos steps a probe; the bias falls fast with them where f is smooth.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        The trace, a scalar tensor. Exact where the eigenvalues have a closed form (no products) or
        `num_probes * num_steps` is at least n (n products) and n at most 16,384.

    Raises:
        ValueError: See `lanczos_quadrature`; or f is not finite on the spectrum.

    Example:
        >>> import torch
        >>> from laplace_debias.linalg import matrix_function_trace
        >>> from laplace_debias.operators import Diagonal
        >>> float(matrix_function_trace(Diagonal(torch.tensor([1.0, 4.0])), torch.sqrt))
        3.0
    """
    rule = lanczos_quadrature(
        A, num_probes, num_steps, generator=generator, progress=progress, label="f(A)"
    )
    return integrate(rule, function, A.shape[0])


def integrate(rule: Quadrature, function: Callable[[Tensor], Tensor], size: int) -> Estimate:
    """`size` times the integral of a function under a quadrature, with its standard error.

    Raises:
        ValueError: The function is not finite at a node that counts.
    """
    if rule.is_exact:
        return Estimate.exact(_sum(rule.nodes, size * rule.weights, function), rule.num_matvecs)
    samples = torch.stack(
        [_sum(*pair, function) for pair in zip(rule.nodes, size * rule.weights, strict=True)]
    )
    fewer = [
        _sum(*pair, function)
        for pair in zip(rule.fewer_nodes, size * rule.fewer_weights, strict=True)
    ]
    mean, standard_error = mean_of(samples)
    bias = mean - torch.stack(fewer).mean()
    return Estimate(mean, (standard_error**2 + bias**2).sqrt(), rule.num_matvecs)


def _sum(nodes: Tensor, weights: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    # Nodes without weight belong to steps after a Krylov space was exhausted.
    counts = weights > 0
    values = function(nodes[counts])
    if not values.isfinite().all():
        worst = float(nodes[counts][~values.isfinite()][0])
        raise ValueError(
            f"the function is not finite at the Ritz value {worst:.4g}; expected it to be finite "
            "between the least and the greatest eigenvalue. Add damping, `A + c * Identity(n)`, or "
            "clamp within the function."
        )
    return (weights[counts] * values).sum()


def _of_eigenvalues(values: Tensor, num_matvecs: int) -> Quadrature:
    nodes = values[None]
    weights = torch.full_like(nodes, 1 / values.numel())
    return Quadrature(nodes, weights, nodes, weights, num_matvecs, is_exact=True)


def _tridiagonal(products: Products, start: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Lanczos from unit columns `[n, p]`: diagonals `[p, steps]`, off-diagonals `[p, steps - 1]`.

    Where a Krylov space is exhausted, the rest of the tridiagonal matrix is zero and apart.
    """
    current = start.T
    basis = start.new_zeros(len(current), num_steps, current.shape[1])
    alphas = start.new_zeros(len(current), num_steps)
    betas = start.new_zeros(len(current), num_steps - 1)
    scale, eps = 0.0, torch.finfo(start.dtype).eps
    for step in range(num_steps):
        basis[:, step] = current
        so_far = basis[:, : step + 1]
        vectors = products(current.T).T
        scale = max(scale, float(vectors.norm(dim=1).max()))
        inside = (so_far @ vectors[:, :, None])[:, :, 0]
        if step:
            difference = inside[:, step - 1] - betas[:, step - 1]
            _check_symmetric(products.operator, difference, scale)
        alphas[:, step] = inside[:, step]
        if step == num_steps - 1:
            break
        vectors = vectors - (inside[:, None] @ so_far)[:, 0]
        for _ in range(2):
            again = so_far @ vectors[:, :, None]
            vectors = vectors - (again.mT @ so_far)[:, 0]
        norms = vectors.norm(dim=1)
        norms = torch.where(norms > 10 * eps * scale, norms, torch.zeros_like(norms))
        betas[:, step] = norms
        unit = vectors / norms[:, None]
        current = torch.where(norms[:, None] > 0, unit, torch.zeros_like(unit))
    return alphas, betas


def _gauss(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    matrices = alphas.diag_embed() + betas.diag_embed(1) + betas.diag_embed(-1)
    nodes, vectors = eigh(matrices, "the Lanczos matrices")
    weights = vectors[:, 0] ** 2
    return nodes, weights / weights.sum(dim=1, keepdim=True)


def _check_symmetric(A: LinearOperator, difference: Tensor, scale: float) -> None:
    deviation = float(difference.abs().max())
    if deviation > asymmetry_tolerance(A.dtype) * scale:
        raise asymmetry_error(A, deviation, scale)
