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
from laplace_debias.metrics.intervals import area_interval, mean_interval, proportion_interval


def predictions(n, generator):
    """Two overconfident networks that see the same, and labels; `[n, 5]` and `[n]`."""
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    noise = torch.randn(2, n, 5, generator=generator, dtype=torch.float64)
    a, b = (1.4 * logits + 0.3 * noise[0]).softmax(1), (logits + 0.5 * noise[1]).softmax(1)
    return a, b, labels


def scores(n, generator):
    """Two scores that see the same, of n ID and n OOD examples, and which is which."""
    common, *noise = torch.randn(3, 2 * n, generator=generator, dtype=torch.float64)
    is_ood = (torch.arange(2 * n) >= n).long()
    common = common + 1.5 * is_ood
    return common + 0.5 * noise[0], common + 0.8 * noise[1], is_ood


def statistic_of(name, predictions, labels):
    """The statistic of a metric of probabilities, or of scores with labels 1 where they are OOD."""
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
    n, deviation = 40, values.std(correction=0).item()
    gamma = stats.skew(values.numpy())
    # The deviation of T is the one over n - 1.
    T = (values.mean().item() - np.array(ends)) / (deviation * math.sqrt(n / (n - 1)))
    transformed = T + gamma * T**2 / 3 + gamma**2 * T**3 / 27 + gamma / (6 * n)
    quantile = stats.t.ppf(0.975, n - 1) / math.sqrt(n)
    np.testing.assert_allclose(transformed, [quantile, -quantile], rtol=1e-9)


def test_the_interval_of_a_paired_proportion_adds_half_an_example_to_each_cell():
    a = torch.tensor([[0.9, 0.1]]).repeat(10, 1)
    b, labels = a.clone(), torch.zeros(10, dtype=torch.long)
    b[:3] = torch.tensor([0.1, 0.9])  # b wrong where a is right: cells 3 and 0 of 10
    interval = metrics.compare(metrics.evaluate(a, labels), metrics.evaluate(b, labels))["accuracy"]
    more, fewer, n = 3.5, 0.5, 12
    centre = (more - fewer) / n
    half = 1.959964 / n * math.sqrt(more + fewer - (more - fewer) ** 2 / n)
    assert interval.value == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((centre - half, centre + half))


def test_intervals_of_a_few_examples_stay_in_the_range_of_the_metric():
    """Three examples, one of which is right: an interval that is symmetric in t is very wide."""
    probs = torch.tensor([[0.96, 0.02, 0.02], [0.9, 0.05, 0.05], [0.7, 0.2, 0.1]]).double()
    report = metrics.evaluate(probs, torch.tensor([0, 1, 2]))
    labels = metrics.evaluate_multilabel(probs, torch.tensor([[0, 1, 1], [0, 1, 0], [1, 0, 0]]))
    for each in (report, labels):
        for name, lowest, highest in (("overconfidence", -1, 1), ("brier", 0, 2)):
            assert lowest <= each[name].low < each[name] < each[name].high <= highest


@pytest.mark.parametrize("n", [3, 40])
def test_shares_of_several_outputs_without_a_miss_have_wilsons_interval(n):
    z = stats.norm.ppf(0.975)
    targets = torch.zeros(n, 2)
    report = metrics.evaluate_regression(targets, torch.ones(n, 2), targets)
    probs = torch.full((n, 3), 0.9)
    labels = metrics.evaluate_multilabel(probs, torch.ones(n, 3, dtype=torch.long))
    for interval in (report["coverage"], labels["accuracy"]):
        assert interval.value == interval.high == 1
        assert interval.low == pytest.approx(n / (n + z**2))
    labels = metrics.evaluate_multilabel(probs, torch.zeros(n, 3, dtype=torch.long))
    assert labels["accuracy"].value == labels["accuracy"].low == 0
    assert labels["accuracy"].high == pytest.approx(z**2 / (n + z**2))


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
        # Wilson's lower end of a proportion of 1.
        assert interval.low == pytest.approx(n / (n + z**2))


