"""Calibration errors and selective prediction against slow loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from laplace_debias import metrics


def predictions(n=300, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((0.6 * logits).softmax(1), 1, generator=generator)[:, 0]
    return logits.softmax(1), labels


def confidences(probs, labels):
    """Pairs of each example's confidence, and 1 if its prediction is right or else 0."""
    rows = zip(probs.tolist(), labels.tolist(), strict=True)
    return [(max(row), float(row.index(max(row)) == label)) for row, label in rows]


def equal_mass_by_sorting(probs, labels, num_bins):
    ordered = sorted(confidences(probs, labels))
    groups = np.array_split(np.array(ordered), num_bins)
    return sum(abs((group[:, 1] - group[:, 0]).sum()) for group in groups) / len(ordered)


def mce_by_loop(probs, labels, num_bins):
    gaps = []
    for index in range(num_bins):
        lower = index / num_bins
        upper = (index + 1) / num_bins
        # A confidence of 1 belongs to the last bin.
        is_last = index == num_bins - 1
        inside = [
            (c, r)
            for c, r in confidences(probs, labels)
            if lower <= c < upper or (is_last and c == 1)
        ]
        if inside:
            gaps.append(abs(np.mean([r - c for c, r in inside])))
    return max(gaps)


def smooth_ece_by_kernel(probs, labels, points=1500):
    """Compute it by its definition: reflected Gaussian kernels, midpoints, bisection for sigma."""
    pairs = np.array(confidences(probs, labels))
    f = pairs[:, 0]
    residual = pairs[:, 1] - f
    t = (np.arange(points) + 0.5) / points

    def error(sigma):
        smoothed = np.zeros(points)
        for period in range(-4, 5):
            for image in (2 * period + f, 2 * period - f):
                kernel = np.exp(-((t[:, None] - image) ** 2) / (2 * sigma**2))
                smoothed += kernel @ residual / (sigma * math.sqrt(2 * math.pi))
        return np.abs(smoothed).mean() / len(f)

    low = 1e-4
    high = 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if error(middle) > middle:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_equal_mass_ece_equals_groups_of_the_sorted_examples(num_bins):
    probs, labels = predictions()
    expected = equal_mass_by_sorting(probs, labels, num_bins)
    assert metrics.ece_equal_mass(probs, labels, num_bins).item() == pytest.approx(expected)


def test_equal_confidences_share_a_bin_in_any_order():
    probs = torch.tensor([[0.7, 0.3]] * 10 + [[0.9, 0.1]] * 2)
    labels = torch.tensor([0] * 4 + [1] * 6 + [0, 0])
    order = torch.randperm(12)
    expected = (abs(4 - 7) + abs(2 - 1.8)) / 12
    for indices in (torch.arange(12), order):
        error = metrics.ece_equal_mass(probs[indices], labels[indices], 3).item()
        assert error == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_mce_equals_a_loop_over_the_bins(num_bins):
    probs, labels = predictions()
    expected = mce_by_loop(probs, labels, num_bins)
    assert metrics.mce(probs, labels, num_bins).item() == pytest.approx(expected, abs=1e-6)


