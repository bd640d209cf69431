r"""Kronecker factors of one block, and their normalisation.

Let T positions share a weight, let k run over the columns of the loss Hessian's root, and n over
the examples. The block of the mean loss over N examples is $\tfrac1N G \otimes \tfrac1M A$, where M
of the examples have a position in the layer (all examples, unless stated otherwise below). The
factors are:

- `expand`: $G = \tfrac1T\sum_n\sum_t\sum_k g g^\top$ and $A = \sum_n\sum_t a a^\top$;
- `reduce`: $G = \sum_n\sum_k \hat g\hat g^\top$ with $\hat g = \sum_t g$, and
  $A = \sum_n \bar a\bar a^\top$ with $\bar a = \tfrac1T\sum_t a$.

If only some positions take part (see `positions`), t runs over these positions, and T is their
number for each example: $G = \sum_n\tfrac1{T_n}\sum_t\sum_k g g^\top$. An example for which
$T_n = 0$ adds nothing to the sums, and does not count in M. The product $G_n \otimes A_n$ of this
example is zero. The mean of the products over all examples is therefore estimated without bias if G
and A of the other examples are independent.

If the loss has weighted terms, as with class weights, the gradients g contain the roots of the
weights. Example n then enters A with the mean weight $\omega_n$ of its terms:
$A = \sum_n\omega_n\sum_t a a^\top$ and $M = \sum_n\omega_n$. The weight of an example is a further
factor of $\omega_n$.

The block of a bias is exact, with $G = \sum_n\sum_k (\sum_t g)(\sum_t g)^\top$ and A = 1. The
blocks of a scale and of the kernel of a depthwise convolution are also exact, with Jacobian rows
instead of `Σ_t g`. Each group of a convolution has its own factors, and the factors of all groups
are computed together. An embedding's activations are unit vectors, so its A is diagonal and is kept
as a vector of counts; an embedding always uses `expand`. If a factor is wider than `WIDE`, only its
diagonal is computed, also as a vector.

Reference: Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern neural
network architectures".
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import append_dims, scale_examples
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor, add_gram, gram
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.records import BlockRecord, Masks

# Factors with at least this many columns are kept as rows, not as products, if the rows are few.
_WIDE = 16


def gradient_factor(record: BlockRecord, as_rows: bool = False) -> Factor:
    """Compute G of one block on one chunk, summed over its examples.

    Further calls of the layer count as further positions. If G is wide and there are fewer gradient
    vectors than its size, the vectors are returned instead of their product (`GramFactor`): it is
    cheaper to multiply the vectors of several chunks together than to write G for each chunk. With
    `as_rows`, the vectors are always returned.
    """
    block = record.block
    d_out = block.shape[0]
    gradients = _gradients(record)
    divisor = gradients.divisor
    has_few_rows = gradients.num_rows < d_out and d_out >= _WIDE and not block.has_diagonal_G
    if as_rows or has_few_rows:
        rows = torch.cat([columns.movedim(-1, 1).flatten(0, 1) for columns in gradients.by_call])
        return GramFactor(rows if divisor == 1 else rows * divisor**-0.5)
    products = (_outer_products(block, columns) for columns in gradients.by_call)
    total = reduce(operator.add, products)
    return total if divisor == 1 else total / divisor


def _outer_products(
    block: Block, columns: Float[Tensor, "n *groups d_out positions"]
) -> Float[Tensor, "..."]:
    """Sum the outer products of gradients, or only the diagonals if G is diagonal."""
    if block.has_diagonal_G:
        return columns.movedim(-1, 1).flatten(0, 1).square().sum(0)
    if columns.shape[-1] > block.shape[0]:
        # Products are computed per example, because they are smaller than a copy with the positions
        # as rows.
        return (columns @ columns.mT).sum(0)
    return gram(columns.movedim(-1, 1).flatten(0, 1))


class _Gradients(NamedTuple):
    """The gradients whose outer products, divided by a number, add up to G.

    Attributes:
        by_call: The gradients of each call, or of each slice of the examples.
        num_rows: The number of outer products.
        divisor: The number by which their sum is divided.
    """

    by_call: Iterable[Float[Tensor, "n *groups d_out positions"]]
    num_rows: int
    divisor: int


def _gradients(record: BlockRecord) -> _Gradients:
    """Return the gradients of a block on one chunk."""
    block = record.block
    num_vectors = record.num_columns * record.num_examples
    if block.is_vector:
        slices_of_rows = record.jacobian_rows()
        # Slices are yielded one at a time to save memory, because even one example of a large
        # parameter may fill a slice.
        columns_by_slice = (rows.flatten(0, 1).unsqueeze(-1) for _, rows in slices_of_rows)
        return _Gradients(columns_by_slice, num_vectors, divisor=1)
    columns_by_call = [gradients.flatten(0, 1) for gradients in record.columns()]
    if block.sharing == "reduce":
        total = torch.stack([columns.sum(-1) for columns in columns_by_call]).sum(0)
        return _Gradients([total.unsqueeze(-1)], num_vectors, divisor=1)
    num_positions = sum(columns.shape[-1] for columns in columns_by_call)
    num_rows = num_vectors * num_positions
    masks = _without_padding(record.layer, block, record.inputs, record.masks)
    if masks is None:
        # If there are no positions, the sum is zero whatever the divisor, and 1 is used.
        return _Gradients(columns_by_call, num_rows, divisor=max(1, num_positions))
    return _Gradients(_masked_columns(columns_by_call, masks), num_rows, divisor=1)


def _masked_columns(
    columns_by_call: Sequence[Float[Tensor, "n *groups d_out positions"]], masks: Masks
) -> list[Float[Tensor, "rows *groups d_out 1"]]:
    """Return the gradients at the positions that take part, divided by the root of T.

    T is the number of positions of an example that take part, over all calls.
    """
    weights = _num_positions(masks).to(columns_by_call[0]).clamp_min(1).rsqrt()
    masked_columns = []
    for columns, mask in zip(columns_by_call, masks, strict=True):
        by_example = columns.unflatten(0, (-1, len(mask)))  # [K, B, *groups, d_out, T]
        rows = _select_positions(by_example.movedim(-1, 2), mask)  # [K, n, *groups, d_out]
        # Every position has the weight of its example.
        row_weights = _select_positions(weights[:, None].expand_as(mask)[None], mask)[0]
        rows = rows * append_dims(row_weights, rows.ndim - 1)
        masked_columns.append(rows.flatten(0, 1).unsqueeze(-1))
    return masked_columns


def _select_positions(
    rows: Float[Tensor, "columns batch positions *d"], mask: Bool[Tensor, "batch positions"]
) -> Float[Tensor, "columns n *d"]:
    """Select the rows of the positions that take part, `[K, n, ...]`.

    On an accelerator, the host would have to wait for the number of these positions. Therefore, all
    positions are kept there, and the rows of the other positions are zero.
    """
    if mask.device.type == "cpu":
        return rows[:, mask]
    # Entries are replaced, not multiplied by the mask, because padded entries may be infinite.
    return rows.where(append_dims(mask, rows.ndim - 1), 0).flatten(1, 2)


def input_factors(
    layer: nn.Module,
    block: Block,
    inputs: Sequence[Tensor],
    masks: Masks | None = None,
    weights: Float[Tensor, " batch"] | None = None,
    as_rows: bool = False,
) -> Iterable[Factor]:
    """Compute factor A of one weight block, summed over the examples of one batch.

    Args:
        layer: The layer.
        block: The block of the layer's weight.
        inputs: The inputs of all calls, each `[B, ...]`.
        masks: For each call, the positions that take part; None for all.
        weights: The weights of the examples; None for equal weights.
        as_rows: Whether to return the rows of A in several slices, which have to be added up.

    Returns:
        The summands of A. Even without `as_rows`, a wide A is returned as rows if there are at most
        half as many rows as columns.
    """
    masks = _without_padding(layer, block, inputs, masks)
    if block.is_one_hot:
        return [_count_indices(layer, block, inputs, masks, weights)]
    scales = None if weights is None else weights.to(inputs[0].dtype).sqrt()
    if scales is not None and not block.is_joint:
        # Scale the inputs instead of the activations, which are linear in the inputs and have more
        # entries.
        inputs = [scale_examples(x, scales, 0) for x in inputs]
        scales = None
    rows_by_slice = _input_rows(layer, block, inputs, masks, scales)
    if as_rows:
        return map(GramFactor, rows_by_slice)
    if block.has_diagonal_A:
        diagonal = next(rows_by_slice).square().sum(0)
        for rows in rows_by_slice:
            diagonal += rows.square().sum(0)
        return [diagonal]
    d_in = block.shape[1]
    num_rows = len(inputs[0])
    if block.sharing == "expand":
        num_rows *= sum(block.rule.num_positions(layer, x) for x in inputs)
    if d_in >= _WIDE and num_rows <= d_in // 2:
        return [GramFactor(torch.cat(list(rows_by_slice)))]
    if masks is None and scales is None and block.sharing == "expand":
        second_moments = block.rule.second_moments(layer, block, inputs)
        if second_moments is not None:
            return second_moments
    A = gram(next(rows_by_slice))
    for rows in rows_by_slice:
        add_gram(A, rows)
    return [A]


def input_weight(record: BlockRecord) -> Tensor | int:
    """Return the total weight of a record's examples that have a position in the layer."""
    absent = absent_examples(record.layer, record.block, record.inputs, record.masks)
    num_examples = len(record.inputs[0])
    weights = record.input_weights
    if weights is None:
        return num_examples if absent is None else num_examples - absent.sum(dtype=torch.float64)
    weights = weights.double()
    if absent is not None:
        weights = weights.masked_fill(absent, 0)
    return weights.sum()


