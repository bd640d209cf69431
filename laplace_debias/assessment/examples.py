"""Test examples that a person should look at: the uncertain, the certain mistakes, the changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment.predictions import Chosen
from laplace_debias.assessment.run_folder import write_json, write_picture
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.sources.loaded import Loaded

NUM_EXAMPLES = 12
NUM_CLASSES = 5
_MOST_NUMBERS = 32


def write_examples(
    folder: Path, loaded: Loaded, tables: Mapping[str, Mapping[str, Tensor]], network: str
) -> None:
    """Write `examples.json`, and the pictures of the examples where inputs are images."""
    found = chosen_examples(tables, network, loaded.task)
    entries = [entry for group in found.values() for entry in group["examples"]]
    wanted = sorted({entry["index"] for entry in entries})
    inputs = _inputs_at(loaded, wanted)
    for entry in entries:
        x = inputs.get(entry["index"])
        if x is not None and loaded.picture is None:
            entry["inputs"] = x.flatten()[:_MOST_NUMBERS].tolist()
        if x is not None and loaded.row is not None:
            entry["columns"] = dict(list(loaded.row(x).items())[:_MOST_NUMBERS])
    if loaded.picture is not None:
        for index, x in inputs.items():
            write_picture(folder / "examples" / f"{index}.png", loaded.picture(x))
    groups = {name: group["examples"] for name, group in found.items()}
    chosen_by = {name: group["method"] for name, group in found.items()}
    write_json(folder / "examples.json", {**groups, "chosen_by": chosen_by})


def chosen_examples(
    tables: Mapping[str, Mapping[str, Tensor]], network: str, task: str
) -> dict[str, dict[str, Any]]:
    """Which examples, and what the methods say of them.

    The posterior that ranks them is the first one: most uncertain by its entropy (of a regression
    its standard deviation), most changed by the total variation distance of its probabilities from
    the network's (the difference of standard deviations). Most confidently wrong is the network:
    by its largest probability among its mistakes (the error in standard deviations).
    """
    others = [key for key, table in tables.items() if _has_posterior(table)]
    ranking = others[0] if others else network
    rankings = {
        "most_uncertain": (ranking, _uncertainty(tables[ranking], task)),
        "most_confidently_wrong": (network, _wrong(tables[network], task)),
    }
    return {
        name: {
            "method": method,
            "examples": [
                _described(tables, index, task) for index in _first(tables[method], scores)
            ],
        }
        for name, (method, scores) in rankings.items()
    }


def _has_posterior(table: Mapping[str, Tensor]) -> bool:
    column = table["variance"] if "variance" in table else table["epistemic"]
    return bool((column > 0).any())


def _first(table: Mapping[str, Tensor], scores: Tensor) -> list[int]:
    """Indices of the largest scores, ties in the order of the set; −∞ is out."""
    order = scores.argsort(descending=True, stable=True)[:NUM_EXAMPLES]
    return [int(table["index"][i]) for i in order if scores[i] > -torch.inf]


def _rows(values: Tensor) -> Tensor:
    return values.unsqueeze(1) if values.ndim == 1 else values


def _uncertainty(table: Mapping[str, Tensor], task: str) -> Tensor:
    if task == "regression":
        return _rows(table["standard_deviation"]).mean(1)
    return table["entropy"]


def _wrong(table: Mapping[str, Tensor], task: str) -> Tensor:
    if task == "regression":
        error = (table["target"] - table["mean"]) / table["standard_deviation"]
        return _rows(error.abs()).amax(1)
    probs, labels = table["probs"], table["label"].long()
    if task == "multilabel":
        chosen = (probs > 0.5).long()
        confidence = torch.maximum(probs, 1 - probs)
        return confidence.where(chosen != labels, -torch.inf).amax(1)
    top = probs.max(1)
    return top.values.where(top.indices != labels, -torch.inf)


def _described(tables: Mapping[str, Mapping[str, Tensor]], index: int, task: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index}
    for key, table in tables.items():
        if index not in table["index"]:
            continue  # Predicted for some examples only.
        at = int(torch.searchsorted(table["index"], index))
        if task == "regression":
            entry["target"] = table["target"][at].tolist()
            values = {name: table[name][at].tolist() for name in ("mean", "standard_deviation")}
            entry.setdefault("predictions", {})[key] = values
            continue
        entry["label"] = table["label"][at].tolist()
        probs = table["probs"][at]
        top = probs.topk(min(NUM_CLASSES, len(probs)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        entry.setdefault("probs", {})[key] = [[label, value] for label, value in pairs]
    return entry


def _inputs_at(loaded: Loaded, wanted: list[int]) -> dict[int, Tensor]:
    """The first input tensor of some test examples."""
    found: dict[int, Tensor] = {}
    if not wanted:
        return found
    positions = torch.tensor(wanted, dtype=torch.long)
    for x, _ in Chosen(loaded.model, loaded.test, positions):
        for row in tensors_of(x)[0].cpu():
            found[wanted[len(found)]] = row
    return found
