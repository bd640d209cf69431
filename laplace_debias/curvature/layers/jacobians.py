"""A block's Jacobian in an eigenbasis, computed from its layer's inputs and output gradients."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.operators.structures.directions import Axes, Directions, ThinBasis

# The maximum number of entries in a slice of an embedding's Jacobian.
_SLICE = 2**22
# Columns are rotated together if there are at most this many positions.
_FEW_POSITIONS = 16


class Rotated(NamedTuple):
    """Jacobians of some examples in a block's eigenbasis.

    `J` is `[b, K, *groups, d_out, d_in]`. If the directions are thin, J contains coordinates in
    their frame, and its last rows and columns are left out if they are zero. For an embedding, J
    contains only the columns with the indices `columns`, and all other columns are zero; for other
    layers, `columns` is None.
    """

    examples: slice
    J: Float[Tensor, "part columns *groups d_out some_d_in"]
    columns: Int[Tensor, " some_d_in"] | None = None


Jacobians = Callable[[BlockRecord, Directions, Directions], Iterator[Rotated]]
"""A function that takes a block's record and directions, and yields rotated Jacobians."""


def rotated_jacobians(
    record: BlockRecord,
    output_directions: Directions,
    input_directions: Directions,
    *,
    frame_per_example: bool = True,
) -> Iterator[Rotated]:
    r"""Yield a block's Jacobian in its eigenbasis, $U_G^\top(\sum_t g_t a_t^\top)U_A$, in slices.

    Activations and output gradients are rotated, never their product, so the only additional cost
    is one rotation of each row. If `frame_per_example` is true, each example may have its own rows
    and columns for the part outside the span of thin directions.
    """
    block = record.block
    if block.is_vector:
        for examples, rows in record.jacobian_rows():
            coordinates = output_directions.coordinates(rows)
            yield Rotated(examples, coordinates.movedim(0, 1).unsqueeze(-1))
        return
    if block.is_one_hot:
        yield from _one_hot_jacobians(record, output_directions, input_directions)
        return
    # This is possible only for a single call, which then contains all rows of an example.
    frame_per_example = frame_per_example and len(record.inputs) == 1
    rotation = _RowRotation(record, output_directions, input_directions, frame_per_example)
    jacobian_size = record.num_columns * block.size
    for examples in block.rule.slices(record.layer, block, record.inputs[0], extra=jacobian_size):
        # No variable refers to the slice, so that it is released before the next slice is computed.
        yield Rotated(examples, rotation.jacobian(examples))


@dataclass(frozen=True, eq=False)
class _RowRotation:
    """The rotation of a record's rows, the activations and output gradients, into the eigenbasis.

    Attributes:
        record: The record.
        output_directions: U_G.
        input_directions: U_A.
        frame_per_example: Whether each example has its own rows and columns for the part outside
            the span of thin directions.
    """

    record: BlockRecord
    output_directions: Directions
    input_directions: Directions
    frame_per_example: bool

    def jacobian(self, examples: slice) -> Float[Tensor, "part columns *groups rows some_d_in"]:
        """Compute the Jacobian of the given examples in the eigenbasis.

        The activations are always rotated before the product with the output gradients. The
        gradients are rotated before the product or, if this takes less time, after it.
        """
        record = self.record
        block = record.block
        layer = record.layer
        rule = block.rule
        rotate_gradients = self._rotation_of_gradients()

        def product_of_call(x: Tensor, g: Tensor) -> Float[Tensor, "part *groups rows some_d_in"]:
            """Compute Σ_t g_t a_tᵀ U_A of one call, with the rows of all columns stacked."""
            if rotate_gradients is None:
                summed = rule.summed_products(layer, block, x, g)
                if summed is not None:
                    return self.input_directions.coordinates(summed)
            a = self._rotated_activations(x)
            gradients = rule.output_gradients(layer, block, x, g).movedim(0, -3)
            if rotate_gradients is not None:
                gradients = rotate_gradients(gradients)
            # [b, *groups, K·d_out, T] times [b, *groups, T, d_in]: one batched product serves every
            # column.
            return gradients.flatten(-3, -2) @ a.movedim(1, -2)

        products = (product_of_call(x[examples], g[:, examples]) for x, g in record.calls())
        J = reduce(Tensor.add_, products).unflatten(-2, (record.num_columns, -1))
        if rotate_gradients is None:
            J = _coordinates_of_columns(J, self.output_directions)
        return J.movedim(-3, 1)

    def _rotation_of_gradients(self) -> Callable[[Tensor], Tensor] | None:
        """Choose how to rotate the output gradients of each position.

        The result is None if it takes less time to rotate the sum over the positions instead.
        """
        record = self.record
        directions = self.output_directions
        d_out, d_in = record.block.shape
        num_gradients = record.num_columns * record.num_positions
        are_few = self.frame_per_example and 2 * num_gradients < d_out
        if are_few and isinstance(directions, ThinBasis):
            return partial(_few_gradients, directions=directions)
        are_axes = isinstance(directions, Axes) and isinstance(self.input_directions, Axes)
        if record.num_positions > d_in or are_axes:
            return None
        return partial(_coordinates_of_columns, directions=directions)

    def _rotated_activations(self, x: Tensor) -> Float[Tensor, "batch positions *groups some_d_in"]:
        """Compute the coordinates of a layer's activations along the directions."""
        layer = self.record.layer
        block = self.record.block
        directions = self.input_directions
        if not (self.frame_per_example and isinstance(directions, ThinBasis)):
            return block.rule.activations_along(layer, block, x, directions)
        a = block.rule.activations(layer, block, x)
        if a.shape[1] < block.shape[1]:
            return _few_coordinates(a, directions)
        return directions.coordinates(a)


