"""How two sets of directions lie to each other."""

import torch
from jaxtyping import Float
from torch import Tensor


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
        identity = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
        error = float((basis.T @ basis - identity).abs().max()) if basis.numel() else 0.0
        if not error <= tol:
            raise ValueError(
                f"The columns of {name} are not orthonormal (off by {error:.1e}): use "
                "`torch.linalg.qr(...).Q`, or `eigh`'s vectors."
            )
    return (U.T @ V).square()
