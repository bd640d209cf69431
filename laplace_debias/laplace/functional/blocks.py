"""Functional covariance of a posterior that is block-diagonal."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Site
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.jacobians import rotated_jacobians, single_products
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.laplace.functional.accumulator import CovarianceAccumulator
from laplace_debias.laplace.functional.last_layer import LastLayer
from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.operators import EigenKronecker
from laplace_debias.operators.structures.directions import Directions

# With more prior precisions than this, products of pairs of outputs are formed once and reused.
_PAIRS_FROM = 3
# In a block of at least `_WIDE` columns, columns of nearly the same curvature form runs of `_RUN`
# columns, whose weights differ by a factor of at most 1 + `_TOLERANCE`.
_WIDE = 2**15
_RUN = 64
_TOLERANCE = 0.05
# The number of entries in a slice of weighted products, by device type. On a CPU, a slice stays in
# the cache. On a GPU, smaller slices would spend most of their time on launching kernels.
_SLICE = defaultdict(lambda: 2**25, cpu=2**19)
# The number of entries of the weights 1/P that are used together.
_WEIGHTS = 2**22
# A product is split into products of this many columns, which are summed afterwards. Libraries
# compute each entry of a product on a single part of a GPU, so a long product would leave most of
# the GPU idle.
_SPLIT = defaultdict(lambda: 2**8, cpu=2**62)


class BlockwiseAccumulator(CovarianceAccumulator):
    """The covariance under a block-diagonal posterior, computed in the eigenbasis of each block."""

    def _read_directions(self) -> None:
        """Read the directions of each block, and create caches for quantities of the blocks."""
        self._indices = {block: index for index, block in enumerate(self.blocks)}
        self._operators: list[EigenKronecker] = []
        self._directions: list[tuple[Directions, Directions]] = []
        for block in self.blocks:
            operator = self.posterior.curvature.blocks[block.name]
            assert isinstance(operator, EigenKronecker)
            self._operators.append(operator)
            directions = operator.output_directions, operator.input_directions
            self._directions.append(directions)
        self._runs: dict[int, ColumnRuns] = {}
        # The weights 1/(N Λ + δ) of the blocks at a single prior precision.
        self._weights: dict[int, Tensor] = {}
        # The last layers seen so far, by site, because a network may end in different layers.
        self._last_layers: dict[Site, LastLayer] = {}

    def last_layer(
        self, forward_pass: ForwardPass
    ) -> tuple[LastLayer, Float[Tensor, "batch d"]] | None:
        """Return the last layer and its inputs, or None if it does not return the outputs."""
        last = forward_pass.last_layer()
        if last is None or forward_pass.outputs.ndim > 2:
            return None
        site = Site((last.layer,))
        if site not in self._last_layers:
            heads = []
            prior_precisions = []
            for index, block in enumerate(self.blocks):
                if block.site == site and block.rule.is_linear:
                    heads.append(LinearHead.from_posterior(block, self.posterior))
                    prior_precisions.append(self.prior_precisions[:, index])
            if not heads:
                return None
            self._last_layers[site] = LastLayer(heads, prior_precisions)
        return self._last_layers[site], last.x

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        records: Iterable[BlockRecord],
        outputs: Int[Tensor, "#batch columns"] | None,
    ) -> None:
        """Add the covariances under the posterior that all outputs share; `outputs` is not used."""
        if len(self.prior_precisions) == 1:
            self._add_weighted(into[0], records)
            return
        for record in records:
            index = self._indices[record.block]
            operator = self._operators[index]
            deltas = self.prior_precisions[:, index]
            curvature = self.posterior.curvature_weight * operator.expanded_magnitudes
            U_G, U_A = self._directions[index]
            products = self._single_products(record, U_G, U_A)
            if products is not None:
                gradients, activations = products
                add_single_products(into, gradients, activations, curvature, deltas, self._diagonal)
                continue
            for examples, J, columns in self._jacobians(record, U_G, U_A):
                column_curvature = values_of_columns(curvature, J, columns)
                rows = J.flatten(2)
                total = into[:, examples]
                if self._diagonal:
                    total += weighted_squares(rows, column_curvature, deltas)
                else:
                    has_all_columns = len(column_curvature) == curvature.numel()
                    total += self._gram_at_grid(index, rows, column_curvature, has_all_columns)
                # Release the memory before the next Jacobians are computed.
                del J, rows
            del record

    def _gram_at_grid(
        self,
        index: int,
        rows: Float[Tensor, "batch outputs d"],
        curvature: Float[Tensor, " d"],
        has_all_columns: bool,
    ) -> Float[Tensor, "grid batch outputs outputs"]:
        """Compute `weighted_gram` for a block at all its prior precisions, in the fastest way.

        Args:
            index: The index of the block.
            rows: Rows of the block's Jacobian, `[B, C, d]`.
            curvature: The curvature of their columns.
            has_all_columns: Whether the rows have all columns of the block.
        """
        deltas = self.prior_precisions[:, index]
        is_wide = len(curvature) >= _WIDE and len(deltas) > _PAIRS_FROM
        # The runs are kept for the next rows, so they must consist of all columns. A GPU multiplies
        # faster than it sorts.
        if not (has_all_columns and is_wide and rows.device.type == "cpu"):
            return weighted_gram(rows, curvature, deltas)
        if index not in self._runs:
            self._runs[index] = ColumnRuns.build(curvature, deltas)
        return self._runs[index].gram(rows)

    def _single_products(
        self, record: BlockRecord, output_directions: Directions, input_directions: Directions
    ) -> tuple[Float[Tensor, "batch columns rows"], Float[Tensor, "batch some_d_in"]] | None:
        """Return `single_products`, or None if another function computes the Jacobians."""
        if self._jacobians is not rotated_jacobians:
            return None
        return single_products(record, output_directions, input_directions)

    def _add_weighted(
        self, into: Float[Tensor, "batch columns *again"], records: Iterable[BlockRecord]
    ) -> None:
        r"""Add $\sum_{ij} \hat J_{c,ij} w_{ij} \hat J_{k,ij}$ at a single prior precision.

        The weights are $w_{ij} = 1 / (N\lambda_{ij} + \delta)$.
        """
        for record in records:
            index = self._indices[record.block]
            block_weights = self._weights_of_block(index)
            U_G, U_A = self._directions[index]
            products = self._single_products(record, U_G, U_A)
            if products is not None:
                # Here, Ĵ_{c,ij} = ĝ_ci â_j, so the sum over j is the same for all outputs.
                gradients, activations = products
                weights = block_weights[: gradients.shape[-1], : activations.shape[-1]]
                row_weights = activations.square() @ weights.mT
                add_outer_products(into, gradients, row_weights, self._diagonal)
                continue
            for examples, J, columns in self._jacobians(record, U_G, U_A):
                weights = values_of_columns(block_weights, J, columns)
                add_weighted_products(into[examples], J.flatten(2), weights, self._diagonal)
                # Release the memory before the next Jacobians are computed.
                del J
            del record

    def _weights_of_block(self, index: int) -> Float[Tensor, "*groups d_out d_in"]:
        """Compute 1/(N Λ + δ) of a block at the only prior precision, or reuse earlier weights."""
        if index not in self._weights:
            magnitudes = self._operators[index].expanded_magnitudes
            precisions = self.posterior.curvature_weight * magnitudes
            precisions += self.prior_precisions[0, index]
            self._weights[index] = precisions.reciprocal_()
        return self._weights[index]


def values_of_columns(
    values: Float[Tensor, "*groups rows columns"],
    J: Float[Tensor, "part outputs *groups some_rows some_columns"],
    columns: Int[Tensor, " some_columns"] | None,
) -> Float[Tensor, " d"]:
    """Select the values for the columns of `J.flatten(2)`, which leaves out some that are zero.

    Args:
        values: One value for each direction of a block.
        J: Jacobians of the block; see `Rotated`.
        columns: The indices of the columns of J; None for all, or for the first ones.
    """
    if columns is not None:
        values = values[..., columns]
    return values[..., : J.shape[-2], : J.shape[-1]].flatten()


def add_weighted_products(
    into: Float[Tensor, "batch outputs *again"],
    rows: Float[Tensor, "batch outputs d"],
    weights: Float[Tensor, " d"],
    diagonal: bool,
) -> None:
    r"""Add `Σ_i Ĵ_ci w_i Ĵ_ki` for all pairs of outputs, or only for c = k.

    The columns are processed in slices that stay in the processor's cache.
    """
    device_type = rows.device.type
    width = max(1, _SLICE[device_type] // (rows.shape[0] * rows.shape[1]))
    slices: Iterable[tuple[Tensor, Tensor]] = [(rows, weights)]
    if width < len(weights):
        slices = zip(rows.split(width, 2), weights.split(width), strict=True)
    for columns, w in slices:
        if diagonal:
            into += columns.square() @ w
        else:
            add_products(into, columns * w, columns, _SPLIT[device_type])


def add_single_products(
    into: Float[Tensor, "grid batch columns *again"],
    gradients: Float[Tensor, "batch columns rows"],
    activations: Float[Tensor, "batch d_in"],
    curvature: Float[Tensor, "all_rows all_d_in"],
    deltas: Float[Tensor, " grid"],
    diagonal: bool,
) -> None:
    r"""Add the covariances, or variances, of Jacobians $\hat J_{c,ij} = \hat g_{ci} \hat a_j$.

    This calls `add_outer_products` with $w_i = \sum_j \hat a_j^2 / (\lambda_{ij} + \delta)$.
    """
    # Along thin directions, there may be fewer coordinates than directions.
    num_rows = gradients.shape[-1]
    curvature = curvature[:num_rows, : activations.shape[-1]]
    squares = activations.square()
    step = max(1, _WEIGHTS // squares.shape[1])
    for point, delta in zip(into, deltas, strict=True):
        sums = [squares @ (c + delta).reciprocal_().mT for c in curvature.split(step)]
        add_outer_products(point, gradients, torch.cat(sums, 1), diagonal)


def add_outer_products(
    into: Float[Tensor, "batch columns *again"],
    gradients: Float[Tensor, "batch columns rows"],
    weights: Float[Tensor, "batch rows"],
    diagonal: bool,
) -> None:
    r"""Add $\sum_i \hat g_{ci} \hat g_{ki} w_i$ for all pairs of outputs, or only for c = k.

    The weights of an example are the same for all of its outputs.
    """
    if diagonal:
        into += (gradients.square() @ weights.unsqueeze(2)).squeeze(2)
    else:
        into.baddbmm_(gradients * weights.unsqueeze(1), gradients.mT)


def weighted_squares(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs"]:
    r"""Compute `Σ_i Ĵ_ci² / (curvature_i + δ_p)` for every δ, `[P, B, C]`."""
    flat_rows = rows.flatten(0, 1)
    width = max(1, _SLICE[rows.device.type] // len(flat_rows))
    sums = rows.new_zeros(len(flat_rows), len(deltas))
    for columns, c in zip(flat_rows.split(width, 1), curvature.split(width), strict=True):
        sums.addmm_(columns.square(), (c + deltas[:, None]).reciprocal_().T)
    return sums.T.reshape(len(deltas), *rows.shape[:2])


def weighted_gram(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    r"""Compute `Σ_i Ĵ_ci Ĵ_ki / (curvature_i + δ_p)` for every δ, `[P, B, C, C]`.

    For a few values of δ, there is a separate product for each value. For many values, the products
    `Ĵ_ci Ĵ_ki` of each pair of outputs are formed once, and a single matrix product weights them
    for the whole grid. Columns are taken in slices that stay in the processor's cache.
    """
    if len(deltas) > _PAIRS_FROM:
        return _weighted_gram_of_pairs(rows, curvature, deltas)
    batch, num_outputs = rows.shape[:2]
    width = max(1, _SLICE[rows.device.type] // (batch * num_outputs))
    split = _SPLIT[rows.device.type]
    total = rows.new_zeros(len(deltas), batch, num_outputs, num_outputs)
    for columns, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
        for point, delta in zip(total, deltas, strict=True):
            add_products(point, columns * (c + delta).reciprocal_(), columns, split)
    return total


def _weighted_gram_of_pairs(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    """Compute `weighted_gram` from the products of each pair of outputs."""
    batch, num_outputs = rows.shape[:2]
    pairs = num_outputs * (num_outputs + 1) // 2
    width = max(1, _SLICE[rows.device.type] // (batch * pairs))
    sums = rows.new_zeros(batch * pairs, len(deltas))
    for columns, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
        products = columns.new_empty(batch, pairs, columns.shape[2])
        by_output = products.split(list(range(num_outputs, 0, -1)), 1)
        for output, output_products in enumerate(by_output):
            torch.mul(columns[:, output, None], columns[:, output:], out=output_products)
        sums.addmm_(products.flatten(0, 1), (c[:, None] + deltas).reciprocal())
    upper = torch.triu_indices(num_outputs, num_outputs, device=rows.device)
    total = rows.new_empty(len(deltas), batch, num_outputs, num_outputs)
    by_pair = sums.unflatten(0, (batch, pairs)).permute(2, 0, 1)
    total[:, :, upper[0], upper[1]] = by_pair
    total[:, :, upper[1], upper[0]] = by_pair
    return total


def add_products(
    into: Float[Tensor, "batch m n"],
    a: Float[Tensor, "batch m d"],
    b: Float[Tensor, "batch n d"],
    split: int,
) -> None:
    """Add `a @ b.mT`, split into parts of `split` columns that are multiplied in parallel."""
    num_parts = a.shape[2] // split
    if num_parts:
        a_parts = a[..., : num_parts * split].unflatten(2, (num_parts, split))
        b_parts = b[..., : num_parts * split].unflatten(2, (num_parts, split))
        into += torch.einsum("bmpd,bnpd->bpmn", a_parts, b_parts).sum(1)
        a = a[..., num_parts * split :]
        b = b[..., num_parts * split :]
    into.baddbmm_(a, b.mT)


@dataclass(frozen=True)
class ColumnRuns:
    """The columns of a wide block, in runs of nearly equal curvature that share one weight.

    Attributes:
        columns: Indices of the columns in each run.
        weights: 1/(c + δ) for the mean curvature c of a run.
        single_columns: Indices of the columns that are in no run.
        single_curvature: The curvature of these columns.
        deltas: The prior precisions δ.
    """

    columns: Int[Tensor, "runs n"]
    weights: Float[Tensor, "runs grid"]
    single_columns: Int[Tensor, " single"]
    single_curvature: Float[Tensor, " single"]
    deltas: Float[Tensor, " grid"]

    @classmethod
    def build(cls, curvature: Float[Tensor, " d"], deltas: Float[Tensor, " grid"]) -> "ColumnRuns":
        """Sort the columns by their curvature, and form runs."""
        # Sorting by the first 16 bits (the sign, the exponent, and 7 bits of the mantissa) is
        # correct up to 1 %, and takes a tenth of the time.
        keys = (curvature + deltas.min()).float().view(torch.int32) >> 16
        order = keys.to(torch.int16).argsort(stable=True)
        remainder, runs = order.tensor_split([len(curvature) % _RUN])
        runs = runs.view(-1, _RUN)
        ends = curvature[runs[:, [0, -1]]] + deltas.min()
        is_narrow = ends[:, 1] <= (1 + _TOLERANCE) * ends[:, 0]
        columns = runs[is_narrow]
        single_columns = torch.cat([remainder, runs[~is_narrow].flatten()])
        weights = (curvature[columns].mean(1, keepdim=True) + deltas).reciprocal()
        return cls(
            columns=columns,
            weights=weights,
            single_columns=single_columns,
            single_curvature=curvature[single_columns],
            deltas=deltas,
        )

    def gram(
        self, rows: Float[Tensor, "batch outputs d"]
    ) -> Float[Tensor, "grid batch outputs outputs"]:
        """Compute the same sums as `weighted_gram`, but with one weight per run."""
        total = weighted_gram(
            rows.index_select(2, self.single_columns), self.single_curvature, self.deltas
        )
        for example, example_rows in enumerate(rows):
            columns = self.columns.flatten().expand(len(example_rows), -1)
            runs = example_rows.gather(1, columns).unflatten(1, self.columns.shape).transpose(0, 1)
            in_runs = self.weights.T @ (runs @ runs.mT).flatten(1)
            total[:, example] += in_runs.view_as(total[:, example])
        return total
