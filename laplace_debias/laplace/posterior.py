"""The Gaussian posterior over parameters, and the fit that it belongs to."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.network.shadow import Watch, unwrapped
from laplace_debias.laplace.subject import Subject, check_prior_precision
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

# Of a dense curvature it is low-rank, or has the eigenvectors of the whole matrix.
CurvatureBlock = EigenKronecker | LowRankPlusDiagonal


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
    curvature: BlockDiagonal[CurvatureBlock]
    num_data: int
    prior_precision: Float[Tensor, ""] | Float[Tensor, " blocks"]
    order: Int[Tensor, " parameters"] | None = None
    prior_mean: Float[Tensor, ""] | Float[Tensor, " parameters"] | None = None
    temperature: float = 1.0
    # N/T, which the curvature is multiplied by; and θ* − μ, from the prior's mean, `[D]`.
    data_weight: float = field(init=False, repr=False)
    from_prior_mean: Float[Tensor, " parameters"] = field(init=False, repr=False)
    _largest: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_data", whole(self.num_data, "num_data"))
        if not hasattr(self, "_largest"):
            object.__setattr__(self, "_largest", largest_curvatures(self.curvature))
        weight = self.num_data if self.temperature == 1 else self.num_data / self.temperature
        object.__setattr__(self, "data_weight", weight)
        moved = self.mean if self.prior_mean is None else self.mean.double() - self.prior_mean
        object.__setattr__(self, "from_prior_mean", moved)
        if not torch.linalg.vector_norm(moved, dtype=torch.float64).square().isfinite():
            raise ValueError(
                "The posterior's mean holds NaN or Inf, or its square overflows: the model has "
                "diverged, its checkpoint is damaged, or the prior's mean is too far from it."
            )
        self.check_prior_precision(self.prior_precision)

    def changed(self, **fields: Any) -> "GaussianPosterior":
        """The same with other fields, whose blocks are not read again.

        A curvature may be among them if its magnitudes are no larger.
        """
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        other.__post_init__()
        return other

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
        blocks = self._blocks(function)
        return blocks if self.order is None else Permuted(blocks, self.order)

    def _blocks(self, function: Spectrum) -> BlockDiagonal[CurvatureBlock]:
        """A function of P, block by block."""
        deltas = dict(zip(self.curvature.blocks, self.deltas(), strict=True))
        return self.curvature.map(
            lambda name, block: block.apply(lambda L: function(self.data_weight * L + deltas[name]))
        )

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
        shape = whole(num_samples, "the number of samples"), len(self.mean)
        noise = standard_normal(shape, self.mean, generator)
        parts = noise.split(self.curvature.sizes, dim=1)
        draws = []
        for block, part in zip(self._blocks(torch.rsqrt).blocks.values(), parts, strict=True):
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
            magnitudes = block.magnitudes.double()
            counts = block.multiplicities.double().expand_as(magnitudes)
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


def standard_normal(
    shape: Sequence[int], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Standard normal numbers, of a tensor's dtype and on its device.

    They are drawn where the generator is, so that one on the CPU gives the same on every device.
    """
    device = (like if generator is None else generator).device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like)


@dataclass(frozen=True)
class FitReport:
    """How far a fit of `mode="auto"` is from the one of all the data.

    An error is that of standard deviations of outputs, relative, as the root mean square over
    inputs that had no part in the fit: what they differ by from fold to fold, and by magnitudes in
    fold and out of fold (see the page on the method, also for how often the true one is smaller).

    Attributes:
        num_examples: How many examples were drawn, and went backward.
        num_read: How many were read, and went forward.
        seconds: How long it took.
        ended_by: `"tolerance"`, `"seconds"`, `"examples"`, `"interrupt"`; `"the end of the data"`,
            within a budget or of an iterator; or `"data"`: all of it was fitted.
        rounds: Examples and error after each round.
        curve: The errors if the fit's prior precision is multiplied by 1, 10, … 10⁴.
        of_blocks: The part of the error that each block brings, at the fit's prior precision.
        left: What `Auto(after=)` goes on with, of the size of four fits' factors; None where the
            tolerance was reached or all data was fitted.
    """

    num_examples: int
    num_read: int
    seconds: float
    ended_by: str
    rounds: tuple[tuple[int, float], ...]
    curve: dict[float, float]
    of_blocks: dict[str, float]
    left: Any = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> float:
        """The largest error of the curve: that of whatever prior precision is tuned."""
        return max(self.curve.values())

    @property
    def error_of_twice(self) -> float:
        """The error to expect of twice as many examples: it falls with the root of their number."""
        return self.error / math.sqrt(2)

    def __str__(self) -> str:
        if self.ended_by == "data":
            return f"All {self.num_examples:,} examples were fitted."
        factors = ", ".join(f"{error:.1%} at {factor:g}" for factor, error in self.curve.items())
        return (
            f"{self.num_examples:,} examples, drawn from {self.num_read:,}, in "
            f"{self.seconds:.3g} s, ended by {self.ended_by}. "
            f"Standard deviations of the outputs are within {self.error:.1%} of those of a fit of "
            f"all the data; of twice the examples, within some {self.error_of_twice:.1%}. By "
            f"multiples of the prior precision: {factors}. The largest part is that of "
            f"{max(self.of_blocks, key=self.of_blocks.__getitem__)}."
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A posterior, and all that goes with it.

    The `nll` is summed over the N examples, in nats. For a `Gaussian` likelihood and a curvature
    that is proportional to σ⁻², `num_targets` is how many numbers the targets of the N examples
    hold.
    """

    subject: Subject
    posterior: GaussianPosterior
    nll: float
    others: dict[str, int]
    mode: str | None
    num_targets: float | None = None
    watch: Watch = field(default_factory=Watch, repr=False)
    report: FitReport | None = None

    @classmethod
    def of(
        cls,
        subject: Subject,
        curvature: BlockDiagonal,
        num_data: int,
        nll: float,
        others: dict[str, int],
        mode: str | None,
        num_targets: float | None,
    ) -> "Fitted":
        """The fit of a curvature, around the model's parameters and under the subject's prior."""
        mean, order = subject.known.flat(unwrapped(subject.model)), subject.known.order
        posterior = GaussianPosterior(
            mean,
            curvature,
            num_data,
            subject.prior_precision,
            None if order is None else order.to(mean.device),
            subject.prior_mean,
            subject.temperature,
        )
        if not math.isfinite(nll):
            raise ValueError(
                f"The loss, summed over {num_data} examples, is {nll}: targets are too far from "
                "the outputs for the likelihood (regression: in units of sigma). Check both, or "
                "convert the model to a wider dtype."
            )
        return cls(subject, posterior, nll, others, mode, num_targets)

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        """As `Laplace.log_marginal_likelihood`."""
        posterior = self.posterior
        delta = posterior.prior_precision if prior_precision is None else prior_precision
        delta = real(delta, "prior_precision", posterior.mean.device)
        check_prior_precision(delta.detach(), len(self.subject.known.block_names))
        normaliser = 0.5 * len(posterior.mean) * math.log(2 * math.pi)
        return (
            -self.nll / posterior.temperature
            + posterior.log_prior(delta)
            + normaliser
            - 0.5 * posterior.log_det_precision(delta)
        )
