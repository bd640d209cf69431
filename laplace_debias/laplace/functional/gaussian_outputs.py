"""Two forms of the Gaussian distribution of a linearised network's outputs.

`DenseOutputs` contain a covariance matrix for each example. `FactoredOutputs`, which serve for a
last layer with many outputs, contain factors that are common to all examples.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias import metrics
from laplace_debias.laplace.links import SecondMoments
from laplace_debias.laplace.state.posterior import standard_normal
from laplace_debias.metrics.uncertainties import difference_variances
from laplace_debias.operators.eigh import eigh


@dataclass(frozen=True)
class GaussianOutputs(ABC):
    """The Gaussian distribution of the outputs of each example.

    Attributes:
        mean: The means, `[B, ..., C]`.
    """

    mean: Float[Tensor, "batch *positions classes"]

    @abstractmethod
    def variances(self) -> Float[Tensor, "batch *positions classes"]:
        """Compute the variance of each output."""

    @abstractmethod
    def covariance(self) -> Float[Tensor, "batch *positions classes classes"]:
        """Compute the covariance of the outputs at each position."""

    @abstractmethod
    def mean_variance(self) -> Float[Tensor, "batch *positions"]:
        """Compute in float64 the mean variance of the outputs without their common part."""

    @abstractmethod
    def difference_variances(
        self, first: Int[Tensor, "batch *positions"], second: Int[Tensor, "batch *positions"]
    ) -> Float[Tensor, "batch *positions"]:
        """Compute in float64 the variance of the difference of two outputs at each position."""

    @abstractmethod
    def draws(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "samples batch *positions classes"]:
        """Draw samples of the outputs."""

    @abstractmethod
    def divided_by(self, temperature: float) -> "GaussianOutputs":
        """Return the distribution of the outputs divided by a temperature."""

    def second_moments(self, kind: SecondMoments) -> Float[Tensor, "..."]:
        """Compute the variances, or the covariance at each position."""
        return self.variances() if kind == "variances" else self.covariance()


@dataclass(frozen=True)
class DenseOutputs(GaussianOutputs):
    """Outputs with a covariance matrix for each example.

    Attributes:
        joint_covariance: The covariance of all outputs of an example, at all positions.
    """

    joint_covariance: Float[Tensor, "batch all all"]

    def variances(self) -> Float[Tensor, "batch *positions classes"]:
        """Compute the variance of each output."""
        return self.joint_covariance.diagonal(dim1=-2, dim2=-1).view_as(self.mean)

    def covariance(self) -> Float[Tensor, "batch *positions classes classes"]:
        """Compute the covariance of the outputs at each position."""
        if self.mean.ndim == 2:
            return self.joint_covariance
        return within_positions(self.joint_covariance, self.mean.shape)

    def mean_variance(self) -> Float[Tensor, "batch *positions"]:
        """Compute in float64 the mean variance of the outputs without their common part."""
        return metrics.logit_variance(self.covariance().double())

    def difference_variances(
        self, first: Int[Tensor, "batch *positions"], second: Int[Tensor, "batch *positions"]
    ) -> Float[Tensor, "batch *positions"]:
        """Compute in float64 the variance of the difference of two outputs at each position."""
        return difference_variances(self.covariance(), first, second)

    def draws(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "samples batch *positions classes"]:
        """Draw samples of the outputs, whose covariances may be singular."""
        eigenvalues, eigenvectors = eigh(self.joint_covariance, "the functional covariance")
        root = eigenvectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
        flat = self.mean.flatten(1)
        noise = standard_normal((num_samples, *flat.shape), self.mean, generator)
        draws = flat + torch.einsum("bij,sbj->sbi", root, noise)
        return draws.unflatten(2, self.mean.shape[1:])

    def divided_by(self, temperature: float) -> "DenseOutputs":
        """Return the distribution of the outputs divided by a temperature."""
        if temperature == 1:
            return self
        return DenseOutputs(self.mean / temperature, self.joint_covariance / temperature**2)


def within_positions(
    covariances: Float[Tensor, "*grid batch all all"], shape: torch.Size
) -> Float[Tensor, "..."]:
    """Extract the covariance at each position, `[..., B, T, C, C]`, from the joint covariance."""
    num_outputs = shape[-1]
    between_positions = covariances.unflatten(-1, (-1, num_outputs)).unflatten(
        -3, (-1, num_outputs)
    )
    blocks = between_positions.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return blocks.unflatten(-3, shape[1:-1])


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
        """Compute in float64 the mean variance of the outputs without their common part."""
        variances = self.variances.double()
        if self.directions is None:
            return variances.mean(-1) * (1 - 1 / variances.shape[-1])
        U = self.directions.double()
        return variances @ (U - U.mean(0)).square().mean(0)

    def difference_variances(
        self, first: Int[Tensor, " batch"], second: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Compute in float64 the variance of the difference of two outputs of each example."""
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
class FactoredOutputs(GaussianOutputs):
    """Outputs `[B, C]` of a last layer, stored without a C × C matrix per example.

    Attributes:
        factors: The summands of the covariance.
    """

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
        """Compute in float64 the mean variance of the outputs without their common part."""
        return torch.stack([factor.mean_variance() for factor in self.factors]).sum(0)

    def difference_variances(
        self, first: Int[Tensor, " batch"], second: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Compute in float64 the variance of the difference of two outputs of each example."""
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

    def divided_by(self, temperature: float) -> "FactoredOutputs":
        """Return the distribution of the outputs divided by a temperature."""
        if temperature == 1:
            return self
        factors = [
            replace(factor, variances=factor.variances / temperature**2) for factor in self.factors
        ]
        return FactoredOutputs(self.mean / temperature, factors)
