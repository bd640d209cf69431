"""Metrics of what methods predicted, with intervals, and paired differences between methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias import metrics

Table = Mapping[str, Tensor]
_LEVEL = 1.959963984540054


def rows_of_set(method: str, name: str, table: Table, task: str) -> list[dict[str, Any]]:
    """The metrics of one method on a labelled set.

    Args:
        method: Its key.
        name: The set's.
        table: Its predictions.
        task: As in `Loaded`.
    """
    found = []
    for metric, per_example in _per_example(table, task).items():
        mean = per_example.mean().item()
        half = _LEVEL * per_example.std().item() / len(per_example) ** 0.5
        found.append(_row(method, name, metric, mean, mean - half, mean + half))
    for metric, function in _of_all(task).items():
        found.append(_row(method, name, metric, function(table), None, None))
    return found


def _row(
    method: str, name: str, metric: str, value: float, low: float | None, high: float | None
) -> dict[str, Any]:
    row = {"method": method, "set": name, "metric": metric}
    return row | {"value": value, "low": low, "high": high}


def _per_example(table: Table, task: str) -> dict[str, Tensor]:
    if task == "regression":
        error = table["target"] - table["mean"]
        normal = torch.distributions.Normal(table["mean"], table["standard_deviation"])
        return {
            "nll": _flat(-normal.log_prob(table["target"])),
            "squared_error": _flat(error.square()),
        }
    probs, labels = table["probs"], table["label"]
    if task == "multilabel":
        y = labels.double()
        tiny = torch.finfo(torch.float64).tiny
        nll = -(y * probs.clamp_min(tiny).log() + (1 - y) * (1 - probs).clamp_min(tiny).log())
        return {
            "accuracy": ((probs > 0.5) == (y > 0.5)).double().mean(1),
            "nll": nll.sum(1),
            "brier": (probs - y).square().mean(1),
        }
    labels = labels.long()
    true = probs.gather(1, labels[:, None])[:, 0]
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return {
        "accuracy": (probs.argmax(1) == labels).double(),
        "nll": -true.clamp_min(torch.finfo(torch.float64).tiny).log(),
        "brier": (probs - one_hot).square().sum(1),
    }


def _flat(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.sum(1)


def _of_all(task: str) -> dict[str, Callable[[Table], float]]:
    if task in ("regression", "multilabel"):
        return {}
    return {"ece": lambda table: metrics.ece(table["probs"], table["label"].long()).item()}


def ood_rows(method: str, name: str, test: Table, ood: Table) -> list[dict[str, Any]]:
    """How well each score of a method tells an OOD set from the test set."""
    found = []
    inside, outside = scores_of(test), scores_of(ood)
    for score in inside:
        for metric, function in (
            ("auroc", metrics.auroc),
            ("aupr_out", metrics.aupr),
            ("fpr95", metrics.fpr95),
        ):
            value = function(inside[score], outside[score]).item()
            found.append(_row(method, name, metric, value, None, None) | {"score": score})
    return found


def scores_of(table: Table) -> dict[str, Tensor]:
    """What tells that an example is unlike the training data, higher where it is more so."""
    scores = {}
    if "probs" in table:
        scores["entropy"] = table["entropy"]
        scores["max_probability"] = 1 - table["probs"].max(1).values
    for name, column in (("mutual_information",) * 2, ("variance",) * 2, ("variance", "epistemic")):
        if column in table and not bool(table[column].isnan().any()):
            scores[name] = _flat(table[column])
    return scores


def difference_rows(
    method: str, reference: str, name: str, ours: Table, theirs: Table, task: str
) -> list[dict[str, Any]]:
    """One method less another on the same examples, paired."""
    found = []
    mine, other = _per_example(ours, task), _per_example(theirs, task)
    for metric in mine:
        difference = mine[metric] - other[metric]
        mean = difference.mean().item()
        half = _LEVEL * difference.std().item() / len(difference) ** 0.5
        row = _row(method, name, metric, mean, mean - half, mean + half)
        found.append(row | {"reference": reference, "num_examples": len(difference)})
    return found


def common(ours: Table, theirs: Table) -> tuple[Table, Table]:
    """The rows of both tables that are of the same examples, in one order."""
    import numpy as np

    _, a, b = np.intersect1d(
        ours["index"].numpy(), theirs["index"].numpy(), assume_unique=True, return_indices=True
    )
    return _some(ours, a), _some(theirs, b)


def _some(table: Table, positions: Sequence[int]) -> Table:
    at = torch.as_tensor(positions, dtype=torch.long)
    return {name: column[at] for name, column in table.items()}