def _few_gradients(
    rows: Float[Tensor, "batch *groups columns d_out positions"], directions: ThinBasis
) -> Float[Tensor, "batch *groups columns few positions"]:
    """Rotate output gradients if there are fewer pairs of columns and positions than outputs."""
    by_example = rows.movedim((-3, -1), (1, 2))  # [b, K, T, *groups, d_out]
    few = _few_coordinates(by_example.flatten(1, 2), directions)
    return few.unflatten(1, by_example.shape[1:3]).movedim((1, 2), (-3, -1))


def single_products(
    record: BlockRecord, output_directions: Directions, input_directions: Directions
) -> tuple[Float[Tensor, "batch columns rows"], Float[Tensor, "batch some_d_in"]] | None:
    r"""Compute the factors of a Jacobian that is one outer product per example and column.

    The Jacobian of a layer that is called once, at one position, is $U_G^\top g_k a^\top U_A$, so
    the product itself is never needed.

    Returns:
        $U_G^\top g_k$ and $U_A^\top a$; in thin directions, their coordinates as in `Rotated`. The
        result is None if a Jacobian is a sum over positions or calls.
    """
    block = record.block
    is_weight = not (block.is_vector or block.is_one_hot or block.groups or record.replayed)
    if not is_weight or len(record.inputs) != 1 or record.num_positions != 1:
        return None
    ((x, g),) = record.calls()
    activations = block.rule.activations(record.layer, block, x)
    gradients = block.rule.output_gradients(record.layer, block, x, g).squeeze(-1).movedim(0, 1)
    if isinstance(input_directions, ThinBasis):
        a = _few_coordinates(activations, input_directions)
    else:
        a = input_directions.coordinates(activations)
    if isinstance(output_directions, ThinBasis) and 2 * record.num_columns < block.shape[0]:
        rows = _few_coordinates(gradients, output_directions)
    else:
        rows = output_directions.coordinates(gradients)
    return rows, a.squeeze(1)


def _few_coordinates(
    rows: Float[Tensor, "batch n *groups d"], directions: ThinBasis
) -> Float[Tensor, "batch n *groups few"]:
    """Compute coordinates of n < d rows along thin directions, and n coordinates outside them.

    All directions outside have the same magnitude, so any orthonormal basis of the rows is valid.
    """
    along, remainder = directions.split(rows)
    return torch.cat([along, _triangular(remainder.movedim(1, -2)).movedim(-2, 1)], -1)


def _triangular(
    rows: Float[Tensor, "batch *groups n d"],
) -> Float[Tensor, "batch *groups n n"]:
    """Compute triangular matrices `L` with the same products as the rows, `L Lᵀ = rows rowsᵀ`."""
    if rows.dtype != torch.float64 and rows.device.type == "cpu":
        # A Cholesky factor is many times faster than LAPACK's QR on several threads. Scaling avoids
        # overflow.
        scale = rows.float().abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        scaled = rows.float() / scale
        L, info = torch.linalg.cholesky_ex(scaled @ scaled.mT)
        if not info.any():
            return L.mul_(scale).to(rows.dtype)
        double_rows = rows.double()
        products = double_rows @ double_rows.mT
        diagonal = products.diagonal(dim1=-2, dim2=-1)
        # Rows may be linearly dependent or zero. The number added to the diagonal is below the
        # rounding error of the products.
        diagonal += (diagonal.sum(-1, keepdim=True) * 1e-14).clamp_min(1e-300)
        L, info = torch.linalg.cholesky_ex(products)
        if not info.any():
            return L.to(rows.dtype)
    return torch.linalg.qr(rows.mT, mode="r").R.mT


