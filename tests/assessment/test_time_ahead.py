"""How long predictions will take is told before they begin, with what shortens it."""

import time

import a_run
import pytest

from laplace_debias.assessment import assess, time_ahead


def test_a_line_tells_the_time_and_what_shortens_it():
    line = time_ahead.told("Laplace", 1.0, 1200, 300)
    assert line == (
        "Laplace: an example takes about 1 s, so tuning and predicting (1,200 predictions) will "
        "take about 20 minutes; with examples=75 instead of 300 about 5 minutes."
    )
    # 75 of 300 examples: a fourth of 1,200 s.
    assert time_ahead.told("Laplace", 0.04, 1200, 300) is None
    assert "a limit, examples, makes it shorter" in time_ahead.told("L", 1.0, 1200, None)
    assert "with examples=20 instead of 300 about 3.3 hours" in time_ahead.told(
        "L", 1.0, 180000, 300
    )
    assert time_ahead.told("L", 60.0, 30, 10).endswith("about 30 minutes.")


@pytest.mark.parametrize(
    ("seconds", "words"), [(61, "61 s"), (1500, "25 minutes"), (12240, "3.4 hours")]
)
def test_times_in_words(seconds, words):
    assert time_ahead.in_words(seconds) == words


def test_a_run_tells_the_number_of_predictions_that_it_makes(tmp_path, monkeypatch):
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=(1,))
    lines, made, tuned = [], [], []

    class Console:
        def print(self, *objects, soft_wrap=None):
            lines.append(" ".join(map(str, objects)))

    from laplace_debias.assessment import families, fit_stage

    monkeypatch.setattr(time_ahead, "seconds_an_example", lambda *_: 1e6)
    functional, grid = families.of_laplace, fit_stage.Laplace.predict_grid

    def counted(la, x, *rest):
        made.append(len(x))
        return functional(la, x, *rest)

    def counted_grid(la, x, *rest, **named):
        tuned.append(len(x))
        return grid(la, x, *rest, **named)

    monkeypatch.setattr(families, "of_laplace", counted)
    monkeypatch.setattr(fit_stage.Laplace, "predict_grid", counted_grid)
    methods = (a_run.NETWORK, a_run.ALL_PARAMETERS)
    assess(loaded, tmp_path / "run", methods, num_resamples=2, console=Console())
    (line,) = (line for line in lines if "will take about" in line)
    # A search that need not be refined takes one pass instead of two.
    assert sum(tuned) in (60, 120)
    assert f"({sum(made) + 120} predictions)" in line
    # It comes before the first prediction of a set.
    assert lines.index(line) < min(n for n, one in enumerate(lines) if one.startswith("Predicting"))


def test_the_time_of_an_example_is_measured(monkeypatch):
    loaded = a_run.loaded_images(num_test=30, num_ood=10, severities=())
    from laplace_debias import Laplace

    la = Laplace(loaded.model).fit(list(loaded.train))
    monkeypatch.setattr(time_ahead, "of_laplace", lambda *_: time.sleep(0.2))
    # Four examples together.
    assert 0.05 <= time_ahead.seconds_an_example(la, loaded, 0) < 0.2
