"""Functional covariance of posteriors that are block-diagonal."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import Jacobians, Rotated, rotated_jacobians
from laplace_debias.curvature.layers.tap import Use
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.laplace.functional.weights import weighted_gram, weighted_squares
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker


class BlockMoments:
    r"""$J P^{-1} J^\top$ as the sum over blocks, each in its own eigenbasis.

    Args:
        blocks: The blocks, in the posteriors' order.
        posteriors: Posteriors over them.
        prior_precisions: δ of every block at every grid point, `[posteriors, P, blocks]`.
        diagonal: Whether to give variances alone.
        jacobians: Where rotated Jacobians come from.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        posteriors: Sequence[GaussianPosterior],
        prior_precisions: Float[Tensor, "posteriors grid blocks"],
        diagonal: bool,
        jacobians: Jacobians = rotated_jacobians,
    ) -> None:
        self._blocks = blocks
        self._posteriors = posteriors
        self._prior_precisions = prior_precisions
        self._diagonal = diagonal
        self._jacobians = jacobians

    def add_last_layer(
        self,
        into: Float[Tensor, "posteriors grid batch columns *again"],
        layer: nn.Module,
        last: Use,
        outputs: Tensor,
        chosen: Int[Tensor, "batch k"] | None,
    ) -> int:
        r"""Add the blocks of a linear layer whose outputs are the network's, `[B, C]`.

        With its input φ its Jacobian is $J = I \otimes \phi^\top$, which takes no backward pass.

        Args:
            into: Where to add them.
            layer: The layer.
            last: Its use.
            outputs: The network's outputs.
            chosen: Which outputs; None for all.

        Returns:
            How many blocks there are: none of another layer.
        """
        of_layer = linear_blocks(self._blocks, layer, last, outputs)
        for index in of_layer:
            self._add_linear(into, index, last, chosen)
        return len(of_layer)

    def _add_linear(
        self, total: Tensor, index: int, last: Use, chosen: Int[Tensor, "batch k"] | None
    ) -> None:
        r"""Add $U_G\,\mathrm{diag}\big(\sum_j (U_A^\top\phi)_j^2 / P_{ij}\big)_i\,U_G^\top$."""
        block = self._blocks[index]
        phi = last.x if not block.is_exact else last.x.new_ones(len(last.x), 1)
        if block.is_joint:
            phi = torch.nn.functional.pad(phi, (0, 1), value=1.0)
        for into, posterior, deltas in zip(
            total, self._posteriors, self._prior_precisions[:, :, index], strict=True
        ):
            operator = posterior.curvature.blocks[block.name]
            assert isinstance(operator, EigenKronecker)
            precisions = posterior.data_weight * operator.magnitudes + deltas[:, None, None]
            rotated = phi if operator.U_A is None else phi @ operator.U_A
            along = rotated.square() @ precisions.reciprocal().mT  # [P, B, d_out]
            U_G = operator.U_G
            if U_G is None:
                along = (
                    along if chosen is None else along.gather(-1, chosen.expand(len(along), -1, -1))
                )
                if self._diagonal:
                    into += along
                    continue
                products = torch.diag_embed(along)
                if chosen is not None:
                    # An output that is asked for twice.
                    same = chosen.unsqueeze(-1) == chosen.unsqueeze(-2)
                    products = along.unsqueeze(-1) * same
                into += products
                continue
            # [C, d_out] for every example alike, or its own choice of rows [B, k, d_out].
            rows = U_G if chosen is None else U_G[chosen]
            if self._diagonal:
                into += (rows.square() @ along.unsqueeze(-1)).squeeze(-1)
                continue
            for point, variances in zip(into, along, strict=True):
                point += (rows * variances.unsqueeze(1)) @ rows.mT

    def begin(self, into: Float[Tensor, "posteriors grid batch columns *again"]) -> None:
        """Begin with some columns, whose covariances or variances are added to `into`."""
        self._into = into

    def add(self, index: int, layer: nn.Module, uses: Uses) -> None:
        """Take one block's inputs and output gradients.

        Args:
            index: The block's number.
            layer: Its layer.
            uses: Inputs and output gradients of the layer's uses.
        """
        block = self._blocks[index]
        for members in self._with_same_directions(block.name):
            operators = [self._posteriors[m].curvature.blocks[block.name] for m in members]
            curvature = torch.stack(
                [
                    self._posteriors[member].data_weight * operator.magnitudes
                    for member, operator in zip(members, operators, strict=True)
                ]
            )
            U_G, U_A = operators[0].U_G, operators[0].U_A
            parts = self._jacobians(layer, block, uses, U_G, U_A)
            self._add_parts(members, index, curvature, parts)

    def add_table(self, index: int, parts: Sequence[Rotated], shape: torch.Size) -> None:
        """Take the Jacobian of a block of entries that are those of an embedding's table.

        Args:
            index: The block's number.
            parts: Its Jacobian as that of a table, `[b, K, d, tokens]`.
            shape: Of the table, `[tokens, d]`.
        """
        everyone = range(len(self._posteriors))
        magnitudes = [
            posterior.data_weight * posterior.curvature.blocks[self._blocks[index].name].magnitudes
            for posterior in self._posteriors
        ]
        curvature = torch.stack(magnitudes).view(-1, *shape).mT
        self._add_parts(list(everyone), index, curvature, parts)

    def _add_parts(
        self, members: list[int], index: int, curvature: Tensor, parts: Iterable[Rotated]
    ) -> None:
        """Add products of Jacobian rows, for posteriors with the same directions.

        Args:
            members: Numbers of the posteriors.
            index: The block's.
            curvature: N·Λ of each of them, `[posteriors, *groups, d_out, d_in]`.
            parts: The block's Jacobian along the directions.
        """
        grids = self._prior_precisions[members, :, index]
        for part, J, columns in parts:
            seen = curvature if columns is None else curvature[..., columns]
            rows, seen = J.flatten(2), seen.flatten(1)
            if self._diagonal:
                self._into[members, :, part] += weighted_squares(rows, seen, grids)
                continue
            for member, of_member, grid in zip(members, seen, grids, strict=True):
                self._into[member, :, part] += weighted_gram(rows, of_member, grid)

    def end(self) -> None:
        """Nothing is left to add: every block was added as it came."""

    def _with_same_directions(self, block: str) -> list[list[int]]:
        """Numbers of the posteriors, those together that hold the very same directions."""
        groups: dict[tuple[int, int], list[int]] = {}
        for position, posterior in enumerate(self._posteriors):
            operator = posterior.curvature.blocks[block]
            groups.setdefault((id(operator.U_G), id(operator.U_A)), []).append(position)
        return list(groups.values())


def linear_blocks(
    blocks: Sequence[Block], layer: nn.Module, last: Use, outputs: Tensor
) -> list[int]:
    """Numbers of the blocks of a linear layer that gives the outputs `[B, C]` itself."""
    of_layer = [i for i, block in enumerate(blocks) if block.layer == last.layer]
    is_known = all(blocks[i].role in ("weight", "bias") for i in of_layer)
    is_linear = isinstance(layer, nn.Linear) and outputs.ndim == 2
    return of_layer if is_linear and is_known else []
