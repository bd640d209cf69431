"""The eigenbases of the blocks' factors, computed by one process or by several processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.fits.block_tensors import owners_of_blocks
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import (
    Eigenbasis,
    Eigenpairs,
    descending_eigenpairs_of_each,
)
from laplace_debias.curvature.fits.factor_keys import FactorKey, Side
from laplace_debias.curvature.fits.factor_sums import FactorSums
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layer_rules import Block

# The largest total number of entries of small factors that are decomposed together.
_DECOMPOSED_TOGETHER = 2**20


def eigenbases(
    context: FitContext, sums: FactorSums, totals: DataTotals
) -> dict[Block, Eigenbasis]:
    """Decompose the mean factors of the blocks, and empty `sums` in the process.

    `sums` contains only the blocks of this process, summed over the examples that `totals` counts,
    but the eigenbases of all blocks are returned. Small factors of one shape are decomposed
    together, because the overhead of a call exceeds the time for its arithmetic. If a layer has one
    position per example, its bias and its weight have the same G, which is decomposed only once.
    """
    blocks = list(sums)
    factors: dict[FactorKey, Factor] = {}
    for block in blocks:
        for side, factor in zip(Side, sums.pop(block), strict=True):
            factors[FactorKey(block, side)] = factor
    repeated = _pop_repeated(factors)
    pairs: dict[FactorKey, Eigenpairs] = {}
    for keys in _keys_to_decompose_together(factors):
        pairs.update(_decompose(keys, factors, totals))
    for key, first_key in repeated.items():
        eigenvalues, U = pairs[first_key]
        pairs[key] = Eigenpairs(eigenvalues.clone(), None if U is None else U.clone())
    bases = {}
    for block in blocks:
        pairs_G = pairs.pop(FactorKey(block, Side.G))
        pairs_A = pairs.pop(FactorKey(block, Side.A))
        bases[block] = Eigenbasis(pairs_G, pairs_A)
    return share_bases(context, bases)


def _pop_repeated(factors: dict[FactorKey, Factor]) -> dict[FactorKey, FactorKey]:
    """Remove every G that equals the G of an earlier block of the same layer.

    Returns:
        For each removed factor, the key of the equal factor.
    """
    keys_by_layer: dict[str, FactorKey] = {}
    repeated: dict[FactorKey, FactorKey] = {}
    for key in list(factors):
        if key.side is not Side.G:
            continue
        first_key = keys_by_layer.get(key.block.layer)
        if first_key is not None and _are_equal(factors[key], factors[first_key]):
            repeated[key] = first_key
            del factors[key]
        else:
            keys_by_layer[key.block.layer] = key
    return repeated


def _keys_to_decompose_together(factors: Mapping[FactorKey, Factor]) -> list[list[FactorKey]]:
    """Group factors of the same form, up to a total number of entries."""
    keys_by_form: dict[Any, list[FactorKey]] = {}
    for key, factor in factors.items():
        if isinstance(factor, GramFactor):
            form: tuple[Any, ...] = (GramFactor, factor.max_rows, factor.rows.shape)
        else:
            form = (Tensor, None, factor.shape)
        keys_by_form.setdefault(form, []).append(key)
    groups: list[list[FactorKey]] = []
    for (*_, shape), keys in keys_by_form.items():
        size = max(1, _DECOMPOSED_TOGETHER // max(1, shape.numel()))
        groups += [keys[start : start + size] for start in range(0, len(keys), size)]
    return groups


def _are_equal(factor: Factor, weight_factor: Factor) -> bool:
    """Whether two factors are the same matrix."""
    if not isinstance(factor, Tensor) or not isinstance(weight_factor, Tensor):
        return False
    return factor.ndim > 1 and torch.equal(factor, weight_factor)


def _decompose(
    keys: Sequence[FactorKey], factors: dict[FactorKey, Factor], totals: DataTotals
) -> dict[FactorKey, Eigenpairs]:
    """Decompose the means of factors of the same form at once, and remove these from `factors`.

    The sums themselves are decomposed, and then their eigenvalues are divided, because computing a
    mean would copy the sum.
    """
    pairs = descending_eigenpairs_of_each(
        [factors.pop(key) for key in keys], ", ".join(map(str, keys))
    )
    mean_pairs: dict[FactorKey, Eigenpairs] = {}
    for key, (eigenvalues, U) in zip(keys, pairs, strict=True):
        weight = totals.weight if key.side is Side.G else totals.input_divisor(key.block)
        mean_pairs[key] = Eigenpairs(eigenvalues / weight, U)
    return mean_pairs


def share_bases(context: FitContext, bases: dict[Block, Eigenbasis]) -> dict[Block, Eigenbasis]:
    """Send the eigenbases of each process's own blocks to all processes, and return all of them."""
    if context.ranks.size == 1:
        return bases
    owned = {block: (*basis.G, *basis.A) for block, basis in bases.items()}
    shared: dict[Block, Eigenbasis] = {}
    for block, tensors in context.ranks.share(owned, owners_of_blocks(context)).items():
        eigenvalues_G, U_G, eigenvalues_A, U_A = tensors
        assert eigenvalues_G is not None
        assert eigenvalues_A is not None
        shared[block] = Eigenbasis(Eigenpairs(eigenvalues_G, U_G), Eigenpairs(eigenvalues_A, U_A))
    return shared
