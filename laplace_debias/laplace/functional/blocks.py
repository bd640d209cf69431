"""Functional covariance of a posterior that is block-diagonal."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block, Site
from laplace_debias.curvature.layers.jacobians import Jacobians, rotated_jacobians
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker

# From so many prior precisions on, products of pairs of outputs are formed once for all of them.
_PAIRS_FROM = 3
# From `_WIDE` columns on those of nearly the same curvature go in runs of `_RUN`: their
# weights differ by a factor of 1 + `_ALIKE` at most.
_RUN, _ALIKE, _WIDE = 64, 0.05, 2**15
# Numbers that a slice of weighed products holds, by kind of device. One of a processor stays in its
# cache; of a GPU calls of a few microseconds would be most of the time.
_SLICE = defaultdict(lambda: 2**25, cpu=2**19)
# Products of so many columns are summed afterwards. Libraries give each output of a product to one
# part of a GPU, however many columns there are.
_SPLIT = defaultdict(lambda: 2**8, cpu=2**62)


class BlockMoments:
    r"""$J P^{-1} J^\top$ as the sum over blocks, each in its own eigenbasis.

    Args:
        blocks: The blocks, in the posterior's order.
        posterior: A posterior over them.
        prior_precisions: δ of every block at every grid point, `[P, blocks]`.
        diagonal: Whether to give variances alone.
        jacobians: Where rotated Jacobians come from.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        posterior: GaussianPosterior,
        prior_precisions: Float[Tensor, "grid blocks"],
        diagonal: bool,
        jacobians: Jacobians = rotated_jacobians,
    ) -> None:
        self.blocks = blocks
        self.posterior = posterior
        self.prior_precisions = prior_precisions
        self._diagonal = diagonal
        self._jacobians = jacobians
        self._operators: list[EigenKronecker] = []
        for block in blocks:
            operator = posterior.curvature.blocks[block.name]
            assert isinstance(operator, EigenKronecker)
            self._operators.append(operator)
        self._alike: dict[int, AlikeColumns] = {}

    def last_layer_inputs(self, tap: Tap, outputs: Tensor) -> dict[int, Tensor]:
        """Return the input of the last layer for each of its blocks, by the block's index.

        It is empty unless the outputs `[B, C]` are those of a tapped linear layer.
        """
        last = tap.last_layer(outputs)
        if last is None or outputs.ndim > 2:
            return {}
        if not isinstance(tap.network.get_submodule(last.layer), nn.Linear):
            return {}
        site = Site((last.layer,))
        return {index: last.x for index, block in enumerate(self.blocks) if block.site == site}

    def add_last_layer(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        inputs: dict[int, Tensor],
        chosen: Int[Tensor, "batch k"] | None,
    ) -> None:
        """Add the covariances, or variances, of the last layer's blocks, without a backward pass.

        Args:
            into: The sums.
            inputs: `last_layer_inputs`.
            chosen: Indices of the outputs; None for all.
        """
        for index, phi in inputs.items():
            head = LinearHead.of_posterior(self.blocks[index], self.posterior)
            variances = head.variances(self.prior_precisions[:, index])
            # One prior precision after the other: not all covariances may fit into memory.
            for total, along in zip(into, head.eigen_variances(phi, variances), strict=True):
                total += head.covariance(along, chosen, self._diagonal)

    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        backward: Iterable[tuple[int, nn.Module, Uses]],
    ) -> None:
        """Add the covariances, or variances, of some columns, from each block's output gradients.

        Args:
            into: The sums.
            backward: Numbers of blocks, with their layers and uses, as `Tap.backward` yields them.
        """
        for index, layer, uses in backward:
            operator, deltas = self._operators[index], self.prior_precisions[:, index]
            curvature = self.posterior.data_weight * operator.in_frame
            for part, J, columns in self._jacobians(
                layer, self.blocks[index], uses, operator.U_G, operator.U_A
            ):
                seen = curvature if columns is None else curvature[..., columns]
                seen = seen[..., : J.shape[-2], : J.shape[-1]].flatten()
                rows, total = J.flatten(2), into[:, part]
                if self._diagonal:
                    total += weighted_squares(rows, seen, deltas)
                elif (
                    len(deltas) <= _PAIRS_FROM
                    or len(seen) < max(_WIDE, curvature.numel())
                    or J.device.type != "cpu"  # a GPU multiplies faster than it sorts
                ):
                    total += weighted_gram(rows, seen, deltas)
                else:
                    if index not in self._alike:
                        self._alike[index] = AlikeColumns.of(seen, deltas)
                    total += self._alike[index].gram(rows)
                # Let go before the next are made.
                del J, rows
            del uses


