"""Directions: the eigenbases of Kronecker factors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Eigenbasis:
    """Directions of a block, and the factors' own curvature along them.

    Attributes:
        U_G: Eigenvectors of G as columns, by descending eigenvalue, `[d_out, d_out]`.
        U_A: Eigenvectors of A as columns, by descending eigenvalue, `[d_in, d_in]`.
        along_G: Eigenvalues of G, `[d_out]`.
        along_A: Eigenvalues of A, `[d_in]`.
    """

    U_G: Float[Tensor, "d_out d_out"]
    U_A: Float[Tensor, "d_in d_in"]
    along_G: Float[Tensor, " d_out"]
    along_A: Float[Tensor, " d_in"]

    @property
    def magnitudes(self) -> Float[Tensor, "d_out d_in"]:
        """The factors' own curvature along every direction, `λ_i(G) λ_j(A)`."""
        return torch.outer(self.along_G, self.along_A)


def eigenbasis(G: Float[Tensor, "d_out d_out"], A: Float[Tensor, "d_in d_in"]) -> Eigenbasis:
    """The eigenbasis of `G ⊗ A`."""
    along_G, U_G = _eigh(G)
    along_A, U_A = _eigh(A)
    return Eigenbasis(U_G, U_A, along_G, along_A)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(factor)
    # The factors are positive semi-definite: what lies below zero is rounding.
    return values.flip(0).clamp_min(0), vectors.flip(1)
