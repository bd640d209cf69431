"""Run folders as docs/run-folder.md describes them, of predictions that are made up.

The classes are Gaussians around unit vectors, x = s·e_y + noise: softmax(s·x) is the exact
posterior, a multiple of it is over-confident, and by how much is known.
"""

import json
import math

import numpy as np
import pandas as pd
import torch
from PIL import Image
from scipy.stats import norm

from laplace_debias import metrics

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship"),
    "<script>alert('truck')</script>",
)
# Key, label, what the exact logits are multiplied with, how much doubt a strange input adds.
METHODS = (
    ("network", "Network as it is", 1.7, 0.0),
    ("temperature", "Temperature scaling", 1.02, 0.0),
    ("last-layer", "Last-layer Laplace", 1.2, 0.6),
    ("laplace", "Laplace, all layers", 1.05, 1.3),
)
SIGNAL = 3.2


def make_run(
    folder, task="classification", *, shifts=True, ood=True, posterior=True, pictures=True, n=1500
):
    """Writes a run folder.

    Args:
        folder: Where; it is made.
        task: `classification` or `regression`.
        shifts: Whether there are five severities of corruption.
        ood: Whether there are a near and a far out-of-distribution set.
        posterior: Whether there are sweeps, and methods that need them.
        pictures: Whether inputs are images.
        n: Number of test examples.
    """
    rng = np.random.default_rng(0)
    methods = METHODS if posterior else METHODS[:2]
    sets = [{"name": "test", "role": "test", "severity": None, "kind": None}]
    if shifts:
        sets += [
            {"name": f"shift-{s}", "role": "shift", "severity": s, "kind": None}
            for s in range(1, 6)
        ]
    if ood:
        sets += [
            {"name": "shuffled-patches", "role": "ood", "severity": None, "kind": "near"},
            {"name": "digits", "role": "ood", "severity": None, "kind": "far"},
        ]
    sets = [data | {"num_examples": n} for data in sets]
    draw = _regression if task == "regression" else _classification
    tables = {data["name"]: draw(rng, data, methods, n) for data in sets}
    for name, by_method in tables.items():
        for key, table in by_method.items():
            path = folder / "predictions" / key / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            table.to_parquet(path)
    write_json(folder / "run.json", _meta(task, methods, sets, pictures, n))
    write_json(folder / "metrics.json", _metrics(task, sets, tables))
    (folder / "config.yaml").write_text("model:\n  timm: resnet18\ndata: images/\nseed: 0\n")
    for index, (key, *_) in enumerate(methods[2:]):
        write_json(folder / "sweeps" / f"{key}.json", _sweep(30.0 * (1 + index)))
    write_json(folder / "examples.json", _examples(task, tables["test"], methods, pictures))
    if pictures:
        for index in range(36):
            write_picture(folder / "examples" / f"{index}.png", rng)
    return folder


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_picture(path, rng, size=32):
    """A disk before a gradient."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:size, :size] / size
    ends = rng.uniform(40, 230, (3, 3))
    image = ends[0] + (ends[1] - ends[0]) * (0.6 * y + 0.4 * x)[..., None]
    centre, radius = rng.uniform(0.3, 0.7, 2), rng.uniform(0.12, 0.3)
    image[np.hypot(x - centre[0], y - centre[1]) < radius] = ends[2]
    image += rng.normal(0, 8, image.shape)
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path)


def _meta(task, methods, sets, pictures, n):
    is_regression = task == "regression"
    return {
        "format": 1,
        "status": "complete",
        "title": "Energy use of buildings" if is_regression else "ResNet-18 on small images",
        "created": "2026-11-22T12:00:00+00:00",
        "task": task,
        "input_name": "image" if pictures else "row",
        "classes": None if is_regression else list(CLASSES),
        "num_train": 45000,
        "num_parameters": 11173962,
        "sets": sets,
        "methods": [
            {
                "key": key,
                "label": label,
                "describes": f"{label}, as the paper has it.",
                "is_laplace": index > 1,
                "temperature": 1.66 if key == "temperature" else None,
                "prior_precision": 30.0 * (index - 1) if index > 1 else None,
                "seconds": {"fit": 20.0 * index**2, "predict": 30.0 + 90 * max(0, index - 1) ** 2},
                "bytes": (0, 8, 2_100_000, 88_000_000)[index],
            }
            for index, (key, label, *_) in enumerate(methods)
        ],
        "versions": {"python": "3.11.2", "torch": "2.9.0", "laplace-debias": "0.2.0"},
        "seed": 0,
        "device": "cpu",
        "threads": 2,
        "seconds": {"fit": 210.0, "predict": 840.0, "page": 9.0},
        "conclusion": [
            f"On {n:,} test examples the network is over-confident.",
            "Temperature scaling lowers its NLL by 0.21 nats (95 % interval 0.18 to 0.24).",
            "The Laplace approximation of all layers does no better than that on the test set, and "
            "finds strange inputs more often.",
            "Take temperature scaling if you only meet inputs like these.",
        ],
    }


def _classification(rng, data, methods, n):
    labels = rng.integers(0, 10, n)
    noise, signal = 1.0 + 0.22 * (data["severity"] or 0), SIGNAL * np.eye(10)[labels]
    strangeness = 0.25 * (data["severity"] or 0)
    if data["kind"] == "near":
        signal, strangeness = 0.55 * SIGNAL * (np.eye(10)[labels] + np.eye(10)[labels - 1]), 1.0
    if data["kind"] == "far":
        signal, strangeness = 0 * signal, 2.0
    exact = SIGNAL * (signal + rng.normal(0, noise, (n, 10)))
    tables = {}
    for key, _, factor, doubt in methods:
        logits = exact * factor / math.sqrt(1 + doubt * strangeness)
        logits += 0.4 * doubt * rng.normal(size=logits.shape)
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        entropy = -(probs * np.log(probs.clip(1e-300))).sum(1)
        share = 0.2 * doubt / (1 + doubt)
        table = {
            "index": np.arange(n),
            "probs": list(probs),
            "entropy": entropy,
            "aleatoric": entropy * (1 - share) if doubt else None,
            "mutual_information": entropy * share if doubt else None,
            "variance": doubt * (1 + strangeness + 0 * entropy) if doubt else None,
        }
        if data["role"] != "ood":
            table["label"] = labels
        tables[key] = pd.DataFrame(table)
    return tables


def _regression(rng, data, methods, n):
    x = rng.uniform(-1, 1, n) * (1 if data["role"] != "ood" else 2)
    noise = 0.2 + 0.3 * np.abs(x) + 0.1 * (data["severity"] or 0)
    target = np.sin(3 * x) + noise * rng.normal(size=n)
    tables = {}
    for index, (key, *_) in enumerate(methods):
        epistemic = 0.05 * index * (1 + np.abs(x))
        spread = np.full(n, 0.3) if index < 2 else np.hypot(noise * (0.8 + 0.1 * index), epistemic)
        table = {
            "index": np.arange(n),
            "mean": np.sin(3 * x),
            "standard_deviation": spread,
            "epistemic": epistemic,
        }
        if data["role"] != "ood":
            table["target"] = target
        tables[key] = pd.DataFrame(table)
    return tables


def _metrics(task, sets, tables):
    rows, differences = [], []
    for data in sets:
        by_method = tables[data["name"]]
        if data["role"] == "ood":
            rows += [
                row
                for key, table in by_method.items()
                for row in _ood_rows(task, key, data["name"], tables["test"][key], table)
            ]
            continue
        values = {
            key: _of_regression(table) if task == "regression" else _of_classes(table)
            for key, table in by_method.items()
        }
        for key, each in values.items():
            rows += [_row(key, data["name"], metric, value) for metric, value in each.items()]
            for reference in ("network", "temperature"):
                if key == reference:
                    continue
                differences += [
                    _row(key, data["name"], metric, value - values[reference][metric])
                    | {"reference": reference}
                    for metric, value in each.items()
                    if np.ndim(value)
                ]
    return {"rows": rows, "differences": differences}


def _row(method, name, metric, values):
    """A mean with its interval; a single number without."""
    value, half = float(np.mean(values)), None
    if np.ndim(values):
        half = 1.96 * float(np.std(values)) / len(values) ** 0.5
    ends = (None, None) if half is None else (value - half, value + half)
    row = {"method": method, "set": name, "metric": metric, "value": value}
    return row | dict(zip(("low", "high"), ends, strict=True))


def _of_classes(table):
    probs, labels = np.stack(table["probs"]), table["label"].to_numpy()
    true = probs[np.arange(len(labels)), labels]
    return {
        "accuracy": (probs.argmax(1) == labels).astype(float),
        "nll": -np.log(true.clip(1e-300)),
        "brier": ((probs - np.eye(10)[labels]) ** 2).sum(1),
        "ece": metrics.ece(torch.tensor(probs), torch.tensor(labels)).item(),
    }


def _of_regression(table):
    error, spread = table["target"] - table["mean"], table["standard_deviation"]
    return {
        "nll": -norm.logpdf(error, scale=spread),
        "rmse": float(np.sqrt((error**2).mean())),
        "coverage": (np.abs(error) < 1.96 * spread).to_numpy(float),
        "width": (2 * 1.96 * spread).to_numpy(),
    }


def _ood_rows(task, key, name, test, table):
    column, score = ("epistemic", "variance") if task == "regression" else ("entropy", "entropy")
    scores = [torch.from_numpy(part[column].to_numpy().copy()) for part in (test, table)]
    area = metrics.auroc(*scores).item()
    half = 0.9 / len(table) ** 0.5
    return [
        {"method": key, "set": name, "metric": "auroc", "value": area}
        | {"low": area - half, "high": min(1.0, area + half), "score": score},
        {"method": key, "set": name, "metric": "fpr95", "value": metrics.fpr95(*scores).item()}
        | {"low": None, "high": None, "score": score},
        {"method": key, "set": name, "metric": "auroc", "value": 0.5, "low": None, "high": None}
        | {"score": "max_probability"},
    ]


def _sweep(best):
    grid = np.logspace(-2, 4, 25)
    value = 0.42 + 0.012 * np.log10(grid / best) ** 2
    rows = [
        {"prior_precision": float(p), "value": float(v), "low": float(v) - 0.01}
        | {"high": float(v) + 0.01}
        for p, v in zip(grid, value, strict=True)
    ]
    flat = [best / 3, best * 3]
    return {"metric": "nll", "rows": rows, "chosen": best, "flat": flat, "sigma": None}


def _examples(task, tables, methods, pictures):
    groups = ("most_uncertain", "most_confidently_wrong")
    found = {}
    for start, group in enumerate(groups):
        entries = []
        for index in range(12 * start, 12 * start + 12):
            rows = {key: tables[key].iloc[index] for key, *_ in methods}
            entry = {"index": index}
            if not pictures:
                entry["inputs"] = [0.5 * index, -1.25, 3.0]
            if task == "regression":
                entry["target"] = float(rows["network"]["target"])
                entry["predictions"] = {
                    key: {name: float(row[name]) for name in ("mean", "standard_deviation")}
                    for key, row in rows.items()
                }
            else:
                entry["label"] = int(rows["network"]["label"])
                entry["probs"] = {
                    key: [[int(i), float(row["probs"][i])] for i in np.argsort(-row["probs"])[:5]]
                    for key, row in rows.items()
                }
            entries.append(entry)
        found[group] = entries
    chosen_by = dict.fromkeys(groups, methods[-1][0]) | {"most_confidently_wrong": "network"}
    return found | {"chosen_by": chosen_by}
