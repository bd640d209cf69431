r"""Products of a linear head's own Jacobian rows, $e_c \otimes h_t$, weighed by variances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
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

    def rows_of(self, example: int, some: Tensor | slice) -> Float[Tensor, "some p_d"]:
        """Rows $w_c$ at their positions, as they multiply an example's flattened h."""
        at, classes = self.positions[example, some], self.classes[example, some]
        rows = self.weight.new_zeros(len(at), *self.h.shape[1:])
        rows[torch.arange(len(at), device=at.device), at] = self.weight[classes]
        return rows.flatten(1)


def can_go_through(head: str, blocks: Sequence[Block], posterior: GaussianPosterior) -> bool:
    """Whether all parameters are a head's, or act on the outputs through what goes into it.

    A weight that the head shares with an embedding does both, and does not go this way.
    """
    # Calls that are run once more give what comes behind the head.
    others = [block for block in blocks if block.role == "entries"]
    paths = [path for block in others for path in block.calls or (block.layer,)]
    is_behind = any(not path or path == head or head.startswith(f"{path}.") for path in paths)
    return DENSE_BLOCK not in posterior.curvature.blocks and not is_behind


def contracted(
    found: Float[Tensor, "grid batch *columns"], wanted: Wanted, diagonal: bool
) -> Float[Tensor, "grid batch *outputs"]:
    r"""The outputs' covariance from that of h, $w_c^\top \Sigma_h w_{c'}$."""
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
    block: Block,
    posterior: GaussianPosterior,
    deltas: Float[Tensor, " grid"],
    wanted: Wanted,
    diagonal: bool,
) -> Float[Tensor, "grid batch *outputs"]:
    """Products of the rows `e_c ⊗ h_t`, `[P, b, k, k]`, or with themselves, `[P, b, k]`."""
    operator, h = posterior.curvature.blocks[block.name], wanted.h
    assert isinstance(operator, EigenKronecker)
    if block.is_exact:
        h = h.new_ones(*h.shape[:2], 1)
    if block.is_joint:
        h = torch.nn.functional.pad(h, (0, 1), value=1.0)
    magnitudes, inputs = operator.in_frame, coordinates(h, operator.U_A)
    rows_of_G = None if operator.U_G is None else frame(operator.U_G)

    def own(example: int, delta: Tensor) -> Tensor:
        a, at, classes = inputs[example], wanted.positions[example], wanted.classes[example]

        def variances(some: Tensor | slice) -> Tensor:
            return (posterior.data_weight * magnitudes[some] + delta).reciprocal()

        if rows_of_G is None and diagonal:
            step = max(1, _SLICE // wanted.weight.shape[1])
            parts = zip(at.split(step), classes.split(step), strict=True)
            return torch.cat([(a[t].square() * variances(c)).sum(-1) for t, c in parts])
        if rows_of_G is None:
            products = (a[at] * variances(classes)) @ a[at].mT
            return products * (classes[:, None] == classes)
        weights, rows = variances(slice(None)), rows_of_G[classes]
        if diagonal:
            return (rows.square() * (a.square() @ weights.mT)[at]).sum(-1)
        total = a.new_zeros(len(at), len(at))
        for t, s in torch.cartesian_prod(*[torch.arange(len(a), device=a.device)] * 2):
            along = (a[t] * a[s]) @ weights.mT
            total += ((rows * along) @ rows.mT) * ((at == t)[:, None] & (at == s))
        return total

    of_points = [[own(example, delta) for example in range(len(h))] for delta in deltas]
    return torch.stack([torch.stack(of_examples) for of_examples in of_points])
