"""Intervals against other libraries, slow loops, and simulation."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score

from laplace_debias import metrics
from laplace_debias.metrics.definitions import METRICS
from laplace_debias.metrics.intervals import (
    area_interval,
    mean_interval,
    proportion_interval,
    quantile_rank_limits,
)
from laplace_debias.metrics.statistics import Mean


def predictions(n, generator):
    """Predictions `[n, 5]` of two overconfident networks for the same inputs, and labels `[n]`."""
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    noise = torch.randn(2, n, 5, generator=generator, dtype=torch.float64)
    a = (1.4 * logits + 0.3 * noise[0]).softmax(1)
    b = (logits + 0.5 * noise[1]).softmax(1)
    return a, b, labels


def scores(n, generator):
    """Two scores of the same n ID and n OOD examples, and 1 for each OOD example; all `[2n]`."""
    common, *noise = torch.randn(3, 2 * n, generator=generator, dtype=torch.float64)
    is_ood = (torch.arange(2 * n) >= n).long()
    common = common + 1.5 * is_ood
    return common + 0.5 * noise[0], common + 0.8 * noise[1], is_ood


def statistic_of(name, predictions, labels):
    """The statistic of a metric, from class probabilities, or from scores with labels 1 for OOD."""
    if predictions.ndim == 1:
        return METRICS[name].statistic(predictions[labels == 0], predictions[labels == 1])
    return METRICS[name].statistic(predictions, labels)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------- a float with ends


def test_an_interval_is_its_value():
    interval = metrics.Interval(0.25, 0.125, 0.5)
    assert interval == 0.25
    assert interval + 1 == 1.25
    assert f"{interval:.3f}" == "0.250"
    assert json.loads(json.dumps({"nll": interval})) == {"nll": 0.25}
    assert type(interval.value) is float
    assert hash(interval) == hash(0.25)
    assert torch.tensor([interval]).item() == 0.25


def test_copies_of_an_interval_keep_its_ends():
    interval = metrics.Interval(0.5, 0.0, 1.0)
    for copied in (pickle.loads(pickle.dumps(interval)), copy.deepcopy(interval)):
        assert copied == interval
        assert repr(copied) == "Interval(0.5, 0.0, 1.0)"


def test_text_has_the_digits_that_tell_the_ends_apart():
    assert str(metrics.Interval(0.91234, 0.90512, 0.91901)) == "0.912 [0.905, 0.919]"
    assert str(metrics.Interval(123.4, 100.0, 150.0)) == "123 [100, 150]"
    assert str(metrics.Interval(0.5)) == "0.5"


# --------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("successes", "total"), [(0, 5), (3, 5), (5, 5), (190, 200)])
def test_the_interval_of_a_proportion_is_wilsons(successes, total):
    expected = stats.binomtest(successes, total).proportion_ci(0.9, "wilson")
    assert proportion_interval(successes, total, 0.9) == pytest.approx(
        (expected.low, expected.high)
    )


def test_the_interval_of_a_mean_without_skewness_is_students():
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    expected = stats.t.interval(0.95, 4, 0, stats.sem(values.numpy()))
    assert mean_interval(0.0, values, 0.95) == pytest.approx(expected)
    assert all(math.isnan(end) for end in mean_interval(0.0, values[:1], 0.95))
    assert mean_interval(3.0, torch.full((4,), 3.0), 0.95) == (3.0, 3.0)


def test_the_interval_of_a_skewed_mean_solves_halls_equation():
    """At its ends g(T) = T + γT²/3 + γ²T³/27 + γ/(6n) is ± the quantile of t over √n."""
    values = torch.rand(40, generator=seeded(), dtype=torch.float64).log().neg()
    ends = mean_interval(values.mean().item(), values, 0.95)
    n = 40
    deviation = values.std(correction=0).item()
    gamma = stats.skew(values.numpy())
    # T uses the standard deviation with n - 1.
    T = (values.mean().item() - np.array(ends)) / (deviation * math.sqrt(n / (n - 1)))
    transformed = T + gamma * T**2 / 3 + gamma**2 * T**3 / 27 + gamma / (6 * n)
    quantile = stats.t.ppf(0.975, n - 1) / math.sqrt(n)
    np.testing.assert_allclose(transformed, [quantile, -quantile], rtol=1e-9)


def test_the_interval_of_a_paired_proportion_adds_half_an_example_to_each_cell():
    a = torch.tensor([[0.9, 0.1]]).repeat(10, 1)
    b = a.clone()
    labels = torch.zeros(10, dtype=torch.long)
    b[:3] = torch.tensor([0.1, 0.9])  # 3 of 10: b is wrong and a is right; 0 of 10: the reverse
    interval = metrics.compare(metrics.evaluate(a, labels), metrics.evaluate(b, labels))["accuracy"]
    only_a_right = 3.5
    only_b_right = 0.5
    n = 12
    gain = only_a_right - only_b_right
    centre = gain / n
    half = 1.959964 / n * math.sqrt(only_a_right + only_b_right - gain**2 / n)
    assert interval.value == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((centre - half, centre + half))


def test_intervals_of_a_few_examples_stay_in_the_range_of_the_metric():
    """Three examples, one of which is right: an interval that is symmetric in t is very wide."""
    probs = torch.tensor([[0.96, 0.02, 0.02], [0.9, 0.05, 0.05], [0.7, 0.2, 0.1]]).double()
    report = metrics.evaluate(probs, torch.tensor([0, 1, 2]))
    multilabel_report = metrics.evaluate_multilabel(
        probs, torch.tensor([[0, 1, 1], [0, 1, 0], [1, 0, 0]])
    )
    for metric_report in (report, multilabel_report):
        for name, lowest, highest in (("overconfidence", -1, 1), ("brier", 0, 2)):
            interval = metric_report[name]
            assert lowest <= interval.low < interval < interval.high <= highest


def test_shares_of_several_outputs_are_means_over_examples():
    targets = 1.5 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    deviations = (torch.ones(60, 2), torch.full((60, 2), 0.5))
    report, other_report = (
        metrics.evaluate_regression(torch.zeros(60, 2), deviation, targets)
        for deviation in deviations
    )
    # The fraction of an example's outputs within 1.96 standard deviations, which may be 1/2.
    inside, other_inside = (
        (targets.abs() < 1.959964 * deviation).double().mean(1) for deviation in deviations
    )
    interval = report["coverage"]
    assert (interval.low, interval.high) == pytest.approx(
        mean_interval(inside.mean().item(), inside, 0.95)
    )
    gain = inside - other_inside
    difference = metrics.compare(report, other_report)["coverage"]
    assert (difference.low, difference.high) == pytest.approx(
        mean_interval(gain.mean().item(), gain, 0.95)
    )


@pytest.mark.parametrize("n", [3, 40])
def test_shares_of_several_outputs_without_a_miss_have_wilsons_interval(n):
    z = stats.norm.ppf(0.975)
    targets = torch.zeros(n, 2)
    report = metrics.evaluate_regression(targets, torch.ones(n, 2), targets)
    probs = torch.full((n, 3), 0.9)
    multilabel_report = metrics.evaluate_multilabel(probs, torch.ones(n, 3, dtype=torch.long))
    for interval in (report["coverage"], multilabel_report["accuracy"]):
        assert interval.value == interval.high == 1
        assert interval.low == pytest.approx(n / (n + z**2))
    multilabel_report = metrics.evaluate_multilabel(probs, torch.zeros(n, 3, dtype=torch.long))
    assert multilabel_report["accuracy"].value == multilabel_report["accuracy"].low == 0
    assert multilabel_report["accuracy"].high == pytest.approx(z**2 / (n + z**2))


@pytest.mark.parametrize("num_id", [5, 7, 20])
@pytest.mark.parametrize("num_ood", [3, 7, 20])
def test_the_interval_of_perfect_detection_is_wilsons(num_id, num_ood):
    generator = torch.Generator().manual_seed(num_id + num_ood)
    low = torch.rand(num_id, generator=generator)
    high = 2 + torch.rand(num_ood, generator=generator)
    report = metrics.evaluate_ood(low, high)
    n = min(num_id, num_ood)
    z = stats.norm.ppf(0.975)
    for name in ("auroc", "aupr_out", "aupr_in"):
        interval = report[name]
        assert interval.value == interval.high == 1
        # It is Wilson's lower end of a proportion of 1.
        assert interval.low == pytest.approx(n / (n + z**2))


def test_the_variance_of_the_auroc_is_delongs():
    """All pairs of an ID and an OOD example are compared."""
    a, b, is_ood = scores(40, seeded())
    rounded_a = a.round(decimals=0)
    rounded_b = b.round(decimals=0)
    placements_a = placements(rounded_a, is_ood)
    placements_b = placements(rounded_b, is_ood)
    value = placements_a[0].mean()
    variances = np.array([np.var(shares, ddof=1) / 40 for shares in placements_a])
    statistic_a = statistic_of("auroc", rounded_a, is_ood)
    statistic_b = statistic_of("auroc", rounded_b, is_ood)
    interval = statistic_a.interval(0.95)
    ends = np.array([interval.low, interval.high])
    # One more row of each set has an influence of 0 or 1, with the mean `value`.
    error = math.sqrt(variances.sum() + 2 * value * (1 - value) / 40**2)
    half = welch_quantile(variances, [40, 40]) * error / (value * (1 - value))
    np.testing.assert_allclose(
        np.log(ends / (1 - ends)),
        math.log(value / (1 - value)) + np.array([-half, half]),
        rtol=1e-5,
    )
    difference = statistic_a.difference(statistic_b, 0.95)
    gaps = [
        shares_a - shares_b for shares_a, shares_b in zip(placements_a, placements_b, strict=True)
    ]
    variances = np.array([np.var(gap, ddof=1) / 40 for gap in gaps])
    half = welch_quantile(variances, [40, 40]) * math.sqrt(variances.sum())
    assert difference.high - difference.low == pytest.approx(2 * half, rel=1e-5)


def welch_quantile(variances, sizes):
    """The 97.5 % quantile of Student's t with the degrees of freedom of Welch's test."""
    degrees = variances.sum() ** 2 / sum(
        v**2 / (n - 1) for v, n in zip(variances, sizes, strict=True)
    )
    return stats.t.ppf(0.975, degrees)


def placements(scores, is_ood):
    """Shares of the ID examples below each OOD example, and of the OOD ones above each ID one."""
    scores_id = scores[is_ood == 0]
    scores_ood = scores[is_ood == 1]
    wins = (scores_ood[:, None] > scores_id).double()
    wins += (scores_ood[:, None] == scores_id).double() / 2
    return wins.mean(1).numpy(), wins.mean(0).numpy()


@pytest.mark.parametrize("metric", ["aupr_out", "aupr_in"])
def test_influence_on_average_precision_is_the_slope_in_a_weight(metric):
    a, _, is_ood = scores(25, seeded())
    rounded = a.round(decimals=1)
    statistic = statistic_of(metric, rounded, is_ood)
    influence = torch.cat([statistic.influence, statistic.influence_ood]).numpy()
    if metric == "aupr_out":
        sign = 1
        positive = is_ood
    else:
        sign = -1
        positive = 1 - is_ood

    def precision_with_weight(index, step):
        """Average precision where an example has the weight 1 + step."""
        weights = np.ones(50)
        weights[index] += step
        return average_precision_score(
            positive.numpy(), sign * rounded.numpy(), sample_weight=weights
        )

    # The sizes of both groups are fixed, so that weights count relative to the mean of their group.
    # Slopes are therefore centred: an interval keeps the ratio of the groups.
    for group in (range(25), range(25, 50)):
        slopes = np.array(
            [
                (precision_with_weight(index, 1e-6) - precision_with_weight(index, -1e-6)) / 2e-6
                for index in group
            ]
        )
        np.testing.assert_allclose(
            25 * (slopes - slopes.mean()), influence[group] - influence[group].mean(), atol=1e-5
        )


def test_influence_on_the_aurc_is_what_leaving_an_example_out_changes():
    probs, _, labels = predictions(400, seeded())
    statistic = statistic_of("aurc", probs, labels)
    aurc_without = []
    for index in range(400):
        is_kept = torch.arange(400) != index
        aurc_without.append(metrics.aurc(probs[is_kept], labels[is_kept]).item())
    jackknife = -399 * (np.array(aurc_without) - np.mean(aurc_without))
    influence = statistic.influence.numpy()
    np.testing.assert_allclose(influence - influence.mean(), jackknife, atol=0.03)
    assert np.std(influence) == pytest.approx(np.std(jackknife), rel=0.01)


@pytest.mark.parametrize(("value", "exact"), [(1 + 2**-52, 1.0), (-(2**-60), 0.0)])
def test_an_area_a_rounding_error_beyond_its_ends_has_their_interval(value, exact):
    assert area_interval(value, 0.0, 50, 0.95) == proportion_interval(50 * exact, 50, 0.95)


def test_a_metric_with_an_ideal_is_compared_by_its_distance_from_it():
    """If a value below its ideal grows, its distance from the ideal falls."""
    labels = torch.arange(200) % 2
    right = torch.where(torch.arange(200) < 140, labels, 1 - labels)
    noise = 0.02 * torch.rand(3, 200, generator=seeded(), dtype=torch.float64)
    # 70 % are right, so the networks are over-confident by 0.25, by -0.15 and by 0.1.
    confidences = torch.tensor([[0.95], [0.55], [0.8]]).double() + noise - 0.01
    reports = [metrics.evaluate(torch.where(right == 1, c, 1 - c), labels) for c in confidences]
    gaps = [report["overconfidence"] for report in reports]
    assert gaps[1].high < 0 < gaps[0].low
    over, under, slightly_over = reports
    same_side = metrics.compare(over, slightly_over)["overconfidence"]
    assert same_side.value == pytest.approx(gaps[0].value - gaps[2].value)
    difference = confidences[0] - confidences[2]
    assert (same_side.low, same_side.high) == pytest.approx(
        mean_interval(difference.mean().item(), difference, 0.95)
    )
    across = metrics.compare(under, over)["overconfidence"]
    assert across.value == pytest.approx(-gaps[1].value - gaps[0].value)
    sums = 2 * (right == labels).double() - confidences[0] - confidences[1]
    assert (across.low, across.high) == pytest.approx(mean_interval(sums.mean().item(), sums, 0.95))
    narrow, wide = (
        metrics.evaluate_regression(0 * noise[0], torch.full((200,), s).double(), noise[0] - 0.01)
        for s in (0.004, 0.02)
    )
    narrow_error = narrow["scaled_error"].value
    wide_error = wide["scaled_error"].value
    assert wide_error < 1 < narrow_error
    scaled_error = metrics.compare(narrow, wide)["scaled_error"]
    assert scaled_error.value == pytest.approx(narrow_error - 1 - (1 - wide_error))


def test_distances_from_an_ideal_on_different_sides_are_rarely_called_different():
    """In 500 data sets, both methods are equally far from the ideal, one above and one below it."""
    generator = seeded()
    names = ("overconfidence", "bias")
    num_excluded = dict.fromkeys(names, 0)
    for _ in range(500):
        # The probability of class 1 is 0.75, and the networks predict 0.78 and 0.72.
        labels = (torch.rand(200, generator=generator) < 0.75).long()
        classes = [metrics.evaluate(torch.full((200,), p), labels) for p in (0.78, 0.72)]
        targets = torch.randn(200, generator=generator)
        numbers = [
            metrics.evaluate_regression(torch.full((200,), m), torch.ones(200), targets)
            for m in (0.07, -0.07)
        ]
        differences = metrics.compare(*classes) | metrics.compare(*numbers)
        for name in names:
            num_excluded[name] += not differences[name].low <= 0 <= differences[name].high
    # With a coverage of 95 %, more than 40 of 500 intervals exclude 0 with a probability of 0.15 %.
    assert all(count <= 40 for count in num_excluded.values()), num_excluded


def test_differences_between_distances_from_an_ideal_depend_only_on_the_deviations():
    influences = torch.randn(2, 100, generator=seeded()).double() + torch.tensor([[0.8], [1.1]])

    def difference(influences, ideal):
        a, b = (Mean(values.mean().item(), values, ideal=ideal) for values in influences)
        interval = a.difference(b, 0.95)
        return interval.value, interval.low, interval.high

    expected = difference(influences, 0)
    assert difference(influences + 1, 1) == pytest.approx(expected)
    assert difference(influences - 2, -2) == pytest.approx(expected)


def test_of_errors_over_bins_no_interval_is_printed():
    probs_a, probs_b, labels = predictions(100, seeded())
    report_a = metrics.evaluate(probs_a, labels)
    report_b = metrics.evaluate(probs_b, labels)
    for name in ("ece", "ece_equal_mass", "smooth_ece", "mce", "classwise_ece"):
        assert not report_a[name].is_known
        assert not metrics.compare(report_a, report_b)[name].is_known
        assert METRICS[name].interval.startswith("None")


def test_intervals_do_not_depend_on_the_order_of_the_examples():
    """Several processes have the examples in another order."""
    probs_a, probs_b, labels = predictions(200, seeded())

    def compare_in(order):
        ood = {"x": probs_b[order]}
        report_a = metrics.evaluate(probs_a[order], labels[order], ood)
        report_b = metrics.evaluate(probs_b[order], labels[order], ood)
        return metrics.compare(report_a, report_b)

    in_order = compare_in(torch.arange(200))
    permuted = compare_in(torch.randperm(200, generator=seeded(1)))
    for name, expected in in_order.items():
        interval = permuted[name]
        assert (interval.value, interval.low, interval.high) == pytest.approx(
            (expected.value, expected.low, expected.high), abs=1e-6, nan_ok=True
        ), name


# -------------------------------------------------------------------------- simulation

CLASSIFICATION_METRICS = ["accuracy", "nll", "brier", "overconfidence", "aurc"]
OOD_METRICS = ["auroc", "aupr_out", "aupr_in", "fpr95"]


def statistics_of_drawn(n, generator):
    """Draw n examples; yield each metric's name and its statistics for two methods."""
    classification = predictions(n, generator)
    detection = scores(n, generator)
    for names, (a, b, labels) in (
        (CLASSIFICATION_METRICS, classification),
        (OOD_METRICS, detection),
    ):
        for name in names:
            yield name, statistic_of(name, a, labels), statistic_of(name, b, labels)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1.8, 3.3])
