"""The first stages of a run: fitting posteriors and temperatures, and then predicting.

Each stage reads the results that the run's folder already contains, and computes and writes only
the missing ones.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.assessment.methods import Method, PosteriorChoice
from laplace_debias.assessment.posteriors import (
    fitted_posterior,
    thin_posterior,
    training_record,
    tune_posterior,
)
from laplace_debias.assessment.predicting import (
    posterior_predictions,
    predict_set,
    selected_batches,
    subset_indices,
)
from laplace_debias.assessment.predictions import (
    ClassPredictions,
    NumberPredictions,
    PredictedSet,
)
from laplace_debias.assessment.recalibration import Recalibration, fit_recalibration
from laplace_debias.assessment.run import Run
from laplace_debias.assessment.temperature import BOUNDS, fit_temperature
from laplace_debias.curvature.data.batches import Batches, total_size
from laplace_debias.curvature.fits.checkpoint import states_kept
from laplace_debias.curvature.network.inputs import num_examples, take
from laplace_debias.laplace import Laplace
from laplace_debias.runs.records import PredictionsSummary
from laplace_debias.runs.wording import duration
from laplace_debias.sources.changed import Changed
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, process_group
from laplace_debias.system.shown import counted


@dataclass(frozen=True, eq=False)
class Member:
    """A network with its data and the posterior or recalibration that was fitted for it."""

    loaded: Loaded
    posterior: Laplace | None
    recalibration: Recalibration | None = None


ANNOUNCED_SECONDS = 60.0
"""If a step is expected to take at least this many seconds, the expected time is printed first."""
AFFORDED_SECONDS = 600.0
"""The time budget in seconds for a posterior over more than the last layer, which limits the number
of examples that it predicts."""
FEWEST_EXAMPLES = 100
"""At least this many examples of each set are predicted, however long it takes."""
_MEASURED_SECONDS = 2.0
"""Once a timed prediction takes longer than this many seconds, no more examples are timed."""
_PASSES_OF_TUNING = 3
"""The cost of tuning, as a multiple of the cost of predicting the validation examples. Tuning makes
a single pass, in which it evaluates a grid. On the All-CNN-C, this costs 1.6 (last layer) to 4.2
times (all parameters) as much as predicting."""


def fit(run: Run) -> dict[str, list[Member]]:
    """Fit the noise, the posteriors and the temperature that the methods need."""
    members: dict[str, list[Member]] = {}
    with run.stage("fit"):
        likelihood = run.loaded.likelihood
        if likelihood.has_sigma and likelihood.is_assumed:
            run.record.sigma = _noise(run.loaded)
            run.write()
        if run.record.training is None:
            run.record.training = training_record(run.loaded)
            run.write()
        for method in run.methods:
            models = [run.loaded.model]
            if method.uses_all_checkpoints:
                models += run.loaded.further_models
            members[method.key] = [
                Member(replace(run.loaded, model=model), _posterior(run, method, model, number))
                for number, model in enumerate(models, start=1)
            ]
            if method.has_temperature and run.method_record(method).temperature is None:
                _find_temperature(run, method)
            if method.recalibration is not None:
                (member,) = members[method.key]
                recalibration = _recalibration(run, method)
                members[method.key] = [replace(member, recalibration=recalibration)]
            run.write()
    return members


def _noise(loaded: Loaded) -> float | list[float]:
    """Estimate the noise as the RMS residual on the validation, or else the training examples.

    If there are several outputs, there is one number per output.
    """
    data = loaded.train if loaded.validation is None else loaded.validation
    predicted = predict_set(loaded, data)
    assert isinstance(predicted.predictions, NumberPredictions)
    mean = predicted.predictions.mean
    residuals = predicted.targets.double().reshape(mean.shape) - mean
    num_outputs = residuals.shape[1]
    sigmas = [math.sqrt(column.square().mean().item()) for column in residuals.unbind(1)]
    for number, sigma in enumerate(sigmas, start=1):
        if sigma == 0:
            output = "" if num_outputs == 1 else f" of output {number} of {num_outputs}"
            raise ValueError(
                f"The network predicts every target{output} exactly, so the noise cannot be "
                "estimated. Check that the targets are not among the inputs."
            )
    return sigmas[0] if num_outputs == 1 else sigmas


def _posterior(run: Run, method: Method, model: nn.Module, number: int) -> Laplace | None:
    """Return a checkpoint's posterior, fitted if it has no file, or None for the network."""
    choice = method.posterior
    if choice is None:
        return None
    name = _posterior_name(method, number)
    path = run.folder.posterior(name)
    if not process_group().from_rank(path.exists(), 0):
        with states_kept():
            _make_posterior(run, method, choice, model, number)
    # Read the posterior from its file even if it was just fitted, so that a resumed run gives the
    # same numbers as an uninterrupted one.
    la = run.loaded.posterior(path, model)
    record = run.method_record(method)
    if not method.uses_all_checkpoints:
        record.prior_precision = la.prior_precision.tolist()
        record.link = None if la.link is None else str(la.link)
    record.prior_precision_at_limit = run.folder.read_sweep(name).is_at_limit
    record.bytes = number * path.stat().st_size
    return la


