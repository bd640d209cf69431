"""The figures that the page shows, against plain loops over the predictions."""

import math
import re

import matplotlib
import numpy as np
import pandas as pd
import pytest
from a_run import shortened, write_json

from laplace_debias.report.page import calibration, sections
from laplace_debias.report.page.metric_tables import (
    difference_tables,
    full_tables,
    main_table,
)
from laplace_debias.report.page.panel import SETTINGS, looks
from laplace_debias.report.page.run import read_run
from laplace_debias.runs.wording import decimals, duration, number, significant, size


@pytest.fixture(scope="module")
def run(run_of_images):
    return read_run(run_of_images)


@pytest.fixture(scope="module")
def numbers_run(run_of_rows):
    return read_run(run_of_rows)


@pytest.fixture
def drawn():
    """Use the page's settings of matplotlib."""
    with matplotlib.rc_context(SETTINGS):
        yield


def looks_of(run):
    return looks(run.methods)


def numbers_in(text):
    """List the numbers in the text that is shown at a point of a picture."""
    return [float(digits) for digits in re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))]


def predictions(folder, method, data="test"):
    return pd.read_parquet(folder / "predictions" / method / f"{data}.parquet")


def wilson(hits, count, z=1.959963984540054):
    share = hits / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    root = math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    half = z * root / (1 + z**2 / count)
    return 100 * (middle - half), 100 * (middle + half)


def test_reliability_tells_each_bin_and_its_wilson_interval(run_of_images, run, drawn):
    picture = calibration.reliability(run, looks_of(run)["laplace"], "test")
    table = predictions(run_of_images, "laplace")
    bins = {}
    for probs, label in zip(table["probs"], table["label"], strict=True):
        index = min(int(max(probs) * 15), 14)
        bins.setdefault(index, []).append((max(probs), np.argmax(probs) == label))
    shown = [numbers_in(point.text) for point in picture.points]
    assert len(shown) == 2 * len(bins)  # once at the curve, once at the bars
    for index, numbers in zip(sorted(bins), shown, strict=False):
        examples = bins[index]
        hits = sum(is_right for _, is_right in examples)
        confidence = 100 * sum(probability for probability, _ in examples) / len(examples)
        expected = [len(examples), confidence, 100 * hits / len(examples)]
        assert numbers == pytest.approx([*expected, *wilson(hits, len(examples))], abs=0.0501)


def test_risk_coverage_is_the_error_rate_of_those_kept(run_of_images, run, drawn):
    picture = calibration.risk_coverage(run, looks_of(run), "test", "Test set")
    table = predictions(run_of_images, "last-layer")
    order = sorted(range(len(table)), key=lambda i: -max(table["probs"][i]))
    wrong = [np.argmax(table["probs"][i]) != table["label"][i] for i in order]
    shown = [numbers_in(p.text) for p in picture.points if p.method == "last-layer"]
    assert shown[-1][0] == 100
    for share, risk in shown:
        # The share is rounded, so the number of examples may be off by one.
        number = round(share / 100 * len(wrong))
        risks = [
            100 * np.mean(wrong[:count])
            for count in (number - 1, number, number + 1)
            if 0 < count <= len(wrong)
        ]
        assert min(risks) - 0.06 <= risk <= max(risks) + 0.06


def test_histograms_of_uncertainty_add_up(run, drawn):
    picture = sections.score_histograms(run, looks_of(run), "static")
    shares = [numbers_in(point.text)[0] for point in picture.points]
    assert all(0 < share <= 100 for share in shares)
    assert {point.method for point in picture.points} == {method.key for method in run.methods}
    assert picture.svg.count('id="method:laplace:') == 3  # two histograms and a name


def test_severity_has_a_point_for_each_severity_with_its_interval(run, drawn):
    picture = sections.severity(run, looks_of(run), "nll")
    rows = run.rows[(run.rows["method"] == "laplace") & (run.rows["metric"] == "nll")]
    rows = rows[~rows["set_name"].isin(["static", "shuffled"])]
    shown = [numbers_in(p.text)[-3:] for p in picture.points if p.method == "laplace"]
    assert len(shown) == 6
    for numbers, row in zip(shown, rows.itertuples(), strict=True):
        assert numbers == pytest.approx([row.value, row.low, row.high], rel=0.02)


