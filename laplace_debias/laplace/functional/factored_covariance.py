"""Covariances of a last layer's outputs in factors, without a matrix of C × C per example."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.laplace.functional.request import check_covariance
from laplace_debias.laplace.links import pairs_of_outputs
from laplace_debias.laplace.posterior import standard_normal


@dataclass(frozen=True)
class CovarianceFactor:
    r"""A summand $U\,\mathrm{diag}(v)\,U^\top$ of the covariance of each example.

    Attributes:
        directions: U `[C, rows]`, the same for all examples; None for the coordinate axes.
        variances: v, the variances along the directions, `[B, rows]`.
    """

    directions: Float[Tensor, "classes rows"] | None
    variances: Float[Tensor, "batch rows"]

    def output_variances(self) -> Float[Tensor, "batch classes"]:
        """Compute the variance of each output."""
        if self.directions is None:
            return self.variances
        return self.variances @ self.directions.square().mT

    def output_covariance(self) -> Float[Tensor, "batch classes classes"]:
        """Compute the covariance of the outputs."""
        if self.directions is None:
            return torch.diag_embed(self.variances)
        return (self.directions * self.variances.unsqueeze(-2)) @ self.directions.mT

    def mean_variance(self) -> Float[Tensor, " batch"]:
        """Compute the mean variance of the outputs without their common part, in float64."""
        variances = self.variances.double()
        if self.directions is None:
            return variances.mean(-1) * (1 - 1 / variances.shape[-1])
        U = self.directions.double()
        return variances @ (U - U.mean(0)).square().mean(0)

    def difference_variances(
        self, first: Int[Tensor, " batch"], second: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Compute the variance of the difference of two outputs of each example, in float64."""
        variances = self.variances.double()
        if self.directions is None:
            pairs = torch.stack([first, second], -1)
            return variances.gather(-1, pairs).sum(-1).where(first != second, 0)
        rows = self.directions[first].double() - self.directions[second].double()
        return (rows.square() * variances).sum(-1)

    def draws(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "samples batch classes"]:
        """Draw samples with this covariance and mean zero."""
        shape = (num_samples, *self.variances.shape)
        coordinates = standard_normal(shape, self.variances, generator) * self.variances.sqrt()
        return coordinates if self.directions is None else coordinates @ self.directions.mT


@dataclass(frozen=True)
class FactoredOutputs:
    """Gaussian outputs with a covariance that is a sum of factors.

    Attributes:
        mean: The means, `[B, C]`.
        factors: The summands of the covariance.
    """

    mean: Float[Tensor, "batch classes"]
    factors: Sequence[CovarianceFactor]

    def variances(self) -> Float[Tensor, "batch classes"]:
        """Compute the variance of each output."""
        return torch.stack([factor.output_variances() for factor in self.factors]).sum(0)

    def covariance(self) -> Float[Tensor, "batch classes classes"]:
        """Compute the covariance of the outputs."""
        total = self.factors[0].output_covariance()
        for factor in self.factors[1:]:
            total += factor.output_covariance()
        return total

    def mean_variance(self) -> Float[Tensor, " batch"]:
        """Compute the mean variance of the outputs without their common part, in float64."""
        return torch.stack([factor.mean_variance() for factor in self.factors]).sum(0)

    def difference_variances(
        self, first: Int[Tensor, " batch"], second: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Compute the variance of the difference of two outputs of each example, in float64."""
        by_factor = [factor.difference_variances(first, second) for factor in self.factors]
        return torch.stack(by_factor).sum(0)

    def draws(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "samples batch classes"]:
        """Draw samples of the outputs, along the directions of each factor."""
        total = self.mean.expand(num_samples, -1, -1)
        for factor in self.factors:
            total = total + factor.draws(num_samples, generator)
        return total


@dataclass(frozen=True)
class LastLayerInputs:
    """The outputs, and all that their covariance depends on if only the last layer is Bayesian.

    They suffice for any prior precision, without another pass through the network.

    Attributes:
        mean: The outputs, `[B, C]`.
        heads: The last layer's blocks.
        squares: For each block the squared inputs along its input directions, `[B, columns]`.
    """

    mean: Float[Tensor, "batch classes"]
    heads: Sequence[LinearHead]
    squares: Sequence[Float[Tensor, "batch _"]]

    @classmethod
    def concatenate(cls, batches: Sequence["LastLayerInputs"]) -> "LastLayerInputs":
        """Join the examples of several batches."""
        squares = zip(*(batch.squares for batch in batches), strict=True)
        return cls(
            mean=torch.cat([batch.mean for batch in batches]),
            heads=batches[0].heads,
            squares=[torch.cat(block_squares) for block_squares in squares],
        )

    def take(self, examples: slice) -> "LastLayerInputs":
        """Return some of the examples."""
        squares = [block_squares[examples] for block_squares in self.squares]
        return LastLayerInputs(self.mean[examples], self.heads, squares)

    def eigen_variances(
        self, prior_precisions: Float[Tensor, " blocks"]
    ) -> list[Float[Tensor, "batch _"]]:
        """Compute the variances of the outputs' coordinates along each of `distinct_directions`.

        Args:
            prior_precisions: δ of each block.

        Raises:
            ValueError: If the variances are not finite.
        """
        totals: dict[int, Tensor] = {}
        for head, squares, delta in zip(self.heads, self.squares, prior_precisions, strict=True):
            variances = squares @ head.variances(delta).mT
            key = id(head.U_G)
            totals[key] = totals[key] + variances if key in totals else variances
        for total in totals.values():
            check_covariance(total, prior_precisions)
        return list(totals.values())

    def outputs(self, eigen_variances: Sequence[Float[Tensor, "batch _"]]) -> FactoredOutputs:
        """Return the outputs with the factors of their covariance, from its `eigen_variances`."""
        factors = []
        directions = distinct_directions(self.heads)
        for U_G, variances in zip(directions, eigen_variances, strict=True):
            factors.append(CovarianceFactor(U_G, variances))
        return FactoredOutputs(self.mean, factors)


def with_shared_directions(heads: Sequence[LinearHead]) -> list[LinearHead]:
    """Let blocks with equal output directions have one tensor of them.

    If a layer is called once per example, its bias has the output directions of its weight.
    """
    shared: list[LinearHead] = []
    for head in heads:
        for earlier in shared:
            U_G = earlier.U_G
            if U_G is not None and head.U_G is not None and torch.equal(U_G, head.U_G):
                head = replace(head, U_G=U_G)
        shared.append(head)
    return shared


def distinct_directions(
    heads: Sequence[LinearHead],
) -> list[Float[Tensor, "classes rows"] | None]:
    """Return the output directions of blocks, each once; None for the coordinate axes."""
    directions = {id(head.U_G): head.U_G for head in heads}
    return list(directions.values())


def squared_differences(heads: Sequence[LinearHead]) -> Float[Tensor, "rows pairs"]:
    r"""Compute the squared differences of the outputs' coordinates along the directions of U_G.

    The variance of the difference of the outputs k and i is $\sum_r (U_{kr} - U_{ir})^2 v_r$ for
    the variances $v_r$ along the directions.

    Returns:
        A row for each of the `distinct_directions`, and a column for each of the
        `pairs_of_outputs`.
    """
    magnitudes = heads[0].magnitudes
    directions = []
    for U_G in distinct_directions(heads):
        directions.append(torch.eye(len(magnitudes)).to(magnitudes) if U_G is None else U_G)
    U = torch.cat(directions, 1).mT
    first, second = pairs_of_outputs(U.shape[1], U.device)
    return (U[:, first] - U[:, second]).square_()