def absent_examples(
    layer: nn.Module, block: Block, inputs: Sequence[Tensor], masks: Masks | None
) -> Bool[Tensor, " batch"] | None:
    """Return a mask of the examples without a position in a weight block's layer, or None."""
    masks = _without_padding(layer, block, inputs, masks)
    if masks is not None:
        return _num_positions(masks) == 0
    if any(block.rule.num_positions(layer, x) for x in inputs):
        return None
    return torch.ones(len(inputs[0]), dtype=torch.bool, device=inputs[0].device)


def _without_padding(
    layer: nn.Module, block: Block, inputs: Sequence[Tensor], masks: Masks | None
) -> Masks | None:
    """Return the positions that take part and are not padding for the layer (an embedding)."""
    paddings = [block.rule.padding(layer, x) for x in inputs]
    is_input = [padding.logical_not() for padding in paddings if padding is not None]
    if not is_input or masks is None:
        return is_input or masks
    return [a & b for a, b in zip(is_input, masks, strict=True)]


def _count_indices(
    layer: nn.Module,
    block: Block,
    inputs: Sequence[Tensor],
    masks: Masks | None,
    weights: Float[Tensor, " batch"] | None,
) -> Float[Tensor, " d_in"]:
    """Compute the diagonal of A for one-hot activations: the number of times each index occurs."""
    embedding = layer.get_parameter(block.rule.weight_name)
    dtype = torch.long if weights is None else torch.float64
    counts = embedding.new_zeros(block.shape[1], dtype=dtype)
    for number, x in enumerate(inputs):
        indices = block.rule.activation_indices(layer, x)
        summands = torch.ones_like(indices, dtype=dtype)
        if masks is not None:
            summands = summands * masks[number]
        if weights is not None:
            summands = scale_examples(summands, weights, 0)
        counts.index_add_(0, indices.flatten().long(), summands.flatten())
    return counts.to(embedding.dtype)


