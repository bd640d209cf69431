"""How two sets of directions lie to each other."""

import torch
from jaxtyping import Float
from torch import Tensor

_PART = 2**16
"""Entries of each direction that are multiplied at a time."""


def overlaps(
    U: Float[Tensor, "dim k"], V: Float[Tensor, "dim m"], tol: float = 1e-3
) -> Float[Tensor, "k m"]:
    r"""Squared inner products of two orthonormal sets, $w_{ij} = (u_i^\top \tilde u_j)^2$ (Eq. 6).

    With the curvature's eigenvectors on two mini-batches, they are the weights by which one
    batch's eigenvalues make up the other's directional curvatures,
    $c_{\tilde B}(u_i) = \sum_j w_{ij} \tilde\lambda_j$. Between two full bases every row and every
    column sums to one (Eq. 20); between two k-dimensional subspaces the sum of all, divided by k,
    is the overlap of the subspaces, in [0, 1].

    Args:
        U: Orthonormal columns, `[D, k]`.
        V: Orthonormal columns, `[D, m]`.
        tol: How far the columns' inner products may be from those of orthonormal ones.

    Returns:
        The weights, `[k, m]`, in [0, 1] up to rounding.

    Raises:
        ValueError: If the dimensions differ, or a set is not orthonormal.
    """
    if U.shape[0] != V.shape[0]:
        raise ValueError(
            f"Directions of {U.shape[0]} and of {V.shape[0]} entries lie in different spaces: "
            "expected [D, k] and [D, m]."
        )
    for name, basis in (("U", U), ("V", V)):
        products = _products(basis, basis)
        identity = torch.eye(basis.shape[1], dtype=products.dtype, device=basis.device)
        error = float((products - identity).abs().max()) if basis.numel() else 0.0
        if not error <= tol:
            raise ValueError(
                f"The columns of {name} are not orthonormal (off by {error:.1e}): use "
                "`torch.linalg.qr(...).Q`, or `eigh`'s vectors."
            )
    return _products(U, V).square().to(U.dtype)


def _products(U: Float[Tensor, "dim k"], V: Float[Tensor, "dim m"]) -> Float[Tensor, "k m"]:
    # In double precision, part by part: over a million entries single precision is off by 1e-3.
    total = torch.zeros(U.shape[1], V.shape[1], dtype=torch.float64, device=U.device)
    for of_U, of_V in zip(U.split(_PART), V.split(_PART), strict=True):
        total += of_U.double().T @ of_V.double()
    return total
