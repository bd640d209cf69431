"""All examples are predicted where that is quick; where it is not, the time is told before."""

import time

import a_run
import pytest

from laplace_debias import Laplace
from laplace_debias.assessment import assess, predictions, stages
from laplace_debias.report.run_folder import read_json


class Console:
    """Keeps what is printed."""

    def __init__(self):
        self.lines = []

    def print(self, *objects, soft_wrap=None):
        self.lines.append(" ".join(map(str, objects)))


def test_a_run_tells_the_number_of_predictions_that_it_makes(tmp_path, monkeypatch):
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=(1,))
    made, console = [], Console()
    monkeypatch.setattr(stages, "seconds_an_example", lambda *_: 1e6)
    functional = predictions.of_laplace

    def counted(la, x, *rest):
        made.append(len(x))
        return functional(la, x, *rest)

    monkeypatch.setattr(predictions, "of_laplace", counted)
    assess(loaded, tmp_path / "run", (a_run.NETWORK, a_run.ALL_PARAMETERS), console=console)
    (line,) = (line for line in console.lines if "will take about" in line)
    # A search takes at most two passes over the 60 that are chosen.
    assert f"({sum(made) + 120} predictions)" in line
    # It comes before the first prediction of a set by the posterior.
    first = next(n for n, one in enumerate(console.lines) if one.startswith("Predicting"))
    assert console.lines.index(line) < first


def test_the_time_of_an_example_is_measured(monkeypatch):
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=())
    la = Laplace(loaded.model).fit(list(loaded.train))
    monkeypatch.setattr(stages, "of_laplace", lambda *_: time.sleep(0.2))
    # Four examples together.
    assert 0.05 <= stages.seconds_an_example(la, loaded) < 0.2


@pytest.mark.parametrize(("seconds", "number"), [(0.0, 120), (1e6, 60)])
def test_all_examples_are_predicted_where_that_is_quick(seconds, number, tmp_path, monkeypatch):
    """And a run that goes on stays with what was chosen."""
    loaded = a_run.loaded_images(num_test=120, num_ood=0, severities=())
    monkeypatch.setattr(stages, "seconds_an_example", lambda *_: seconds)
    folder = assess(loaded, tmp_path / "run", (a_run.NETWORK, a_run.ALL_PARAMETERS))
    rows = read_json(folder / "metrics.json")["rows"]
    assert {row["num_examples"] for row in rows if row["method"] == "laplace"} == {number}
    (folder / "predictions/laplace/test.parquet").unlink()
    monkeypatch.setattr(stages, "seconds_an_example", lambda *_: 1e6 - seconds)
    assess(loaded, folder, (a_run.NETWORK, a_run.ALL_PARAMETERS))
    assert read_json(folder / "metrics.json")["rows"] == rows


def test_sets_that_do_not_tell_their_size_keep_the_limit():
    assert stages.num_predictions([iter(())], None) is None
    assert stages.num_predictions([iter(()), [(0, [1, 2])], None], 7) == 9