def calibrated_and_one_certain_mistake(dtype, n=2000):
    """Predictions in the last of 15 bins that are calibrated, and a certain one that is wrong."""
    confidence = torch.full((n,), 0.975, dtype=dtype)
    probs = torch.stack([confidence, 1 - confidence], 1)
    labels = torch.zeros(n, dtype=torch.long)
    labels[: n // 40] = 1
    certain = torch.tensor([[1.0, 0.0]], dtype=dtype)
    return torch.cat([probs, certain]), torch.cat([labels, torch.tensor([1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_bins", [1, 15])
def test_a_confidence_of_one_belongs_to_the_last_bin(dtype, num_bins):
    probs, labels = calibrated_and_one_certain_mistake(dtype)
    expected = (2000 * 0.975 + 1) / 2001 - 1950 / 2001  # One bin holds every example.
    curve = metrics.reliability_curve(probs, labels, num_bins)
    assert (curve.confidence - curve.accuracy)[-1].item() == pytest.approx(expected, abs=1e-6)
    for metric in (metrics.ece, metrics.mce):
        assert metric(probs, labels, num_bins).item() == pytest.approx(expected, abs=1e-6)


def test_the_maximum_of_one_bin_is_the_expected_error():
    probs, labels = predictions()
    probs[:20] = torch.eye(4, dtype=torch.float64)[0]
    expected = metrics.ece(probs, labels, 1).item()
    assert metrics.mce(probs, labels, 1).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_classwise_ece_is_the_mean_of_torchmetrics_binary_ones(num_bins):
    probs, labels = predictions()
    binary_errors = [
        binary_calibration_error(probs[:, c], (labels == c).long(), num_bins).item()
        for c in range(probs.shape[1])
    ]
    error = metrics.classwise_ece(probs, labels, num_bins).item()
    assert error == pytest.approx(np.mean(binary_errors), abs=1e-6)


@pytest.mark.parametrize(("n", "seed"), [(20, 0), (100, 1), (100, 2)])
def test_smooth_ece_equals_its_definition_by_kernels(n, seed):
    probs, labels = predictions(n, seed=seed)
    expected = smooth_ece_by_kernel(probs, labels)
    assert metrics.smooth_ece(probs, labels).item() == pytest.approx(expected, abs=2e-5)
    assert metrics.smooth_ece(probs, labels, 256).item() == pytest.approx(expected, abs=1e-3)


def test_smooth_ece_moves_little_where_a_confidence_crosses_a_border_of_bins():
    labels = torch.zeros(100, dtype=torch.long)
    below, above = (torch.tensor([[p, 1 - p]]).repeat(100, 1) for p in (0.5999999, 0.6000001))
    below[:50] = torch.tensor([0.61, 0.39])
    above[:50] = torch.tensor([0.61, 0.39])
    error_below = metrics.smooth_ece(below, labels).item()
    error_above = metrics.smooth_ece(above, labels).item()
    assert error_below == pytest.approx(error_above, abs=1e-5)


@pytest.mark.parametrize(
    "metric", [metrics.ece_equal_mass, metrics.mce, metrics.classwise_ece, metrics.smooth_ece]
)
def test_certainty_is_perfect_or_worst(metric):
    probs = torch.eye(4).repeat(3, 1)
    labels = torch.arange(4).repeat(3)
    assert metric(probs, labels).item() == pytest.approx(0, abs=1e-6)
    # Two of the four classes are wrong in each example: the predicted one and the true one.
    worst = 0.5 if metric is metrics.classwise_ece else 1
    # Kernels of width 1 lose nothing beyond the ends, because they are reflected there.
    assert metric(probs, (labels + 1) % 4).item() == pytest.approx(worst, abs=1e-6)


@pytest.mark.parametrize(
    "metric",
    [
        metrics.ece_equal_mass,
        metrics.mce,
        metrics.classwise_ece,
        metrics.smooth_ece,
        metrics.aurc,
        metrics.risk_coverage_curve,
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_empty_input_and_bad_labels_are_refused(metric):
    with pytest.raises(ValueError, match="is empty"):
        metric(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    with pytest.raises(ValueError, match="labels` are between 3"):
        metric(torch.full((2, 3), 1 / 3), torch.tensor([3, 3]))


@pytest.mark.parametrize("metric", [metrics.ece_equal_mass, metrics.mce, metrics.classwise_ece])
def test_fewer_than_one_bin_is_refused(metric):
    with pytest.raises(ValueError, match="num_bins must be at least 1"):
        metric(torch.full((2, 2), 0.5), torch.tensor([0, 1]), 0)
    with pytest.raises(ValueError, match="num_points must be at least 2"):
        metrics.smooth_ece(torch.full((2, 2), 0.5), torch.tensor([0, 1]), 1)


def risk_by_loop(pairs):
    """The error rates over the first 1, 2 … n pairs of `confidences`."""
    errors = 0.0
    risks = []
    for number, (_, right) in enumerate(pairs, start=1):
        errors += 1 - right
        risks.append(errors / number)
    return risks


def test_risk_coverage_curve_equals_a_loop():
    probs, labels = predictions()
    pairs = sorted(confidences(probs, labels), reverse=True)
    curve = metrics.risk_coverage_curve(probs, labels)
    np.testing.assert_allclose(curve.risk, risk_by_loop(pairs), atol=1e-12)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 301) / 300, atol=1e-12)
    assert curve.risk[-1].item() == pytest.approx(1 - metrics.accuracy(probs, labels).item())
    assert metrics.aurc(probs, labels).item() == pytest.approx(np.mean(risk_by_loop(pairs)))


def test_aurc_of_ties_is_the_expectation_over_their_order():
    p = torch.tensor([0.9, 0.7, 0.7, 0.7, 0.6], dtype=torch.float64)
    probs = torch.stack([p, 1 - p], 1)
    labels = torch.tensor([0, 1, 0, 0, 1])
    pairs = confidences(probs, labels)
    orders = [[0, *middle, 4] for middle in itertools.permutations([1, 2, 3])]
    expected = np.mean([np.mean(risk_by_loop([pairs[i] for i in order])) for order in orders])
    assert metrics.aurc(probs, labels).item() == pytest.approx(expected)


def test_aurc_is_lowest_where_mistakes_come_last():
    p = torch.linspace(0.99, 0.6, 10)
    probs = torch.stack([p, 1 - p], 1)
    mistakes_last = torch.zeros(10, dtype=torch.long)
    mistakes_last[-2:] = 1
    mistakes_first = torch.zeros(10, dtype=torch.long)
    mistakes_first[:2] = 1
    assert metrics.aurc(probs, mistakes_last) < metrics.aurc(probs, mistakes_first)
    assert metrics.aurc(probs, torch.zeros(10, dtype=torch.long)) == 0


def sharp_predictions(dtype, n=400):
    """Predictions whose confidence falls from 1 - 1e-12 to 1 - 1e-8, and labels."""
    doubt = torch.logspace(-12, -8, n, dtype=torch.float64)
    probs = torch.stack([1 - doubt, doubt / 2, doubt / 3, doubt / 6], 1).to(dtype)
    labels = torch.zeros(n, dtype=torch.long)
    labels[-n // 10 :] = 1  # The least confident ones are wrong.
    return probs, labels


def test_confidences_that_float32_rounds_to_one_keep_their_order():
    expected = metrics.aurc(*sharp_predictions(torch.float64)).item()
    aurc = metrics.aurc(*sharp_predictions(torch.float32)).item()
    assert aurc == pytest.approx(expected, rel=1e-3)
