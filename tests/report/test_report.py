import csv
import math

import numpy as np
import pytest
import torch
from csv_table import read_csv

from laplace_debias.report.tables import print_table, write_csv
from laplace_debias.system.shown import counted

ROWS = [
    {"method": "MAP", "nll": 0.61803, "images": 1000, "prior_precision": None},
    {"method": "a|b", "nll": 12.5, "images": 20, "prior_precision": 1e-4, "tuned": True},
]


def test_tables_take_scalars_of_torch_and_numpy(tmp_path):
    row = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.int64(3)}
    write_csv([row], tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == [{"a": 0.5, "b": 0.25, "c": 3}]


def test_printed_table_holds_title_header_and_literal_cells(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    rows = [*ROWS, {"method": "[red]x", "nll": math.inf}]
    print_table(rows, "[b]Results")
    text = capsys.readouterr().out
    for piece in ("[b]Results", "prior_precision", "0.618", "1.00e-04", "[red]x", "inf"):
        assert piece in text


def test_a_noun_after_a_number_is_singular_or_plural():
    assert counted(1, "row") == "1 row"
    assert counted(0, "row") == "0 rows"
    assert counted(2000, "batch", "batches") == "2,000 batches"


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_leaves_no_escape_sequences(no_color, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    print_table(ROWS, "Results")
    assert ("\x1b[" in capsys.readouterr().out) != no_color


def test_csv_round_trip_is_exact(tmp_path):
    path = tmp_path / "new" / "folder" / "table.csv"
    rows = [
        {"name": 'comma, "quote"\nline', "x": 1 / 3, "n": -7, "flag": True, "none": None},
        {"name": "1.2.3", "x": 1e-300, "n": 10**20, "flag": False, "none": None},
        {"name": "é", "x": -math.inf, "n": 0, "flag": True, "none": None},
    ]
    write_csv(rows, path)
    assert read_csv(path) == rows
    assert [type(value) for value in read_csv(path)[0].values()] == [
        str,
        float,
        int,
        bool,
        type(None),
    ]


def test_no_text_of_a_csv_is_a_formula(tmp_path):
    texts = ["=1+1", "@SUM(A1)", "-2+3", "+cmd|x", "-1", "+0.5", "a=b", "", "-"]
    write_csv([{"x": text, "=y": -1.5} for text in texts], tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["x", "'=y"]
    assert [line[0] for line in lines] == [*(f"'{text}" for text in texts[:4]), *texts[4:]]
    assert {line[1] for line in lines} == {"-1.5"}


def test_csv_has_the_columns_of_all_rows(tmp_path):
    write_csv([{"a": 1}, {"b": 2.0}], tmp_path / "table.csv")
    assert read_csv(tmp_path / "table.csv") == [{"a": 1, "b": None}, {"a": None, "b": 2.0}]


def test_failed_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_csv([{"a": 1}], path)

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_csv([{"a": 2}], path)
    assert read_csv(path) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]
