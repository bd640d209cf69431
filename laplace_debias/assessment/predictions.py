"""A method's predictions for a data set: of classes, of labels or of numbers.

All tensors have one row per example. They are in float64 on the CPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from laplace_debias import metrics
from laplace_debias.assessment.recalibration import Recalibration
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.laplace.prediction.predictive import mean_logits
from laplace_debias.metrics.ood import label_entropy

POSTERIOR_SCORES = ("mutual_information", "variance", "instability")
"""Scores that need a posterior."""
SCORES = (*POSTERIOR_SCORES, "energy", "max_logit")
"""Scores that cannot be computed from probabilities. The last two need the network's own logits."""


class Predictions(ABC):
    """Base class for predictions of classes and predictions of numbers."""

    @classmethod
    @abstractmethod
    def concatenate(cls, batches: Sequence[Any]) -> "Predictions":
        """Concatenate the predictions for several batches, which have the same parts."""

    @classmethod
    @abstractmethod
    def mean_of(cls, members: Sequence[Any], likelihood: Likelihood) -> "Predictions":
        """Average several predictives for the same examples."""

    @abstractmethod
    def columns(self, likelihood: Likelihood, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the columns of a table of predictions, after the index.

        Args:
            likelihood: The likelihood.
            targets: The true targets; None for a set without targets.
        """


@dataclass(frozen=True, eq=False)
class ClassPredictions(Predictions):
    """Predictions of classes or labels.

    Attributes:
        log_probs: Log-probabilities, `[n, C]`; or logits, if each logit has its own sigmoid.
        scores: The available scores among `SCORES` and `aleatoric` (in nats), each `[n]`.
        logits: The network's own logits, `[n, C]`; None for other predictions, and for a likelihood
            without logits.
    """

    log_probs: Float[Tensor, "n outputs"]
    scores: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)
    logits: Float[Tensor, "n outputs"] | None = None

    @classmethod
    def from_logits(
        cls, logits: Float[Tensor, "n outputs"], likelihood: Likelihood
    ) -> "ClassPredictions":
        """Build predictions from rescaled or recalibrated logits, which have no scores."""
        is_softmax = likelihood.activation == "softmax"
        return cls(logits.log_softmax(1) if is_softmax else logits)

    @classmethod
    def concatenate(cls, batches: Sequence["ClassPredictions"]) -> "ClassPredictions":
        """Concatenate the predictions for several batches, which have the same parts."""
        return cls(
            log_probs=torch.cat([batch.log_probs for batch in batches]),
            scores={
                name: torch.cat([batch.scores[name] for batch in batches])
                for name in batches[0].scores
            },
            logits=_concatenate([batch.logits for batch in batches]),
        )

    @classmethod
    def mean_of(
        cls, members: Sequence["ClassPredictions"], likelihood: Likelihood
    ) -> "ClassPredictions":
        """Average several predictives for the same examples.

        The mutual information is that between the label and the pair of member and parameters. The
        other scores are defined only for a single posterior, so they are not available.
        """
        log_probs = mean_logits(
            torch.stack([member.log_probs for member in members]),
            exclusive=likelihood.activation != "sigmoid",
        )
        total = entropy(log_probs, likelihood)
        entropies = [entropy(member.log_probs, likelihood) for member in members]
        mean_entropy = torch.stack(entropies).mean(0)
        # By the chain rule, the score is the mutual information between the label and the member,
        # plus the mutual information between the label and the parameters given the member.
        mutual_information = (total - mean_entropy).clamp(min=0)
        scores = {}
        if all("mutual_information" in member.scores for member in members):
            within_members = [member.scores["mutual_information"] for member in members]
            mutual_information = mutual_information + torch.stack(within_members).mean(0)
            aleatoric = [member.scores["aleatoric"] for member in members]
            scores["aleatoric"] = torch.stack(aleatoric).mean(0)
        return cls(log_probs, {"mutual_information": mutual_information, **scores})

    def scaled(self, temperature: float, likelihood: Likelihood) -> "ClassPredictions":
        """Divide the network's logits by a temperature."""
        return self.from_logits(self.log_probs / temperature, likelihood)

    def recalibrated(
        self, recalibration: Recalibration, likelihood: Likelihood
    ) -> "ClassPredictions":
        """Apply a recalibration to the network's logits."""
        assert self.logits is not None
        return self.from_logits(recalibration(self.logits), likelihood)

    def columns(self, likelihood: Likelihood, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the columns of a table of predictions, after the index.

        Scores that are not available are NaN.
        """
        probs = probabilities(self.log_probs, likelihood)
        columns = {}
        if targets is not None:
            columns["label"] = labels_like(probs, targets, likelihood)
        columns["probs"] = probs
        columns["entropy"] = entropy(self.log_probs, likelihood)
        unknown = torch.full((len(probs),), torch.nan, dtype=torch.float64)
        for name in ("aleatoric", *SCORES):
            columns[name] = self.scores.get(name, unknown)
        return columns


@dataclass(frozen=True, eq=False)
class NumberPredictions(Predictions):
    """Predictions of numbers.

    Attributes:
        mean: Means, `[n, C]`.
        standard_deviation: Standard deviations, including the noise, `[n, C]`.
        lower: Lower ends of the 95 % intervals, `[n, C]`; None if the predictive is normal or has
            no quantiles.
        upper: Upper ends; None if `lower` is None.
        log_prob: Log-probabilities of the targets, `[n]`; None if the predictive is normal or there
            are no targets.
        interval_level: The smallest level of a central interval that contains the target, `[n, C]`;
            None if `log_prob` is None, or if the predictive has no distribution function.
        epistemic: Standard deviations without the noise, `[n, C]`.
    """

    mean: Float[Tensor, "n outputs"]
    standard_deviation: Float[Tensor, "n outputs"]
    lower: Float[Tensor, "n outputs"] | None
    upper: Float[Tensor, "n outputs"] | None
    log_prob: Float[Tensor, " n"] | None
    interval_level: Float[Tensor, "n outputs"] | None
    epistemic: Float[Tensor, "n outputs"]

    @classmethod
    def concatenate(cls, batches: Sequence["NumberPredictions"]) -> "NumberPredictions":
        """Concatenate the predictions for several batches, which have the same parts."""
        return cls(
            mean=torch.cat([batch.mean for batch in batches]),
            standard_deviation=torch.cat([batch.standard_deviation for batch in batches]),
            lower=_concatenate([batch.lower for batch in batches]),
            upper=_concatenate([batch.upper for batch in batches]),
            log_prob=_concatenate([batch.log_prob for batch in batches]),
            interval_level=_concatenate([batch.interval_level for batch in batches]),
            epistemic=torch.cat([batch.epistemic for batch in batches]),
        )

    @classmethod
    def mean_of(
        cls, members: Sequence["NumberPredictions"], likelihood: Likelihood
    ) -> "NumberPredictions":
        """Average several predictives for the same examples.

        Intervals are left out, because those of a mixture cannot be computed from those of its
        members.
        """
        means = torch.stack([member.mean for member in members])
        variance_of_means = means.var(0, unbiased=False)

        def deviation_of_mixture(deviations: list[Tensor]) -> Tensor:
            # A mixture's variance is the mean of the variances plus the variance of the means.
            return (torch.stack(deviations).square().mean(0) + variance_of_means).sqrt()

        log_prob = None
        log_probs = [member.log_prob for member in members if member.log_prob is not None]
        if log_probs:
            log_prob = torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))
        return cls(
            mean=means.mean(0),
            standard_deviation=deviation_of_mixture(
                [member.standard_deviation for member in members]
            ),
            lower=None,
            upper=None,
            log_prob=log_prob,
            interval_level=None,
            epistemic=deviation_of_mixture([member.epistemic for member in members]),
        )

    def columns(self, likelihood: Likelihood, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the columns of a table of predictions, after the index."""
        columns = {name: values for name, values in vars(self).items() if values is not None}
        if targets is not None:
            columns = {"target": targets.double().reshape(self.mean.shape), **columns}
        return {name: _squeeze_single_column(column) for name, column in columns.items()}


@dataclass(frozen=True, eq=False)
class PredictedSet:
    """A method's predictions for a data set.

    Attributes:
        predictions: The predictions.
        targets: The targets; zeros if the set has no targets.
        index: Positions of the examples in the set.
        seconds: The prediction time of the slowest process in seconds, without reading the data.
    """

    predictions: Predictions
    targets: Shaped[Tensor, "n *outputs"]
    index: Integer[Tensor, " n"]
    seconds: float

    @classmethod
    def mean_of(cls, members: Sequence["PredictedSet"], likelihood: Likelihood) -> "PredictedSet":
        """Average the predictives of several members."""
        predictions = [member.predictions for member in members]
        return replace(
            members[0],
            predictions=type(predictions[0]).mean_of(predictions, likelihood),
            seconds=sum(member.seconds for member in members),
        )


def entropy(log_probs: Tensor, likelihood: Likelihood) -> Float[Tensor, " n"]:
    """Compute the entropy of the label, or the total entropy of independent labels, in nats."""
    probs = probabilities(log_probs, likelihood)
    return label_entropy(probs) if likelihood.targets == "labels" else metrics.entropy(probs)


def probabilities(
    log_probs: Float[Tensor, "n outputs"], likelihood: Likelihood
) -> Float[Tensor, "n classes"]:
    """Return the probabilities of all classes, `[n, C]`, even for a single logit."""
    if likelihood.activation != "sigmoid":
        return log_probs.exp()
    if likelihood.targets == "class":
        return torch.cat([-log_probs, log_probs], 1).sigmoid()
    return log_probs.sigmoid()


def labels_like(
    probs: Float[Tensor, "n classes"], targets: Tensor, likelihood: Likelihood
) -> Integer[Tensor, "n *labels"]:
    """Reshape labels to match probabilities: one label per example, or one per probability."""
    shape = probs.shape if likelihood.targets == "labels" else probs.shape[:1]
    return targets.long().reshape(shape)


def _concatenate(columns: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate a column of all batches, or return None if the batches lack this column."""
    tensors = [column for column in columns if column is not None]
    if not tensors:
        return None
    assert len(tensors) == len(columns)
    return torch.cat(tensors)


def _squeeze_single_column(values: Tensor) -> Tensor:
    """Return values `[n, 1]` as `[n]`, and other values unchanged."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
