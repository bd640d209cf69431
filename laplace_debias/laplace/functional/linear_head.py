r"""Covariance of a linear layer's outputs due to its own parameters, without a backward pass.

An output at position t is $f_{tc} = w_c^\top h_t + b_c$. Its Jacobian row is $e_c \otimes h_t$ for
the weight and $e_c$ for the bias.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.laplace.links import SecondMoments
from laplace_debias.laplace.state.posterior import GaussianPosterior
from laplace_debias.operators import EigenKronecker
from laplace_debias.operators.structures.directions import Basis, Directions, ThinBasis

# The number of entries in the rows of a weight that are processed together.
_SLICE = 2**22

HeadMomentKind = Literal[SecondMoments, "difference variances"]
"""The kind of second moments of outputs: `SecondMoments`, or a matrix of the variances of the
differences between pairs of outputs.
"""


@dataclass(frozen=True)
class HeadOutputs:
    """Requested outputs of a linear layer at several positions.

    Attributes:
        weight: The layer's weight, `[C, d]`.
        h: The layer's inputs, `[B, p, d]`.
        positions: The position of each output, `[B, k]`.
        classes: The index of each output at its position, `[B, k]`.
    """

    weight: Float[Tensor, "classes d"]
    h: Float[Tensor, "batch p d"]
    positions: Int[Tensor, "batch k"]
    classes: Int[Tensor, "batch k"]

    @classmethod
    def from_indices(
        cls, weight: Tensor, h: Tensor, indices: Int[Tensor, "batch k"] | None
    ) -> "HeadOutputs":
        """Select all outputs, or outputs by indices into the flattened outputs `[p · C]`."""
        num_classes = len(weight)
        if indices is None:
            indices = torch.arange(h.shape[1] * num_classes, device=h.device).expand(len(h), -1)
        return cls(weight, h.detach(), indices // num_classes, indices % num_classes)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of each example."""
        return self.classes.shape[1]

    @property
    def exceeds_inputs(self) -> bool:
        """Whether an example has more requested outputs than entries of h."""
        return self.num_outputs > self.h[0].numel()

    @property
    def num_columns(self) -> int:
        """The number of `input_gradients`: the smallest number that determines all outputs."""
        return min(self.num_outputs, self.h[0].numel())

    def select_columns(self, columns: slice) -> "HeadOutputs":
        """Return the selected columns of each example's outputs."""
        return replace(self, positions=self.positions[:, columns], classes=self.classes[:, columns])

    def input_gradients(self, columns: slice) -> Float[Tensor, "columns batch p d"]:
        """Build vectors to pull back from h: rows of the weight, or unit vectors if fewer."""
        batch, p, d = self.h.shape
        if self.exceeds_inputs:
            units = torch.eye(p * d, dtype=self.h.dtype, device=self.h.device)[columns]
            return units.unflatten(1, (p, d)).unsqueeze(1).expand(-1, batch, -1, -1)
        outputs = self.select_columns(columns)
        vectors = self.h.new_zeros(outputs.num_outputs, batch, p, d)
        index = outputs.positions.T[:, :, None, None].expand(-1, -1, 1, d)
        return vectors.scatter_(2, index, self.weight[outputs.classes.T].unsqueeze(2))

    def covariance(
        self, covariances: Float[Tensor, "grid batch *columns"], diagonal: bool
    ) -> Float[Tensor, "grid batch *outputs"]:
        r"""Compute $w_c^\top \Sigma_h w_{c'}$ from the covariances along `input_gradients`."""
        if not self.exceeds_inputs:
            return covariances
        by_example = []
        for example, covariance in enumerate(covariances.unbind(1)):
            if diagonal:
                by_example.append(self._variances_of_example(example, covariance))
            else:
                by_example.append(self._covariance_of_example(example, covariance))
        return torch.stack(by_example, 1)

    def _covariance_of_example(
        self, example: int, covariance: Float[Tensor, "grid p_d p_d"]
    ) -> Float[Tensor, "grid k k"]:
        """Compute the covariance of an example's outputs from the covariance of h."""
        positions = self.positions[example]
        rows = self.weight.new_zeros(len(positions), *self.h.shape[1:])
        index = torch.arange(len(positions), device=positions.device)
        rows[index, positions] = self.weight[self.classes[example]]
        rows = rows.flatten(1)
        return rows @ covariance @ rows.mT

    def _variances_of_example(
        self, example: int, covariance: Float[Tensor, "grid p_d p_d"]
    ) -> Float[Tensor, "grid k"]:
        """Compute the variances of an example's outputs, one position after the other."""
        p, d = self.h.shape[1:]
        by_position = covariance.unflatten(-1, (p, d)).unflatten(-3, (p, d))
        variances = covariance.new_zeros(len(covariance), self.num_outputs)
        for t in range(p):
            (indices,) = (self.positions[example] == t).nonzero(as_tuple=True)
            for columns in indices.split(max(1, _SLICE // d)):
                rows = self.weight[self.classes[example, columns]]
                variances[..., columns] = ((rows @ by_position[:, t, :, t]) * rows).sum(-1)
        return variances


@dataclass(frozen=True)
class LinearHead:
    r"""A parameter block of the linear layer that returns the network's outputs.

    The covariance of the outputs at one position with layer input φ (1 for a bias) is

    $$\Sigma = U_G\,\mathrm{diag}\Big(\sum_j \frac{(U_A^\top\phi)_j^2}{P_{ij}}\Big)_i\,U_G^\top.$$

    Attributes:
        block: The block.
        magnitudes: Λ, with a row per output direction and a column per input direction,
            `[rows, columns]`.
        curvature_weight: N / T.
        U_G: The output directions, `[C, rows]`; None for the coordinate axes.
        input_directions: The input directions.
    """

    block: Block
    magnitudes: Float[Tensor, "rows columns"]
    curvature_weight: float
    U_G: Float[Tensor, "classes rows"] | None
    input_directions: Directions

    @classmethod
    def from_posterior(cls, block: Block, posterior: GaussianPosterior) -> "LinearHead":
        """Read a block's curvature and directions from a posterior."""
        operator = posterior.curvature.blocks[block.name]
        assert isinstance(operator, EigenKronecker)
        U_G = None
        output_directions = operator.output_directions
        if isinstance(output_directions, Basis | ThinBasis):
            U_G = output_directions.frame()
        return cls(
            block=block,
            magnitudes=operator.expanded_magnitudes,
            curvature_weight=posterior.curvature_weight,
            U_G=U_G,
            input_directions=operator.input_directions,
        )

    def rotated_inputs(self, phi: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch columns"]:
        """Compute the coordinates of the layer's inputs along the input directions."""
        if self.block.is_vector:
            phi = phi.new_ones(*phi.shape[:-1], 1)
        if self.block.is_joint:
            phi = torch.nn.functional.pad(phi, (0, 1), value=1.0)
        return self.input_directions.coordinates(phi)

    def variances(
        self, prior_precisions: Float[Tensor, "*grid"], rows: Int[Tensor, " k"] | None = None
    ) -> Float[Tensor, "*grid rows columns"]:
        """Compute the posterior variances 1/P in the eigenbasis, or only the given rows."""
        magnitudes = self.magnitudes if rows is None else self.magnitudes[rows]
        precisions = self.curvature_weight * magnitudes + prior_precisions[..., None, None]
        return precisions.reciprocal()

    def eigen_variances(
        self, phi: Float[Tensor, "*batch d"], variances: Float[Tensor, "*grid rows columns"]
    ) -> Float[Tensor, "..."]:
        """Compute the variances of the outputs along the columns of U_G, `[*grid, *batch, rows]`.

        Args:
            phi: The layer's inputs.
            variances: The result of `variances`, at one prior precision, or at several if the
                inputs are `[B, d]`.
        """
        return self.rotated_inputs(phi).square() @ variances.mT

    def moments_of_directions(
        self, kind: HeadMomentKind
    ) -> Float[Tensor, "rows outputs"] | Float[Tensor, "rows outputs_outputs"]:
        r"""Compute the contribution of each direction $u_i$ to the outputs' second moments.

        Each row contains variances, covariances $u_i u_i^\top$, or variances of the differences
        between all pairs of outputs, flattened. Multiply `eigen_variances` by this matrix to sum
        over all directions.
        """
        num_rows = len(self.magnitudes)
        U_G = self.U_G
        if U_G is None:
            U_G = torch.eye(num_rows, dtype=self.magnitudes.dtype, device=self.magnitudes.device)
        directions = U_G.mT
        if kind == "variances":
            return directions.square()
        first = directions.unsqueeze(2)
        second = directions.unsqueeze(1)
        if kind == "difference variances":
            return (first - second).square_().flatten(1)
        return (first * second).flatten(1)

    def covariance(
        self,
        eigen_variances: Float[Tensor, "*batch rows"],
        outputs: Int[Tensor, "batch k"] | None = None,
        diagonal: bool = False,
    ) -> Float[Tensor, "..."]:
        """Compute the covariance of the outputs at each position, or their variances.

        This method uses only operations that `torch.export` can trace.

        Args:
            eigen_variances: The result of `eigen_variances`. For variances, its shape may also be
                `[grid, *batch, rows]`.
            outputs: Indices of the outputs, `[B, k]`; None for all C.
            diagonal: Whether to return only variances.

        Returns:
            The covariance, `[*batch, k, k]`, or the variances, `[*batch, k]`.
        """
        if self.U_G is None:
            return _covariance_along_axes(eigen_variances, outputs, diagonal)
        rows = self.U_G if outputs is None else self.U_G[outputs]
        if not diagonal:
            return (rows * eigen_variances.unsqueeze(-2)) @ rows.mT
        if outputs is None:
            return eigen_variances @ rows.square().mT
        return torch.einsum("bkr,...br->...bk", rows.square(), eigen_variances)

    def covariance_between_positions(
        self,
        outputs: HeadOutputs,
        prior_precisions: Float[Tensor, " grid"],
        diagonal: bool,
    ) -> Float[Tensor, "grid batch *covariance"]:
        """Compute the covariances of outputs at several positions, or their variances."""
        inputs = self.rotated_inputs(outputs.h)
        by_point = []
        for delta in prior_precisions:
            # Only one example and one prior precision are processed at a time, because a weight may
            # have 50,000 by 1,000 entries.
            by_example = []
            for example_inputs, positions, classes in zip(
                inputs, outputs.positions, outputs.classes, strict=True
            ):
                if diagonal:
                    moments = self._variances_of_example(example_inputs, positions, classes, delta)
                else:
                    moments = self._covariance_of_example(example_inputs, positions, classes, delta)
                by_example.append(moments)
            by_point.append(torch.stack(by_example))
        return torch.stack(by_point)

    def _variances_of_example(
        self,
        inputs: Float[Tensor, "p columns"],
        positions: Int[Tensor, " k"],
        classes: Int[Tensor, " k"],
        delta: Float[Tensor, ""],
    ) -> Float[Tensor, " k"]:
        """Compute the variances of the outputs at some positions and classes of an example."""
        if self.U_G is not None:
            eigen_variances = inputs.square() @ self.variances(delta).mT
            return (self.U_G[classes].square() * eigen_variances[positions]).sum(-1)
        step = max(1, _SLICE // inputs.shape[-1])
        variances = []
        for position, c in zip(positions.split(step), classes.split(step), strict=True):
            variances.append((inputs[position].square() * self.variances(delta, c)).sum(-1))
        return torch.cat(variances)

    def _covariance_of_example(
        self,
        inputs: Float[Tensor, "p columns"],
        positions: Int[Tensor, " k"],
        classes: Int[Tensor, " k"],
        delta: Float[Tensor, ""],
    ) -> Float[Tensor, "k k"]:
        """Compute the covariance of the outputs at some positions and classes of an example."""
        if self.U_G is None:
            rows = inputs[positions]
            products = (rows * self.variances(delta, classes)) @ rows.mT
            return products * (classes[:, None] == classes)
        variances = self.variances(delta)
        rows = self.U_G[classes]
        total = inputs.new_zeros(len(classes), len(classes))
        indices = torch.arange(len(inputs), device=inputs.device)
        for t, s in torch.cartesian_prod(indices, indices):
            # The covariances of the outputs at positions t and s along the columns of U_G.
            eigen_covariances = (inputs[t] * inputs[s]) @ variances.mT
            is_pair = (positions == t)[:, None] & (positions == s)
            total += ((rows * eigen_covariances) @ rows.mT) * is_pair
        return total


def _covariance_along_axes(
    eigen_variances: Float[Tensor, "*batch classes"],
    outputs: Int[Tensor, "batch k"] | None,
    diagonal: bool,
) -> Float[Tensor, "..."]:
    """Compute `LinearHead.covariance` if the output directions are the coordinate axes.

    Different outputs are then uncorrelated.
    """
    if outputs is None:
        return eigen_variances if diagonal else torch.diag_embed(eigen_variances)
    indices = outputs.expand(*eigen_variances.shape[:-1], -1)
    variances = eigen_variances.gather(-1, indices)
    if diagonal:
        return variances
    # An output may be requested twice, so off-diagonal entries need not be zero.
    return variances.unsqueeze(-1) * (outputs.unsqueeze(-1) == outputs.unsqueeze(-2))
