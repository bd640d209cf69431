"""Predictions of a method for a data set: named tensors with a row per example.

For classes and labels they are `log_probs` (logarithms of probabilities `[n, C]`; logits where each
has a sigmoid), `aleatoric` (nats) and the scores of `SCORES`, `[n]`, NaN where they are not known.
For numbers they are `mean`, `standard_deviation` (with the noise) and `epistemic` (without),
`[n, C]`; if the predictive is not normal, also what `number_columns` adds. All are float64 on the
CPU; `index`, positions in the set, and `targets` come with them.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from laplace_debias import metrics
from laplace_debias.assessment.numbers import gaussian_draws, number_columns
from laplace_debias.assessment.recalibration import Recalibration
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.batch_reader import BatchReader
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.calling import call
from laplace_debias.curvature.network.inputs import Inputs, move, num_examples, take
from laplace_debias.laplace import Laplace, links
from laplace_debias.laplace.functional.gaussian_outputs import DenseOutputs
from laplace_debias.laplace.prediction.decomposition import scores_of_logits, uncertainty_of_draws
from laplace_debias.laplace.prediction.predictive import mean_logits
from laplace_debias.metrics.ood import label_entropy
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import dealt
from laplace_debias.system.ranks import process_group

Predictions = dict[str, Tensor]

SCORES = ("mutual_information", "variance", "instability", "energy", "max_logit")
"""Scores in addition to those computed from the probabilities. The first three need a posterior,
and the last two need the network's own logits."""
MOST_OUTPUTS = 100
"""With more outputs than this, the covariance costs too much. Only the variances of the outputs
are computed, including the part that all outputs share. Mutual information, aleatoric uncertainty
and instability are not known."""


def subset_indices(num_examples: int, limit: int | None, seed: int) -> Tensor | None:
    """Return the indices of the examples that a method predicts, or None for all.

    Sets of one size have the same positions, so that corrupted examples are those of the test set.
    """
    if limit is None or limit >= num_examples:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_examples, generator=generator)[:limit].sort().values


class SelectedBatches:
    """Batches of all or selected examples, on the model's device.

    With several processes each has every n-th batch. Targets that a set without labels lacks are
    zeros.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        positions: Tensor | None = None,
        *,
        has_labels: bool = True,
    ) -> None:
        self._model = model
        self._batches = batches
        self._positions = positions
        self._read = BatchReader(model, needs_targets=has_labels)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for _, x, y in self.with_positions():
            yield x, y

    def with_positions(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Yield the batches, each with the index of its first selected example."""
        device = next(self._model.parameters()).device
        for _, first, x, y in dealt(self._batches, self._read):
            if self._positions is None:
                yield first, move(x, device, None), y
                continue
            start, end = torch.searchsorted(
                self._positions, torch.tensor([first, first + num_examples(x)])
            ).tolist()
            if start < end:
                in_batch = self._positions[start:end] - first
                yield start, move(take(x, in_batch), device, None), y[in_batch]
            if end == len(self._positions):
                return


@torch.no_grad()
def network_outputs(model: nn.Module, x: Inputs) -> Float[Tensor, "batch outputs"]:
    """Compute the outputs of the trained network, `[B, C]`, float64 on the CPU."""
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


def network_predictions(
    outputs: Float[Tensor, "n outputs"], likelihood: Likelihood, targets: Tensor | None = None
) -> Predictions:
    """Predict with the trained network.

    Args:
        outputs: Its outputs.
        likelihood: The likelihood, with its noise.
        targets: The targets of the examples, for their log-probabilities; None if there are none.
    """
    if likelihood.predicts_numbers:
        return number_columns(likelihood, outputs, None, targets)
    unknown_scores = _unknown_scores(len(outputs))
    if likelihood.activation == "sigmoid":
        return {"log_probs": outputs} | unknown_scores
    if likelihood.activation is None:
        return {"log_probs": _log_probs(likelihood.predictive(outputs, None))} | unknown_scores
    scores = {"energy": metrics.energy(outputs), "max_logit": metrics.max_logit(outputs)}
    return {"log_probs": outputs.log_softmax(1)} | unknown_scores | scores


def _log_probs(predictive: Any) -> Float[Tensor, "n classes"]:
    """Logarithms of the probabilities of classes."""
    return predictive.probs.double().cpu().log()


def _unknown_scores(n: int) -> Predictions:
    names = ("aleatoric", *SCORES)
    return {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in names}


