"""Eigenpairs by subspace iteration, the block form of the power method."""

import torch

from laplace_debias.linalg.eigen.eigenpairs import BOUND_STEPS, check_symmetric, far_end, select
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status
from laplace_debias.operators.eigh import eigh


def subspace_iteration(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs from products with a block, with a Rayleigh–Ritz step after each."""
    A, n = products.operator, products.operator.shape[0]
    width = min(n, k + max(k, 10))
    if max_matvecs < width + BOUND_STEPS:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs}; expected at least {width + BOUND_STEPS}: the block "
            f"has {width} vectors for {k} pairs. Raise it, or use method='lanczos'."
        )
    shift = 0.0 if which == "magnitude" else far_end(products, which, generator)
    block = torch.linalg.qr(draw(A, width, "gaussian", generator)).Q
    rounding = 10 * torch.finfo(A.dtype).eps
    # The block may hold none of the largest eigenvalues, to which the tolerance is relative.
    scale = abs(shift)
    while True:
        images = products(block)
        projection = block.T @ images
        scale = max(scale, float(images.norm(dim=0).max()))
        check_symmetric(A, projection, scale)
        values, rotation = eigh((projection + projection.T) / 2, "the projected operator")
        block, images = block @ rotation, images @ rotation
        residuals = (images - block * values).norm(dim=0)
        selected = select(values, block, residuals, k, which)
        goal = max(tol, rounding) * max(scale, float(values.abs().max()))
        if (selected[2] <= goal).all():
            return EigenPairs(*selected, products.count, Status.CONVERGED, "converged")
        if products.count + width > max_matvecs:
            done = int((selected[2] <= goal).sum())
            message = (
                f"{done} of {k} eigenpairs converged in {products.count} products (greatest "
                f"residual {float(selected[2].max()):.3g}, expected {goal:.3g}): raise "
                "`max_matvecs` or `tol`, or use method='lanczos', which converges faster"
            )
            return EigenPairs(*selected, products.count, Status.MAX_ITER, message)
        block = torch.linalg.qr(images - shift * block).Q
