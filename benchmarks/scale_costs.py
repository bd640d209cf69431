"""Costs of an EKFAC of a whole network, and tables of them."""

from collections.abc import Sequence

import torch

from laplace_debias.curvature.fits.costs import (
    BlockCosts,
    costs_of,
    factor_flops,
    network_flops,
    rotation_flops,
)
from laplace_debias.curvature.fits.over_ranks import owners_by_cost
from laplace_debias.curvature.layers.blocks import Block

DTYPE, FACTORS = torch.float32, torch.float64


def passes(positions: dict[Block, int]) -> tuple[int, int]:
    """Operations of an example in the pass for the factors, and in that for the magnitudes."""
    through = 2 * sum(network_flops(block, T) for block, T in positions.items())
    of_factors = through + sum(factor_flops(block, T, 1) for block, T in positions.items())
    of_table = through + sum(rotation_flops(block, T, 1) for block, T in positions.items())
    return of_factors, of_table


def ekfac_costs(positions: dict[Block, int]) -> dict[Block, BlockCosts]:
    """One cotangent an example."""
    return {b: costs_of(b, "ekfac", T, 1, FACTORS, DTYPE) for b, T in positions.items()}


def largest_load(costs: dict[Block, BlockCosts], ranks: int, key: str = "eigh_flops") -> int:
    """The sum of some costs on the rank with most of them, for eigendecompositions by default."""
    owners = owners_by_cost(list(costs), ranks)
    loads = [0] * ranks
    for block, of_block in costs.items():
        loads[owners[block]] += getattr(of_block, key)
    return max(loads)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in Markdown, of which the first names the columns."""
    first, *rest = rows
    lines = [first, ["---", *["---:"] * (len(first) - 1)], *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