def dense_jacobians(
    record: BlockRecord, jacobians: Jacobians = rotated_jacobians
) -> Iterator[tuple[slice, Float[Tensor, "part columns d"]]]:
    """Yield Jacobian rows over all of a block's parameters, with the slice of their examples.

    Args:
        record: The record of the block.
        jacobians: A function that computes Jacobians.
    """
    d_out, d_in = record.block.shape
    for examples, J, columns in jacobians(record, Axes(d_out), Axes(d_in)):
        if columns is not None:
            J = J.new_zeros(*J.shape[:3], d_in).index_add_(3, columns, J)
        yield examples, J.flatten(2)


def joint_jacobians(
    record: BlockRecord, output_directions: Directions, input_directions: Directions
) -> Iterator[Rotated]:
    """Yield a block's Jacobian in its eigenbasis, all examples joined: `[1, b·K, d_out, d_in]`."""
    slices = list(
        rotated_jacobians(record, output_directions, input_directions, frame_per_example=False)
    )
    looked_up = [rotated.columns for rotated in slices if rotated.columns is not None]
    columns = torch.cat(looked_up).unique() if looked_up else None
    if columns is not None:
        # The columns are sorted, so that the columns of each slice can be found among them.
        places = [torch.searchsorted(columns, part_columns) for part_columns in looked_up]
        slices = [
            Rotated(examples, J.new_zeros(*J.shape[:3], len(columns)).index_add_(3, place, J))
            for (examples, J, _), place in zip(slices, places, strict=True)
        ]
    J = slices[0].J if len(slices) == 1 else torch.cat([rotated.J for rotated in slices])
    yield Rotated(slice(0, 1), J.flatten(0, 1).unsqueeze(0), columns)


def _one_hot_jacobians(
    record: BlockRecord, output_directions: Directions, input_directions: Directions
) -> Iterator[Rotated]:
    """Yield the Jacobian of a layer with one-hot activations, such as an embedding.

    Each index has a column of the Jacobian, the sum of the output gradients at the positions where
    the index is looked up. Only the columns of indices that occur are computed.
    """
    assert isinstance(input_directions, Axes), "One-hot inputs have the coordinate axes."
    block = record.block
    rule = block.rule
    indices_by_call = [rule.activation_indices(record.layer, x) for x in record.inputs]
    num_positions = sum(indices.shape[1] for indices in indices_by_call)
    # A slice of `step` examples has up to `step · num_positions` different indices, so the size of
    # its Jacobian is proportional to the square of `step`.
    numbers = num_positions * block.shape[0] * record.num_columns
    step = max(1, math.isqrt(_SLICE // max(1, numbers)))
    for start in range(0, record.num_examples, step):
        examples = slice(start, min(start + step, record.num_examples))
        indices = torch.cat([call_indices[examples] for call_indices in indices_by_call], dim=1)
        # The output gradients, and their coordinates, are [K, b, d_out, positions].
        g = _coordinates_of_columns(torch.cat(record.columns(examples), dim=3), output_directions)
        columns, places = _distinct_indices(indices, block.shape[1])
        J = g.new_zeros(*g.shape[:3], len(columns))
        J.scatter_add_(3, places[None, :, None, :].expand_as(g), g)
        yield Rotated(examples, J.movedim(0, 1), columns)


def _distinct_indices(
    indices: Int[Tensor, "batch positions"], d_in: int
) -> tuple[Int[Tensor, " some"], Int[Tensor, "batch positions"]]:
    """Return the indices that occur, ascending, and the place of each position's index among them.

    On an accelerator, the host would have to wait for the number of different indices. Instead,
    unused entries with the index 0 follow, to which no position refers.
    """
    if indices.device.type == "cpu":
        return torch.unique(indices, return_inverse=True)
    ordered, order = indices.flatten().sort()
    is_new = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
    ordered_places = is_new.cumsum(0) - 1
    places = torch.empty_like(ordered_places).scatter_(0, order, ordered_places)
    columns = ordered.new_zeros(min(len(ordered), d_in))
    return columns.scatter_(0, ordered_places, ordered), places.view_as(indices)


def _coordinates_of_columns(
    columns: Float[Tensor, "batch *groups n d k"], directions: Directions
) -> Float[Tensor, "batch *groups n rows k"]:
    """Compute the coordinates of columns, `[b, *groups, n, d, k]`."""
    has_groups = columns.ndim > 4
    if not has_groups and columns.shape[-1] < _FEW_POSITIONS:
        # One product of all columns is many times faster than a product for each column.
        return directions.coordinates(columns.mT).mT
    return directions.coordinates_of_columns(columns)
