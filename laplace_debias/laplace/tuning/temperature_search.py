"""A search over prior precisions and temperatures that evaluates only some of the settings.

For a fixed prior precision δ, the metric first decreases and then increases with the temperature T,
and the best T changes little from one δ to the next. The search therefore goes from the largest δ
to the smallest. At each δ, it starts from the best T of the previous δ, and evaluates the
neighbours of the best T so far until neither of them is better. T = 1 is always evaluated. If the
metric had several minima in T, the search might find only a local one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace.functional.last_layer import (
    LastLayerInputs,
    recorded_inputs,
    squared_differences,
)
from laplace_debias.laplace.links import MOST_CLASSES, Link, required_moments
from laplace_debias.laplace.pairwise import pairwise_of_directions
from laplace_debias.laplace.prediction.evaluation import concatenate_batches
from laplace_debias.laplace.prediction.predictive import tempered_predictives
from laplace_debias.laplace.state.fitted import FittedPosterior
from laplace_debias.laplace.tuning.grid_metrics import (
    SCORING_RULES,
    GridMetrics,
    ScoredTargets,
)

# The number of outputs, over all examples, that are evaluated together.
_ENTRIES = 2**14
_MIN_BATCH = 64


def search_temperatures(
    fitted: FittedPosterior,
    data: Iterable[Batch],
    metric: str,
    prior_precisions: Sequence[float],
    links: Sequence[Link],
    network_links: Sequence[Link],
) -> GridMetrics:
    """Read the data once, and compute a metric at the settings that a search visits.

    The search visits the temperatures around the best one for each prior precision, and all prior
    precisions for the chosen link.

    Args:
        fitted: A fit for which `recorded_inputs` is not None.
        data: Batches `(inputs, targets)`.
        metric: `"nll"` or `"brier"`.
        prior_precisions: The prior precisions, ascending.
        links: The links, ordered by formula and starting with the simplest.
        network_links: The links of the network without a posterior, starting with the simplest.

    Returns:
        The metric, which is infinite where a predictive overflows.
    """
    batches = _last_layer_batches(fitted, data, metric)
    search = TemperatureSearch(batches, prior_precisions, links, network_links)
    search.run()
    link = search.table().choose_link()
    for point in range(len(prior_precisions)):
        search.evaluate(point, [link])
    return search.table()


@dataclass(eq=False)
class LastLayerBatch:
    """A batch, reduced to the values from which predictives are computed at any setting.

    The variances at the most recent prior precision are kept, because several temperatures may be
    evaluated there one after the other.

    Attributes:
        likelihood: The likelihood.
        inputs: The outputs and the inputs of the last layer, which is the only Bayesian layer.
        targets: The targets and the metric.
        counts: The number of terms of each example.
        squared_differences: The result of `last_layer.squared_differences` for at most 100
            exclusive classes; otherwise None.
    """

    likelihood: Likelihood
    inputs: LastLayerInputs
    targets: ScoredTargets
    counts: Float[Tensor, " examples"]
    squared_differences: Float[Tensor, "rows pairs"] | None
    _last_variances: tuple[float, list[Float[Tensor, "batch _"]]] | None = field(
        default=None, init=False
    )

    @classmethod
    def score(
        cls,
        likelihood: Likelihood,
        inputs: LastLayerInputs,
        y: Tensor,
        metric: str,
        class_dim: int | None,
        squared_differences: Float[Tensor, "rows pairs"] | None,
    ) -> "LastLayerBatch":
        """Check the targets against the predictions of the network."""
        (predicted,) = tempered_predictives(likelihood, inputs.mean, None, [Link("probit")])
        if isinstance(predicted, ValueError):
            raise predicted
        targets = ScoredTargets.check(likelihood, SCORING_RULES[metric], class_dim, predicted, y)
        _, counts = targets.score(predicted)
        return cls(likelihood, inputs, targets, counts, squared_differences)

    def sums(
        self, prior_precision: float, links: Sequence[Link]
    ) -> Float[Tensor, "examples links"]:
        """Compute the metric for links of one formula, for each example that has terms.

        The metric is infinite if a predictive overflows.
        """
        columns = []
        try:
            for predicted in self._predictives(prior_precision, links):
                if isinstance(predicted, ValueError):
                    raise predicted
                sums, _ = self.targets.score(predicted)
                columns.append(sums)
        except ValueError:
            columns = [self.counts.new_full((len(self.counts), len(links)), math.inf)]
        return torch.cat(columns, 1)[self.counts > 0]

    def _predictives(
        self, prior_precision: float, links: Sequence[Link]
    ) -> Iterable[Distribution | ValueError]:
        """Predict with links of one formula."""
        inputs = self.inputs
        likelihood = self.likelihood
        if prior_precision == math.inf:
            return tempered_predictives(likelihood, inputs.mean, None, links)
        eigen_variances = self._eigen_variances(prior_precision)
        if links[0].name == "pairwise" and self.squared_differences is not None:
            variances = torch.cat(eigen_variances, 1)
            temperatures = [link.temperature for link in links]
            logits = pairwise_of_directions(
                inputs.mean, variances, self.squared_differences, temperatures
            )
            return [likelihood.predictive(logits, None)]
        outputs = inputs.outputs(eigen_variances)
        covariance = outputs.second_moments(required_moments(likelihood, links))
        return tempered_predictives(likelihood, inputs.mean, covariance, links)

    def _eigen_variances(self, prior_precision: float) -> list[Float[Tensor, "batch _"]]:
        """Compute the variances at a prior precision, or reuse those of the last call."""
        if self._last_variances is None or self._last_variances[0] != prior_precision:
            heads = self.inputs.heads
            deltas = heads[0].magnitudes.new_full((len(heads),), prior_precision)
            self._last_variances = prior_precision, self.inputs.eigen_variances(deltas)
        return self._last_variances[1]


class TemperatureSearch:
    """A search over settings, with the metric at the settings evaluated so far.

    Args:
        batches: The data of this process.
        prior_precisions: The prior precisions, ascending.
        links: The links, with the simplest link first, ordered by formula.
        network_links: The links of the network without a posterior, with the simplest link first.
    """

    def __init__(
        self,
        batches: Sequence[LastLayerBatch],
        prior_precisions: Sequence[float],
        links: Sequence[Link],
        network_links: Sequence[Link],
    ) -> None:
        self._batches = batches
        self._prior_precisions = prior_precisions
        self._links = links
        # For each example that has terms, their number, over all batches and processes.
        counts = [[batch.counts[batch.counts > 0]] for batch in batches]
        (self._counts,) = concatenate_batches(counts, "tune on")
        # For each setting, the sums of the metric over the terms of each example, and its mean over
        # all terms; NaN for settings that have not been evaluated.
        shape = len(prior_precisions), len(links)
        self._sums = self._counts.new_full((*shape, len(self._counts)), math.nan)
        self._values = torch.full(shape, math.nan, dtype=torch.float64)
        network_sums = self._sums_of_links(math.inf, network_links).T.unsqueeze(0)
        self._network = GridMetrics([math.inf], network_links, network_sums, self._counts)

    def run(self) -> None:
        """Search the temperatures of each formula, from the largest prior precision downwards."""
        indices_by_formula = dict[str, list[int]]()
        for index in sorted(range(len(self._links)), key=self._temperature):
            indices_by_formula.setdefault(self._links[index].name, []).append(index)
        lowest = {
            name: self._nearest_to_network(indices) for name, indices in indices_by_formula.items()
        }
        # All formulas are searched at one prior precision before the next, so that they share its
        # variances.
        for point in reversed(range(len(self._prior_precisions))):
            for name, indices in indices_by_formula.items():
                lowest[name] = self._descend(point, indices, lowest[name])

    def evaluate(self, point: int, links: Iterable[int]) -> None:
        """Compute the metric of links at a prior precision unless it has been computed before."""
        missing = [index for index in sorted(links) if self._values[point, index].isnan()]
        if not missing:
            return
        links_used = [self._links[index] for index in missing]
        sums = self._sums_of_links(self._prior_precisions[point], links_used)
        self._sums[point, missing] = sums.T
        means = sums.sum(0) / self._counts.sum()
        self._values[point, missing] = means.nan_to_num(math.inf, math.inf).cpu()

    def table(self) -> GridMetrics:
        """Return the metric at the settings that were evaluated."""
        return GridMetrics(
            self._prior_precisions, self._links, self._sums, self._counts, network=self._network
        )

    def _sums_of_links(
        self, prior_precision: float, links: Sequence[Link]
    ) -> Float[Tensor, "examples links"]:
        batch_sums = [[batch.sums(prior_precision, links)] for batch in self._batches]
        (sums,) = concatenate_batches(batch_sums, "tune on")
        return sums

    def _nearest_to_network(self, indices: list[int]) -> int:
        """Return the index of the link whose temperature is nearest to the network's best."""
        network = self._network
        lowest = network.lowest(network.points, range(len(network.links)))
        best = network.links[lowest.link].temperature
        return min(indices, key=lambda index: abs(math.log(self._temperature(index) / best)))

    def _descend(self, point: int, indices: list[int], start: int) -> int:
        """Return the index of the link with a formula's best temperature at a prior precision.

        Args:
            point: Index of the prior precision.
            indices: Indices of the formula's links, ascending in temperature.
            start: The index of the link at which the search starts.
        """
        untempered = [index for index in indices if self._temperature(index) == 1]
        self.evaluate(point, {*untempered, *_with_neighbours(indices, start)})
        lowest = self._lowest(point, indices)
        if self._values[point, lowest] == math.inf:
            return start
        previous = None
        while lowest != previous:
            self.evaluate(point, _with_neighbours(indices, lowest))
            previous = lowest
            lowest = self._lowest(point, indices)
        return lowest

    def _lowest(self, point: int, indices: list[int]) -> int:
        """Return the index with the lowest metric among those evaluated at a prior precision."""
        values = self._values[point].tolist()
        evaluated = [index for index in indices if not math.isnan(values[index])]
        return min(evaluated, key=values.__getitem__)

    def _temperature(self, index: int) -> float:
        return self._links[index].temperature


