"""Eigenpairs by ARPACK, checked and completed by Lanczos."""

import numpy as np
import torch
from torch import Tensor

from laplace_debias.linalg.eigen.eigenpairs import (
    BOUND_STEPS,
    far_end,
    lanczos_eigenpairs,
    searched_eigenpairs,
    select,
)
from laplace_debias.linalg.eigen.krylov import KrylovBasis
from laplace_debias.linalg.eigen.lanczos import capacity
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products
from laplace_debias.linalg.results import EigenPairs, Status


def arpack_eigenpairs(
    products: Products,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int,
    generator: torch.Generator | None,
) -> EigenPairs:
    """Eigenpairs by SciPy's ARPACK; then a Lanczos search for those that it missed."""
    # Slow to import, and few need it.
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence
    from scipy.sparse.linalg import LinearOperator as SciPyOperator
    from scipy.sparse.linalg import eigsh as arpack

    A, n = products.operator, products.operator.shape[0]
    num_vectors = min(n, max(2 * k + 1, k + 40))
    restarts = (max_matvecs - BOUND_STEPS - num_vectors) // (num_vectors - k)
    if restarts < 1:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs}; expected at least "
            f"{BOUND_STEPS + 2 * num_vectors - k}: ARPACK holds {num_vectors} vectors for {k} "
            "pairs. Raise it, or use method='lanczos'."
        )
    # ARPACK's tolerance is relative to each eigenvalue, so that those near zero never converge.
    # Shifted by the unwanted end of the spectrum, the wanted ones are the largest.
    shift = 0.0 if which == "magnitude" else far_end(products, which, generator)
    scale = 0.0

    def multiply(vector: np.ndarray) -> np.ndarray:
        nonlocal scale
        column = torch.from_numpy(vector.ravel()).to(A.device, A.dtype)
        product = products(column)
        scale = max(scale, float(product.norm() / column.norm()))
        return (product - shift * column).cpu().numpy()

    start = draw(A, 1, "gaussian", generator)[:, 0].cpu().numpy()
    try:
        _, vectors = arpack(
            SciPyOperator((n, n), matvec=multiply, dtype=start.dtype),
            k=k,
            which={"largest": "LA", "smallest": "SA", "magnitude": "LM"}[which],
            v0=start,
            ncv=num_vectors,
            maxiter=restarts,
            tol=tol,
        )
    except ArpackNoConvergence as error:
        found = torch.from_numpy(np.ascontiguousarray(error.eigenvectors)).to(A.device, A.dtype)
        return _partial(products, found, k, which)
    except ArpackError:
        # It refuses operators that map its start to zero, such as multiples of the identity.
        return lanczos_eigenpairs(products, k, which, tol, max_matvecs, generator)
    found = torch.linalg.qr(torch.from_numpy(vectors.copy()).to(A.device, A.dtype)).Q
    basis = KrylovBasis(A, products, n, capacity(n, k, A.dtype.itemsize), generator)
    basis.seed(found.T, products(found).T, scale)
    return searched_eigenpairs(basis, products, k, which, tol, max_matvecs, (shift,))


def _partial(products: Products, vectors: Tensor, k: int, which: str) -> EigenPairs:
    """What ARPACK had when it gave up."""
    count = vectors.shape[1]
    message = (
        f"{count} of {k} eigenpairs converged in {products.count} products, only these are given: "
        "raise `max_matvecs` or `tol`, or use method='lanczos', which holds more vectors"
    )
    images = products(vectors) if count else vectors
    values = (vectors * images).sum(dim=0)
    residuals = (images - vectors * values).norm(dim=0)
    selected = select(values, vectors, residuals, count, which)
    return EigenPairs(*selected, products.count, Status.MAX_ITER, message)
