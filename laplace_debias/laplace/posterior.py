"""The Gaussian posterior over parameters."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    LowRankPlusDiagonal,
    Permuted,
    Spectrum,
)
from laplace_debias.operators.structures.eigen_kronecker import is_thin
from laplace_debias.system.checks import check_generator, real, whole


@dataclass(frozen=True, eq=False)
class GaussianPosterior:
    r"""$N(\theta^*, P^{-1})$ with precision $P = N C + \mathrm{diag}(\delta)$ (Eq. 4, 17).

    With a temperature T of the likelihood, $p(D \mid \theta)^{1/T}$, the precision is
    $P = \tfrac NT C + \mathrm{diag}(\delta)$.

    Args:
        mean: θ*, the trained Bayesian parameters, flattened in the model's order, `[D]`.
        curvature: C, the curvature of the mean loss per example, `[D, D]`, block by block.
        num_data: N, the number of training examples.
        prior_precision: δ, one number or one per block, in units of one over parameter squared.
        order: Where the blocks' entries lie among the flattened parameters, `[D]`; None if they lie
            there one after the other.
        prior_mean: Mean of the prior, one number or one per parameter, float64; None for zero.
        temperature: T.
    """

    mean: Float[Tensor, " parameters"]
    curvature: BlockDiagonal
    num_data: int
    prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    order: Int[Tensor, " parameters"] | None = None
    prior_mean: Float[Tensor, ""] | Float[Tensor, " parameters"] | None = None
    temperature: float = 1.0
    data_weight: float = field(init=False, repr=False)
    _largest: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", whole(self.num_data, "num_data"))
        object.__setattr__(self, "_largest", largest_curvatures(self.curvature))
        self._check()

    def changed(self, **fields: Any) -> "GaussianPosterior":
        """The same with other fields, whose blocks are not read again.

        A curvature may be among them if its magnitudes are no larger.
        """
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        other._check()
        return other

    def _check(self) -> None:
        # N/T, which the curvature is multiplied by.
        weight = self.num_data if self.temperature == 1 else self.num_data / self.temperature
        object.__setattr__(self, "data_weight", weight)
        mean = self.from_prior_mean
        if not torch.linalg.vector_norm(mean, dtype=torch.float64).square().isfinite():
            raise ValueError(
                "The posterior's mean holds NaN or Inf, or its square overflows: the model has "
                "diverged, its checkpoint is damaged, or the prior's mean is too far from it."
            )
        self.check_prior_precision(self.prior_precision)

    def check_prior_precision(
        self, prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    ) -> None:
        """Require a prior precision that this curvature can be combined with; reads no block.

        Magnitudes below the dtype's least normal number lose digits, which N multiplies. That must
        not show beside δ: so δ/N, too, must be a normal number.
        """
        deltas = check_prior_precision(prior_precision, len(self._largest))
        deltas = deltas * len(self._largest) if len(deltas) == 1 else deltas
        num_data, dtype = self.data_weight, self.curvature.dtype
        tiny = torch.finfo(dtype).tiny
        for (name, curvature), delta in zip(self._largest.items(), deltas, strict=True):
            highest = num_data * curvature + delta
            if delta < num_data * tiny:
                wrong = f"The prior precision of {name}, {delta:.3g}, is too small"
            elif highest > 1 / tiny:
                wrong = f"The precision of {name} is up to {highest:.3g}, which is too large"
            else:
                continue
            raise ValueError(
                f"{wrong} for {dtype}, with N = {num_data} times a curvature of up to "
                f"{curvature:.3g}: expected {num_data * tiny:.3g} to {1 / tiny:.3g}. Rescale the "
                "inputs, the targets and their sigma, use another prior precision, or convert the "
                "model to a wider dtype."
            )

    @property
    def from_prior_mean(self) -> Float[Tensor, " parameters"]:
        """θ* − μ, from the prior's mean to the posterior's, `[D]`."""
        return self.mean if self.prior_mean is None else self.mean.double() - self.prior_mean

    @property
    def precision(self) -> LinearOperator:
        """P, `[D, D]`, in the order of the parameters."""
        return self._spectral(lambda precision: precision)

    @property
    def covariance(self) -> LinearOperator:
        """P⁻¹, `[D, D]`, in the order of the parameters."""
        return self._spectral(torch.reciprocal)

    @property
    def scale(self) -> LinearOperator:
        """The symmetric root P^{-1/2}, `[D, D]`, in the order of the parameters."""
        return self._spectral(torch.rsqrt)

    def _spectral(self, function: Spectrum) -> LinearOperator:
        deltas = dict(zip(self.curvature.blocks, self.deltas(), strict=True))
        blocks = self.curvature.map(
            lambda name, block: self._spectral_block(block, deltas[name], function)
        )
        return blocks if self.order is None else Permuted(blocks, self.order)

    def _spectral_block(
        self, block: LinearOperator, delta: Tensor, function: Spectrum
    ) -> LinearOperator:
        return applied(block, lambda L: function(self.data_weight * L + delta))

    def deltas(self, prior_precision: Tensor | None = None) -> Float[Tensor, " blocks"]:
        """δ of every block, the posterior's own or another one in double precision."""
        own = self.prior_precision.to(self.mean)
        deltas = own if prior_precision is None else prior_precision.double()
        return deltas.expand(len(self.curvature.blocks))

    def sample(
        self, num_samples: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples parameters"]:
        r"""Draw parameters, `[S, D]`.

        Per block $W^* + U_G[(N\Lambda + \delta)^{-1/2} \odot Z]U_A^\top$ with standard normal Z
        (Appendix A.3.2).
        """
        check_generator(generator)
        noise = torch.randn(
            whole(num_samples, "the number of samples"),
            len(self.mean),
            generator=generator,
            dtype=self.mean.dtype,
            device=self.mean.device,
        )
        parts = noise.split(self.curvature.sizes, dim=1)
        draws = []
        for curvature, delta, part in zip(
            self.curvature.blocks.values(), self.deltas(), parts, strict=True
        ):
            # One block after the other: they may lie on disk.
            block = self._spectral_block(curvature, delta, torch.rsqrt)
            # Of a thin one the symmetric root alone is known.
            if not isinstance(block, EigenKronecker) or is_thin(block.U_G) or is_thin(block.U_A):
                draws.append((block @ part.T).T)
                continue
            # Noise looks the same in every orthonormal basis: it is drawn in the eigenbasis.
            Z = part.unflatten(1, block.magnitudes.shape)
            draws.append(block.from_eigenbasis(block.magnitudes * Z).flatten(1))
        steps = torch.cat(draws, dim=1)
        if self.order is not None:
            steps = torch.empty_like(steps).index_copy_(1, self.order, steps)
        return self.mean + steps

    def log_det_precision(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """The log-determinant of P, float64, differentiable in δ; None for the posterior's own."""
        deltas, terms = self.deltas(prior_precision).double(), []
        for block, delta in zip(self.curvature.blocks.values(), deltas, strict=True):
            magnitudes, counts = counted(block)
            is_low_rank = isinstance(block, LowRankPlusDiagonal)
            without_curvature = block.shape[0] - len(magnitudes) if is_low_rank else 0
            terms.append((counts * (self.data_weight * magnitudes + delta).log()).sum())
            terms.append(without_curvature * delta.log())
        return torch.stack(terms).sum()

    def log_prior(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """The log-density of N(μ, δ⁻¹) at θ*, normalised, float64; μ is the prior's mean."""
        deltas = self.deltas(prior_precision).double()
        sizes = torch.tensor(self.curvature.sizes, device=self.mean.device)
        quadratic = (deltas * self.squared_distances()).sum()
        constant = len(self.mean) * math.log(2 * math.pi)
        return 0.5 * ((sizes * deltas.log()).sum() - quadratic - constant)

    def squared_distances(self) -> Float[Tensor, " blocks"]:
        """‖θ* − μ‖² of every block, from the prior's mean μ to the posterior's, float64."""
        mean = self.from_prior_mean
        mean = mean if self.order is None else mean[self.order]
        parts = mean.split(self.curvature.sizes)
        return torch.stack([part.double().square().sum() for part in parts])


def counted(block: LinearOperator) -> tuple[Tensor, Tensor]:
    """A curvature block's magnitudes, and how many directions each stands for, float64.

    Of a low-rank one the directions that have curvature.
    """
    assert isinstance(block, (EigenKronecker, LowRankPlusDiagonal))
    magnitudes = block.magnitudes.double()
    if isinstance(block, LowRankPlusDiagonal):
        return magnitudes, torch.ones_like(magnitudes)
    return magnitudes, block.multiplicities.double().expand_as(magnitudes)


def applied(block: LinearOperator, function: Spectrum) -> LinearOperator:
    """A function of a curvature block, by its eigenvalues."""
    if isinstance(block, EigenKronecker):
        return block.apply(function)
    assert isinstance(block, LowRankPlusDiagonal)
    rest = function(block.diagonal)
    return LowRankPlusDiagonal(block.U, function(block.magnitudes) - rest, rest)


# --------------------------------------------- finite numbers, within the range of their dtype


def check_temperature(temperature: Any) -> float:
    """T as a `float`."""
    value = real(temperature, "temperature")
    if value.ndim:
        raise TypeError(f"temperature must be one number, got {temperature!r}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(
            f"temperature must be positive and finite, got {float(value)}: 1 for the posterior "
            "itself, less for one that is more certain."
        )
    return float(value)


def largest_curvatures(curvature: BlockDiagonal) -> dict[str, float]:
    """The largest curvature of every block, whose parts must all be finite."""
    largest = {}
    for name, block in curvature.blocks.items():
        largest[name] = 0.0
        for part in ("U_G", "U_A", "U", "diagonal", "magnitudes"):
            values = getattr(block, part, None)
            if values is None or not values.numel():
                continue
            low, high = torch.stack(torch.aminmax(values)).tolist()
            is_magnitude = part in ("magnitudes", "diagonal")
            if not (math.isfinite(low) and math.isfinite(high)):
                what = "curvature" if is_magnitude else "directions"
                raise ValueError(
                    f"The {what} of {name} {'holds' if is_magnitude else 'hold'} NaN or Inf in "
                    f"{block.dtype}: look for Inf among the inputs and for targets or a sigma that "
                    "are far from 1 in size, rescale them, or convert the model to a wider dtype."
                )
            if is_magnitude and low < 0:
                raise ValueError(
                    f"The curvature of {name} has negative magnitudes, down to {low:.3g}: expected "
                    "those of a positive semi-definite matrix, such as the GGN or a Fisher."
                )
            largest[name] = max(largest[name], high) if is_magnitude else largest[name]
    return largest


def check_prior_precision(prior_precision: Tensor, num_blocks: int) -> list[float]:
    """One positive finite number, or one per block, as a list."""
    if prior_precision.shape not in ((), (num_blocks,)):
        raise ValueError(
            f"The prior precision must be one number or one for each of the {num_blocks} blocks, "
            f"got shape {tuple(prior_precision.shape)}."
        )
    values: list[float] = prior_precision.detach().double().reshape(-1).tolist()
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(
                f"The prior precision must be positive and finite, got {prior_precision.tolist()}: "
                "a flat prior is approached by a small one, such as 1e-6."
            )
    return values
