"""Test examples that a person should look at: the uncertain, the certain mistakes, the changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.assessment.predictions import Chosen
from laplace_debias.assessment.run_folder import write_json, write_picture
from laplace_debias.curvature.network.inputs import tensors_of
from laplace_debias.metrics.definitions import per_example
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.task import REGRESSIONS

NUM_EXAMPLES = 12
NUM_CLASSES = 5
_MOST_NUMBERS = 32


def write_examples(
    folder: Path, loaded: Loaded, tables: Mapping[str, Mapping[str, Tensor]], network: str
) -> None:
    """Write `examples.json`, and the pictures of the examples where inputs are images."""
    groups, chosen_by = chosen_examples(tables, network, loaded.task)
    entries = [entry for group in groups.values() for entry in group]
    wanted = sorted({entry["index"] for entry in entries})
    batches = Chosen(loaded.model, loaded.test, torch.tensor(wanted, dtype=torch.long))
    rows = [row for x, _ in batches for row in tensors_of(x)[0].cpu()]
    inputs = dict(zip(wanted, rows, strict=True))
    for entry in entries:
        x = inputs[entry["index"]]
        if loaded.picture is None:
            entry["inputs"] = x.flatten()[:_MOST_NUMBERS].tolist()
        if loaded.row is not None:
            entry["columns"] = dict(list(loaded.row(x).items())[:_MOST_NUMBERS])
    if loaded.picture is not None:
        for index, x in inputs.items():
            write_picture(folder / "examples" / f"{index}.png", loaded.picture(x))
    write_json(folder / "examples.json", {**groups, "chosen_by": chosen_by})


def chosen_examples(
    tables: Mapping[str, Mapping[str, Tensor]], network: str, task: str
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Which examples, and what the methods say of them; and by which method each group is chosen.

    The posterior that ranks them is the first one: most uncertain by its entropy (of a regression
    its standard deviation). Most confidently wrong is the network: by its largest probability among
    its mistakes (the error in standard deviations).
    """
    spread = "epistemic" if task in REGRESSIONS else "variance"
    ranking = next((key for key, table in tables.items() if (table[spread] > 0).any()), network)
    uncertain = "standard_deviation" if task in REGRESSIONS else "entropy"
    rankings = {
        "most_uncertain": (ranking, per_example(tables[ranking][uncertain])),
        "most_confidently_wrong": (network, _wrong(tables[network], task)),
    }
    groups = {}
    for name, (method, scores) in rankings.items():
        # Ties are in the order of the set; -inf is out.
        order = scores.argsort(descending=True, stable=True)[:NUM_EXAMPLES]
        indices = [int(tables[method]["index"][i]) for i in order if scores[i] > -torch.inf]
        groups[name] = [_described(tables, index, task) for index in indices]
    return groups, {name: method for name, (method, _) in rankings.items()}


def _wrong(table: Mapping[str, Tensor], task: str) -> Tensor:
    if task in REGRESSIONS:
        errors = (table["target"] - table["mean"]) / table["standard_deviation"]
        return errors.abs().reshape(len(errors), -1).amax(1)
    probs, labels = table["probs"], table["label"].long()
    if task == "multilabel":
        confidence = torch.maximum(probs, 1 - probs)
        return confidence.where((probs > 0.5) != labels, -torch.inf).amax(1)
    top = probs.max(1)
    return top.values.where(top.indices != labels, -torch.inf)


def _described(tables: Mapping[str, Mapping[str, Tensor]], index: int, task: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index}
    for key, table in tables.items():
        if index not in table["index"]:
            continue  # Predicted for some examples only.
        at = int(torch.searchsorted(table["index"], index))
        if task in REGRESSIONS:
            entry["target"] = table["target"][at].tolist()
            values = {name: table[name][at].tolist() for name in ("mean", "standard_deviation")}
            entry.setdefault("predictions", {})[key] = values
            continue
        entry["label"] = table["label"][at].tolist()
        top = table["probs"][at].topk(min(NUM_CLASSES, table["probs"].shape[1]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        entry.setdefault("probs", {})[key] = list(map(list, pairs))
    return entry