def posterior_predictions(la: Laplace, x: Inputs, targets: Tensor | None = None) -> Predictions:
    """Predict with a Laplace posterior, by `method="glm"` in closed form.

    Args:
        la: The posterior.
        x: Inputs.
        targets: Their targets, as for `network_predictions`.
    """
    likelihood = la.likelihood
    if likelihood.predicts_numbers:
        needs_covariance = not (likelihood.has_marginals or likelihood.variances_suffice)
        mean, covariance = la.functional(x, diagonal=not needs_covariance)
        return number_columns(likelihood, mean, covariance, targets)
    if likelihood.activation is None:
        mean, covariance = la.functional(x)
        uncertainty = uncertainty_of_draws([likelihood], [gaussian_draws(mean, covariance)])
        return _unknown_scores(len(mean)) | {
            "log_probs": _log_probs(likelihood.predictive(mean, covariance)),
            "aleatoric": uncertainty.aleatoric,
            "mutual_information": uncertainty.epistemic,
        }
    has_covariance = network_outputs(la.model, take(x, slice(1))).shape[1] <= MOST_OUTPUTS
    mean, covariance = la.functional(x, diagonal=not has_covariance)
    link = la.link or links.default_link(la.likelihood, mean.shape)
    predictive: Any = links.predictive(la.likelihood, link, mean, covariance)
    per_label = getattr(predictive, "base_dist", predictive)
    log_probs = per_label.logits.reshape(mean.shape).double().cpu()
    # The link divides the logits by its temperature, and scores are those of the divided logits.
    mean, covariance = links.tempered_moments(link, mean.double(), covariance.double())
    predictions = _unknown_scores(len(mean))
    if has_covariance:
        predictions |= _posterior_scores(la, mean, covariance)
    else:
        predictions["variance"] = covariance.mean(1).cpu()
    return {"log_probs": log_probs, **predictions}


def _posterior_scores(
    la: Laplace, mean: Float[Tensor, "n outputs"], covariance: Float[Tensor, "n outputs outputs"]
) -> Predictions:
    """Scores of Gaussian logits; entropies at the Sobol points that links take."""
    uncertainty = uncertainty_of_draws([la.likelihood], [gaussian_draws(mean, covariance)])
    scores = scores_of_logits(la.likelihood, [DenseOutputs(mean, covariance)])
    return {
        "aleatoric": uncertainty.aleatoric,
        "mutual_information": uncertainty.epistemic,
        **{name: score.cpu() for name, score in scores.items()},
    }


def predict_set(
    loaded: Loaded,
    batches: Batches,
    la: Laplace | None,
    positions: Tensor | None,
    has_labels: bool = True,
) -> tuple[Predictions, float]:
    """Predict a set with a posterior, or with the network itself, in all processes.

    Args:
        loaded: The network and its data, with the noise of its likelihood.
        batches: The set.
        la: The posterior; None for the network itself.
        positions: Positions of the examples that are predicted; None for all.
        has_labels: Whether targets are the true ones, whose log-probabilities are predicted.

    Returns:
        The predictions, and the seconds of the slowest process, without reading data.
    """
    batch_columns: dict[str, list[Tensor]] = {}
    seconds = 0.0
    selected = SelectedBatches(loaded.model, batches, positions, has_labels=has_labels)
    for first, x, y in selected.with_positions():
        start = time.perf_counter()
        targets = y.detach().cpu() if has_labels else None
        if la is None:
            outputs = network_outputs(loaded.model, x)
            batch = network_predictions(outputs, loaded.likelihood, targets)
        else:
            batch = posterior_predictions(la, x, targets)
        seconds += time.perf_counter() - start
        batch["targets"] = y.detach().cpu()
        batch["index"] = torch.arange(first, first + len(y))
        for name, column in batch.items():
            batch_columns.setdefault(name, []).append(column)
    own_predictions = {name: torch.cat(columns) for name, columns in batch_columns.items()}
    gathered = [columns for columns in process_group().exchange(own_predictions) if columns]
    if not gathered:
        raise ValueError("A data set has no examples. Add examples, or remove the data set.")
    predictions = {name: torch.cat([columns[name] for columns in gathered]) for name in gathered[0]}
    order = predictions["index"].argsort()
    predictions = {name: column[order] for name, column in predictions.items()}
    if positions is not None:
        predictions["index"] = positions
    return predictions, max(process_group().exchange(seconds))


def scaled_by_temperature(
    predictions: Predictions, temperature: float, likelihood: Likelihood
) -> Predictions:
    """Divide the network's logits by a temperature, and remove its scores."""
    log_probs = predictions["log_probs"].double() / temperature
    if likelihood.activation == "softmax":
        log_probs = log_probs.log_softmax(1)
    return predictions | {"log_probs": log_probs} | _unknown_scores(len(log_probs))