@pytest.mark.parametrize(("name", "num_ood"), [("auroc", 20), ("fpr95", 20), ("fpr95", 50)])
def test_intervals_for_few_ood_examples_cover_the_truth(name, num_ood, shift):
    """The AUROC is 0.90 or 0.99; few OOD examples contain none of the rarest scores."""
    generator = seeded()

    def drawn(num_id, num_ood):
        scores_id = torch.randn(num_id, generator=generator, dtype=torch.float64)
        scores_ood = shift + torch.randn(num_ood, generator=generator, dtype=torch.float64)
        return METRICS[name].statistic(scores_id, scores_ood)

    truth = drawn(500_000, 500_000).value
    hits = 0
    for _ in range(1000):
        interval = drawn(1000, num_ood).interval(0.95)
        hits += interval.low <= truth <= interval.high
    # Intervals for so few examples are conservative. The share has a standard error of 0.8 %.
    assert hits >= 930


def test_the_difference_of_two_false_alarm_rates_needs_enough_ood_examples():
    a, b, is_ood = scores(80, seeded())
    for num_kept, is_known in ((71, False), (72, True)):
        kept = (is_ood == 0) | (is_ood.cumsum(0) <= num_kept)
        statistics = [statistic_of("fpr95", x[kept], is_ood[kept]) for x in (a, b)]
        assert statistics[0].difference(statistics[1], 0.95).is_known == is_known


