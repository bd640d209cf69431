"""The Gaussian posterior over the Bayesian parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.fits.context import FactorScales
from laplace_debias.curvature.structures.base import CurvatureBlock
from laplace_debias.laplace.state.prior import Prior, check_prior_precision
from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    ParameterLayout,
    Permuted,
    Spectrum,
)
from laplace_debias.operators.structures.directions import is_thin
from laplace_debias.system.checks import check_generator, check_no_autocast, whole


@dataclass(frozen=True, eq=False)
class GaussianPosterior:
    r"""$N(\theta^*, P^{-1})$ with precision $P = N \cdot C + \mathrm{diag}(\delta)$ (Eq. 4, 17).

    With a temperature T of the likelihood, $p(D \mid \theta)^{1/T}$, the precision is
    $P = \tfrac NT C + \mathrm{diag}(\delta)$.

    If the prior contains the information $w C_0$ of earlier data, C is the weighted mean of the
    curvatures of the new and the earlier data, $(\tfrac NT + w) C = \tfrac NT C_1 + w C_0$.

    Args:
        mean: θ*, the trained Bayesian parameters, flattened in the model's order, `[D]`.
        curvature: C, the curvature of the mean loss per example, `[D, D]`, block by block, in the
            order of the blocks' entries; see `order`.
        num_data: N, the number of training examples.
        prior: The prior N(μ, P₀⁻¹).
        order: The index of each block entry among the flattened parameters, `[D]`; None if both
            have the same order.
        temperature: T.
        curvature_bounds: The largest curvature of each block, by name; None to compute it from the
            blocks.
        layout: The names and shapes of the parameters, so that `covariance` and the other matrices
            can be indexed by name; None if they are not known.
        factor_scales: The scales of K-FAC's factors by block name, from which an update recovers
            the factors; empty for other curvatures, or if the scales are not known.
    """

    mean: Float[Tensor, " parameters"]
    curvature: BlockDiagonal[CurvatureBlock]
    num_data: int
    prior: Prior
    order: Int[Tensor, " parameters"] | None = None
    temperature: float = 1.0
    curvature_bounds: Mapping[str, float] | None = field(default=None, repr=False)
    layout: ParameterLayout | None = field(default=None, repr=False)
    factor_scales: Mapping[str, FactorScales] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        whole(self.num_data, "num_data")
        if not torch.linalg.vector_norm(self.displacement, dtype=torch.float64).square().isfinite():
            raise ValueError(
                "The posterior's mean contains NaN or Inf, or its square overflows. "
                "Either the model has diverged, its checkpoint is damaged, or the "
                "prior's mean is too far from the posterior's mean. Check the model's "
                "parameters and `prior_mean`."
            )
        self.check_prior_precision(self.prior.precision)

    @property
    def prior_precision(self) -> Float[Tensor, ""] | Float[Tensor, " blocks"]:
        """The prior precision δ, one number or one per block."""
        return self.prior.precision

    @property
    def prior_mean(self) -> Float[Tensor, ""] | Float[Tensor, " parameters"] | None:
        """The prior mean μ, one number or one per parameter; None means zero."""
        return self.prior.mean

    @cached_property
    def curvature_weight(self) -> float:
        """N/T, the factor of the curvature; N/T + w if the prior contains information."""
        weight = self.num_data if self.temperature == 1 else self.num_data / self.temperature
        information = self.prior.information
        return weight if information is None else weight + information.weight

    @property
    def num_copies(self) -> int:
        """The number of independent Gaussians over all parameters: one, or one per output."""
        return self.curvature.shape[0] // len(self.mean)

    def _check_is_single(self) -> None:
        """Require that there is a single Gaussian over the parameters."""
        if self.num_copies > 1:
            raise ValueError(
                "This posterior was fitted with `independent_outputs=True`: each of the "
                f"{self.num_copies} outputs has its own distribution of the parameters, "
                "and there is no single distribution for all outputs. To predict, use "
                "`predict` with its default method, or `functional`. For samples of the "
                "parameters, their covariance or their density, fit again with "
                "`independent_outputs=False`."
            )

    @cached_property
    def displacement(self) -> Float[Tensor, " parameters"]:
        """The displacement θ* − μ of the posterior mean from the prior mean, `[D]`."""
        if self.prior.mean is None:
            return self.mean
        return self.mean.double() - self.prior.mean

    @cached_property
    def largest_curvatures(self) -> Mapping[str, float]:
        """The largest curvature of each block, keyed by the name of the block."""
        if self.curvature_bounds is not None:
            return self.curvature_bounds
        return largest_curvatures(self.curvature)

    def changed(self, **fields: Any) -> "GaussianPosterior":
        """Return the posterior with some fields replaced."""
        if "curvature" not in fields:
            fields["curvature_bounds"] = self.largest_curvatures
        return replace(self, **{"curvature_bounds": None, **fields})

    def check_prior_precision(
        self, prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    ) -> None:
        """Require a prior precision that can be added to this curvature without loss of precision.

        Magnitudes below the smallest normal number of the dtype lose digits, and this error is
        multiplied by the weight of the data. It is negligible compared with δ if the ratio of δ to
        the weight is also a normal number.
        """
        bounds = self.largest_curvatures
        deltas = check_prior_precision(prior_precision, len(bounds))
        if len(deltas) == 1:
            deltas = deltas * len(bounds)
        weight = self.curvature_weight
        dtype = self.curvature.dtype
        tiny = torch.finfo(dtype).tiny
        for (name, curvature), delta in zip(bounds.items(), deltas, strict=True):
            highest = weight * curvature + delta
            if delta < weight * tiny:
                reason = f"The prior precision of {name} is {delta:.3g}, which is too small"
            elif highest > 1 / tiny:
                reason = (
                    f"The posterior precision of {name} is up to {highest:.3g}, which is too large"
                )
            else:
                continue
            raise ValueError(
                f"{reason} for {dtype}, because the curvature has values up to "
                f"{curvature:.3g}, which are multiplied by the weight of the data, {weight}. "
                "The prior precision and the posterior precision must lie between "
                f"{weight * tiny:.3g} and {1 / tiny:.3g}. Rescale the inputs, the targets and "
                "`sigma`, use a different prior precision, or convert the model to a "
                "wider dtype."
            )

    @property
    def precision(self) -> LinearOperator:
        """The precision matrix P, `[D, D]`, in the order of the parameters."""
        return self._spectral(lambda precision: precision)

    @property
    def covariance(self) -> LinearOperator:
        """The covariance matrix P⁻¹, `[D, D]`, in the order of the parameters."""
        return self._spectral(torch.reciprocal)

    @property
    def scale(self) -> LinearOperator:
        """The symmetric root P^{-1/2}, `[D, D]`, in the order of the parameters."""
        return self._spectral(torch.rsqrt)

    @property
    def covariances_by_output(self) -> list[LinearOperator]:
        """The covariance matrices of independent outputs, each `[D, D]`, in the model's order."""
        blocks = self._blocks(torch.reciprocal).blocks.values()
        return [self._in_model_order(block) for block in blocks]

    def _spectral(self, function: Spectrum) -> LinearOperator:
        self._check_is_single()
        return self._in_model_order(self._blocks(function))

    def _in_model_order(self, operator: LinearOperator) -> LinearOperator:
        """Permute an operator from the order of the blocks to the order of the model."""
        block_names = tuple(operator.blocks) if isinstance(operator, BlockDiagonal) else ()
        # If each block contains a single parameter, the operator can already be indexed by
        # parameter name.
        has_names = self.layout is None or self.layout.names == block_names
        if self.order is None and has_names:
            return operator
        return Permuted(operator, self.order, self.layout)

    def _blocks(self, function: Spectrum) -> BlockDiagonal[CurvatureBlock]:
        """Compute a function of P, block by block."""
        deltas = dict(zip(self.curvature.blocks, self.deltas(), strict=True))
        return self.curvature.map(
            lambda name, block: block.apply(
                lambda L: function(self.curvature_weight * L + deltas[name])
            )
        )

    def deltas(self, prior_precision: Tensor | None = None) -> Float[Tensor, " blocks"]:
        """Return δ for every block; by default, the prior precision of this posterior."""
        if prior_precision is None:
            deltas = self.prior.precision.to(self.mean)
        else:
            deltas = prior_precision.double()
        return deltas.expand(len(self.curvature.blocks))

    def by_parameter(self, values: Float[Tensor, " blocks"]) -> Float[Tensor, " parameters"]:
        """Repeat each block's value for all of its parameters, in the model's order."""
        sizes = torch.tensor(self.curvature.sizes, device=values.device)
        entries = values.repeat_interleave(sizes)
        if self.order is None:
            return entries
        return torch.empty_like(entries).index_copy_(0, self.order, entries)

    def sample(
        self, num_samples: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        r"""Draw samples of the parameters, `[S, D]`.

        For each block, a sample is $W^* + U_G[(N\Lambda + \delta)^{-1/2} \odot Z]U_A^\top$ with
        standard normal Z (Appendix A.3.2).
        """
        check_generator(generator)
        check_no_autocast(self.mean.device, self.mean.dtype)
        self._check_is_single()
        shape = whole(num_samples, "the number of samples"), len(self.mean)
        noise_by_block = standard_normal(shape, self.mean, generator).split(
            self.curvature.sizes, dim=1
        )
        scales = self._blocks(torch.rsqrt).blocks.values()
        draws = []
        for scale, noise in zip(scales, noise_by_block, strict=True):
            # A thin block has no complete eigenbasis, so its symmetric root is used.
            if not isinstance(scale, EigenKronecker) or is_thin(scale.U_G) or is_thin(scale.U_A):
                draws.append((scale @ noise.T).T)
                continue
            # The noise has the same distribution in every orthonormal basis, so it is drawn in the
            # eigenbasis.
            Z = noise.unflatten(1, scale.magnitudes.shape)
            draws.append(scale.from_eigenbasis(scale.magnitudes * Z).flatten(1))
        steps = torch.cat(draws, dim=1)
        if self.order is not None:
            steps = torch.empty_like(steps).index_copy_(1, self.order, steps)
        return self.mean + steps

    def log_prob(self, parameters: Float[Tensor, "*n parameters"]) -> Float[Tensor, "*n"]:
        """Compute the normalised log-density of parameters, in nats.

        Args:
            parameters: One or several vectors of all Bayesian parameters, `[..., D]`, in the
                model's order, with the dtype and the device of the mean.

        Raises:
            ValueError: If the length of the vectors is not D.
        """
        size = len(self.mean)
        if parameters.ndim == 0 or parameters.shape[-1] != size:
            raise ValueError(
                f"`parameters` has shape {tuple(parameters.shape)}. Pass a tensor of shape "
                f"[..., {size}], whose last dimension contains all Bayesian parameters."
            )
        steps = (parameters - self.mean).reshape(-1, size)
        quadratic = (steps * (self.precision @ steps.T).T).sum(1).double()
        constant = self.log_det_precision() - size * math.log(2 * math.pi)
        log_probs = (constant - quadratic) / 2
        return log_probs.reshape(parameters.shape[:-1]).to(self.mean.dtype)

    def log_det_precision(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """Compute log det P; by default, for the prior precision of this posterior."""
        deltas = self.deltas(prior_precision).double()
        return _log_det(self.curvature, self.curvature_weight, deltas)

    def log_prior(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """Compute the log-density of the prior N(μ, P₀⁻¹) at θ*.

        P₀ is diag(δ), plus the information of earlier data if there is any.
        """
        deltas = self.deltas(prior_precision).double()
        sizes = torch.tensor(self.curvature.sizes, device=self.mean.device)
        quadratic = (deltas * self.squared_distances()).sum()
        information = self.prior.information
        if information is None:
            log_det = (sizes * deltas.log()).sum()
        else:
            log_det = _log_det(information.curvature, information.weight, deltas)
            steps = self._in_block_order(self.displacement).double()
            products = information.curvature.to(torch.float64) @ steps
            quadratic = quadratic + information.weight * steps @ products
        constant = sum(self.curvature.sizes) * math.log(2 * math.pi)
        return 0.5 * (log_det - quadratic - constant)

    def log_marginal_likelihood(
        self,
        nll: float | Float[Tensor, ""],
        prior_precision: Tensor,
        log_det_precision: Float[Tensor, ""],
    ) -> Float[Tensor, ""]:
        r"""Compute the Laplace approximation of log p(D) in float64.

        $$-\tfrac1T\ell + \log p(\theta^*) + \tfrac D2\log 2\pi - \tfrac12\log\det P$$

        Args:
            nll: The negative log-likelihood ℓ of the N examples at θ*.
            prior_precision: δ, one number or one per block.
            log_det_precision: log det P for this δ.
        """
        normaliser = 0.5 * sum(self.curvature.sizes) * math.log(2 * math.pi)
        log_joint = -nll / self.temperature + self.log_prior(prior_precision)
        return log_joint + normaliser - 0.5 * log_det_precision

    def squared_distances(self) -> Float[Tensor, " blocks"]:
        """Compute ‖θ* − μ‖² for every block in float64."""
        displacements = self._in_block_order(self.displacement).repeat(self.num_copies)
        by_block = displacements.split(self.curvature.sizes)
        return torch.stack([entries.double().square().sum() for entries in by_block])

    def _in_block_order(self, vector: Float[Tensor, " parameters"]) -> Float[Tensor, " parameters"]:
        """Reorder a vector of parameters to the order in which the blocks contain them."""
        return vector if self.order is None else vector[self.order]


def _log_det(
    curvature: BlockDiagonal[CurvatureBlock], weight: float, deltas: Float[Tensor, " blocks"]
) -> Float[Tensor, ""]:
    """Compute log det of a weighted curvature plus δ in float64, differentiable in δ."""
    terms = []
    for block, delta in zip(curvature.blocks.values(), deltas, strict=True):
        eigenvalues = block.distinct_eigenvalues.double()
        counts = block.multiplicities.double()
        terms.append((counts * (weight * eigenvalues + delta).log()).sum())
    return torch.stack(terms).sum()


def largest_curvatures(curvature: BlockDiagonal) -> dict[str, float]:
    """Return the largest curvature of each block, and require that every entry is finite."""
    return {name: _largest_curvature(name, block) for name, block in curvature.blocks.items()}


def _largest_curvature(name: str, block: CurvatureBlock) -> float:
    """Return the largest eigenvalue of a block; all must be finite and not negative."""
    directions = (block.U_G, block.U_A) if isinstance(block, EigenKronecker) else (block.U,)
    for U in directions:
        if isinstance(U, Tensor):
            _finite_range(U, f"eigenvectors of {name}")
    lowest, highest = _finite_range(block.distinct_eigenvalues, f"curvature of {name}")
    if lowest < 0:
        raise ValueError(
            f"The curvature of {name} is negative along some directions, down to "
            f"{lowest:.3g}. Use a positive semi-definite matrix, such as the GGN or a "
            "Fisher."
        )
    return highest


def _finite_range(values: Tensor, subject: str) -> tuple[float, float]:
    """Return the smallest and the largest entry of a tensor, which must be finite."""
    if not values.numel():
        return 0.0, 0.0
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError(
            f"Entries of the {subject} are NaN or Inf in {values.dtype}. Check the "
            "inputs for Inf. If the targets or `sigma` are far from 1 in size, rescale them. "
            "Otherwise convert the model to a wider dtype."
        )
    return lowest, highest


def standard_normal(
    shape: Sequence[int], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw standard normal numbers with the dtype and device of a tensor.

    The numbers are drawn on the generator's device, so a CPU generator gives the same numbers for
    every device.
    """
    device = (like if generator is None else generator).device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like)
