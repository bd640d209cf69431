"""Metrics of unusual inputs: half precision, one example, sets that are well separated."""

import math

import numpy as np
import pytest
import torch

from laplace_debias import metrics
from laplace_debias.metrics import modules


def half_probabilities(dtype, n=400, num_classes=10):
    torch.manual_seed(0)
    probs = torch.randn(n, num_classes).softmax(1)
    labels = torch.multinomial(probs, 1).squeeze(1)
    return probs, probs.to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accepted_by_all_metrics(dtype):
    probs, half, labels = half_probabilities(dtype)
    expected = metrics.evaluate(probs, labels, {"far": probs.roll(1, 0)})
    half_report = metrics.evaluate(half, labels, {"far": half.roll(1, 0)})
    assert half_report.keys() == expected.keys()
    tolerance = 8 * torch.finfo(dtype).eps
    for name in ("accuracy", "nll", "brier", "mean_entropy", "aurc"):
        assert abs(half_report[name] - expected[name]) <= tolerance * max(
            1.0, abs(expected[name])
        ), name
    assert abs(metrics.aurc(half, labels) - metrics.aurc(probs, labels)) < tolerance
    area = modules.AURC()
    area.update(half, labels)
    assert float(area.compute()) == pytest.approx(float(metrics.aurc(half, labels)))


def test_the_interval_of_a_share_near_zero_with_a_large_error_does_not_overflow():
    scores_ood = 0.45 - 0.1 * torch.rand(200, generator=torch.Generator().manual_seed(0))
    scores_ood[:5] = 1e-4
    probs = 1e-3 * (1 + torch.rand(2000, generator=torch.Generator().manual_seed(1)))
    probs[0] = 0.46
    report = metrics.evaluate(probs, torch.zeros(2000).long(), {"far": scores_ood})
    share = report["fpr95_far"]
    assert share == pytest.approx(0.0005, rel=1e-3)
    assert 0 <= share.low <= share <= share.high <= 1


def test_one_example_has_no_interval():
    values = [torch.tensor([number]) for number in (0.0, 1.0, 0.5)]
    report = metrics.evaluate_regression(*values)
    for name in ("rmse", "scaled_error", "crps"):
        assert math.isnan(report[name].low), name
        assert math.isnan(report[name].high), name


def test_probabilities_slightly_above_one_are_those_of_the_label():
    probs = torch.tensor([[0.9, 0.2], [1.00001, 0.1]])
    report = metrics.evaluate_multilabel(probs, torch.tensor([[1, 0], [1, 0]]))
    assert report["exact_match"] == report["accuracy"] == 1


def test_the_interval_of_a_share_ends_at_one():
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    area = metrics.evaluate(probs, torch.tensor([1, 1, 0]))["aurc"]
    assert 0 <= area.low <= area <= area.high <= 1
    mean = torch.zeros(12, 2)
    targets = torch.zeros(12, 2)
    targets[0, 0] = 9.0
    coverage = metrics.evaluate_regression(mean, torch.ones(12, 2), targets)["coverage"]
    assert coverage.high <= 1


def test_sets_whose_metrics_would_have_one_name_are_refused():
    probs = torch.rand(20, 3).softmax(1)
    labels = torch.zeros(20).long()
    with pytest.raises(ValueError, match="'aupr_in_x'"):
        metrics.evaluate(probs, labels, {"x": probs, "in_x": probs.flip(0)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GaussianNLL", "'standard_deviation'"),
        ("IntervalCoverage", "'high'"),
        ("IntervalWidth", "'high'"),
        ("AUROC", "'is_ood'"),
        ("ECE", "'labels'"),
    ],
)
def test_a_missing_argument_is_refused_at_once(name, message):
    with pytest.raises(TypeError, match=message):
        getattr(modules, name)().update(torch.ones(3))


def test_large_errors_in_half_precision():
    mean = torch.zeros(4, dtype=torch.float16)
    targets = torch.full((4,), 500.0, dtype=torch.float16)
    assert float(metrics.rmse(mean, targets)) == 500


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([0.5, 0.2], TypeError, "is a list, but must be a tensor"),
        (np.array([0.5, 0.2]), TypeError, "is a ndarray, but must be a tensor"),
        (torch.ones(3, 1), ValueError, r"has shape \[3, 1\], but must have one score per example"),
        (torch.ones(0), ValueError, "is empty"),
        (torch.tensor([0.5, torch.nan]), ValueError, "contains NaN"),
        (torch.tensor([1, 2]), ValueError, "has dtype torch.int64, but must be floating point"),
    ],
)
def test_scores_are_checked_by_all_metrics_of_detection(scores, error, message):
    good = torch.tensor([0.1, 0.4])
    for function in (metrics.evaluate_ood, metrics.auroc, metrics.fpr95):
        with pytest.raises(error, match=f"`scores_ood` {message}"):
            function(good, scores)
        with pytest.raises(error, match=f"`scores_id` {message}"):
            function(scores, good)
    with pytest.raises(TypeError, match="`is_ood` is a list, but must be a tensor"):
        modules.AUROC().update(good, [0, 1])


@pytest.mark.usefixtures("unchecked")
def test_log_probabilities_in_a_list_are_refused():
    probs = torch.full((3, 2), 0.5)
    labels = torch.zeros(3).long()
    with pytest.raises(TypeError, match="`log_probs` is a list, but must be a tensor"):
        metrics.evaluate(probs, labels, log_probs=[-0.7, -0.7, -0.7])
