"""Norms of vectors whose squared entries may be out of the range of single precision."""

import torch
from jaxtyping import Float
from torch import Tensor


def column_norms(vectors: Float[Tensor, "n *k"]) -> Float[Tensor, "*k"]:
    """Compute the norm of a vector, or of each column, in float64.

    In single precision, the squares of numbers above 1e19 overflow, and the squares of numbers
    below 1e-23 are 0.
    """
    norms = torch.linalg.vector_norm(vectors, dim=0)
    if ((norms > 1e-15) & (norms < 1e15)).all():
        return norms.double()
    return torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64)
