"""Fit, tune and thin posteriors of a loaded network."""

import math
from pathlib import Path

import torch
from torch import Tensor

from laplace_debias.assessment.labelled import labelled_report
from laplace_debias.assessment.methods import PosteriorChoice
from laplace_debias.assessment.numbers import number_predictions
from laplace_debias.assessment.predicting import (
    network_classes,
    network_outputs,
    selected_batches,
)
from laplace_debias.assessment.predictions import labels_like, probabilities
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_reader import BatchReader
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import join
from laplace_debias.curvature.structures import STRUCTURES
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.fitting.modes import MODES
from laplace_debias.metrics.intervals import normal_quantile
from laplace_debias.runs.records import MetricValue, Sweep, SweepPoint, TrainingRecord
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import share
from laplace_debias.system.ranks import alone

_SELECTIONS = ("all", "weights", "supported", "last_layer")
TRAINING_EXAMPLES = 1000
"""The number of training examples on which the network itself is evaluated."""
_THINNING_EXAMPLES = 32
"""The number of validation examples on which thinning chooses directions and measures its error."""
_THINNING_ERROR = 1e-3
"""The largest relative error that the removal of directions may cause in a standard deviation."""


def fitted_posterior(
    loaded: Loaded, choice: PosteriorChoice | Path, seed: int, resume: Path
) -> Laplace:
    """Fit a posterior to the training examples, or read it from a file."""
    if isinstance(choice, Path):
        return loaded.posterior(choice)
    names = [name.strip() for name in choice.params.split(",")]
    la = Laplace(
        loaded.model,
        loaded.likelihood,
        curvature=choice.curvature,
        params=choice.params if choice.params in _SELECTIONS else names,
        fisher=choice.fisher,
        joint=choice.joint,
        sharing=choice.sharing,
    )
    batches = loaded.train
    if choice.num_read is not None:
        batches = _first_batches(loaded, choice.num_read, MODES[choice.mode].num_first_batches)
    return la.fit(
        share(batches, loaded.model),
        choice.mode,
        num_data=loaded.num_train,
        generator=torch.Generator().manual_seed(seed),
        resume=None if choice.mode == "auto" else resume,
    )


def _first_batches(loaded: Loaded, num_examples: int, num_batches: int | None) -> Batches:
    """Return the first training examples; the data must be in an order that mixes the classes.

    They are divided into `num_batches` batches of equal size, or kept in the loader's own batches
    if `num_batches` is None.
    """
    num_missing = num_examples
    read = BatchReader(loaded.model)
    batches = []
    for loaded_batch in loaded.train:
        batch = read(loaded_batch).take(slice(num_missing))
        batches.append(batch)
        num_missing -= batch.num_examples
        if not num_missing:
            break
    if num_batches is not None:
        joined = Batch.joined(batches)
        size = joined.num_examples // num_batches
        batches = [
            joined.take(slice(number * size, (number + 1) * size)) for number in range(num_batches)
        ]
    return [(batch.inputs, batch.targets) for batch in batches]


def tune_posterior(
    la: Laplace, choice: PosteriorChoice | Path, validation: Batches | None
) -> tuple[Sweep, tuple[str, ...]]:
    """Tune the prior precision of a posterior and, for a regression, the noise.

    The criterion is the negative log-likelihood of the validation examples. If there are no
    validation examples, the marginal likelihood is used; if it has no optimum, nothing is tuned. A
    posterior that was read from a file is not changed.

    Returns:
        The record of the search, and notes for the reader.
    """
    sweep = Sweep(chosen=la.prior_precision.tolist())
    if isinstance(choice, Path):
        return sweep, ()
    # With the empirical Fisher, there is no closed form for the best noise, so it is not tuned.
    with_noise = la.likelihood.has_sigma and choice.fisher != "empirical"
    if validation is not None:
        tuning = la.tune(validation, sigma=with_noise)
    else:
        try:
            tuning = la.tune_evidence(sigma=with_noise)
        except ValueError as error:
            return sweep, (f"The prior precision was not tuned, so it is 1. {error}",)
    for row in tuning.table:
        value = row[tuning.metric]
        half_width = normal_quantile(0.95) * row.get("standard_error", math.nan)
        point = SweepPoint(
            row["prior_precision"], value, low=value - half_width, high=value + half_width
        )
        sweep.rows.append(point)
    sweep.metric = tuning.metric
    sweep.chosen = tuning.prior_precision
    sweep.flat = None if tuning.flat is None else list(tuning.flat)
    sweep.sigma = tuning.sigma
    return sweep, tuning.notes


def thin_posterior(la: Laplace, choice: PosteriorChoice | Path, loaded: Loaded) -> tuple[str, ...]:
    """Thin a posterior over more than the last layer, so that it predicts faster.

    Returns:
        Notes for the reader.
    """
    if isinstance(choice, Path) or choice.params == "last_layer" or loaded.validation is None:
        return ()
    if not STRUCTURES[choice.curvature].has_factors:
        return ()
    # All processes must thin with the same inputs, so each of them reads these inputs itself.
    with alone():
        positions = torch.arange(_THINNING_EXAMPLES)
        batches = selected_batches(loaded.model, loaded.validation, positions)
        inputs = [batch.inputs for batch in batches]
    return (la.thin(join(inputs), _THINNING_ERROR).message,)


def training_record(loaded: Loaded) -> TrainingRecord:
    """Evaluate the network on the first `TRAINING_EXAMPLES` of its own training examples."""
    all_outputs = []
    all_targets = []
    with alone():
        positions = torch.arange(TRAINING_EXAMPLES)
        for batch in selected_batches(loaded.model, loaded.train, positions):
            all_outputs.append(network_outputs(loaded.model, batch.inputs))
            all_targets.append(batch.targets.cpu())
    outputs = torch.cat(all_outputs)
    targets = torch.cat(all_targets)
    if loaded.likelihood.predicts_numbers:
        return _record_of_numbers(outputs, targets, loaded.likelihood)
    return _record_of_classes(outputs, targets, loaded.likelihood)


def _record_of_numbers(outputs: Tensor, targets: Tensor, likelihood: Likelihood) -> TrainingRecord:
    """Compute the fraction of the targets' variance that the network explains."""
    mean = number_predictions(likelihood, outputs, None, None).mean
    targets = targets.double().reshape(mean.shape)
    squared_error = (mean - targets).square().mean(0)
    variance = (targets - targets.mean(0)).square().mean(0)
    # Leave out constant targets, whose computed variance is only rounding error.
    rounding = 64 * torch.finfo(torch.float64).eps
    varies = variance > rounding**2 * targets.square().mean(0)
    if not varies.any():
        return TrainingRecord(len(targets), [])
    explained = (1 - squared_error[varies] / variance[varies]).mean().item()
    return TrainingRecord(len(targets), [MetricValue(metric="explained", value=explained)])


def _record_of_classes(outputs: Tensor, targets: Tensor, likelihood: Likelihood) -> TrainingRecord:
    """Compute the metrics that reveal whether the classes are those of the network."""
    log_probs = network_classes(outputs, likelihood).log_probs
    probs = probabilities(log_probs, likelihood)
    columns = {"probs": probs, "label": labels_like(probs, targets, likelihood)}
    rows = [
        MetricValue(**row)
        for row in labelled_report(columns, likelihood).rows()
        if row["metric"] in ("accuracy", "nll", "overconfidence")
    ]
    num_classes = probs.shape[1]
    uniform_nll = math.log(num_classes)
    if likelihood.targets == "labels":
        uniform_nll = num_classes * math.log(2)
    return TrainingRecord(len(targets), rows, num_classes, uniform_nll)