def test_limits_of_the_rank_of_a_quantile_are_those_of_scipy():
    for size in (1, 20, 71, 72, 1000):
        expected = stats.binom.ppf([0.025, 0.975], size, 0.05)
        assert quantile_rank_limits(0.05, size, 0.95) == tuple(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_intervals_cover_the_truth_as_often_as_they_say():
    """95 % intervals cover the truth in 93 to 97 % of the simulations, up to chance.

    The truth is the value for 10⁶ examples. The share in 1,500 simulations has a standard error of
    0.6 %, so that a coverage of 91 or 99 % does not pass.
    """
    n = 200
    generator = seeded(200)
    true_values = {}
    true_differences = {}
    for name, statistic_a, statistic_b in statistics_of_drawn(10**6, generator):
        value_a = statistic_a.value
        value_b = statistic_b.value
        true_values[name] = value_a
        if name == "overconfidence":
            true_differences[name] = abs(value_a) - abs(value_b)
        else:
            true_differences[name] = value_a - value_b
    covered = {name: [] for name in true_values}
    for _ in range(1500):
        for name, statistic_a, statistic_b in statistics_of_drawn(n, generator):
            interval = statistic_a.interval(0.95)
            difference = statistic_a.difference(statistic_b, 0.95)
            covered[name].append(
                [
                    interval.low <= true_values[name] <= interval.high,
                    difference.low <= true_differences[name] <= difference.high,
                ]
            )
    for name, hits in covered.items():
        slack = 2 * math.sqrt(0.95 * 0.05 / len(hits))
        for share in np.mean(hits, axis=0):
            assert 0.93 - slack <= share <= 0.97 + slack, (name, n, share)
