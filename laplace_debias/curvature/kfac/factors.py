"""Kronecker factors of one block, in the project's units."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.blocks import Block
from laplace_debias.curvature.kfac.layers import (
    Uses,
    activations,
    output_gradients,
    slices,
    summed_gradients,
)


@dataclass
class Factors:
    r"""The Kronecker factors of a block, summed over examples.

    In the `expand` approximation for T positions: $G = \tfrac1T\sum_n\sum_t\sum_k g g^\top$ over
    the columns k of the loss Hessian's root, and $A = \sum_n\sum_t a a^\top$. The block of the
    mean loss over N examples is $\tfrac1N G \otimes \tfrac1N A$. A bias block is exact:
    $G = \sum_n\sum_k (\sum_t g)(\sum_t g)^\top$, $A = N$.

    Reference: Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern
    neural network architectures".

    Attributes:
        G: `[d_out, d_out]`.
        A: `[d_in, d_in]`.
    """

    G: Float[Tensor, "d_out d_out"]
    A: Float[Tensor, "d_in d_in"]

    def __iadd__(self, other: "Factors") -> "Factors":
        self.G += other.G
        self.A += other.A
        return self

    def to(self, dtype: torch.dtype) -> "Factors":
        """Both factors in another dtype."""
        return Factors(self.G.to(dtype), self.A.to(dtype))


def kronecker_factors(layer: nn.Module, block: Block, uses: Uses) -> Factors:
    """The factors of one block on one batch, summed over its examples.

    Args:
        layer: The layer.
        block: Its weight or bias block.
        uses: For every use of the layer the input `[B, ...]` and the gradients at the output
            `[K, B, ...]`, one for each column of the loss Hessian's root. Several uses count as
            further positions.
    """
    if block.role == "bias":
        rows = summed_gradients(layer, block, uses).flatten(0, 1)
        num_examples = rows.new_tensor([[float(uses[0][0].shape[0])]])
        return Factors(rows.T @ rows, num_examples)
    d_out, d_in = block.shape
    x = uses[0][0]
    G, A = x.new_zeros(d_out, d_out), x.new_zeros(d_in, d_in)
    positions = 0
    for x, g in uses:
        gradients = output_gradients(layer, block, g)
        positions += gradients.shape[2]
        rows = gradients.flatten(0, 2)
        G.addmm_(rows.T, rows)
        for part in slices(layer, block, x):
            rows = activations(layer, block, x[part]).flatten(0, 1)
            A.addmm_(rows.T, rows)
    return Factors(G / positions, A)
