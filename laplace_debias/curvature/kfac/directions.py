"""Directions: the eigenbases of Kronecker factors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Eigenbasis:
    """Directions of a block, and the factors' own curvature along them.

    Attributes:
        U_G: Eigenvectors of G as columns, by descending eigenvalue, `[d_out, d_out]`; None for the
            coordinate axes.
        U_A: Likewise of A, `[d_in, d_in]`.
        along_G: Eigenvalues of G, `[d_out]`.
        along_A: Eigenvalues of A, `[d_in]`.
    """

    U_G: Float[Tensor, "d_out d_out"] | None
    U_A: Float[Tensor, "d_in d_in"] | None
    along_G: Float[Tensor, " d_out"]
    along_A: Float[Tensor, " d_in"]

    @property
    def magnitudes(self) -> Float[Tensor, "d_out d_in"]:
        """The factors' own curvature along every direction, `λ_i(G) λ_j(A)`."""
        return torch.outer(self.along_G, self.along_A)


def eigenbasis(G: Tensor, A: Tensor) -> Eigenbasis:
    """The eigenbasis of `G ⊗ A`; of a diagonal factor, given as a vector, the coordinate axes."""
    along_G, U_G = eigh(G)
    along_A, U_A = eigh(A)
    return Eigenbasis(U_G, U_A, along_G, along_A)


def eigh(factor: Tensor) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"] | None]:
    """Eigenvalues, descending, and eigenvectors; of a diagonal factor its entries and None."""
    if factor.ndim == 1:
        return factor, None
    # Entries near the smallest numbers of a dtype keep LAPACK from converging.
    scale = factor.abs().max().clamp_min(torch.finfo(factor.dtype).tiny)
    try:
        values, vectors = torch.linalg.eigh(factor / scale)
    except torch.linalg.LinAlgError:
        # Many close eigenvalues in single precision.
        values, vectors = torch.linalg.eigh((factor / scale).double())
    # The factors are positive semi-definite: what lies below zero is rounding.
    values = values.flip(0).clamp_min(0).to(factor.dtype) * scale
    return values, vectors.flip(1).to(factor.dtype)
