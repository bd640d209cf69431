"""The frozen state of a fit: what predictions, grids and files read."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.fingerprint import Watch
from laplace_debias.curvature.network.inputs import Inputs, move
from laplace_debias.curvature.network.shadow import unwrapped
from laplace_debias.laplace.posterior import GaussianPosterior, check_prior_precision
from laplace_debias.laplace.subject import Subject
from laplace_debias.operators import BlockDiagonal
from laplace_debias.system.checks import real


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
    """

    num_examples: int
    num_read: int
    seconds: float
    ended_by: str
    rounds: tuple[tuple[int, float], ...]
    curve: dict[float, float]
    of_blocks: dict[str, float]

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

    def __post_init__(self) -> None:
        if not math.isfinite(self.nll):
            raise ValueError(
                f"The loss, summed over {self.posterior.num_data} examples, is {self.nll}: targets "
                "are too far from the outputs for the likelihood (regression: in units of sigma). "
                "Check both, or convert the model to a wider dtype."
            )

    def under(self, subject: Subject) -> "Fitted":
        """The same fit under another prior, at a temperature and with a link."""
        posterior = self.posterior.changed(
            prior_precision=subject.prior_precision,
            prior_mean=subject.prior_mean,
            temperature=subject.temperature,
        )
        return replace(self, subject=subject, posterior=posterior)

    def moved(self, x: Any) -> Inputs:
        """Inputs, or a batch with names, on the model's device; raises as `move`, `BatchReader`."""
        x = self.subject.read_batch.inputs(x)
        return move(x, self.posterior.mean.device, self.subject.dtypes)

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


def posterior_of(subject: Subject, curvature: BlockDiagonal, num_data: int) -> GaussianPosterior:
    """The Gaussian around the model's parameters, under its prior."""
    mean, order = subject.known.flat(unwrapped(subject.model)), subject.known.order
    order = None if order is None else order.to(mean.device)
    return GaussianPosterior(
        mean,
        curvature,
        num_data,
        subject.prior_precision,
        order,
        subject.prior_mean,
        subject.temperature,
    )
