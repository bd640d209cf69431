"""Replacements of torch functions whose derivatives are missing or wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Look up rows, and keep the row of `padding_idx` fixed in every derivative, as in training.

    torch's forward derivatives wrongly include this row, and so do derivatives if each example has
    its own table.
    """
    rows = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up rows and reduce them bag by bag, because torch's has only a first derivative."""
    if max_norm is not None:
        # torch's function also renormalises the looked-up rows of the table in place.
        return F.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    bags, num_bags = _bags_of_entries(input, offsets, include_last_offset)
    rows = F.embedding(input.flatten(), weight)
    counts = torch.ones_like(bags)
    if padding_idx is not None:
        counts = (input.flatten() != padding_idx % len(weight)).to(bags.dtype)
    if mode == "max":
        # Padding entries are put into an additional bag.
        bags = torch.where(counts > 0, bags, num_bags)
        largest = rows.new_zeros(num_bags + 1, weight.shape[1])
        index = bags.unsqueeze(1).expand_as(rows)
        return largest.scatter_reduce(0, index, rows, "amax", include_self=False)[:-1]
    factors = counts.to(rows.dtype)
    if per_sample_weights is not None:
        factors = factors * per_sample_weights.flatten()
    sums = rows.new_zeros(num_bags, weight.shape[1])
    sums = sums.index_add(0, bags, rows * factors.unsqueeze(1))
    if mode == "sum":
        return sums
    sizes = torch.zeros(num_bags, dtype=counts.dtype, device=counts.device)
    sizes = sizes.index_add(0, bags, counts).clamp_min(1)
    return sums / sizes.unsqueeze(1)


def _bags_of_entries(
    input: Tensor, offsets: Tensor | None, include_last_offset: bool
) -> tuple[Int[Tensor, " entries"], int]:
    """Return the index of the bag of each entry, and the number of bags.

    Without offsets, each row of the input is a bag. Otherwise, `offsets` are the first entries of
    the bags, followed by the number of entries if `include_last_offset` is true.
    """
    entries = torch.arange(input.numel(), device=input.device)
    if offsets is None:
        return entries.div(max(input.shape[1], 1), rounding_mode="floor"), input.shape[0]
    starts = offsets[:-1] if include_last_offset else offsets
    return torch.searchsorted(starts, entries.to(starts.dtype), right=True) - 1, len(starts)


def _pairwise_distances(input: Tensor, p: float = 2.0) -> Tensor:
    """Compute the distances between all pairs of rows, in the order of `F.pdist`."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


# The functions below replace torch functions with missing or wrong derivatives. Arguments have
# torch's names, because they may be passed by name; `compute_mode` of distances affects only the
# speed.
_IN_PLACE_OF: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.embedding: _embedding,
    # torch has neither a forward derivative nor a second derivative of these two functions.
    F.embedding_bag: _embedding_bag,
    F.pdist: _pairwise_distances,
    # torch has no second derivative of this function.
    F.hardsigmoid: lambda input, inplace=False: (
        input.add_(3).clamp_(0, 6).div_(6) if inplace else F.relu6(input + 3) / 6
    ),
    # torch's gradients are wrong for several examples or several columns at once.
    torch.cdist: lambda x1, x2, p=2.0, compute_mode=None: torch.linalg.vector_norm(
        x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1
    ),
    # torch's second derivative of this function is not symmetric.
    torch._weight_norm: lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)),
}


class ReplacedFunctions(TorchFunctionMode):
    """A mode that runs the functions of `_IN_PLACE_OF`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _IN_PLACE_OF.get(func, func)(*args, **(kwargs or {}))