def test_coverage_counts_the_targets_within(numbers_run, drawn):
    picture = calibration.coverage(numbers_run, looks_of(numbers_run))
    table = predictions(numbers_run.folder.path, "laplace")
    coverage = dict(numbers_in(p.text) for p in picture.points if p.method == "laplace")
    inside = (table["target"] - table["mean"]).abs() <= 1.9599640 * table["standard_deviation"]
    assert coverage[95] == pytest.approx(100 * inside.mean(), abs=0.051)


def test_residuals_compare_groups_of_equal_size(numbers_run, drawn):
    picture = calibration.residuals(numbers_run, looks_of(numbers_run))
    table = predictions(numbers_run.folder.path, "laplace").sort_values("standard_deviation")
    shown = [numbers_in(p.text) for p in picture.points if p.method == "laplace"]
    smallest = table.iloc[: math.ceil(len(table) / len(shown))]
    predicted_error = math.sqrt((smallest["standard_deviation"] ** 2).mean())
    actual_error = math.sqrt(((smallest["target"] - smallest["mean"]) ** 2).mean())
    assert shown[0] == pytest.approx([predicted_error, actual_error], rel=0.01)
    # The network has the same noise for all examples, so there is nothing to sort by.
    assert len([p for p in picture.points if p.method == "network"]) == 1


def cells(table, label, caption=""):
    """The cells of the metric's column whose caption contains a text, by method."""
    (index,) = (
        index
        for index, (metric, column_caption) in enumerate(table.columns)
        if metric.label == label and caption in column_caption
    )
    return {method.key: row[index] for method, row in table.rows}


def run_with_metrics(run_of_images, folder, rows, differences):
    """Read a run whose `metrics.json` has these rows and differences."""
    shortened(run_of_images, folder, shifts=False, ood=False)
    keys = ("method", "set", "metric", "value", "low", "high")
    write_json(
        folder / "metrics.json",
        {
            "rows": [dict(zip(keys, row, strict=True)) for row in rows],
            "differences": [
                dict(zip((*keys, "reference"), row, strict=True)) for row in differences
            ],
        },
    )
    return read_run(folder)


def test_the_table_marks_what_is_beyond_chance(run_of_images, tmp_path):
    run = run_with_metrics(
        run_of_images,
        tmp_path / "run",
        [
            ("network", "test", "accuracy", 0.9, 0.88, 0.92),
            ("temperature", "test", "accuracy", 0.9, 0.88, 0.92),
            ("laplace", "test", "accuracy", 0.93, 0.91, 0.95),
            ("network", "test", "nll", 0.3, 0.28, 0.32),
            ("temperature", "test", "nll", 0.25, 0.23, 0.27),
            ("laplace", "test", "nll", 0.31, None, None),
        ],
        [
            ("temperature", "test", "accuracy", 0.0, -0.01, 0.01, "network"),
            ("laplace", "test", "accuracy", 0.03, 0.01, 0.05, "network"),
            ("temperature", "test", "nll", -0.05, -0.07, -0.03, "network"),
            ("laplace", "test", "nll", 0.01, 0.001, 0.02, "network"),
            ("network", "test", "nll", 0.05, 0.03, 0.07, "temperature"),
            ("laplace", "test", "nll", 0.06, None, None, "temperature"),
        ],
    )
    table = main_table(run)
    accuracy = cells(table, "Accuracy")
    nll = cells(table, "NLL")
    assert [c.verdict for c in accuracy.values()] == ["", "no clear difference", "", "better"]
    assert accuracy["last-layer"].value == "–"
    assert [c.verdict for c in nll.values()] == ["", "better", "", "worse"]
    assert nll["temperature"].interval == "0.230 … 0.270"
    assert nll["laplace"].interval == ""
    assert table.reference == "Network"
    first, second = difference_tables(run)
    assert (first.reference, second.reference) == ("Network", "Temperature scaling")
    assert cells(first, "NLL")["laplace"].value == "+0.010"
    assert cells(second, "NLL")["network"].verdict == "worse"
    assert cells(second, "NLL")["laplace"].verdict == ""  # its interval is not known


