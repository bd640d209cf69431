"""Run folders of other versions: missing keys have a default, and unknown keys are ignored."""

import json

import a_run
import pytest

from laplace_debias.assessment import assess
from laplace_debias.assessment.methods import NETWORK
from laplace_debias.report.page import write_page
from laplace_debias.runs.folder import RunFolder
from laplace_debias.runs.records import (
    Measurements,
    MetricRow,
    RunRecord,
    SetRecord,
    from_json,
    to_json,
)


def test_a_folder_without_the_newer_keys_has_a_page(run_of_images, tmp_path):
    folder = a_run.shortened(run_of_images, tmp_path / "run")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for key in ("notes", "conclusion", "versions", "training", "target", "identity", "threads"):
        del run[key]
    run["of_a_later_version"] = {"a": 1}
    for method in run["methods"]:
        for key in ("seconds_per_example", "prior_precision_at_limit", "link", "bytes"):
            del method[key]
    a_run.write_json(folder / "run.json", run)
    measured = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    del measured["recommended"]
    a_run.write_json(folder / "metrics.json", measured)
    assert "The methods side by side" in write_page(folder).read_text(encoding="utf-8")


def test_records_are_the_json_that_they_were_read_from(run_of_images):
    for name, kind in (("run.json", RunRecord), ("metrics.json", Measurements)):
        content = json.loads((run_of_images / name).read_text(encoding="utf-8"))
        assert to_json(from_json(kind, content)) == content


def test_keys_of_a_row_and_of_a_set():
    row = MetricRow(method="m", set_name="test", metric="nll", value=1.0)
    assert to_json(row)["set"] == "test"
    assert "score" not in to_json(row)
    assert to_json(SetRecord("test", "test")) == {
        "name": "test",
        "role": "test",
        "num_examples": None,
    }
    assert to_json(SetRecord("shift-3", "shift", 3))["severity"] == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: run.pop("task"), "'task' is missing"),
        (lambda run: run["methods"][0].pop("key"), "'key' is missing"),
        (lambda run: run.update(sets=3), "not iterable"),
        (lambda run: run["methods"].append("laplace"), "it has str instead of an object"),
    ],
)
def test_a_damaged_record_is_named(run_of_images, tmp_path, change, reason):
    folder = a_run.shortened(run_of_images, tmp_path / "run")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(run)
    a_run.write_json(folder / "run.json", run)
    with pytest.raises(ValueError, match=r"run\.json is damaged") as error:
        RunFolder(folder).read_record()
    assert reason in str(error.value)


def test_an_interrupted_run_of_an_earlier_version_resumes(tmp_path):
    """Missing keys of the record are added; the noise and the time of creation are kept."""
    loaded = a_run.loaded_rows(num_test=30, num_ood=0)
    folder = assess(loaded, tmp_path / "run", (NETWORK,))
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run["status"] = "running"
    run["sigma"] = 0.75
    del run["training"]
    del run["threads"]
    a_run.write_json(folder / "run.json", run)
    assess(loaded, folder, (NETWORK,))
    record = RunFolder(folder).read_complete_record()
    assert record.sigma == 0.75
    assert record.training is not None
    assert record.created == run["created"]


@pytest.mark.parametrize("sigma", [None, 0.75, [0.75, 2.0]])
def test_a_noise_is_one_number_or_a_list(sigma):
    """Earlier versions wrote one number for all outputs."""
    record = from_json(
        RunRecord, {"format": 1, "task": "regression", "sets": [], "methods": [], "sigma": sigma}
    )
    assert record.sigma == sigma
    assert to_json(record)["sigma"] == sigma
