r"""Products of a linear head's own Jacobian rows, $e_c \otimes h_t$, weighed by variances."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.laplace.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker
from laplace_debias.operators.structures.eigen_kronecker import coordinates, frame

# Numbers in the rows of a weight that are looked at together.
_SLICE = 2**22


@dataclass(frozen=True)
class Wanted:
    """Outputs of a linear head that are asked for.

    Attributes:
        weight: The head's weight, `[C, d]`.
        h: What goes into the head, `[B, p, d]`.
        positions: At which position each output is, `[B, k]`.
        classes: Which one it is there, `[B, k]`.
    """

    weight: Float[Tensor, "classes d"]
    h: Float[Tensor, "batch p d"]
    positions: Int[Tensor, "batch k"]
    classes: Int[Tensor, "batch k"]

    @classmethod
    def of(cls, weight: Tensor, h: Tensor, chosen: Int[Tensor, "batch k"] | None) -> "Wanted":
        """The products of indices into an example's flattened outputs `[p · C]`; all for None."""
        size = len(weight)
        if chosen is None:
            chosen = torch.arange(h.shape[1] * size, device=h.device).expand(len(h), -1)
        return cls(weight, h.detach(), chosen // size, chosen % size)

    def of_columns(self, some: slice) -> "Wanted":
        """Some of the outputs of every example."""
        return replace(self, positions=self.positions[:, some], classes=self.classes[:, some])

    @property
    def num_outputs(self) -> int:
        """How many of each example."""
        return self.classes.shape[1]

    @property
    def by_inputs(self) -> bool:
        """Whether there are more outputs than numbers that they are made of."""
        return self.num_outputs > self.h[0].numel()

    def columns(self, some: slice) -> Float[Tensor, "columns batch p d"]:
        """Cotangents of h: units if `by_inputs`, else a row of the weight for every output."""
        batch, p, d = self.h.shape
        if self.by_inputs:
            units = torch.eye(p * d, dtype=self.h.dtype, device=self.h.device)[some]
            return units.unflatten(1, (p, d)).unsqueeze(1).expand(-1, batch, -1, -1)
        rows = self.of_columns(some)
        columns = self.h.new_zeros(rows.num_outputs, batch, p, d)
        at = rows.positions.T[:, :, None, None].expand(-1, -1, 1, d)
        return columns.scatter_(2, at, self.weight[rows.classes.T].unsqueeze(2))

    def slices(self) -> Iterator[slice]:
        """Parts of the outputs whose rows of the weight fit into a slice."""
        step = max(1, _SLICE // self.weight.shape[1])
        for start in range(0, self.num_outputs, step):
            yield slice(start, min(start + step, self.num_outputs))

    def rows_of(self, example: int, some: Tensor | slice) -> Float[Tensor, "some p_d"]:
        """Rows $w_c$ at their positions, as they multiply an example's flattened h."""
        at, classes = self.positions[example, some], self.classes[example, some]
        rows = self.weight.new_zeros(len(at), *self.h.shape[1:])
        rows[torch.arange(len(at), device=at.device), at] = self.weight[classes]
        return rows.flatten(1)


@dataclass(frozen=True)
class OfHead:
    """A block of the head's at one point of the grid.

    Attributes:
        block: The block: the head's weight, or its bias.
        operator: Its curvature.
        data_weight: N.
        delta: δ.
    """

    block: Block
    operator: EigenKronecker
    data_weight: float
    delta: Tensor

    @classmethod
    def grid(
        cls,
        block: Block,
        index: int,
        posterior: GaussianPosterior,
        prior_precisions: Float[Tensor, "grid blocks"],
    ) -> list["OfHead"]:
        """The products at the grid's points."""
        operator = posterior.curvature.blocks[block.name]
        assert isinstance(operator, EigenKronecker)
        deltas = prior_precisions[:, index]
        return [cls(block, operator, posterior.data_weight, delta) for delta in deltas]

    def variances(self, classes: Int[Tensor, " some"] | slice) -> Float[Tensor, "some d"]:
        """1/P of some rows of the magnitudes."""
        return (self.data_weight * self.operator.in_frame[classes] + self.delta).reciprocal()

    def own(self, wanted: Wanted, example: int, diagonal: bool) -> Tensor:
        """Products of the rows `e_c ⊗ h_t` of an example, `[k, k]`, or with themselves, `[k]`."""
        h, at, classes = wanted.h[example], wanted.positions[example], wanted.classes[example]
        if self.block.is_exact:
            h = h.new_ones(len(h), 1)
        if self.block.is_joint:
            h = torch.nn.functional.pad(h, (0, 1), value=1.0)
        a, U_G = coordinates(h, self.operator.U_A), self.operator.U_G
        if U_G is None and not diagonal:
            rows = a[at]
            products = (rows * self.variances(classes)) @ rows.mT
            return products * (classes[:, None] == classes)
        if U_G is None:
            parts = [
                (a[at[s]].square() * self.variances(classes[s])).sum(-1) for s in wanted.slices()
            ]
            return torch.cat(parts)
        variances, rows = self.variances(slice(None)), frame(U_G)[classes]
        if diagonal:
            along = a.square() @ variances.mT
            return (rows.square() * along[at]).sum(-1)
        total = a.new_zeros(len(at), len(at))
        for t, s in torch.cartesian_prod(*[torch.arange(len(a), device=a.device)] * 2):
            along = (a[t] * a[s]) @ variances.mT
            total += ((rows * along) @ rows.mT) * ((at == t)[:, None] & (at == s))
        return total


def contracted(
    found: Float[Tensor, "grid batch *columns"], wanted: Wanted, diagonal: bool
) -> Float[Tensor, "grid batch *outputs"]:
    r"""The outputs' covariance from that of h, $w_c^\top \Sigma_h w_{c'}$.

    Args:
        found: The covariance of `wanted.columns`.
        wanted: The outputs.
        diagonal: Whether to give variances alone.
    """
    if not wanted.by_inputs:
        return found
    p, d = wanted.h.shape[1:]
    results = []
    for example in range(len(wanted.h)):
        covariance = found[:, example]
        if not diagonal:
            rows = wanted.rows_of(example, slice(None))
            results.append(rows @ covariance @ rows.mT)
            continue
        of_positions = covariance.unflatten(-1, (p, d)).unflatten(-3, (p, d))
        total = found.new_zeros(len(found), wanted.num_outputs)
        for t in range(p):
            (here,) = (wanted.positions[example] == t).nonzero(as_tuple=True)
            for some in here.split(max(1, _SLICE // d)):
                rows = wanted.weight[wanted.classes[example, some]]
                total[..., some] = ((rows @ of_positions[:, t, :, t]) * rows).sum(-1)
        results.append(total)
    return torch.stack(results, 1)


def head_products(
    grid: Sequence[OfHead], wanted: Wanted, diagonal: bool
) -> Float[Tensor, "grid batch *outputs"]:
    """Products of the head's own rows, for every point of the grid and every example."""
    examples = range(len(wanted.h))
    return torch.stack(
        [torch.stack([point.own(wanted, n, diagonal) for n in examples]) for point in grid]
    )
