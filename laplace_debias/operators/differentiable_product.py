"""Products of operators that compute without a graph of automatic differentiation."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator


class DifferentiableProduct(torch.autograd.Function):
    """A product with a matrix, whose derivative is the product with the adjoint."""

    @staticmethod
    def forward(
        ctx: Any,
        matrix: Float[Tensor, "columns k"],
        product: Callable[[Tensor], Tensor],
        adjoint: LinearOperator,
    ) -> Float[Tensor, "rows k"]:
        """Compute the product with a matrix."""
        ctx.adjoint = adjoint
        return product(matrix)

    @staticmethod
    def backward(
        ctx: Any, gradient: Float[Tensor, "rows k"]
    ) -> tuple[Float[Tensor, "columns k"], None, None]:
        """Multiply a gradient by the adjoint."""
        return ctx.adjoint @ gradient, None, None
