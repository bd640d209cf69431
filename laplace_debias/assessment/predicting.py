"""Predict a data set with a network or a posterior."""

import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias import metrics
from laplace_debias.assessment.numbers import gaussian_draws, number_predictions
from laplace_debias.assessment.predictions import (
    ClassPredictions,
    NumberPredictions,
    PredictedSet,
    Predictions,
)
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, move, take
from laplace_debias.laplace import Laplace, links
from laplace_debias.laplace.functional.gaussian_outputs import DenseOutputs
from laplace_debias.laplace.prediction.decomposition import scores_of_logits, uncertainty_of_draws
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import dealt
from laplace_debias.system.ranks import process_group

MOST_OUTPUTS = 100
"""With more outputs than this, computing the covariance would be too expensive. Only the variances
of the outputs are then computed, including the part that all outputs share, so mutual information,
aleatoric uncertainty and instability are not available."""


def subset_indices(num_examples: int, limit: int | None, seed: int) -> Tensor | None:
    """Return the indices of the examples that a method predicts, or None if it predicts all.

    They are the same for all sets of equal size, so that corrupted examples correspond to the
    examples of the test set.
    """
    if limit is None or limit >= num_examples:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_examples, generator=generator)[:limit].sort().values


def selected_batches(
    model: nn.Module,
    batches: Batches,
    positions: Tensor | None = None,
    *,
    has_labels: bool = True,
) -> Iterator[Batch]:
    """Read all or selected examples, and move the inputs to the model's device.

    If there are n processes, each one reads every n-th batch. The indices of a batch count the
    selected examples of all processes. If a set has no labels, its targets are zeros.
    """
    device = next(model.parameters()).device
    for batch in dealt(batches, BatchReader(model, needs_targets=has_labels)):
        if positions is None:
            yield replace(batch, inputs=move(batch.inputs, device, None))
            continue
        first = batch.first_index
        start, end = torch.searchsorted(
            positions, torch.tensor([first, first + batch.num_examples])
        ).tolist()
        if start < end:
            selected = batch.take(positions[start:end] - first)
            inputs = move(selected.inputs, device, None)
            yield replace(selected, inputs=inputs, first_index=start)
        if end == len(positions):
            return


Result = TypeVar("Result")


def in_order(own_results: Sequence[tuple[int, Result]]) -> list[Result]:
    """Collect the results of all processes in the order of the batches.

    Args:
        own_results: For each batch of this process, the index of its first example and the result.
    """
    results = itertools.chain.from_iterable(process_group().exchange(own_results))
    return [result for _, result in sorted(results, key=operator.itemgetter(0))]


@torch.no_grad()
def network_outputs(model: nn.Module, x: Inputs) -> Float[Tensor, "batch outputs"]:
    """Compute the outputs of the trained network, `[B, C]`, in float64 on the CPU."""
    outputs = call(model, x)
    if outputs.ndim != 2:
        raise ValueError(
            f"The outputs of the network have the shape {tuple(outputs.shape)}. Return one row "
            "of outputs per example, [B, C]."
        )
    if not outputs.isfinite().all():
        raise ValueError(
            "The outputs of the network are not finite. Check its inputs and its weights."
        )
    return outputs.double().cpu()


def network_classes(
    outputs: Float[Tensor, "n outputs"], likelihood: Likelihood
) -> ClassPredictions:
    """Predict classes or labels from the trained network's outputs."""
    if likelihood.activation == "sigmoid":
        return ClassPredictions(outputs, logits=outputs)
    if likelihood.activation is None:
        return ClassPredictions(_log_probs(likelihood.predictive(outputs, None)))
    scores = {"energy": metrics.energy(outputs), "max_logit": metrics.max_logit(outputs)}
    return ClassPredictions(outputs.log_softmax(1), scores, logits=outputs)


def _log_probs(predictive: Any) -> Float[Tensor, "n classes"]:
    """Return the logarithms of the class probabilities."""
    return predictive.probs.double().cpu().log()


def posterior_predictions(la: Laplace, x: Inputs, targets: Tensor | None = None) -> Predictions:
    """Predict with a Laplace posterior in closed form, as with `method="glm"`.

    Args:
        la: The posterior.
        x: Inputs.
        targets: The targets of the examples, for their log-probabilities; None if there are no
            targets.
    """
    if la.likelihood.predicts_numbers:
        return posterior_numbers(la, x, targets)
    return posterior_classes(la, x)