def recalibrated(
    predictions: Predictions, recalibration: Recalibration, likelihood: Likelihood
) -> Predictions:
    """Apply a map to the network's logits, and remove its scores."""
    log_probs = recalibration(network_logits(predictions))
    if likelihood.activation == "softmax":
        log_probs = log_probs.log_softmax(1)
    return predictions | {"log_probs": log_probs} | _unknown_scores(len(log_probs))


def network_logits(predictions: Predictions) -> Float[Tensor, "n outputs"]:
    """Return the logits of a network's predictions, whose log-probabilities may be of a softmax."""
    log_probs = predictions["log_probs"].double()
    if predictions["energy"].isnan().all():
        return log_probs
    # The energy is minus the logarithm of the sum that the softmax divides by.
    return log_probs - predictions["energy"].double().unsqueeze(1)


def mean_of_members(members: Sequence[Predictions], likelihood: Likelihood) -> Predictions:
    """Average several predictives; of numbers, only the mean and the variance.

    The mutual information is that of the label with member and parameters together; other scores
    of single posteriors are not known.
    """
    columns = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    shared = {name: members[0][name] for name in ("targets", "index")}
    if likelihood.predicts_numbers:
        return shared | _mean_of_numbers(columns)
    log_probs = mean_logits(columns["log_probs"], exclusive=likelihood.activation != "sigmoid")
    total = entropy(log_probs, likelihood)
    entropies = [entropy(member, likelihood) for member in columns["log_probs"]]
    mean_entropy = torch.stack(entropies).mean(0)
    # The chain rule: label and member, and given the member its parameters.
    between_members = (total - mean_entropy).clamp(min=0)
    within_members = columns["mutual_information"].nan_to_num(0).mean(0)
    scores = {
        "aleatoric": columns["aleatoric"].mean(0),
        "mutual_information": between_members + within_members,
    }
    return shared | {"log_probs": log_probs} | _unknown_scores(len(total)) | scores


def _mean_of_numbers(columns: Mapping[str, Tensor]) -> Predictions:
    """Columns of the mixture of several predictives, `[members, n, C]`.

    Its intervals are not those of a member, so they are left out.
    """
    variance_of_means = columns["mean"].var(0, unbiased=False)
    mixture = {"mean": columns["mean"].mean(0)}
    for name in ("standard_deviation", "epistemic"):
        mixture[name] = (columns[name].square().mean(0) + variance_of_means).sqrt()
    if "log_prob" in columns:
        log_probs = columns["log_prob"]
        mixture["log_prob"] = log_probs.logsumexp(0) - math.log(len(log_probs))
    return mixture


def entropy(log_probs: Tensor, likelihood: Likelihood) -> Float[Tensor, " n"]:
    """Compute the entropy of the label, or of all labels together, in nats."""
    probs = probabilities(log_probs, likelihood)
    return label_entropy(probs) if likelihood.targets == "labels" else metrics.entropy(probs)


def columns_to_write(
    predictions: Predictions, likelihood: Likelihood, has_labels: bool
) -> Predictions:
    """Return the columns of `predictions/METHOD/SET.parquet`."""
    columns = {"index": predictions["index"]}
    scores = {
        name: column
        for name, column in predictions.items()
        if name not in ("index", "targets", "log_probs")
    }
    if likelihood.predicts_numbers:
        if has_labels:
            shape = predictions["mean"].shape
            columns["target"] = predictions["targets"].double().reshape(shape)
        return {name: _squeezed(column) for name, column in {**columns, **scores}.items()}
    probs = probabilities(predictions["log_probs"], likelihood)
    if has_labels:
        columns["label"] = labels_like(probs, predictions["targets"], likelihood)
    columns["probs"] = probs
    columns["entropy"] = entropy(predictions["log_probs"], likelihood)
    return {**columns, **scores}


def probabilities(
    log_probs: Float[Tensor, "n outputs"], likelihood: Likelihood
) -> Float[Tensor, "n classes"]:
    """Return the probabilities of all classes, `[n, C]`, also for a single logit."""
    if likelihood.activation != "sigmoid":
        return log_probs.exp()
    if likelihood.targets == "class":
        return torch.cat([-log_probs, log_probs], 1).sigmoid()
    return log_probs.sigmoid()


def labels_like(
    probs: Float[Tensor, "n classes"], targets: Tensor, likelihood: Likelihood
) -> Integer[Tensor, "n *labels"]:
    """Return the labels that belong to probabilities: one per example, or one per probability."""
    shape = probs.shape if likelihood.targets == "labels" else probs.shape[:1]
    return targets.long().reshape(shape)


def _squeezed(values: Tensor) -> Tensor:
    """Values `[n, 1]` as `[n]`."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