def _num_positions(masks: Masks) -> Int[Tensor, " batch"]:
    """Return T, the number of positions that take part, for every example."""
    return torch.stack([mask.sum(1) for mask in masks]).sum(0)


def _input_rows(
    layer: nn.Module,
    block: Block,
    inputs: Sequence[Tensor],
    masks: Masks | None,
    scales: Float[Tensor, " batch"] | None,
) -> Iterator[Float[Tensor, "n *groups d_in"]]:
    """Yield slices of rows with `rowsᵀ rows = A`; each example's rows are multiplied by a scale."""
    if block.sharing == "reduce":
        rows = _mean_activations(layer, block, inputs, masks)
        yield rows if scales is None else scale_examples(rows, scales, 0)
        return
    for index, x in enumerate(inputs):
        for examples in block.rule.slices(layer, block, x):
            if masks is None and scales is None:
                yield block.rule.activation_rows(layer, block, x[examples])
                continue
            rows = block.rule.activations(layer, block, x[examples])
            if scales is not None:
                rows = scale_examples(rows, scales[examples], 0)
            if masks is None:
                yield rows.flatten(0, 1)
            else:
                yield _select_positions(rows[None], masks[index][examples])[0]


def _mean_activations(
    layer: nn.Module, block: Block, inputs: Sequence[Tensor], masks: Masks | None
) -> Float[Tensor, "batch *groups d_in"]:
    """Compute ā, the mean over the positions of all calls."""
    sums: list[Tensor] = []
    num_positions = 0
    for index, x in enumerate(inputs):
        slice_sums = []
        for examples in block.rule.slices(layer, block, x):
            rows = block.rule.activations(layer, block, x[examples])
            if masks is not None:
                # Entries are replaced instead of multiplied by the mask, because padded entries may
                # be infinite.
                rows = rows.where(append_dims(masks[index][examples], rows.ndim), 0)
            slice_sums.append(rows.sum(1))
        # Every slice has all positions of some examples.
        num_positions += rows.shape[1]
        sums.append(torch.cat(slice_sums))
    total = torch.stack(sums).sum(0)
    if masks is None:
        return total / max(1, num_positions)
    return total / append_dims(_num_positions(masks).clamp_min(1), total.ndim)