def posterior_numbers(la: Laplace, x: Inputs, targets: Tensor | None = None) -> NumberPredictions:
    """Predict numbers with a Laplace posterior; see `posterior_predictions`."""
    likelihood = la.likelihood
    needs_covariance = not (likelihood.has_marginals or likelihood.variances_suffice)
    mean, covariance = la.functional(x, diagonal=not needs_covariance)
    return number_predictions(likelihood, mean, covariance, targets)


def posterior_classes(la: Laplace, x: Inputs) -> ClassPredictions:
    """Predict classes or labels with a Laplace posterior; see `posterior_predictions`."""
    likelihood = la.likelihood
    if likelihood.activation is None:
        mean, covariance = la.functional(x)
        log_probs = _log_probs(likelihood.predictive(mean, covariance))
        return ClassPredictions(log_probs, _information_scores(la, mean, covariance))
    has_covariance = network_outputs(la.model, take(x, slice(1))).shape[1] <= MOST_OUTPUTS
    mean, covariance = la.functional(x, diagonal=not has_covariance)
    link = la.link or links.default_link(la.likelihood, mean.shape)
    assert link is not None  # every likelihood with an activation has a default link
    predictive: Any = links.predictive(la.likelihood, link, mean, covariance)
    per_label = getattr(predictive, "base_dist", predictive)
    log_probs = per_label.logits.reshape(mean.shape).double().cpu()
    # Compute the scores from logits divided by the temperature, as `Laplace.uncertainty` does.
    mean = mean.double()
    covariance = covariance.double()
    tempered_mean, tempered_covariance = links.tempered_moments(mean, covariance, link.temperature)
    if not has_covariance:
        return ClassPredictions(log_probs, {"variance": tempered_covariance.mean(1).cpu()})
    outputs = DenseOutputs(tempered_mean, tempered_covariance)
    scores = {
        name: score.cpu() for name, score in scores_of_logits(la.likelihood, [outputs]).items()
    }
    draw_mean, draw_covariance = links.tempered_moments(mean, covariance, link.draw_temperature)
    return ClassPredictions(log_probs, scores | _information_scores(la, draw_mean, draw_covariance))


def _information_scores(
    la: Laplace, mean: Float[Tensor, "n outputs"], covariance: Float[Tensor, "n outputs outputs"]
) -> dict[str, Float[Tensor, " n"]]:
    """Compute mutual information and aleatoric entropy at the same Sobol points as the links."""
    uncertainty = uncertainty_of_draws([la.likelihood], [gaussian_draws(mean, covariance)])
    return {"aleatoric": uncertainty.aleatoric, "mutual_information": uncertainty.epistemic}


def predict_set(
    loaded: Loaded,
    batches: Batches,
    la: Laplace | None = None,
    positions: Tensor | None = None,
    *,
    has_labels: bool = True,
) -> PredictedSet:
    """Predict a set with a posterior or the network itself; all processes share the work.

    Args:
        loaded: The network and its data; for a regression, its likelihood must include the noise.
        batches: The set.
        la: The posterior; None for the network itself.
        positions: Indices of the examples to predict; None for all.
        has_labels: Whether the set has true targets, whose log-probabilities are predicted.
    """
    own_batches: list[tuple[int, tuple[Predictions, Tensor]]] = []
    seconds = 0.0
    for batch in selected_batches(loaded.model, batches, positions, has_labels=has_labels):
        start = time.perf_counter()
        targets = batch.targets.detach().cpu()
        predictions = _batch_predictions(loaded, batch.inputs, la, targets if has_labels else None)
        seconds += time.perf_counter() - start
        own_batches.append((batch.first_index, (predictions, targets)))
    all_batches = in_order(own_batches)
    if not all_batches:
        raise ValueError("A data set has no examples. Add examples, or remove the data set.")
    predictions_of_batches, targets_of_batches = zip(*all_batches, strict=True)
    targets = torch.cat(targets_of_batches)
    return PredictedSet(
        predictions=type(predictions_of_batches[0]).concatenate(predictions_of_batches),
        targets=targets,
        index=torch.arange(len(targets)) if positions is None else positions,
        seconds=max(process_group().exchange(seconds)),
    )


def _batch_predictions(
    loaded: Loaded, x: Inputs, la: Laplace | None, targets: Tensor | None
) -> Predictions:
    """Predict a batch with a posterior, or with the network itself."""
    if la is not None:
        return posterior_predictions(la, x, targets)
    likelihood = loaded.likelihood
    outputs = network_outputs(loaded.model, x)
    if likelihood.predicts_numbers:
        return number_predictions(likelihood, outputs, None, targets)
    return network_classes(outputs, likelihood)
