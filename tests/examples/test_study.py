"""The study: a problem runs, continues after an interruption, and makes its tables."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from examples.study import methods
from examples.study.__main__ import PROBLEMS, main
from examples.study.problems import MissingError
from examples.study.tables import Column, Measure, cell, read, significant_sign
from laplace_debias.assessment.recalibration import fit_recalibration


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder and the printed tables of a run of one problem with one seed."""
    folder = tmp_path_factory.mktemp("study")
    tables = main(["--problems", "wine-few", "--seeds", "1", "--out", str(folder)])
    return folder, tables


def test_one_problem_has_every_method_and_measure(finished_run):
    folder, tables = finished_run
    (row,) = read(folder / "study.jsonl")
    methods = row["methods"]
    for name in ("network", "temperature", "vector", "isotonic", "ensemble, tempered", "mixture"):
        assert name in methods
    assert "platt" not in methods  # there are three classes
    for name in ("last layer", "all"):
        assert {name, f"{name}, T = 1", f"{name}, identity", f"{name}, evidence"} <= set(methods)
    # Dividing the logits by a temperature does not change the most probable class.
    assert methods["temperature"]["accuracy"] == methods["network"]["accuracy"]
    assert methods["temperature"]["auroc"].keys() == {"entropy"}
    assert {"entropy", "mutual_information"} <= methods["all"]["auroc"].keys()
    assert f"| wine-few | {methods['temperature']['nll']:.3f} | " in tables
    assert (folder / "tables.md").read_text(encoding="utf-8") == tables


@pytest.mark.slow
def test_two_classes_are_recalibrated_in_each_way(tmp_path):
    arguments = ["--problems", "cancer-few", "--seeds", "1", "--networks_only"]
    table = main([*arguments, "--out", str(tmp_path)])
    (row,) = read(tmp_path / "networks.jsonl")
    methods = row["methods"]
    assert "last layer" not in methods
    problem = PROBLEMS["cancer-few"](0)
    network = problem.networks[0]
    x, y = problem.validation
    x_test, y_test = problem.test
    for name, fit in (("isotonic", lambda f: f), ("platt", lambda f: f.diff(dim=1))):
        recalibrate = fit_recalibration(name, fit(network(x).double()), y)
        logits = recalibrate(fit(network(x_test).double().detach()))
        if name == "platt":
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        nll = float(torch.nn.functional.cross_entropy(logits, y_test))
        assert methods[name]["nll"] == pytest.approx(nll, abs=2e-5)
    assert "| problem | temperature | network | vector | platt | isotonic | ensemble |" in table
    assert not (tmp_path / "study.jsonl").exists()


def test_a_killed_run_goes_on(finished_run, tmp_path, capsys):
    folder, tables = finished_run
    file = tmp_path / "study.jsonl"
    file.write_text((folder / "study.jsonl").read_text() + '{"problem": "wine-few", "seed": 1, ')
    arguments = ["--problems", "wine-few", "--seeds", "1", "--out", str(tmp_path)]
    assert main(arguments) == tables
    assert file.read_text() == (folder / "study.jsonl").read_text()
    assert "seed" not in capsys.readouterr().out


def test_what_is_missing_is_said_and_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LAPLACE_DEBIAS_DATA", raising=False)
    with pytest.raises(MissingError):
        PROBLEMS["resnet"](0)
    assert main(["--problems", "resnet,all-cnn-c", "--out", str(tmp_path)]) == ""
    assert "resnet is skipped: LAPLACE_DEBIAS_DATA is not set" in capsys.readouterr().out


def test_unknown_problems_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["--problems", "wines"])
    assert "no problem wines" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["friedman", "digits-rare"])
def test_parts_are_disjoint_and_repeatable(name, monkeypatch):
    monkeypatch.setattr("examples.study.problems.train_network", lambda *_, **__: None)
    problem = PROBLEMS[name](0)
    repeated = PROBLEMS[name](0)
    different = PROBLEMS[name](1)
    splits = [problem.train, problem.validation, problem.test]
    x = torch.cat([x for x, _ in splits])
    assert len(x.unique(dim=0)) == len(x)
    for tensor, repeated_tensor in zip(problem.train, repeated.train, strict=True):
        assert torch.equal(tensor, repeated_tensor)
    assert not torch.equal(problem.train[0], different.train[0])
    shifted = problem.shifted[0] - problem.test[0]
    assert float(shifted.std()) == pytest.approx(0.5, rel=0.05)


def test_the_seconds_of_a_method_do_not_include_the_evaluation_of_others(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(methods, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for method in methods.all_methods(PROBLEMS["wine-few"](0)):
        assert method.seconds == 0.0, method.names
        clock[0] += 100.0  # the caller evaluates this method before it requests the next one


def test_a_cell_is_a_paired_t_interval():
    pairs = np.array([[1.0, 1.5], [2.0, 2.4], [4.0, 4.7]])
    rows = [{"methods": {"a": {"nll": a}, "b": {"nll": b}}} for a, b in pairs.tolist()]
    column = Column("a", Measure("a", "nll"))
    difference = Column("a minus b", Measure("a", "nll"), reference=Measure("b", "nll"))
    interval = stats.ttest_rel(*pairs.T).confidence_interval()
    middle = (interval.low + interval.high) / 2
    half_width = (interval.high - interval.low) / 2
    assert cell(rows, difference) == f"**−{-middle:.3f}±{half_width:.3f}**"
    assert significant_sign(difference.values(rows)) == -1
    assert cell(rows, column) == "2.333"
    assert cell([{"methods": {}}], column) == "–"
