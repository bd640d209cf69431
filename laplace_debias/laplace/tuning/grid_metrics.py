"""A metric for every setting of a search, which is a prior precision and a link."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal
from torch.nn.functional import one_hot

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace.links import Link
from laplace_debias.laplace.prediction.evaluation import (
    CheckedTargets,
    check_targets,
    classified,
    concatenate_batches,
    probabilities_or_means,
)
from laplace_debias.metrics.checks import check_classification

MIN_EXAMPLES = 100
"""With fewer examples than this, the simplest link is kept. For a calibrated network with ten
classes, a temperature that is chosen on 100 examples has a standard error of 10 to 15 %. This error
raises the NLL about as much as a fixed temperature that is wrong by 10 % would.
"""
_TIE_IN_PAIRED_ERRORS = 0.25
"""Two settings count as equally good if they differ by less than this fraction of the paired
standard error. The best temperature is thus chosen if it differs from 1 by more than about half of
its own standard error, because the NLL is quadratic near its minimum.
"""
TIE_IN_STANDARD_ERRORS = 1e-3
"""Two settings also count as equally good if they differ by less than this fraction of the best
setting's standard error, because the paired error of nearly identical settings is nearly zero.
"""

PredictGrid = Callable[
    [Inputs, Tensor, Sequence[Link], Sequence[Link]],
    Iterable[tuple[int, Distribution | ValueError]],
]
"""A function from inputs, prior precisions, links and the network's links to pairs of the index of
a prior precision and a predictive, or its error; see `predictives_by_links`.
"""

ScoringRule = Callable[[Distribution, CheckedTargets], Float[Tensor, "terms columns"]]
"""A function that scores predictives of batch shape `[links, B, ...]` on targets, with one row per
term and one column per link.
"""


class Setting(NamedTuple):
    """The indices of a prior precision and of a link.

    Attributes:
        point: The index of the prior precision.
        link: The index of the link; 0 if there are no links.
    """

    point: int
    link: int


@dataclass(frozen=True, eq=False)
class GridMetrics:
    """A metric for every link at every prior precision of a search.

    The metric is Σ sums / Σ counts over the examples. An example has one or several terms (targets,
    positions, labels), which are not independent, so standard errors are computed over examples. A
    `Setting` is an index into `sums` and `values`.

    Attributes:
        prior_precisions: P values, ascending.
        links: The L links, starting with the simplest. Empty for a likelihood without links; the
            tensors then have L = 1.
        sums: The sum of the metric over the terms of each example, `[P, L, examples]`; NaN for
            settings that were not evaluated.
        counts: Number of terms of each example, `[examples]`.
        sigma_factors: The factor by which σ is multiplied at each prior precision, `[P]`; None if σ
            is not tuned.
        network: The metric of the network without a posterior, at its own links. Its only prior
            precision is infinity, which means no covariance. None without links.
    """

    prior_precisions: Sequence[float]
    links: Sequence[Link]
    sums: Float[Tensor, "points links examples"]
    counts: Float[Tensor, " examples"]
    sigma_factors: Float[Tensor, " points"] | None = None
    network: "GridMetrics | None" = None

    @cached_property
    def values(self) -> Float[Tensor, "points links"]:
        """The metric, `[P, L]`; NaN for settings that were not evaluated."""
        return self.sums.sum(-1) / self.counts.sum()

    @property
    def points(self) -> range:
        """The indices of the prior precisions."""
        return range(len(self.prior_precisions))

    @property
    def has_errors(self) -> bool:
        """Whether there are standard errors, which require several examples."""
        return len(self.counts) > 1

    def lowest(self, points: range, links: Sequence[int]) -> Setting:
        """Return the setting with the lowest metric among these points and links.

        If several settings have the same value, return the first.
        """
        values = self.values[points.start : points.stop, links].nan_to_num(math.inf, math.inf)
        point, link = divmod(int(values.argmin()), len(links))
        return Setting(points[point], links[link])

    def standard_errors(self, sums: Float[Tensor, "*k examples"]) -> Float[Tensor, "*k"]:
        """Compute the standard errors of Σ sums / Σ counts over examples; NaN for one example."""
        n = len(self.counts)
        correction = n / (n - 1) if n > 1 else math.nan
        total = self.counts.sum()
        residuals = sums - (sums.sum(-1) / total).unsqueeze(-1) * self.counts
        return (residuals.square().sum(-1) * correction).sqrt() / total

    def is_tied(self, setting: Setting, best: Setting) -> bool:
        """Whether a setting is tied with the best one; False if its value is NaN."""
        paired_error = self.standard_errors(self.sums[setting] - self.sums[best])
        standard_error = self.standard_errors(self.sums[best])
        tolerance = max(
            _TIE_IN_PAIRED_ERRORS * float(paired_error),
            TIE_IN_STANDARD_ERRORS * float(standard_error),
        )
        return float(self.values[setting] - self.values[best]) <= tolerance

    def prefers(self, simpler: Setting, best: Setting) -> bool:
        """Whether a simpler setting is chosen: if it is tied with the best, or examples are few."""
        return len(self.counts) < MIN_EXAMPLES or self.is_tied(simpler, best)

    def choose_link(self) -> int:
        """Return the index of the simplest link whose best value is tied with the overall best.

        From simple to complex, the order is: the default formula at temperature 1, other formulas
        at temperature 1, the default formula at other temperatures, all links. With fewer than 100
        examples, the default formula at temperature 1 is chosen. With at most one link, the result
        is 0.
        """
        if len(self.links) < 2:
            return 0
        default = self.links[0]
        indices = range(len(self.links))
        same_formula = [index for index in indices if self.links[index].name == default.name]
        untempered = [index for index in indices if self.links[index].temperature == 1]
        simplest_first = [
            [index for index in same_formula if index in untempered],
            untempered,
            sorted({*same_formula, *untempered}),
            list(indices),
        ]
        best = self.lowest(self.points, indices)
        for candidates in simplest_first:
            setting = self.lowest(self.points, candidates)
            if self.prefers(setting, best):
                break
        return setting.link

    def choose_temperature(self, point: int, links: Sequence[int]) -> float:
        """Return the best temperature among some links at a given prior precision.

        Temperature 1 is preferred if it is tied with the best one, or if there are fewer than 100
        examples.
        """
        points = range(point, point + 1)
        best = self.lowest(points, links)
        untempered = [index for index in links if self.links[index].temperature == 1]
        if untempered and self.prefers(self.lowest(points, untempered), best):
            return 1.0
        return self.links[best.link].temperature


def _nll_terms(predicted: Distribution, targets: CheckedTargets) -> Float[Tensor, "terms links"]:
    """Compute, for every link, the negative log-density of each target that is not ignored."""
    # Only the log-probabilities of the targets are computed, because the probabilities of a
    # thousand classes would need a thousand times the memory.
    log_probs = predicted.log_prob(
        targets.targets_with_density.expand(predicted.batch_shape + predicted.event_shape)
    )
    return -log_probs.flatten(1)[:, targets.counted].double().T


def _brier_terms(
    predicted: Distribution, targets: CheckedTargets
) -> Float[Tensor, "counted links"]:
    """Compute, for every link, Σ_k (p_k − y_k)² of each term that is not ignored."""
    num_links = predicted.batch_shape[0]
    labels = targets.labels[targets.counted]
    if not len(labels):  # All targets of a batch may be ignored.
        return torch.zeros(0, num_links, dtype=torch.float64, device=labels.device)
    values = probabilities_or_means(predicted)[targets.counted.repeat(num_links)]
    labels = labels.repeat(num_links, *[1] * (labels.ndim - 1))
    probs, labels = classified(values, labels)
    probs, labels = check_classification(probs, labels)
    return (probs - one_hot(labels, probs.shape[1])).double().square().sum(1).view(num_links, -1).T


SCORING_RULES: dict[str, ScoringRule] = {"nll": _nll_terms, "brier": _brier_terms}
"""The metrics by name. They return the terms of the targets that count, with one column per link.
"""


def _noise_terms(predicted: Distribution, targets: CheckedTargets) -> Float[Tensor, "terms 3"]:
    """Compute the squared whitened residual, log det S, and the number of outputs of each term."""
    assert isinstance(predicted, MultivariateNormal)
    labels = targets.labels.double()
    root = predicted.scale_tril.flatten(0, -3).double()
    residuals = (labels - probabilities_or_means(predicted).double()).unsqueeze(-1)
    # If the targets are the model's own outputs, the residuals are rounding errors. They are set to
    # zero, so that `_with_best_noise` raises an error.
    rounding = 8 * torch.finfo(predicted.mean.dtype).eps * labels.abs()
    residuals = residuals.masked_fill(residuals.abs() <= rounding.unsqueeze(-1), 0)
    # The residuals are whitened by the root L of S = L Lᵀ. The squares are not derived from the
    # log-density, because its constant would swamp small residuals in float32.
    whitened = torch.linalg.solve_triangular(root, residuals, upper=False)
    squares = whitened.square().sum((-2, -1))
    log_dets = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.stack([squares, log_dets, torch.full_like(squares, root.shape[-1])], -1)


@dataclass(frozen=True, eq=False)
class ScoredTargets:
    """The checked targets of a batch, and the metric that scores predictives on them.

    Predictives have batch shape `[links, B, ...]`.

    Attributes:
        rule: The metric.
        targets: The targets.
        example_indices: For each row that counts, the index of its example.
        num_examples: The number of examples.
    """

    rule: ScoringRule
    targets: CheckedTargets
    example_indices: Int[Tensor, " counted"]
    num_examples: int

    @classmethod
    def check(
        cls,
        likelihood: Likelihood,
        rule: ScoringRule,
        class_dim: int | None,
        predicted: Distribution,
        y: Tensor,
    ) -> "ScoredTargets":
        """Check the targets against any of the predictives."""
        targets = check_targets(likelihood, predicted, y, class_dim, leading=1)
        example_indices = targets.counted.view(predicted.batch_shape[1:]).nonzero()[:, 0]
        return cls(rule, targets, example_indices, len(y))

    def score(
        self, predicted: Distribution
    ) -> tuple[Float[Tensor, "examples columns"], Float[Tensor, " examples"]]:
        """Sum and count the terms of each example; the counts are the same for every predictive."""
        terms = self.rule(predicted, self.targets)
        # A row has several terms if each of its labels is one.
        terms_per_row = len(terms) // max(1, len(self.example_indices))
        examples = self.example_indices.repeat_interleave(terms_per_row)
        sums = terms.new_zeros(self.num_examples, terms.shape[1]).index_add_(0, examples, terms)
        counts = examples.bincount(minlength=self.num_examples).double()
        return sums, counts


def evaluate_grid(
    predict: PredictGrid,
    data: Iterable[Batch],
    likelihood: Likelihood,
    metric: str,
    *,
    prior_precisions: Sequence[float],
    links: Sequence[Link],
    network_links: Sequence[Link] = (),
    class_dim: int | None = None,
) -> GridMetrics:
    """Compute a metric for every prior precision and link in one pass over the data.

    Args:
        predict: The predictives.
        data: Batches `(inputs, targets)`.
        likelihood: The likelihood, which checks the targets.
        metric: `"nll"` or `"brier"`.
        prior_precisions: The prior precisions, ascending.
        links: The links; empty for a likelihood without links.
        network_links: The links of the network without a posterior.
        class_dim: The dimension of the outputs that holds the classes. Default: the last one.

    Returns:
        The metric, which is infinite where the predictive of any batch could not be computed.

    Raises:
        ValueError: If the data is empty, or if all of its targets are ignored. If a batch has no
            predictive at any prior precision, the error of the predictive is raised.
    """
    check = partial(ScoredTargets.check, likelihood, SCORING_RULES[metric], class_dim)
    sums_by_point, counts = _scores_of_examples(
        predict, data, check, prior_precisions, links, network_links
    )
    network = None
    if network_links:
        # The sums of the network follow those of the prior precisions.
        network_sums = sums_by_point.pop().T.unsqueeze(0)
        network = GridMetrics([math.inf], network_links, network_sums, counts)
    return GridMetrics(
        prior_precisions, links, _stack_points(sums_by_point), counts, network=network
    )


def evaluate_grid_with_noise(
    predict: PredictGrid,
    data: Iterable[Batch],
    likelihood: Likelihood,
    *,
    gammas: Sequence[float],
    class_dim: int | None = None,
) -> GridMetrics:
    """Compute the NLL of a regression, at the best noise for each γ = δ k², in one pass.

    Args:
        predict: The predictives at the noise σ₀.
        data: Batches `(inputs, targets)`.
        likelihood: The likelihood, with the noise σ₀.
        gammas: The values of γ, ascending.
        class_dim: The dimension of the outputs that holds the targets. Default: the last one.

    Returns:
        The NLL at each δ = γ / k², and the factors k; see `evaluate_grid`.

    Raises:
        ValueError: If the residuals are zero. Also raises the errors of `evaluate_grid`.
    """
    check = partial(ScoredTargets.check, likelihood, _noise_terms, class_dim)
    statistics, counts = _scores_of_examples(predict, data, check, gammas)
    sums, factors = _with_best_noise(_stack_points(statistics))
    deltas = [gamma / factor**2 for gamma, factor in zip(gammas, factors.tolist(), strict=True)]
    return GridMetrics(
        prior_precisions=deltas, links=[], sums=sums, counts=counts, sigma_factors=factors
    )


def _scores_of_examples(
    predict: PredictGrid,
    data: Iterable[Batch],
    check: Callable[[Distribution, Tensor], ScoredTargets],
    prior_precisions: Sequence[float],
    links: Sequence[Link] = (),
    network_links: Sequence[Link] = (),
) -> tuple[list[Float[Tensor, "examples _"]], Float[Tensor, " examples"]]:
    """Sum and count the terms of each example at every prior precision, and then of the network.

    Examples without terms are left out. The sums are infinite where a batch has no predictive.
    """
    grid = torch.tensor(prior_precisions, dtype=torch.float64)
    batches = []
    for batch in data:
        predictives = predict(batch.inputs, grid, links, network_links)
        sums_by_point, counts = _scores_of_batch(
            predictives, batch.targets, check, len(grid), has_network=len(network_links) > 0
        )
        batches.append([values[counts > 0] for values in (counts, *sums_by_point)])
    counts, *sums_by_point = concatenate_batches(batches, "tune on")
    return sums_by_point, counts


def _scores_of_batch(
    predictives: Iterable[tuple[int, Distribution | ValueError]],
    y: Tensor,
    check: Callable[[Distribution, Tensor], ScoredTargets],
    grid_size: int,
    *,
    has_network: bool,
) -> tuple[list[Float[Tensor, "examples _"]], Float[Tensor, " examples"]]:
    """Sum and count the terms of each example of a batch; see `_scores_of_examples`."""
    targets = None
    columns = dict[int, list[Tensor]]()
    errors = dict[int, ValueError]()
    for point, predicted in predictives:
        if isinstance(predicted, ValueError):
            errors[point] = predicted
            continue
        if targets is None:
            # The check gives the same result for every predictive, so it is made once.
            targets = check(predicted, y)
        sums, counts = targets.score(predicted)
        columns.setdefault(point, []).append(sums)
    network = grid_size
    if network in errors or errors.keys() >= set(range(grid_size)):
        raise errors[max(errors)]
    computed = {p: torch.cat(sums, 1) for p, sums in columns.items() if p not in errors}
    infinite = torch.full_like(next(iter(computed.values())), math.inf)
    num_points = grid_size + 1 if has_network else grid_size
    return [computed.get(point, infinite) for point in range(num_points)], counts


def _stack_points(
    sums_by_point: Sequence[Float[Tensor, "examples columns"]],
) -> Float[Tensor, "points columns examples"]:
    return torch.stack(list(sums_by_point)).mT.contiguous()


def _with_best_noise(
    sums: Float[Tensor, "points 3 examples"],
) -> tuple[Float[Tensor, "points 1 examples"], Float[Tensor, " points"]]:
    """Compute the best factor k of σ = k σ₀ for each γ, and the NLL at this noise.

    With C ∝ σ⁻², the precision of the posterior at σ = k σ₀ is k⁻² (N C + γ), so the covariance of
    the predictive is k² times the covariance at δ = γ. With q = rᵀ S⁻¹ r, the NLL of M numbers is
    lowest at k² = Σ q / M. A point without a predictive at σ₀ has none at any other σ either, and
    keeps σ₀.

    Args:
        sums: The sums of `_noise_terms` for each γ and example; infinite where there is no
            predictive.
    """
    squares, log_dets, outputs = sums.unbind(1)
    factors = (squares.sum(-1) / outputs.sum(-1)).sqrt()
    is_computed = factors.isfinite()
    factors = torch.where(is_computed, factors, 1)
    if not factors.all():
        raise ValueError(
            "The residuals on the validation data are zero, so the noise cannot be "
            "estimated. Check that the targets are not the model's own outputs, or "
            "pass `sigma=False`."
        )
    k = factors.unsqueeze(1)
    nll = (squares / k**2 + log_dets + outputs * math.log(2 * math.pi)) / 2 + outputs * k.log()
    nll = torch.where(is_computed.unsqueeze(1), nll, math.inf)
    return nll.unsqueeze(1), factors
