"""The table on the terminal, which has intervals only where they fit."""

import json
import re
import sys

import pytest

from laplace_debias.commands.compared import print_results


@pytest.fixture
def folder(tmp_path):
    methods = [{"key": key, "label": key.title()} for key in ("network", "laplace")]
    sets = [
        {"name": "test", "role": "test", "num_examples": 50},
        {"name": "digits", "role": "ood", "num_examples": 20},
    ]
    run = {"format": 1, "task": "classification", "input_name": "image", "methods": methods}
    run |= {"sets": sets, "conclusion": ["It helps."], "notes": []}
    rows = [
        {"method": m["key"], "set": name, "metric": metric, "value": 0.5, "low": 0.4, "high": 0.6}
        | {"num_examples": 50, "score": score}
        for m in methods
        for name, metric, score in (
            *(("test", metric, None) for metric in ("accuracy", "nll", "brier", "smooth_ece")),
            ("digits", "auroc", "entropy"),
        )
    ]
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "metrics.json").write_text(json.dumps({"rows": rows, "differences": []}))
    return tmp_path


@pytest.mark.parametrize(("columns", "has_intervals"), [(80, False), (160, True)])
def test_every_word_and_value_is_whole(folder, columns, has_intervals, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_results(folder)
    # The codes for bold text are removed.
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "…" not in printed
    assert all(len(line) <= columns for line in printed.splitlines())
    assert printed.count("0.500") == 10
    assert ("0.400–0.600" in printed) == has_intervals
    assert ("on the page" in printed) != has_intervals
    assert "It helps." in printed


def test_a_pipe_has_the_intervals_whatever_its_width(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_results(folder)
    printed = capsys.readouterr().out
    assert printed.count("0.500 (0.400–0.600)") == 10
    assert "on the page" not in printed
    # A row of the table is a line.
    assert all("0.500" in line for line in printed.splitlines() if "Laplace" in line)


def test_without_a_page_none_is_promised(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_results(folder, has_page=False)
    printed = capsys.readouterr().out
    assert "on the page" not in printed
    assert "95 % intervals in a wider terminal" in printed