def _posterior_name(method: Method, number: int) -> str:
    """Return the name of a checkpoint's posterior, under which its files are written."""
    if method.uses_all_checkpoints:
        return f"{method.key}-{number}"
    return method.key


def _make_posterior(
    run: Run, method: Method, choice: PosteriorChoice | Path, model: nn.Module, number: int
) -> None:
    """Fit and tune a checkpoint's posterior, and write it and the record of the search to files."""
    loaded = replace(run.loaded, model=model)
    name = _posterior_name(method, number)
    verb = "Reading" if isinstance(choice, Path) else "Fitting"
    checkpoint = f", checkpoint {number}" if method.uses_all_checkpoints else ""
    run.log(f"{verb} {method.label}{checkpoint}")
    with run.stage("fit", method):
        resume = run.folder.state / f"{name}.fit"
        la = fitted_posterior(loaded, choice, run.seed, resume)
    _choose_examples(run, la, method)
    with run.stage("tune", method):
        validation = _validation_batches(run, method, loaded)
        sweep, tuning_notes = tune_posterior(la, choice, validation)
        for note in tuning_notes:
            run.note(f"{method.label} (posteriors/{name}.safetensors): {note}")
        for note in thin_posterior(la, choice, loaded):
            run.note(f"{method.label}: {note}")
        if isinstance(choice, PosteriorChoice) and choice.mode == "auto":
            run.note(f"{method.label}: {la.fit_report}")
        run.folder.write_sweep(name, sweep)
    # Write this file last, so that its existence shows that the other files are complete.
    path = run.folder.posterior(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    la.save(path, own_likelihood=la.likelihood.name is None)


def _validation_batches(run: Run, method: Method, loaded: Loaded) -> Batches | None:
    """Return the validation examples for tuning, limited to the number predicted per set.

    The result can be read only once.
    """
    if loaded.validation is None:
        return None
    positions = None
    limit = run.method_record(method).examples
    if limit is not None:
        own_batches = selected_batches(loaded.model, loaded.validation)
        own_size = sum(batch.num_examples for batch in own_batches)
        positions = subset_indices(sum(process_group().exchange(own_size)), limit, run.seed)
    selected = selected_batches(loaded.model, loaded.validation, positions)
    return ((batch.inputs, batch.targets) for batch in selected)


def _choose_examples(run: Run, la: Laplace, method: Method) -> None:
    """Choose how many examples to predict unless this is set, and print the expected time."""
    sets: list[Batches | None] = list(run.sets.values())
    is_last_layer = False
    if isinstance(method.posterior, PosteriorChoice):
        # A fitted posterior is also tuned on the validation examples; a file is not.
        sets += [run.loaded.validation] * _PASSES_OF_TUNING
        is_last_layer = method.posterior.params == "last_layer"
    sizes = [size_of(batches) for batches in sets if batches is not None]
    own_seconds = seconds_per_example(la, run.loaded) / process_group().size
    seconds = process_group().from_rank(own_seconds, 0)
    examples = method.examples
    if examples is None and not is_last_layer:
        examples = affordable_examples(sizes, AFFORDED_SECONDS / seconds)
    run.method_record(method).examples = examples
    num_chosen = num_predictions(sizes, examples or math.inf)
    if ANNOUNCED_SECONDS <= seconds * num_chosen < math.inf:
        run.log(
            f"{method.label}: tuning and predicting ({num_chosen:,} predictions) will take about "
            f"{duration(seconds * num_chosen)}. To reduce the time, pass fewer --examples."
        )
    if examples != method.examples:
        num_all = sum(sizes)
        time_of_all = ""
        if num_all < math.inf:
            time_of_all = f" All examples would take about {duration(seconds * num_all)}."
        run.note(
            f"{method.label} predicts only {examples:,} randomly chosen examples of each set, to "
            f"limit the time to about {duration(AFFORDED_SECONDS)}.{time_of_all} To change the "
            "number, pass --examples."
        )


def size_of(batches: Batches) -> float:
    """Return the number of examples of a set, or infinity if it is unknown."""
    source: Any = batches.source if isinstance(batches, Changed) else batches
    if isinstance(source, DataLoader) and source.batch_size is not None:
        return len(source.dataset)  # type: ignore[arg-type]
    size = total_size(source) if isinstance(source, Sequence) else None
    return math.inf if size is None else size


def num_predictions(sizes: Sequence[float], examples: float) -> float:
    """Count the predictions for sets of these sizes, with at most `examples` per set."""
    return sum(min(size, examples) for size in sizes)


def affordable_examples(sizes: Sequence[float], limit: float) -> int | None:
    """Return the limit per set that keeps the total number of predictions within `limit`.

    It is at least `FEWEST_EXAMPLES`, and None if no limit is needed.
    """
    if sum(sizes) <= limit:
        return None
    counts = range(int(limit) + 2)
    largest = bisect_right(counts, limit, key=partial(num_predictions, sizes)) - 1
    return max(FEWEST_EXAMPLES, largest)


def _find_temperature(run: Run, method: Method) -> None:
    """Fit the network's temperature on the validation examples."""
    assert run.loaded.validation is not None
    with run.stage("tune", method):
        predicted = predict_set(run.loaded, run.loaded.validation)
        assert isinstance(predicted.predictions, ClassPredictions)
        temperature = fit_temperature(
            predicted.predictions.log_probs, predicted.targets, run.loaded.likelihood
        )
        num_validation = len(predicted.targets)
        run.method_record(method).temperature = temperature
        run.method_record(method).num_validation = num_validation
    if temperature in BOUNDS:
        run.note(
            f"The temperature of {method.label} is {temperature:g}, the end of the search range. "
            f"It was fitted to {counted(num_validation, 'validation example')}. They are too few "
            "or too easy, or the network is no better than chance."
        )


def _recalibration(run: Run, method: Method) -> Recalibration:
    """Fit a method's recalibration of the network's logits on the validation examples."""
    assert run.loaded.validation is not None
    assert method.recalibration is not None
    with run.stage("tune", method):
        predicted = predict_set(run.loaded, run.loaded.validation)
        assert isinstance(predicted.predictions, ClassPredictions)
        assert predicted.predictions.logits is not None
        return fit_recalibration(
            method.recalibration, predicted.predictions.logits, predicted.targets
        )


def seconds_per_example(la: Laplace, loaded: Loaded) -> float:
    """Measure the prediction time per example, in seconds, on the first test batch.

    If the batch takes long, only its first examples are predicted.
    """
    with alone():
        x = next(selected_batches(loaded.model, loaded.test)).inputs
    # Predict once before measuring, because the first call also chooses algorithms and allocates
    # memory.
    posterior_predictions(la, take(x, slice(1)))
    size = 1
    largest = num_examples(x)
    while True:
        start = time.perf_counter()
        posterior_predictions(la, take(x, slice(size)))
        seconds = time.perf_counter() - start
        if size == largest or seconds > _MEASURED_SECONDS:
            return seconds / size
        size = min(4 * size, largest)


def predict(run: Run, members: Mapping[str, Sequence[Member]]) -> None:
    """Write the missing predictions of every method for every set."""
    for dataset in run.record.sets:
        with run.stage("predict"):
            by_network: PredictedSet | None = None
            for method in run.methods:
                if run.summary(method, dataset.name) is not None:
                    continue
                run.log(f"Predicting {dataset.name}: {method.label}")
                is_network = method.posterior is None and not method.uses_all_checkpoints
                if is_network and by_network is not None:
                    predicted = by_network
                else:
                    predicted = _raw_predictions(run, method, dataset.name, members[method.key])
                if is_network:
                    by_network = predicted
                _write_predictions(
                    run, method, dataset.name, predicted, members[method.key][0].recalibration
                )
            summary = run.summary(run.methods[0], dataset.name)
            assert summary is not None
            dataset.num_examples = summary.num_examples


def _write_predictions(
    run: Run,
    method: Method,
    set_name: str,
    predicted: PredictedSet,
    recalibration: Recalibration | None,
) -> None:
    """Apply a method's recalibration or temperature, if any, and write its predictions."""
    likelihood = run.loaded.likelihood
    predictions = predicted.predictions
    if recalibration is not None:
        assert isinstance(predictions, ClassPredictions)
        predictions = predictions.recalibrated(recalibration, likelihood)
    temperature = run.method_record(method).temperature
    if temperature is not None:
        assert isinstance(predictions, ClassPredictions)
        predictions = predictions.scaled(temperature, likelihood)
    has_labels = set_name not in run.loaded.ood
    columns = {
        "index": predicted.index,
        **predictions.columns(likelihood, predicted.targets if has_labels else None),
    }
    run.folder.write_predictions(
        method.key,
        set_name,
        {name: column.numpy() for name, column in columns.items()},
        PredictionsSummary(len(predicted.index), predicted.seconds),
    )


def _raw_predictions(
    run: Run, method: Method, set_name: str, members: Sequence[Member]
) -> PredictedSet:
    """Return a method's predictions for a set before its recalibration or temperature."""
    positions = None
    limit = run.method_record(method).examples
    if limit is not None:
        # The table of the first method, the network, contains all examples and therefore their
        # number.
        summary = run.summary(run.methods[0], set_name)
        assert summary is not None
        positions = subset_indices(summary.num_examples, limit, run.seed)
    batches = run.sets[set_name]
    has_labels = set_name not in run.loaded.ood
    results = [
        predict_set(member.loaded, batches, member.posterior, positions, has_labels=has_labels)
        for member in members
    ]
    if method.uses_all_checkpoints:
        return PredictedSet.mean_of(results, run.loaded.likelihood)
    return results[0]
