"""Predictives on held-out examples: a metric, and how far it is known from so many examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal
from torch.nn.functional import one_hot

from laplace_debias.curvature.losses.base import flat_terms
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace.evaluation import score
from laplace_debias.laplace.links import Link
from laplace_debias.metrics.checks import check_classification


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A metric at one point of a search.

    A metric is a sum over the terms that count (targets, positions, labels) over their number. The
    terms of one example belong together, so errors are taken over examples.

    Attributes:
        at: The point, what is searched over.
        value: The metric.
        sums: What each example adds to the sum, `[n]`, float64.
        counts: How many terms each has, `[n]`, float64.
        sigma_factor: What σ is multiplied by there, if it is tuned, too.
        link: What logits become probabilities by; None where there are none.
    """

    at: float
    value: float
    sums: Float[Tensor, " n"]
    counts: Float[Tensor, " n"]
    sigma_factor: float | None = None
    link: Link | None = None

    @classmethod
    def of(
        cls, at: float, value: float, terms: Tensor, examples: Int[Tensor, " n"], **known: Any
    ) -> "Evaluated":
        """The metric of terms, each of an example, in ascending order."""
        sums = terms.new_zeros(int(examples[-1]) + 1, dtype=torch.float64)
        counts = torch.zeros_like(sums).index_add_(0, examples, torch.ones_like(terms))
        return cls(at, value, sums.index_add_(0, examples, terms), counts, **known)

    @property
    def prior_precision(self) -> float:
        """δ there."""
        return self.at if self.sigma_factor is None else self.at / self.sigma_factor**2

    @property
    def standard_error(self) -> float:
        """The standard error of the metric over examples; NaN for one."""
        return self._error(self.sums, self.value)

    def minus(self, other: "Evaluated") -> tuple[float, float]:
        """The difference to the metric at another point, and its paired standard error."""
        difference = self.value - other.value
        return difference, self._error(self.sums - other.sums, difference)

    def _error(self, sums: Tensor, value: float) -> float:
        """The standard error of a ratio of means, Σ sums / Σ counts."""
        n = int((self.counts > 0).sum())
        if n < 2:
            return math.nan
        residuals = sums - value * self.counts
        total = float(self.counts.sum())
        return math.sqrt(n / (n - 1) * float(residuals.square().sum())) / total


class MetricOverTerms:
    """A metric of predictives.

    Args:
        metric: `"nll"` or `"brier"`.
        likelihood: What targets must fit.
    """

    def __init__(self, metric: str, likelihood: Likelihood) -> None:
        self._metric = metric
        self._likelihood = likelihood

    def of_batch(self, predicted: Distribution, y: Tensor) -> Float[Tensor, "n links"]:
        """The numbers that must be kept of a batch at one point, a column for each link.

        Args:
            predicted: Batch shape `[links, B, ...]`.
            y: The targets, as many times.
        """
        scored = score(self._likelihood, predicted, y)
        num_links = predicted.batch_shape[0]
        if self._metric == "nll":
            # No class probabilities: for a thousand classes a thousandth of the memory.
            return -scored.log_probs.double().view(num_links, -1).T
        if not len(scored.log_probs):  # A batch may hold ignored targets alone.
            return scored.log_probs.new_zeros(0, num_links, dtype=torch.float64)
        probs, labels = check_classification(*scored.classified)
        squares = (probs - one_hot(labels, probs.shape[1])).double().square().sum(1)
        return squares.view(num_links, -1).T

    def of_all(
        self, at: float, columns: Tensor, examples: Int[Tensor, " n"], links: Sequence[Link | None]
    ) -> list[Evaluated]:
        """The metric at one point, by each link.

        Args:
            at: The point: δ.
            columns: What was kept of the batches.
            examples: The example of each target that counts, from 0 on.
            links: The columns' links.
        """
        examples = examples.repeat_interleave(len(columns) // len(examples))
        return [
            Evaluated.of(at, float(terms.mean()), terms, examples, link=link)
            for link, terms in zip(links, columns.unbind(1), strict=True)
        ]


class NoiseProfile:
    r"""The NLL of a regression at the best σ for each γ, in closed form.

    With C ∝ σ⁻² the posterior's precision at σ = k σ₀ is $k^{-2}(N C + \gamma)$, $\gamma = \delta
    k^2$. So the predictive's covariance is k² times that of the fit at δ = γ, and with the
    residuals' squares $q_n = r_n^\top S_n^{-1} r_n$ under the latter the NLL of M numbers is least
    at $k^2 = \sum_n q_n / M$.

    Args:
        likelihood: The fit's, `Gaussian`.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood

    def of_batch(self, predicted: Distribution, y: Tensor) -> Float[Tensor, "n 1 3"]:
        """Squares of the residuals in units of the predictive, its log-determinant, its size."""
        scored = score(self._likelihood, predicted, y)
        assert isinstance(predicted, MultivariateNormal)
        root = predicted.scale_tril.flatten(0, -3).double()
        residuals = (scored.labels.double() - scored.values.double()).unsqueeze(-1)
        rounding = 8 * torch.finfo(scored.values.dtype).eps * scored.labels.double().abs()
        residuals = residuals.masked_fill(residuals.abs() <= rounding.unsqueeze(-1), 0)
        # Not from the log-density: beside its constant small residuals are lost in float32.
        squares = torch.linalg.solve_triangular(root, residuals, upper=False).square().sum((-2, -1))
        log_dets = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        outputs = torch.full_like(squares, float(root.shape[-1]))
        return torch.stack([squares, log_dets, outputs], -1).unsqueeze(1)

    def of_all(
        self, at: float, columns: Tensor, examples: Int[Tensor, " n"], links: Sequence[Link | None]
    ) -> list[Evaluated]:
        """The NLL at one γ and the best σ; as `MetricOverTerms.of_all`.

        Raises:
            ValueError: If the residuals are zero.
        """
        squares, log_dets, outputs = columns[:, 0].unbind(-1)
        factor = math.sqrt(float(squares.sum() / outputs.sum()))
        if factor == 0:
            raise ValueError(
                "The residuals of the validation data are zero: there is no noise to estimate. "
                "Check that the targets are not the outputs, or pass sigma=False."
            )
        terms = 0.5 * (squares / factor**2 + log_dets + outputs * math.log(2 * math.pi))
        terms = terms + outputs * math.log(factor)
        return [Evaluated.of(at, float(terms.mean()), terms, examples, sigma_factor=factor)]


def examples_of(likelihood: Likelihood, predicted: Distribution, y: Tensor) -> Int[Tensor, " n"]:
    """The example of each target that counts, as `score` has them.

    Args:
        likelihood: What says which targets count.
        predicted: Batch shape `[links, B, ...]`.
        y: The targets, `[B, ...]`.

    Raises:
        ValueError: If the targets do not fit.
        TypeError: If the targets do not fit.
    """
    shape = predicted.batch_shape
    values = predicted.probs if hasattr(predicted, "probs") else predicted.mean
    outputs, labels = flat_terms(values[0].reshape(*shape[1:], -1), y)
    likelihood.check_predicted(outputs, labels)
    examples = torch.arange(len(labels), device=labels.device) // math.prod(shape[2:])
    counted = likelihood.counted(labels)
    return examples if counted is None else examples[counted]