def _with_neighbours(indices: list[int], index: int) -> list[int]:
    """Return an entry of a list with the entries before and after it."""
    position = indices.index(index)
    return indices[max(0, position - 1) : position + 2]


def _last_layer_batches(
    fitted: FittedPosterior, data: Iterable[Batch], metric: str
) -> list[LastLayerBatch]:
    """Run the network on all data once, and check the targets."""
    inputs = []
    targets = []
    for batch in data:
        batch_inputs = recorded_inputs(fitted, batch.inputs)
        assert batch_inputs is not None
        inputs.append(batch_inputs)
        targets.append(batch.targets)
    if not inputs:
        return []
    all_inputs = LastLayerInputs.concatenate(inputs)
    all_targets = torch.cat(targets)
    num_outputs = all_inputs.mean.shape[1]
    differences = None
    if fitted.likelihood.activation == "softmax" and num_outputs <= MOST_CLASSES:
        differences = squared_differences(all_inputs.heads)
    batch_size = max(_MIN_BATCH, _ENTRIES // num_outputs)
    batches = []
    for start in range(0, len(all_targets), batch_size):
        examples = slice(start, start + batch_size)
        scored = LastLayerBatch.score(
            fitted.likelihood,
            all_inputs.take(examples),
            all_targets[examples],
            metric,
            fitted.spec.class_dim,
            differences,
        )
        batches.append(scored)
    return batches
