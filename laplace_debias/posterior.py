"""The Gaussian posterior over parameters."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators import BlockDiagonal, EigenKronecker, Spectrum


@dataclass(frozen=True, eq=False)
class GaussianPosterior:
    r"""$N(\theta^*, P^{-1})$ with precision $P = N C + \mathrm{diag}(\delta)$ (Eq. 4, 17).

    Args:
        mean: θ*, the trained Bayesian parameters, flattened in the model's order, `[D]`.
        curvature: C, the curvature of the mean loss per example, `[D, D]`.
        num_data: N, the number of training examples.
        prior_precision: δ, one number or one a block, in units of one over parameter squared.
    """

    mean: Float[Tensor, " parameters"]
    curvature: BlockDiagonal
    num_data: int
    prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]

    def __post_init__(self) -> None:
        check_prior_precision(self.prior_precision, len(self.curvature.blocks))

    @property
    def precision(self) -> BlockDiagonal:
        """P, `[D, D]`."""
        return self._spectral(lambda precision: precision)

    @property
    def covariance(self) -> BlockDiagonal:
        """P⁻¹, `[D, D]`."""
        return self._spectral(torch.reciprocal)

    @property
    def scale(self) -> BlockDiagonal:
        """The symmetric root P^{-1/2}, `[D, D]`."""
        return self._spectral(torch.rsqrt)

    def _spectral(self, function: Spectrum) -> BlockDiagonal:
        deltas = dict(zip(self.curvature.blocks, self._deltas(), strict=True))

        def of_block(name: str, block: EigenKronecker) -> EigenKronecker:
            return block.apply(lambda L: function(self.num_data * L + deltas[name]))

        return self.curvature.map(of_block)

    def _deltas(self) -> Float[Tensor, " blocks"]:
        return self.prior_precision.to(self.mean).expand(len(self.curvature.blocks))

    def sample(
        self, num_samples: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        r"""Draw parameters, `[S, D]`.

        Per block $W^* + U_G[(N\Lambda + \delta)^{-1/2} \odot Z]U_A^\top$ with standard normal Z
        (Appendix A.3.2).
        """
        noise = torch.randn(
            num_samples,
            len(self.mean),
            generator=generator,
            dtype=self.mean.dtype,
            device=self.mean.device,
        )
        parts = noise.split(self.curvature.sizes, dim=1)
        draws = []
        for block, part in zip(self.scale.blocks.values(), parts, strict=True):
            Z = part.unflatten(1, block.magnitudes.shape)
            draws.append(block.from_eigenbasis(block.magnitudes * Z).flatten(1))
        return self.mean + torch.cat(draws, dim=1)

    def log_det_precision(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """The log-determinant of P, float64.

        Args:
            prior_precision: δ to evaluate at, differentiable; the posterior's own if None.
        """
        deltas = self._deltas() if prior_precision is None else prior_precision
        deltas = deltas.double().expand(len(self.curvature.blocks))
        terms = [
            (self.num_data * block.magnitudes.double() + delta).log().sum()
            for block, delta in zip(self.curvature.blocks.values(), deltas, strict=True)
        ]
        return torch.stack(terms).sum()

    def log_prior(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """The log-density of N(0, δ⁻¹) at θ*, with its normaliser, float64; arguments as above."""
        deltas = self._deltas() if prior_precision is None else prior_precision
        sizes = torch.tensor(self.curvature.sizes, device=self.mean.device)
        deltas = deltas.double().expand(len(sizes))
        squares = [part.double().square().sum() for part in self.mean.split(self.curvature.sizes)]
        quadratic = (deltas * torch.stack(squares)).sum()
        constant = len(self.mean) * math.log(2 * math.pi)
        return 0.5 * ((sizes * deltas.log()).sum() - quadratic - constant)


def check_prior_precision(prior_precision: Tensor, num_blocks: int) -> None:
    """Require one positive finite number, or one a block.

    Raises:
        ValueError: Otherwise.
    """
    if prior_precision.ndim > 1 or (
        prior_precision.ndim == 1 and len(prior_precision) != num_blocks
    ):
        raise ValueError(
            f"The prior precision must be one number or one for each of the {num_blocks} blocks, "
            f"got shape {tuple(prior_precision.shape)}."
        )
    if not bool(((prior_precision > 0) & prior_precision.isfinite()).all()):
        raise ValueError(
            f"The prior precision must be positive and finite, got {prior_precision.tolist()}: a "
            "flat prior is approached by a small one, such as 1e-6."
        )
