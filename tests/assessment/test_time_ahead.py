"""As many examples are predicted as ten minutes allow, and a run says if it will take long."""

import time
from dataclasses import replace

import a_run
import pytest
import torch

from laplace_debias import Laplace
from laplace_debias.assessment import assess, predicting, stages
from laplace_debias.assessment.methods import LAST_LAYER
from laplace_debias.runs.folder import read_json
from laplace_debias.runs.wording import duration


def test_a_run_tells_the_number_of_predictions_that_it_makes(tmp_path, monkeypatch):
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=(1,))
    batch_sizes = []
    lines = []
    monkeypatch.setattr(stages, "seconds_per_example", lambda *_: 1e6)
    posterior_predictions = predicting.posterior_predictions

    def counted(la, x, *further_arguments):
        batch_sizes.append(len(x))
        return posterior_predictions(la, x, *further_arguments)

    monkeypatch.setattr(predicting, "posterior_predictions", counted)
    assess(loaded, tmp_path / "run", (a_run.NETWORK, a_run.ALL_PARAMETERS), log=lines.append)
    (line,) = (line for line in lines if "will take about" in line)
    # A search takes as long as three predictions of the 60 that are chosen.
    assert f"({sum(batch_sizes) + 180} predictions)" in line
    # The line comes before the posterior predicts the first set.
    first_prediction = next(
        number for number, text in enumerate(lines) if text.startswith("Predicting")
    )
    assert lines.index(line) < first_prediction


def test_the_time_of_an_example_is_that_of_a_batch(monkeypatch):
    """The time that a call takes besides its examples is divided among those of a batch."""
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=())
    la = Laplace(loaded.model).fit(list(loaded.train))
    monkeypatch.setattr(stages, "posterior_predictions", lambda *_: time.sleep(0.2))
    assert 0.2 / 30 <= stages.seconds_per_example(la, loaded) < 0.02
    # If examples are slow, few of them are timed.
    sizes = []
    monkeypatch.setattr(stages, "posterior_predictions", lambda _, x: sizes.append(len(x)))
    monkeypatch.setattr(stages, "_MEASURED_SECONDS", 0.0)
    stages.seconds_per_example(la, loaded)
    assert sizes == [1, 1]


@pytest.mark.parametrize(
    ("seconds", "limit", "number"),
    [(1e-9, None, 400), (10.0, None, 100), (10.0, 60, 60), (600 / 1150, None, 350)],
)
def test_as_many_examples_are_predicted_as_ten_minutes_allow(
    seconds, limit, number, tmp_path, monkeypatch
):
    """At least 100 are, or the number that the user passed; a resumed run keeps its number."""
    loaded = a_run.loaded_images(num_test=400, num_ood=0, severities=(1,))
    # A run takes a search, as long as three passes over 150 validation examples, and two sets.
    monkeypatch.setattr(stages, "seconds_per_example", lambda *_: seconds)
    methods = (a_run.NETWORK, replace(a_run.ALL_PARAMETERS, examples=limit))
    folder = assess(loaded, tmp_path / "run", methods)
    rows = read_json(folder / "metrics.json")["rows"]
    assert {row["num_examples"] for row in rows if row["method"] == "laplace"} == {number}
    notes = [note for note in read_json(folder / "run.json")["notes"] if "10 min 0 s" in note]
    assert len(notes) == (number in (100, 350))
    if notes:
        every = duration(seconds * 1250)
        assert notes[0].startswith(
            f"Laplace, all parameters predicts only {number} randomly chosen examples"
        )
        assert (
            f"All examples would take about {every}. To change the number, pass --examples."
            in notes[0]
        )
    (folder / "predictions/laplace/test.parquet").unlink()
    monkeypatch.setattr(stages, "seconds_per_example", lambda *_: 1e6 - seconds)
    assess(loaded, folder, methods)
    assert read_json(folder / "metrics.json")["rows"] == rows


def test_the_last_layer_predicts_all(tmp_path, monkeypatch):
    loaded = a_run.loaded_images(num_test=120, num_ood=0, severities=())
    monkeypatch.setattr(stages, "seconds_per_example", lambda *_: 1e6)
    folder = assess(loaded, tmp_path / "run", (a_run.NETWORK, LAST_LAYER))
    assert {row["num_examples"] for row in read_json(folder / "metrics.json")["rows"]} == {120}


def test_sets_that_do_not_tell_their_size_keep_the_limit():
    sizes = [stages.size_of(batches) for batches in (iter(()), [(0, torch.zeros(2))])]
    assert stages.num_predictions(sizes, 7) == 9
    assert stages.affordable_examples(sizes, 1000) == 998
