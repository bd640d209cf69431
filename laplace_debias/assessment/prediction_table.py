"""Compute the predictions of a posterior as columns of a table."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor
from tqdm import tqdm

from laplace_debias import metrics
from laplace_debias.assessment.numbers import describe_predictive
from laplace_debias.assessment.predicting import (
    in_order,
    posterior_classes,
    posterior_numbers,
    selected_batches,
)
from laplace_debias.assessment.predictions import POSTERIOR_SCORES, probabilities
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.laplace import Laplace
from laplace_debias.laplace.prediction.predictive import NETWORK_METHODS
from laplace_debias.metrics import gaussian_interval
from laplace_debias.metrics.ood import label_entropy
from laplace_debias.sources.loaded import Loaded
from laplace_debias.system.ranks import alone, process_group


def prediction_columns(
    la: Laplace,
    loaded: Loaded,
    batches: Batches,
    *,
    method: str = "glm",
    samples: int | None = None,
    seed: int = 0,
    has_targets: bool = True,
    progress: bool = False,
) -> dict[str, Any]:
    """Predict batches on all processes, and return the columns of the table by name.

    Args:
        la: The posterior.
        loaded: The posterior's network and data.
        batches: Inputs to predict, with targets if `has_targets` is true.
        method: The prediction method. This and `samples` are arguments of `Laplace.predict`.
        samples: Number of draws.
        seed: Seed of the draws.
        has_targets: Whether the batches contain true targets, which are then added as columns.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If there are no inputs.
    """
    generator = Generator(la.mean.device).manual_seed(seed)
    own_tables: list[tuple[int, tuple[dict[str, Tensor], Tensor]]] = []
    reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    takes_part = True
    if method in ("glm-mc", "nn") or samples is not None:
        # Draws depend on the order of all batches, so the first process draws for all of them.
        reading = alone()
        takes_part = process_group().rank == 0
    with reading:
        own_batches: Iterable[Batch] = ()
        if takes_part:
            own_batches = selected_batches(loaded.model, batches, has_labels=has_targets)
        bar = tqdm(own_batches, "predicting", unit="batch", leave=False, disable=not progress)
        for batch in bar:
            columns = _batch_columns(la, loaded, batch.inputs, method, samples, generator)
            columns = {name: column.detach().cpu() for name, column in columns.items()}
            own_tables.append((batch.first_index, (columns, batch.targets.detach().cpu())))
    tables = in_order(own_tables)
    if not tables:
        raise ValueError("There are no inputs to predict. Pass at least one.")
    columns_of_batches, targets_of_batches = zip(*tables, strict=True)
    table: dict[str, Any] = {
        name: torch.cat([columns[name] for columns in columns_of_batches]).numpy()
        for name in columns_of_batches[0]
    }
    if "prediction" in table and loaded.classes is not None:
        table["prediction"] = [loaded.classes[label] for label in table["prediction"]]
    if not has_targets:
        return table
    return _target_columns(torch.cat(targets_of_batches), loaded) | table


def _target_columns(y: Tensor, loaded: Loaded) -> dict[str, Any]:
    """Return the columns of the true targets; classes are replaced by their names."""
    has_classes = loaded.likelihood.targets == "class" and not _has_one_logit(loaded)
    if has_classes and loaded.classes is not None:
        return {"label": [loaded.classes[label] for label in y.tolist()]}
    name = "target" if loaded.likelihood.predicts_numbers else "label"
    return {column: values.numpy() for column, values in _numbered_columns(name, y).items()}


def _batch_columns(
    la: Laplace,
    loaded: Loaded,
    x: Inputs,
    method: str,
    samples: int | None,
    generator: Generator,
) -> dict[str, Tensor]:
    """Compute the columns of a batch: the predictions, and the scores that need a posterior."""
    if loaded.likelihood.predicts_numbers:
        return _number_columns(la, x, method, samples, generator)
    scores: Mapping[str, Tensor] = {}
    if method == "glm" and samples is None:
        predictions = posterior_classes(la, x)
        probs = probabilities(predictions.log_probs, la.likelihood)
        scores = predictions.scores
    else:
        same_draws = generator.clone_state()
        predictive: Any = la.predict(x, method, samples, generator)
        probs = predictive.mean
        if loaded.likelihood.targets == "class":
            probs = predictive.probs
        if _has_one_logit(loaded):
            probs = torch.stack([1 - probs.flatten(), probs.flatten()], 1)
        if method not in NETWORK_METHODS:
            scores = la.uncertainty(x, method, samples, same_draws).scores
    columns = _probability_columns(probs, loaded)
    for name in POSTERIOR_SCORES:
        if name in scores:
            columns[name] = scores[name].flatten()
    return columns


def _has_one_logit(loaded: Loaded) -> bool:
    """Whether the network returns one logit, so the table only has the probability of class 1."""
    return loaded.likelihood.targets == "class" and loaded.likelihood.activation == "sigmoid"


def _probability_columns(probs: Tensor, loaded: Loaded) -> dict[str, Tensor]:
    """Compute the columns of probabilities, the decision and the entropy."""
    if loaded.likelihood.targets == "labels":
        return {**_numbered_columns("probability", probs), "entropy": label_entropy(probs)}
    entropy = metrics.entropy(probs)
    if _has_one_logit(loaded):
        return {"probability": probs[:, 1], "entropy": entropy}
    names = loaded.classes or tuple(map(str, range(probs.shape[-1])))
    by_class = {f"probability_{name}": probs[:, n] for n, name in enumerate(names)}
    return {"prediction": probs.argmax(1), **by_class, "entropy": entropy}


def _number_columns(
    la: Laplace, x: Inputs, method: str, samples: int | None, generator: Generator
) -> dict[str, Tensor]:
    """Compute each target's mean, standard deviations (with and without the noise) and interval.

    If the predictive has no quantiles, the interval is that of a normal distribution.
    """
    if method == "glm" and samples is None:
        predictions = posterior_numbers(la, x)
    else:
        same_draws = generator.clone_state()
        predictive = la.predict(x, method, samples, generator)
        epistemic = None
        if method not in NETWORK_METHODS:
            epistemic = la.uncertainty(x, method, samples, same_draws).epistemic.double().sqrt()
        predictions = describe_predictive(predictive, epistemic)
    mean = predictions.mean
    deviation = predictions.standard_deviation
    lower = predictions.lower
    upper = predictions.upper
    if lower is None or upper is None:
        lower, upper = gaussian_interval(mean, deviation)
    return {
        **_numbered_columns("mean", mean),
        **_numbered_columns("standard_deviation", deviation),
        **_numbered_columns("lower", lower),
        **_numbered_columns("upper", upper),
        **_numbered_columns("epistemic", predictions.epistemic),
    }


def _numbered_columns(name: str, values: Tensor) -> dict[str, Tensor]:
    """Split values `[N]` or `[N, K]` into columns; several columns get numbered names."""
    if values.ndim == 1 or values.shape[1] == 1:
        return {name: values.flatten()}
    return {f"{name}_{number}": values[:, number] for number in range(values.shape[1])}