def weighted_squares(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs"]:
    r"""`Σ_i Ĵ_ci² / (curvature_i + δ_p)` for every δ, `[P, B, C]`."""
    squares = rows.flatten(0, 1)
    width = max(1, _SLICE[rows.device.type] // len(squares))
    sums = rows.new_zeros(len(squares), len(deltas))
    for part, c in zip(squares.split(width, 1), curvature.split(width), strict=True):
        sums.addmm_(part.square(), (c + deltas[:, None]).reciprocal_().T)
    return sums.T.reshape(len(deltas), *rows.shape[:2])


def weighted_gram(
    rows: Float[Tensor, "batch outputs d"],
    curvature: Float[Tensor, " d"],
    deltas: Float[Tensor, " grid"],
) -> Float[Tensor, "grid batch outputs outputs"]:
    r"""`Σ_i Ĵ_ci Ĵ_ki / (curvature_i + δ_p)` for every δ, `[P, B, C, C]`.

    For a few δ each is a product of its own. For many, the products `Ĵ_ci Ĵ_ki` of each pair of
    outputs are formed once, and a single matrix product weighs them for the whole grid. Columns are
    taken in slices that stay in the processor's cache.
    """
    batch, num_outputs = rows.shape[:2]
    pairs = num_outputs * (num_outputs + 1) // 2
    as_pairs = len(deltas) > _PAIRS_FROM
    width = max(1, _SLICE[rows.device.type] // (batch * (pairs if as_pairs else num_outputs)))
    if not as_pairs:
        total = rows.new_zeros(len(deltas), batch, num_outputs, num_outputs)
        for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
            for point, delta in zip(total, deltas, strict=True):
                add_products(point, part * (c + delta).reciprocal_(), part, _SPLIT[c.device.type])
        return total
    sums = rows.new_zeros(batch * pairs, len(deltas))
    for part, c in zip(rows.split(width, 2), curvature.split(width), strict=True):
        products = part.new_empty(batch, pairs, part.shape[2])
        for output, some in enumerate(products.split(list(range(num_outputs, 0, -1)), 1)):
            torch.mul(part[:, output, None], part[:, output:], out=some)
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
    """Add `a @ b.mT`, in parts of `split` columns that are multiplied side by side."""
    parts = a.shape[2] // split
    if parts:
        of_a, of_b = (x[..., : parts * split].unflatten(2, (parts, split)) for x in (a, b))
        into += torch.einsum("bmpd,bnpd->bpmn", of_a, of_b).sum(1)
    into.baddbmm_(a[..., parts * split :], b[..., parts * split :].mT)


@dataclass(frozen=True)
class AlikeColumns:
    """The columns of a wide block, in runs of nearly the same curvature: one weight does for each.

    Attributes:
        columns: Those of each run.
        weights: 1/(c + δ) for the mean curvature c of a run.
        others: Columns that are in no run.
        curvature: That of these.
        deltas: Every δ.
    """

    columns: Int[Tensor, "runs n"]
    weights: Float[Tensor, "runs grid"]
    others: Int[Tensor, " others"]
    curvature: Float[Tensor, " others"]
    deltas: Float[Tensor, " grid"]

    @classmethod
    def of(cls, curvature: Float[Tensor, " d"], deltas: Float[Tensor, " grid"]) -> "AlikeColumns":
        """Runs of columns with these curvatures."""
        # By their first 16 bits (sign, exponent, 7 of the mantissa) they are in order to 1 %, in a
        # tenth of the time.
        keys = (curvature + deltas.min()).float().view(torch.int32) >> 16
        order = keys.to(torch.int16).argsort(stable=True)
        rest, runs = order.tensor_split([len(curvature) % _RUN])
        runs = runs.view(-1, _RUN)
        ends = curvature[runs[:, [0, -1]]] + deltas.min()
        is_alike = ends[:, 1] <= (1 + _ALIKE) * ends[:, 0]
        columns, others = runs[is_alike], torch.cat([rest, runs[~is_alike].flatten()])
        weights = (curvature[columns].mean(1, keepdim=True) + deltas).reciprocal()
        return cls(columns, weights, others, curvature[others], deltas)

    def gram(
        self, rows: Float[Tensor, "batch outputs d"]
    ) -> Float[Tensor, "grid batch outputs outputs"]:
        """As `weighted_gram`, with a weight for each run."""
        total = weighted_gram(rows.index_select(2, self.others), self.curvature, self.deltas)
        for example, of_example in enumerate(rows):
            columns = self.columns.flatten().expand(len(of_example), -1)
            runs = of_example.gather(1, columns).unflatten(1, self.columns.shape).transpose(0, 1)
            in_runs = self.weights.T @ (runs @ runs.mT).flatten(1)
            total[:, example] += in_runs.view_as(total[:, example])
        return total
