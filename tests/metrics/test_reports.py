"""The report of metrics, and the comparison of two reports."""

import json
import pickle

import pandas as pd
import pytest
import torch

from laplace_debias import metrics
from laplace_debias.metrics import evaluation
from laplace_debias.metrics.statistics import Statistic


def predictions(n=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 3, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits.softmax(1), (2 * logits).softmax(1), labels


OOD = torch.full((30, 3), 1 / 3)


def test_it_is_a_dict_of_floats():
    probs, _, labels = predictions()
    report = metrics.evaluate(probs, labels)
    assert json.loads(json.dumps(report)) == {name: value.value for name, value in report.items()}
    assert report["nll"] == pytest.approx(metrics.nll(probs, labels).item())
    copied = pickle.loads(pickle.dumps(report))
    assert copied.rows() == report.rows()
    assert metrics.compare(report, copied)["nll"].value == 0
    assert copied.level == report.level


def test_every_value_is_within_its_interval():
    probs, _, labels = predictions()
    report = metrics.evaluate(probs, labels, {"uniform": OOD})
    with_interval = [entry for entry in report.values() if entry.is_known]
    assert len(with_interval) == len(report) - 5
    assert all(entry.low <= entry.value <= entry.high for entry in with_interval)
    wide = metrics.evaluate(probs, labels, {"uniform": OOD}, level=0.99)
    assert wide.level == 0.99
    for name in ("accuracy", "nll", "aurc", "auroc_uniform"):
        assert wide[name].low <= report[name].low
        assert wide[name].high >= report[name].high
        assert wide[name].high - wide[name].low > report[name].high - report[name].low


def test_intervals_can_be_left_out():
    probs, other_probs, labels = predictions()
    report = metrics.evaluate(probs, labels, intervals=False)
    assert not any(entry.is_known for entry in report.values())
    assert dict(report) == {k: v.value for k, v in metrics.evaluate(probs, labels).items()}
    assert report.rows()[0] | {"value": None} == {
        "metric": "accuracy",
        "value": None,
        "low": None,
        "high": None,
    }
    assert "low" not in repr(report)
    against = metrics.evaluate(other_probs, labels, intervals=False)
    assert metrics.compare(report, against)["nll"].is_known


def test_the_table_is_aligned():
    probs, _, labels = predictions()
    lines = repr(metrics.evaluate(probs, labels)).splitlines()
    assert lines[0].split() == ["metric", "value", "low", "high"]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 12
    assert not any("nan" in line or "-0.0000" in line for line in lines)


def test_the_frame_has_a_row_a_metric():
    probs, _, labels = predictions()
    report = metrics.evaluate(probs, labels)
    frame = report.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == ["value", "low", "high"]
    assert frame.loc["nll"].tolist() == [report["nll"].value, report["nll"].low, report["nll"].high]
    assert report.rows()[1] == {"metric": "nll", **frame.loc["nll"].to_dict()}


def test_compare_gives_the_paired_difference_of_every_metric():
    a, b, labels = predictions()
    reports = [metrics.evaluate(probs, labels, {"uniform": OOD}) for probs in (a, b)]
    differences = metrics.compare(*reports)
    assert list(differences) == list(reports[0])
    for name, difference in differences.items():
        if name != "overconfidence":
            assert difference.value == pytest.approx(reports[0][name] - reports[1][name])
    narrower = differences["nll"].high - differences["nll"].low
    assert narrower < sum(report["nll"].high - report["nll"].low for report in reports)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_paired_is_refused():
    a, b, labels = predictions()
    report = metrics.evaluate(a, labels)
    with pytest.raises(ValueError, match=r"differ in .* of 120 targets"):
        metrics.compare(report, metrics.evaluate(b, (labels + 1) % 3))
    with pytest.raises(
        ValueError, match=r"targets of shape \[120\], but `b` has targets of shape \[100\]"
    ):
        metrics.compare(report, metrics.evaluate(b[:100], labels[:100]))
    with pytest.raises(ValueError, match=r"level 0\.95, but `b` has 0\.9"):
        metrics.compare(report, metrics.evaluate(b, labels, level=0.9))
    with pytest.raises(ValueError, match=r"auroc_x` is computed on \(120, 30\)"):
        metrics.compare(
            metrics.evaluate(a, labels, {"x": OOD}), metrics.evaluate(b, labels, {"x": OOD[:9]})
        )
    with pytest.raises(TypeError, match="`b` is a dict"):
        metrics.compare(report, dict(report))
    with pytest.raises(ValueError, match="no metric in common"):
        metrics.compare(report, metrics.evaluate_ood(a[:, 0], b[:, 0]))


def test_other_scores_are_evaluated_and_compared():
    inside = torch.randn(40)
    outside = torch.randn(50) + 1
    report = metrics.evaluate_ood(inside, outside)
    functions = (metrics.auroc, metrics.aupr, metrics.aupr_in, metrics.fpr95)
    values = [function(inside, outside).item() for function in functions]
    expected = dict(zip(("auroc", "aupr_out", "aupr_in", "fpr95"), values, strict=True))
    assert report == expected
    difference = metrics.compare(report, metrics.evaluate_ood(-inside, -outside))
    assert difference["auroc"].value == pytest.approx(2 * expected["auroc"] - 1, abs=1e-6)


def test_numbers_have_no_negative_standard_deviation():
    mean, y = torch.randn(2, 20)
    deviations = torch.ones(20)
    deviations[3] = -1.0
    with pytest.raises(ValueError, match="is -1, but no entry may be negative"):
        metrics.evaluate_numbers(mean, deviations, y, log_probs=-y.abs())


def test_the_scaled_error_of_numbers_needs_positive_standard_deviations():
    mean, y = torch.randn(2, 20)
    deviations = torch.rand(20) + 1
    report = metrics.evaluate_numbers(mean, deviations, y, log_probs=-y.abs())
    error, expected = (
        metric_report["scaled_error"]
        for metric_report in (report, metrics.evaluate_regression(mean, deviations, y))
    )
    assert (error.value, error.low, error.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    deviations[3] = 0.0
    without = metrics.evaluate_numbers(mean, deviations, y, log_probs=-y.abs())
    assert "scaled_error" not in without
    assert without["rmse"].value == report["rmse"].value


def test_every_metric_of_a_report_is_described():
    a, _, labels = predictions()
    mean, y = torch.randn(2, 20)
    names = {
        *metrics.evaluate(a, labels),
        *metrics.evaluate_multilabel(a, (a > 0.5).long()),
        *metrics.evaluate_regression(mean, torch.ones(20), y),
        *metrics.evaluate_numbers(mean, torch.ones(20), y, log_probs=-y.abs()),
        *metrics.evaluate_ood(mean, y),
    }
    assert set(metrics.METRICS) == names
    for metric in metrics.METRICS.values():
        assert metric.interval.endswith(".")
        assert metric.meaning.endswith(".")


def test_notebooks_show_a_report_with_the_numbers_of_the_text():
    report = metrics.evaluate(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
    lines = [line.split() for line in repr(report).splitlines()]
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in lines[1:])
    head = "".join(f"<th>{cell}</th>" for cell in lines[0])
    assert report._repr_html_() == f"<table><thead><tr>{head}</tr></thead>{rows}</table>"


def test_a_new_metric_of_classes_leaves_the_report_on_labels_as_it_is(monkeypatch):
    probs = torch.rand(20, 3)
    labels = torch.randint(2, (20, 3))
    expected = metrics.evaluate_multilabel(probs, labels)
    inserted = metrics.Metric(
        "inserted", "Inserted", lambda p, y: Statistic(p.mean().item(), y), interval="None."
    )
    monkeypatch.setattr(
        evaluation, "CLASSIFICATION_METRICS", (inserted, *evaluation.CLASSIFICATION_METRICS)
    )
    assert metrics.evaluate_multilabel(probs, labels).rows() == expected.rows()
