"""Rows of a Jacobian, weighed by the loss: those whose products with themselves are the GGN."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.fits.problem import Problem, Seen
from laplace_debias.curvature.fits.sums import check_finite_sums
from laplace_debias.curvature.fits.sweep import Sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.network.batches import Pairs

Rows = Float[Tensor, "rows parameters"]


def sweep_rows(
    problem: Problem,
    batches: Pairs,
    consume: Callable[[Rows], object],
    first: int = 0,
    sums: dict[str, Any] | None = None,
) -> Seen:
    """One pass over data that hands over Jacobian rows, `[b·K, D]`, with `Σ rowᵀ row = N·C`.

    Args:
        problem: The network and its blocks.
        batches: `(x, y)` pairs on the model's device.
        consume: Takes some rows, in `factor_dtype`.
        first: As `Sweep.over` takes it.
        sums: Where `consume` keeps what it sums; None for a pass of which nothing is saved.

    Raises:
        ValueError: Naming the block, if a row is not finite.
    """
    extremes: dict[Block, list[Tensor]] = {block: [] for block in problem.blocks}
    parts: dict[Block, Tensor] = {}

    def measure(layer: nn.Module, block: Block, uses: Uses) -> Float[Tensor, "examples columns d"]:
        found = []
        for _, J, columns in rotated_jacobians(layer, block, uses, None, None):
            if columns is not None:
                J = J.new_zeros(*J.shape[:3], block.shape[1]).index_add_(3, columns, J)
            found.append(J.flatten(2))
        return torch.cat(found)

    def collect(block: Block, part: Tensor) -> None:
        parts[block] = part
        extremes[block].append(torch.stack(torch.aminmax(part)))
        if len(parts) == len(problem.blocks):
            rows = torch.cat([parts[b] for b in problem.blocks], dim=2)
            parts.clear()
            consume(rows.flatten(0, 1).to(problem.factor_dtype))

    row_bytes = sum(block.size for block in problem.blocks) * problem.dtype.itemsize
    kept = None if sums is None else {"rows": sums, "extremes": extremes}
    sweep = Sweep(problem, measure, collect, sums=kept, extra_bytes=row_bytes, joins_blocks=True)
    seen = sweep.over(batches, first)
    check_finite_sums({block: [torch.cat(of)] for block, of in extremes.items() if of})
    return seen