def test_the_variance_of_the_auroc_is_delongs():
    """By comparing all pairs."""
    a, b, is_ood = scores(40, seeded())
    rounded = [part.round(decimals=0) for part in (a, b)]
    placements = []
    for part in rounded:
        inside, outside = part[is_ood == 0], part[is_ood == 1]
        wins = (outside[:, None] > inside).double() + (outside[:, None] == inside).double() / 2
        placements.append((wins.mean(1).numpy(), wins.mean(0).numpy()))
    value = placements[0][0].mean()
    error = math.sqrt(sum(np.var(part, ddof=1) / 40 for part in placements[0]))
    mine, its = (statistic_of("auroc", part, is_ood) for part in rounded)
    found = mine.interval(0.95)
    logits = np.log(np.array([found.low, found.high]) / (1 - np.array([found.low, found.high])))
    half = 1.959964 * error / (value * (1 - value))
    np.testing.assert_allclose(
        logits, math.log(value / (1 - value)) + np.array([-half, half]), rtol=1e-5
    )
    difference = mine.difference(its, 0.95)
    gaps = [mine - its for mine, its in zip(*placements, strict=True)]
    half = 1.959964 * math.sqrt(sum(np.var(gap, ddof=1) / 40 for gap in gaps))
    assert difference.high - difference.low == pytest.approx(2 * half, rel=1e-5)


@pytest.mark.parametrize("metric", ["aupr_out", "aupr_in"])
def test_influence_on_average_precision_is_the_slope_in_a_weight(metric):
    a, _, is_ood = scores(25, seeded())
    part = a.round(decimals=1)
    statistic = statistic_of(metric, part, is_ood)
    found = torch.cat([statistic.influence, statistic.influence_ood]).numpy()
    sign, positive = (1, is_ood) if metric == "aupr_out" else (-1, 1 - is_ood)

    def weighted(index, step):
        weights = np.ones(50)
        weights[index] += step
        return average_precision_score(positive.numpy(), sign * part.numpy(), sample_weight=weights)

    # In groups of given sizes weights count relative to their mean, so slopes are centred; and
    # more weight of a group changes the ratio of the groups, which an interval keeps.
    for group in (slice(0, 25), slice(25, 50)):
        members = range(*group.indices(50))
        slopes = np.array([(weighted(i, 1e-6) - weighted(i, -1e-6)) / 2e-6 for i in members])
        np.testing.assert_allclose(
            25 * (slopes - slopes.mean()), found[group] - found[group].mean(), atol=1e-5
        )


def test_influence_on_the_aurc_is_what_leaving_an_example_out_changes():
    probs, _, labels = predictions(400, seeded())
    statistic = statistic_of("aurc", probs, labels)
    all_but = []
    for index in range(400):
        kept = torch.arange(400) != index
        all_but.append(metrics.aurc(probs[kept], labels[kept]).item())
    jackknife = -399 * (np.array(all_but) - np.mean(all_but))
    influence = statistic.influence.numpy()
    np.testing.assert_allclose(influence - influence.mean(), jackknife, atol=0.03)
    assert np.std(influence) == pytest.approx(np.std(jackknife), rel=0.01)


@pytest.mark.parametrize(("value", "exact"), [(1 + 2**-52, 1.0), (-(2**-60), 0.0)])
def test_an_area_a_rounding_error_beyond_its_ends_has_their_interval(value, exact):
    assert area_interval(value, 0.0, 50, 0.95) == proportion_interval(50 * exact, 50, 0.95)


