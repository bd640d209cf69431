"""Test examples that are worth looking at: uncertain predictions and confident mistakes."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment.predicting import selected_batches
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.metrics.definitions import per_example
from laplace_debias.runs.folder import RunFolder
from laplace_debias.runs.records import ExampleGroups, ExampleRecord
from laplace_debias.sources.loaded import Loaded

NUM_EXAMPLES = 12
NUM_CLASSES = 5
_MOST_NUMBERS = 32


def write_examples(
    folder: RunFolder, loaded: Loaded, tables: Mapping[str, Mapping[str, Tensor]], network: str
) -> None:
    """Write `examples.json`, and the images of the examples if the inputs are images."""
    groups = chosen_examples(tables, network, loaded.likelihood)
    records = [*groups.most_uncertain, *groups.most_confidently_wrong]
    indices = sorted({record.index for record in records})
    positions = torch.tensor(indices, dtype=torch.long)
    batches = selected_batches(loaded.model, loaded.test, positions)
    rows = [row for batch in batches for row in tensors_of(batch.inputs)[0].cpu()]
    inputs = dict(zip(indices, rows, strict=True))
    if loaded.picture is not None:
        for index, x in inputs.items():
            folder.write_example_image(index, loaded.picture(x).cpu().numpy())
    else:
        for record in records:
            record.inputs = inputs[record.index].flatten()[:_MOST_NUMBERS].tolist()
    if loaded.row is not None:
        for record in records:
            columns = loaded.row(inputs[record.index])
            record.columns = dict(islice(columns.items(), _MOST_NUMBERS))
    folder.write_examples(groups)


def chosen_examples(
    tables: Mapping[str, Mapping[str, Tensor]], network: str, likelihood: Likelihood
) -> ExampleGroups:
    """Choose the examples, and collect every method's predictions of them.

    The most uncertain examples have the largest entropy (for a regression, the largest standard
    deviation) under the first posterior. The most confidently wrong examples are the network's
    mistakes with the largest probability (for a regression, the largest errors in units of the
    standard deviation).
    """
    # Recognise posteriors by this column, because only they have an uncertainty of the parameters.
    epistemic = "variance"
    uncertainty = "entropy"
    if likelihood.predicts_numbers:
        epistemic = "epistemic"
        uncertainty = "standard_deviation"
    posteriors = (key for key, table in tables.items() if (table[epistemic] > 0).any())
    posterior = next(posteriors, network)
    uncertainties = per_example(tables[posterior][uncertainty])
    return ExampleGroups(
        most_uncertain=_highest(tables, posterior, uncertainties, likelihood),
        most_confidently_wrong=_highest(
            tables, network, _confidence_in_mistakes(tables[network], likelihood), likelihood
        ),
        chosen_by={"most_uncertain": posterior, "most_confidently_wrong": network},
    )


def _highest(
    tables: Mapping[str, Mapping[str, Tensor]], method: str, scores: Tensor, likelihood: Likelihood
) -> list[ExampleRecord]:
    """Return the examples with the highest scores; scores of minus infinity are left out."""
    # Examples with equal scores keep the order of the set.
    order = scores.argsort(descending=True, stable=True)[:NUM_EXAMPLES]
    indices = [int(tables[method]["index"][i]) for i in order if scores[i] > -torch.inf]
    return [_record(tables, index, likelihood) for index in indices]


def _confidence_in_mistakes(table: Mapping[str, Tensor], likelihood: Likelihood) -> Tensor:
    """Compute the confidence of wrong predictions; minus infinity for correct predictions."""
    if likelihood.predicts_numbers:
        errors = (table["target"] - table["mean"]) / table["standard_deviation"]
        return errors.abs().reshape(len(errors), -1).amax(1)
    probs = table["probs"]
    labels = table["label"].long()
    if likelihood.targets == "labels":
        confidence = torch.maximum(probs, 1 - probs)
        return confidence.where((probs > 0.5) != labels, -torch.inf).amax(1)
    likeliest = probs.max(1)
    return likeliest.values.where(likeliest.indices != labels, -torch.inf)


def _record(
    tables: Mapping[str, Mapping[str, Tensor]], index: int, likelihood: Likelihood
) -> ExampleRecord:
    """Return the record of an example, with the predictions of all methods that have any."""
    record = ExampleRecord(index)
    for key, table in tables.items():
        if index not in table["index"]:
            continue
        row = int(torch.searchsorted(table["index"], index))
        if likelihood.predicts_numbers:
            record.target = table["target"][row].tolist()
            record.predictions[key] = {
                name: table[name][row].tolist() for name in ("mean", "standard_deviation")
            }
        else:
            record.label = table["label"][row].tolist()
            record.probs[key] = _likeliest(table["probs"][row])
    return record


def _likeliest(probs: Tensor) -> list[Any]:
    """Return the most probable classes as pairs of class and probability."""
    top = probs.topk(min(NUM_CLASSES, len(probs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(pair) for pair in pairs]