def test_the_table_calls_certain_but_small_differences_negligible(run_of_images, tmp_path):
    """In the unit of the targets, the smallest difference is a share of the reference's error."""
    run = run_with_metrics(
        run_of_images,
        tmp_path / "run",
        [
            (method, "test", metric, value, 0.9 * value, 1.1 * value)
            for method in ("network", "temperature", "laplace")
            for metric, value in (("nll", 0.3), ("crps", 2e-9), ("rmse", 4e-9), ("bias", 1e-12))
        ],
        [
            ("temperature", "test", "nll", -0.0009, -0.001, -0.0008, "network"),
            ("laplace", "test", "nll", -0.0011, -0.0012, -0.001, "network"),
            ("temperature", "test", "crps", -1.9e-12, -2e-12, -1.8e-12, "network"),
            ("laplace", "test", "crps", -2.1e-12, -2.2e-12, -2e-12, "network"),
            ("temperature", "test", "rmse", 3.9e-12, 3.8e-12, 4e-12, "network"),
            ("laplace", "test", "rmse", 4.1e-12, 4e-12, 4.2e-12, "network"),
            ("temperature", "test", "bias", 3.9e-12, 3.8e-12, 4e-12, "network"),
            ("laplace", "test", "bias", 3.9e-12, -1e-12, 9e-12, "network"),
        ],
    )
    table = main_table(run)
    verdicts = {
        label: [cells(table, label)[key].verdict for key in ("temperature", "laplace")]
        for label in ("NLL", "CRPS", "RMSE", "Bias")
    }
    assert verdicts == {
        "NLL": ["negligible difference", "better"],
        "CRPS": ["negligible difference", "better"],
        "RMSE": ["negligible difference", "worse"],
        "Bias": ["negligible difference", "no clear difference"],
    }


def test_columns_in_small_units_have_powers_of_ten(run_of_images, tmp_path):
    run = run_with_metrics(
        run_of_images,
        tmp_path / "run",
        [
            ("network", "test", "rmse", 2.6543e-9, 2.5e-9, 2.8e-9),
            ("temperature", "test", "rmse", 2.6544e-9, 2.5e-9, 2.8e-9),
            ("network", "test", "nll", 0.3, 0.28, 0.32),
            ("temperature", "test", "nll", 0.3, 0.28, 0.32),
        ],
        [
            ("temperature", "test", "rmse", 1.3e-13, 1e-15, 2.6e-13, "network"),
            ("temperature", "test", "nll", 2e-8, 1e-8, 3e-8, "network"),
        ],
    )
    rmse = cells(main_table(run), "RMSE")["network"]
    assert rmse.value == "2.65·10⁻⁹"
    assert rmse.interval == "2.50·10⁻⁹ … 2.80·10⁻⁹"
    assert cells(main_table(run), "NLL")["network"].value == "0.300"
    (differences,) = difference_tables(run)
    change = cells(differences, "RMSE")["temperature"]
    assert change.value == "+1.30·10⁻¹³"
    assert change.interval.startswith("1·10⁻¹⁵ …")
    assert cells(differences, "NLL")["temperature"].interval == "1.0·10⁻⁸ … 3.0·10⁻⁸"


def test_scores_of_ood_sets_are_kept_apart(run):
    table = main_table(run)
    areas = cells(table, "AUROC", "static")
    area_rows = run.rows[(run.rows["metric"] == "auroc") & (run.rows["set_name"] == "static")]
    entropies = area_rows[area_rows["score"] == "entropy"].set_index("method")["value"]
    assert float(areas["laplace"].value) == pytest.approx(entropies["laplace"], abs=0.001)
    tables = {table.columns[0][1]: table for table in full_tables(run, "static")}
    for label, score in (("entropy", "entropy"), ("largest probability", "max_probability")):
        areas_of_score = area_rows[area_rows["score"] == score].set_index("method")["value"]
        for method, (cell, *_) in tables[f"static, {label}"].rows:
            assert float(cell.value) == pytest.approx(areas_of_score[method.key], abs=0.0006)


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (-0.5, 2, "−0.50"),
        (-0.001, 2, "0.00"),
        (1234.5, 1, "1,234.5"),
        (math.nan, 2, "–"),
        (-1.2345e-9, 11, "−1.23·10⁻⁹"),
        (9.9996e-8, 10, "1.000·10⁻⁷"),
        (3e-12, 11, "0"),
        (0.00012, 5, "0.00012"),
    ],
)
def test_number(value, places, text):
    assert number(value, places) == text


def test_numbers_as_people_read_them():
    assert decimals(0.88, 0.92, 0.9) == 3
    assert [decimals(math.nan, math.nan, x) for x in (0.31, 0.0123, 0.0042)] == [3, 3, 4]
    assert [significant(x) for x in (0, 0.000012345, 3.14159, 123456)] == [
        *("0", "1.23·10⁻⁵", "3.14", "123,456"),
    ]
    assert [duration(x) for x in (0.5, 75, 3700)] == ["0.50 s", "1 min 15 s", "1 h 1 min"]
    assert [size(x) for x in (8, 72_020, 2.1e9)] == ["8 B", "72.0 kB", "2.10 GB"]
