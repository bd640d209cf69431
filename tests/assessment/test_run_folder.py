"""The files of docs/run-folder.md and their contents."""

import itertools
import json
import math

import pandas as pd
import pytest
import torch
from PIL import Image
from user_files import every as joined

from laplace_debias import Laplace

METHODS = ["network", "temperature", "last-layer", "laplace"]
SETS = ["test", "shift-1", "shift-5", "shuffled", "static"]


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def predictions(folder, method, name):
    return pd.read_parquet(folder / "predictions" / method / f"{name}.parquet")


def probs_of(table):
    return torch.tensor(table["probs"].tolist(), dtype=torch.float64)


def test_every_file_of_the_contract_is_there(run_of_images):
    path = run_of_images
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    expected = {"run.json", "config.yaml", "metrics.json", "examples.json"}
    expected |= {f"predictions/{method}/{name}.parquet" for method in METHODS for name in SETS}
    for key in ("last-layer", "laplace"):
        expected |= {f"posteriors/{key}.safetensors", f"sweeps/{key}.json"}
    examples = read(run_of_images, "examples.json")
    groups = ("most_uncertain", "most_confidently_wrong")
    expected |= {f"examples/{e['index']}.png" for group in groups for e in examples[group]}
    assert files == expected


def test_a_posterior_of_all_parameters_is_made_thin_and_says_so(run_of_images, images):
    (note,) = (note for note in read(run_of_images, "run.json")["notes"] if "Kept " in note)
    assert note.startswith("Laplace, all parameters: Kept ")
    la = Laplace.load(run_of_images / "posteriors/laplace.safetensors", images.model)
    U_A = la.posterior.curvature.blocks["4.weight"].U_A
    assert U_A.shape[-1] < U_A.shape[-2]


def test_the_run_tells_what_was_done(run_of_images, images):
    run = read(run_of_images, "run.json")
    assert (run["format"], run["status"], run["title"]) == (1, "complete", "Stripes")
    assert (run["task"], run["input_name"]) == ("classification", "image")
    assert (run["num_train"], run["classes"]) == (200, list(images.classes))
    assert run["num_parameters"] == sum(p.numel() for p in images.model.parameters())
    assert [method["key"] for method in run["methods"]] == METHODS
    assert run["sets"] == [
        {"name": "test", "role": "test", "num_examples": 80},
        {"name": "shift-1", "role": "shift", "severity": 1, "num_examples": 80},
        {"name": "shift-5", "role": "shift", "severity": 5, "num_examples": 80},
        {"name": "shuffled", "role": "ood", "num_examples": 30},
        {"name": "static", "role": "ood", "num_examples": 30},
    ]
    assert {"fit", "predict", "measure"} <= set(run["seconds"])
    assert torch.__version__.startswith(run["versions"]["torch"])
    assert run["conclusion"]


@pytest.mark.parametrize("name", ["test", "shift-5"])
def test_the_network_and_its_temperature(run_of_images, images, name):
    batches = images.test if name == "test" else images.shifts[5]
    x, y = joined(batches)
    logits = images.model(x).detach().double()
    table = predictions(run_of_images, "network", name)
    assert table["index"].tolist() == list(range(80))
    assert table["label"].tolist() == y.tolist()
    torch.testing.assert_close(probs_of(table), logits.softmax(1), rtol=1e-5, atol=1e-7)
    expected = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(torch.tensor(table["entropy"]), expected, rtol=1e-4, atol=1e-5)
    assert table[["aleatoric", "mutual_information", "variance"]].isna().all(axis=None)
    run = read(run_of_images, "run.json")
    T = run["methods"][1]["temperature"]
    scaled = probs_of(predictions(run_of_images, "temperature", name))
    torch.testing.assert_close(scaled, (logits / T).softmax(1), rtol=1e-5, atol=1e-7)


def test_the_temperature_is_the_best_on_the_validation_examples(run_of_images, images):
    T = read(run_of_images, "run.json")["methods"][1]["temperature"]
    x, y = joined(images.validation)
    logits = images.model(x).detach().double()

    def nll(temperature):
        return float(torch.nn.functional.cross_entropy(logits / temperature, y))

    assert nll(T) < min(nll(0.99 * T), nll(1.01 * T))


@pytest.mark.parametrize("key", ["last-layer", "laplace"])
@pytest.mark.parametrize("name", ["test", "static"])
def test_posteriors_predict_what_predict_gives(run_of_images, images, key, name):
    la = Laplace.load(run_of_images / f"posteriors/{key}.safetensors", images.model)
    x, y = joined(images.test if name == "test" else images.ood[name])
    table = predictions(run_of_images, key, name)
    indices = torch.tensor(table["index"])
    expected = la.predict(x[indices]).probs.double()
    torch.testing.assert_close(probs_of(table), expected, rtol=1e-4, atol=1e-6)
    assert (table["mutual_information"] >= 0).all()
    assert ("label" in table) == (name == "test")
    if name == "test":
        assert table["label"].tolist() == y[indices].tolist()


def test_a_limited_method_predicts_the_same_examples_of_shifts(run_of_images):
    limited = [predictions(run_of_images, "laplace", name)["index"] for name in SETS]
    assert [len(index) for index in limited] == [60, 60, 60, 30, 30]
    assert limited[0].tolist() == limited[1].tolist() == limited[2].tolist()
    assert limited[0].is_monotonic_increasing
    assert limited[0].max() > 60  # They are not the first 60.