def test_a_metric_with_an_ideal_is_compared_by_its_distance_from_it():
    """The distance of a value below its ideal falls where the value grows."""
    labels = torch.arange(200) % 2
    right = torch.where(torch.arange(200) < 140, labels, 1 - labels)
    noise = 0.02 * torch.rand(3, 200, generator=seeded(), dtype=torch.float64)
    # 70 % right: too sure by 0.25, not sure enough by 0.15, and too sure by 0.1.
    confidences = torch.tensor([[0.95], [0.55], [0.8]]).double() + noise - 0.01
    reports = [metrics.evaluate(torch.where(right == 1, c, 1 - c), labels) for c in confidences]
    gaps = [report["overconfidence"] for report in reports]
    assert gaps[1].high < 0 < gaps[0].low
    over, under, less = reports
    found = metrics.compare(over, less)["overconfidence"]
    assert found.value == pytest.approx(gaps[0].value - gaps[2].value)
    difference = confidences[0] - confidences[2]
    assert (found.low, found.high) == pytest.approx(
        mean_interval(difference.mean().item(), difference, 0.95)
    )
    turned = metrics.compare(under, over)["overconfidence"]
    assert turned.value == pytest.approx(-gaps[1].value - gaps[0].value)
    sums = 2 * (right == labels).double() - confidences[0] - confidences[1]
    assert (turned.low, turned.high) == pytest.approx(mean_interval(sums.mean().item(), sums, 0.95))
    scaled = [
        metrics.evaluate_regression(0 * noise[0], torch.full((200,), s).double(), noise[0] - 0.01)
        for s in (0.004, 0.02)
    ]
    values = [report["scaled_error"].value for report in scaled]
    assert values[1] < 1 < values[0]
    found = metrics.compare(*scaled)["scaled_error"]
    assert found.value == pytest.approx(values[0] - 1 - (1 - values[1]))


def test_of_errors_over_bins_no_interval_is_printed():
    probs, other, labels = predictions(100, seeded())
    mine, its = metrics.evaluate(probs, labels), metrics.evaluate(other, labels)
    for name in ("ece", "ece_equal_mass", "smooth_ece", "mce", "classwise_ece"):
        assert not mine[name].is_known
        assert not metrics.compare(mine, its)[name].is_known
        assert METRICS[name].interval.startswith("None")


def test_intervals_do_not_depend_on_the_order_of_the_examples():
    """As they are in another order on several processes."""
    probs, other, labels = predictions(200, seeded())
    order = torch.randperm(200, generator=seeded(1))
    reports = [
        metrics.compare(
            *(metrics.evaluate(p[o], labels[o], {"x": other[o]}) for p in (probs, other))
        )
        for o in (torch.arange(200), order)
    ]
    for name in reports[0]:
        ends = [(r[name].value, r[name].low, r[name].high) for r in reports]
        assert ends[1] == pytest.approx(ends[0], abs=1e-6, nan_ok=True), name


# -------------------------------------------------------------------------- simulation

CLASSIFICATION_METRICS = ["accuracy", "nll", "brier", "overconfidence", "aurc"]
OOD_METRICS = ["auroc", "aupr_out", "aupr_in", "fpr95"]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_intervals_cover_the_truth_as_often_as_they_say():
    """93 to 97 % of nominally 95 %, within what chance does to the share of the simulations.

    The truth is that of 10⁶ examples. Of 1,500 simulations the share has a standard error of
    0.6 %, so that a coverage of 91 or 99 % does not pass.
    """
    n, generator = 200, seeded(200)
    many = (*predictions(10**6, generator),), (*scores(10**6, generator),)
    truths = {}
    for group, (a, b, y) in zip((CLASSIFICATION_METRICS, OOD_METRICS), many, strict=True):
        for name in group:
            value, other = (statistic_of(name, part, y).value for part in (a, b))
            distances = (abs(value), abs(other)) if name == "overconfidence" else (value, other)
            truths[name] = value, distances[0] - distances[1]
    covered = {name: [] for name in truths}
    for _ in range(1500):
        drawn = predictions(n, generator), scores(n, generator)
        for group, (a, b, y) in zip((CLASSIFICATION_METRICS, OOD_METRICS), drawn, strict=True):
            for name in group:
                mine, its = (statistic_of(name, part, y) for part in (a, b))
                intervals = mine.interval(0.95), mine.difference(its, 0.95)
                covered[name].append(
                    [i.low <= t <= i.high for i, t in zip(intervals, truths[name], strict=True)]
                )
    for name, hits in covered.items():
        slack = 2 * math.sqrt(0.95 * 0.05 / len(hits))
        for share in np.mean(hits, axis=0):
            assert 0.93 - slack <= share <= 0.97 + slack, (name, n, share)
