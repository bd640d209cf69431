"""Covariances of a last layer's outputs in factors, without a matrix of C × C per example."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.laplace.state.posterior import standard_normal


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