def test_metrics_are_those_of_the_predictions(run_of_images):
    rows = read(run_of_images, "metrics.json")["rows"]
    for method in METHODS:
        table = predictions(run_of_images, method, "shift-5")
        p = probs_of(table)
        label_probs = [row[label] for row, label in zip(p, table["label"], strict=True)]
        expected = {
            "nll": -sum(math.log(value) for value in label_probs) / len(label_probs),
            "accuracy": sum(p.argmax(1) == torch.tensor(table["label"])) / len(p),
            "brier": (p - torch.eye(5)[table["label"]]).square().sum(1).mean(),
        }
        for metric, value in expected.items():
            (row,) = (
                r
                for r in rows
                if (r["method"], r["set"], r["metric"]) == (method, "shift-5", metric)
            )
            assert row["value"] == pytest.approx(float(value), rel=1e-5)
            assert row["low"] < row["value"] < row["high"]
            assert row["num_examples"] == len(p)


def test_ood_rows_are_the_share_of_pairs_in_the_right_order(run_of_images):
    rows = read(run_of_images, "metrics.json")["rows"]
    aurocs = {
        (r["method"], r["score"]): r["value"]
        for r in rows
        if r["set"] == "shuffled" and r["metric"] == "auroc"
    }
    method_scores = {
        "network": ("energy", "max_logit"),
        "temperature": (),
        "last-layer": ("mutual_information", "variance", "instability"),
    }
    for method in METHODS[:3]:
        test, ood = (predictions(run_of_images, method, name) for name in ("test", "shuffled"))
        scores = method_scores[method]
        assert {key[1] for key in aurocs if key[0] == method} == {
            *("entropy", "max_probability", *scores)
        }
        for score in ("entropy", *scores):
            wins = [(b > a) + 0.5 * (b == a) for a in test[score] for b in ood[score]]
            expected = sum(wins) / len(wins)
            assert aurocs[method, score] == pytest.approx(expected, abs=1e-6)


def test_differences_are_of_the_same_examples(run_of_images):
    differences = read(run_of_images, "metrics.json")["differences"]
    keys = {(row["method"], row["reference"]) for row in differences if row["set"] == "test"}
    assert keys == {(later, first) for first, later in itertools.combinations(METHODS, 2)}
    ood_differences = [
        row for row in differences if row["set"] == "static" and row["metric"] == "auroc"
    ]
    assert {(row["reference"], row["reference_score"]) for row in ood_differences} == {
        ("network", "entropy")
    }
    # There is a row for every method and score, except for the reference.
    assert len(ood_differences) == 4 + 2 + 5 + 5 - 1
    for method, reference in sorted(keys):
        (row,) = (
            row
            for row in differences
            if (row["method"], row["reference"], row["set"]) == (method, reference, "test")
            and row["metric"] == "nll"
        )
        tables = [predictions(run_of_images, key, "test") for key in (method, reference)]
        tables = [table.set_index("index") for table in tables]
        shared = tables[0].index.intersection(tables[1].index)
        losses = [
            [-math.log(table["probs"][i][table["label"][i]]) for i in shared] for table in tables
        ]
        expected = sum(a - b for a, b in zip(*losses, strict=True)) / len(shared)
        assert row["value"] == pytest.approx(expected, abs=1e-6)
        assert row["num_examples"] == len(shared)


def test_the_sweep_has_its_best_where_it_was_chosen(run_of_images):
    for key in ("last-layer", "laplace"):
        sweep = read(run_of_images, f"sweeps/{key}.json")
        assert sweep["metric"] == "nll"
        row_by_precision = {row["prior_precision"]: row for row in sweep["rows"]}
        assert row_by_precision[sweep["chosen"]]["value"] == pytest.approx(
            min(row["value"] for row in sweep["rows"]), rel=1e-3
        )
        assert all(row["low"] <= row["value"] <= row["high"] for row in sweep["rows"])
        low, high = sweep["flat"]
        assert low <= sweep["chosen"] <= high


def test_the_examples_are_the_extremes(run_of_images, images):
    examples = read(run_of_images, "examples.json")
    network, last = (predictions(run_of_images, key, "test") for key in ("network", "last-layer"))
    assert examples["chosen_by"] == {
        "most_uncertain": "last-layer",
        "most_confidently_wrong": "network",
    }
    by_entropy = last.sort_values("entropy", ascending=False)["index"].tolist()
    assert [e["index"] for e in examples["most_uncertain"]] == by_entropy[:12]
    p = probs_of(network)
    labels = torch.tensor(network["label"])
    wrong = [(float(row.max()), i) for i, row in enumerate(p) if row.argmax() != labels[i]]
    expected = [i for _, i in sorted(wrong, reverse=True)[:12]]
    assert [e["index"] for e in examples["most_confidently_wrong"]] == expected
    first = examples["most_uncertain"][0]
    assert first["label"] == int(labels[first["index"]])
    (top_class, top), *lower_classes = first["probs"]["network"]
    assert top_class == int(p[first["index"]].argmax())
    assert top == pytest.approx(float(p[first["index"]].max()))
    assert len(lower_classes) == 4
    picture = Image.open(run_of_images / "examples" / f"{first['index']}.png")
    x, _ = joined(images.test)
    expected_picture = images.picture(x[first["index"]])
    assert torch.equal(torch.tensor(list(picture.tobytes())), expected_picture.flatten().long())
