"""Conformal sets and intervals: scores against loops, and coverage on new data."""

import math

import pytest
import torch
from scipy.stats import betabinom
from torch import nn

from laplace_debias import Conformal, Laplace, Link, Mixture
from laplace_debias.laplace.prediction.conformal import (
    ClassSets,
    conformal_quantile,
    mass_above,
)
from laplace_debias.metrics import compare

NUM_CALIBRATION = 200
NUM_TEST = 1000
LEVEL = 0.9


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def network(num_outputs, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, num_outputs)]
    return nn.Sequential(*layers).double().eval()


def class_data(model, size, seed):
    """Labels of which the network is too unsure, at an accuracy below the level."""
    g = generator(seed)
    x = torch.randn(size, 4, generator=g, dtype=torch.float64)
    probs = (3 * model(x).detach()).softmax(-1)
    return x, torch.multinomial(probs, 1, generator=g).squeeze(1)


def numbers(model, size, seed):
    """Noise that is twice the predicted one, and other in each output and half of the inputs."""
    g = generator(seed)
    x = torch.randn(size, 4, generator=g, dtype=torch.float64)
    noise = torch.randn(size, 2, generator=g, dtype=torch.float64)
    scale = torch.tensor([2.0, 0.5]) * (1 + 2 * (x[:, :1] > 0))
    return x, model(x).detach() + scale * noise


def halves(x):
    return (x[:, 0] > 0).long()


@pytest.fixture(scope="module")
def classifier():
    model = network(5)
    return model, Laplace(model, curvature="diag").fit([class_data(model, 100, 1)])


@pytest.fixture(scope="module")
def regression():
    model = network(2)
    return model, Laplace(model, "regression", curvature="diag").fit([numbers(model, 100, 1)])


@pytest.mark.parametrize(("penalty", "free_rank"), [(0.0, 1), (0.1, 2)])
def test_adaptive_scores_are_those_of_a_loop(penalty, free_rank):
    probs = torch.randn(20, 6, dtype=torch.float64, generator=generator()).softmax(-1)
    scores = mass_above(probs, penalty, free_rank)
    for row, score in zip(probs.tolist(), scores.tolist(), strict=True):
        for k, p in enumerate(row):
            above = [q for q in row if q > p]
            expected = sum(above) + penalty * max(0, len(above) + 1 - free_rank)
            assert math.isclose(score[k], expected, abs_tol=1e-12)


def test_the_quantile_is_that_of_its_definition():
    scores = torch.randperm(19, generator=generator()).double()
    # ⌈20 · 0.9⌉ = 18: the 18th smallest of 0 … 18.
    assert conformal_quantile(scores, 0.9) == 17
    assert conformal_quantile(scores, 0.95) == 18
    with pytest.raises(ValueError, match=r"19 calibration examples are too few.*at least 24"):
        conformal_quantile(scores, 0.96)
    with pytest.raises(ValueError, match=r"1 calibration example is too few.*at least 2 examples"):
        conformal_quantile(scores[:1], 0.51)


def test_the_quantile_holds_for_dependent_positions():
    """Equal positions have the rank of one position, here ⌈26 · 0.9⌉ = 24 of 25 examples."""
    scores = torch.randperm(25, generator=generator()).double()
    assert conformal_quantile(scores, 0.9) == 23
    assert conformal_quantile(scores.repeat_interleave(40), 0.9, 40) == 23
    with pytest.raises(ValueError, match=r"320 calibration examples are too few.*at least 360"):
        conformal_quantile(scores[:8].repeat_interleave(40), 0.9, 40)


@pytest.mark.parametrize("groups", [None, lambda x: (x[..., 0] > 0).long().flatten()])
def test_equal_positions_have_the_quantile_of_single_ones(classifier, groups):
    model, la = classifier
    x, y = class_data(model, 75, 3)
    single = Conformal(la, groups=groups).calibrate([(x[:, None], y[:, None])], LEVEL)
    repeated = [(x[:, None].repeat(1, 7, 1), y[:, None].repeat(1, 7))]
    conformal = Conformal(la, groups=groups).calibrate(repeated, LEVEL)
    torch.testing.assert_close(conformal.quantiles, single.quantiles)


def check_coverage(covered, num_calibration=NUM_CALIBRATION):
    """As many of new examples are covered as conformal prediction has in 99.9 % of draws."""
    rank = math.ceil((num_calibration + 1) * LEVEL)
    law = betabinom(len(covered), rank, num_calibration + 1 - rank)
    assert law.ppf(0.0005) <= covered.sum() <= law.ppf(0.9995)


@pytest.mark.usefixtures("unchecked")  # many calls: checks would take most time
@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_class_sets_cover_on_ten_seeds(classifier, penalty):
    model, la = classifier
    conformal = Conformal(la, penalty=penalty)
    for seed in range(10):
        conformal.calibrate([class_data(model, NUM_CALIBRATION, 10 + seed)], LEVEL)
        x, y = class_data(model, NUM_TEST, 30 + seed)
        sets = conformal.predict(x)
        check_coverage(sets.covers(y))
        assert sets.sizes.min() >= 1


@pytest.mark.usefixtures("unchecked")  # many calls: checks would take most time
def test_intervals_cover_each_output_on_ten_seeds(regression):
    model, la = regression
    conformal = Conformal(la)
    for seed in range(10):
        conformal.calibrate([numbers(model, NUM_CALIBRATION, 10 + seed)], LEVEL)
        x, y = numbers(model, NUM_TEST, 30 + seed)
        covered = conformal.predict(x).covers(y)
        check_coverage(covered[:, 0])
        check_coverage(covered[:, 1])


@pytest.mark.usefixtures("unchecked")  # many calls: checks would take most time
def test_groups_are_covered_each(regression):
    model, la = regression
    x, y = numbers(model, 400, 5)
    plain = Conformal(la).calibrate([(x, y)], LEVEL)
    by_group = Conformal(la, groups=halves).calibrate([(x, y)], LEVEL)
    x_new, y_new = numbers(model, 3000, 6)
    groups = halves(x_new)
    for group in (0, 1):
        covered = by_group.predict(x_new).covers(y_new)[groups == group, 0]
        check_coverage(covered, int((halves(x) == group).sum()))
    # Without groups the noisy half is covered too rarely.
    assert plain.predict(x_new).covers(y_new)[groups == 1, 0].double().mean() < 0.87


def test_intervals_are_the_mean_and_a_multiple_of_the_predictive_deviation(regression):
    model, la = regression
    x, y = numbers(model, NUM_CALIBRATION, 3)
    conformal = Conformal(la).calibrate([(x[:80], y[:80]), (x[80:], y[80:])], LEVEL)
    predictive = la.predict(x)
    scores = (y - predictive.mean).abs() / predictive.variance.sqrt()
    quantile = scores.sort(dim=0).values[math.ceil(201 * LEVEL) - 1]
    intervals = conformal.predict(x[:7])
    half_width = quantile * predictive.variance[:7].sqrt()
    torch.testing.assert_close(intervals.low, predictive.mean[:7] - half_width)
    torch.testing.assert_close(intervals.high, predictive.mean[:7] + half_width)


def test_class_sets_are_those_below_the_quantile(classifier):
    model, la = classifier
    x, y = class_data(model, NUM_CALIBRATION, 3)
    conformal = Conformal(la, link="probit", penalty=0.02).calibrate([(x, y)], 0.8)
    scores = mass_above(la.predict(x, link="probit").probs, 0.02)
    label_scores = scores[torch.arange(len(y)), y]
    quantile = label_scores.sort().values[math.ceil(201 * 0.8) - 1]
    assert conformal.predict(x).contains.equal(scores <= quantile)
    assert Conformal(la, penalty=0.02).calibrate([(x, y)], 0.8).quantiles[0] != quantile


def test_evaluate_measures_coverage_and_size(classifier, regression):
    for (model, la), data, size in (
        (classifier, class_data, "set_size"),
        (regression, numbers, "width"),
    ):
        conformal = Conformal(la, groups=halves).calibrate([data(model, 300, 3)], LEVEL)
        x, y = data(model, 120, 4)
        predicted = conformal.predict(x)
        report = conformal.evaluate([(x[:50], y[:50]), (x[50:], y[50:])])
        covered = predicted.covers(y).double()
        assert math.isclose(report["coverage"], covered.mean(), rel_tol=1e-6)
        assert math.isclose(report[size], predicted.sizes.double().mean(), rel_tol=1e-6)
        assert math.isclose(report["coverage_1"], covered[halves(x) == 1].mean(), rel_tol=1e-6)
        assert report["coverage"].low < report["coverage"] < report["coverage"].high


def test_two_classes_and_mixtures_have_sets():
    model = network(1)
    x, y = class_data(network(2), 300, 2)
    la = Laplace(model, "binary", curvature="diag").fit([(x[:100], y[:100])])
    mixture = Mixture([la, la])
    sets = Conformal(la).calibrate([(x[100:], y[100:])], LEVEL).predict(x[:9])
    assert sets.contains.shape == (9, 2)
    mixed = Conformal(mixture).calibrate([(x[100:], y[100:])], LEVEL).predict(x[:9])
    assert mixed.contains.equal(sets.contains)


def test_positions_that_are_ignored_do_not_count():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double().eval()
    x = torch.randn(40, 5, 4, dtype=torch.float64)
    y = torch.randint(3, (40, 5))
    y[:, 3:] = -100
    la = Laplace(model, curvature="diag").fit([(x, y)])
    conformal = Conformal(la).calibrate([(x, y)], LEVEL)
    assert conformal.predict(x).contains.shape == (40, 5, 3)
    short = Conformal(la).calibrate([(x[:, :3], y[:, :3])], LEVEL)
    torch.testing.assert_close(conformal.quantiles[0], short.quantiles[0])


def test_the_state_is_restored(classifier, tmp_path):
    model, la = classifier
    conformal = Conformal(la).calibrate([class_data(model, 100, 3)], LEVEL)
    torch.save(conformal.state_dict(), tmp_path / "conformal.pt")
    restored = Conformal(la).load_state_dict(torch.load(tmp_path / "conformal.pt"))
    x, _ = class_data(model, 9, 4)
    assert restored.predict(x).contains.equal(conformal.predict(x).contains)
    assert restored.level == LEVEL
    with pytest.raises(ValueError, match=r"The state has the entries \['levels'\]. Pass what"):
        Conformal(la).load_state_dict({"levels": 1})


def test_a_posterior_that_has_changed_since_the_calibration_is_refused(classifier, tmp_path):
    """The sets of a changed posterior were returned, with less coverage than the level."""
    model, earlier = classifier
    x, y = class_data(model, 100, 3)
    earlier.save(tmp_path / "posterior.safetensors")
    la = Laplace.load(tmp_path / "posterior.safetensors", model)
    conformal = Conformal(la).calibrate([(x, y)], LEVEL)
    state = conformal.state_dict()
    la.save(tmp_path / "posterior.safetensors")
    same = Laplace.load(tmp_path / "posterior.safetensors", model)
    restored = Conformal(same).load_state_dict(state)
    assert restored.predict(x).contains.equal(conformal.predict(x).contains)
    la.update([(x[:10], y[:10])])
    with pytest.raises(RuntimeError, match=r"number of training examples was .* `calibrate"):
        conformal.predict(x)
    same.prior_precision = 123.0
    for call in (lambda: restored.predict(x), lambda: restored.evaluate([(x, y)])):
        with pytest.raises(RuntimeError, match=r"prior precision was .* is \['123'\]"):
            call()
    assert conformal.calibrate([(x, y)], LEVEL).predict(x).sizes.shape == (100,)


def test_a_new_fit_to_as_many_examples_is_refused(classifier):
    """Only the number of examples of a fit was compared, so the sets were returned."""
    model, _ = classifier
    x, y = class_data(model, 100, 1)
    second = class_data(model, 100, 2)
    la = Laplace(model).fit([(x, y), second])
    conformal = Conformal(la).calibrate([class_data(model, 100, 3)], LEVEL)
    for batches, mode in (([(2 * x, y), second], "full"), ([(x, y), second], "mini")):
        la.fit(batches, mode, num_data=200)
        with pytest.raises(RuntimeError, match=r"log-determinant was .* `calibrate"):
            conformal.predict(x)
    la.fit([(x, y), second])
    assert conformal.predict(x).sizes.shape == (100,)


@pytest.mark.parametrize(
    ("method", "temperature"),
    [("temperature", "network_temperature"), ("nn", "draw_temperature"), ("glm", "temperature")],
)
def test_each_temperature_of_the_link_is_compared(classifier, method, temperature):
    """Only the name of the link and three digits of one temperature were compared."""
    model, _ = classifier
    x, y = class_data(model, 100, 3)
    la = Laplace(model).fit([(x, y)])
    la.link = Link("pairwise")
    conformal = Conformal(la, method).calibrate([(x, y)], LEVEL)
    la.link = Link("pairwise", **{temperature: 1.0004})
    with pytest.raises(RuntimeError, match=rf"its link was .*'{temperature}': 1\.0004"):
        conformal.predict(x)


def test_the_state_of_another_number_of_posteriors_is_refused(classifier):
    model, la = classifier
    x, y = class_data(model, 100, 3)
    state = Conformal(Mixture([la, la])).calibrate([(x, y)], LEVEL).state_dict()
    restored = Conformal(la).load_state_dict(state)
    with pytest.raises(RuntimeError, match="used 2 posteriors, but there are 1 now"):
        restored.predict(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": 0.2}, r"with penalty=0\.2, but this Conformal has penalty=0\.0"),
        ({"penalty": 0.2, "free_rank": 2}, r"penalty=0\.2"),
        ({"groups": lambda x: (x[:, 0] > 0).long()}, "groups='a function', but .* groups=None"),
        ({"method": "map"}, "method='map', but this Conformal has method='glm'"),
        ({"samples": 30}, "samples=30, but this Conformal has samples=None"),
        ({"link": Link("probit", 1.5)}, r"link=\{'name': 'probit', .*\}, but .* link=None"),
    ],
)
def test_a_state_of_other_settings_is_refused(classifier, options, message, tmp_path):
    """Quantiles of other scores were loaded, and the sets did not have the coverage."""
    model, la = classifier
    conformal = Conformal(la, **options).calibrate([class_data(model, 100, 3)], LEVEL)
    torch.save(conformal.state_dict(), tmp_path / "conformal.pt")
    state = torch.load(tmp_path / "conformal.pt")
    with pytest.raises(ValueError, match=message):
        Conformal(la).load_state_dict(state)
    restored = Conformal(la, **options).load_state_dict(state)
    assert restored.quantiles.keys() == conformal.quantiles.keys()


def test_the_temperatures_of_a_state_are_compared_by_name(classifier):
    """The temperatures were compared without their names, so these two links were equal."""
    _, la = classifier
    for_draws = Conformal(la, link=Link("probit", draw_temperature=2.0))
    for_network = Conformal(la, link=Link("probit", network_temperature=2.0))
    with pytest.raises(ValueError, match=r"'draw_temperature': 2.*'network_temperature': 2"):
        for_network.load_state_dict(for_draws.state_dict())


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_wrong_calls_have_remedies(classifier):
    model, la = classifier
    data = class_data(model, 30, 3)
    with pytest.raises(TypeError, match="predictor must be Predictor, got Sequential"):
        Conformal(model)
    with pytest.raises(ValueError, match="`penalty` is -1"):
        Conformal(la, penalty=-1.0)
    with pytest.raises(ValueError, match="free_rank must be at least 1"):
        Conformal(la, free_rank=0)
    with pytest.raises(RuntimeError, match=r"not calibrated. Call `calibrate\(loader\)`"):
        Conformal(la).predict(data[0])
    with pytest.raises(ValueError, match=r"`level` is 1\.5"):
        Conformal(la).calibrate([data], 1.5)
    with pytest.raises(ValueError, match=r"30 calibration examples are too few for `level=0.99"):
        Conformal(la).calibrate([data], 0.99)
    by_group = Conformal(la, groups=halves).calibrate([(data[0].abs(), data[1])], 0.8)
    with pytest.raises(ValueError, match=r"The groups \[0\] have no calibration examples"):
        by_group.predict(-data[0].abs())
    with pytest.raises(ValueError, match="Return a tensor with one integer per example"):
        Conformal(la, groups=lambda x: x[:, 0]).calibrate([data])
    labels = torch.randint(2, (30, 5)).double()
    several = Laplace(model, "multilabel", curvature="diag").fit([(data[0], labels)])
    with pytest.raises(NotImplementedError, match=r"one Laplace\(.* per label"):
        Conformal(several).calibrate([(data[0], labels)])


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_equally_probable_classes_have_the_same_score(penalty):
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3]])
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for scores, row in zip(expected, probs.double(), strict=True):
        for k in range(3):
            more_probable = row[row > row[k]]
            scores[k] = more_probable.sum() + penalty * len(more_probable)
    torch.testing.assert_close(mass_above(probs, penalty), expected)


def test_a_level_near_zero_takes_the_smallest_score():
    scores = torch.tensor([0.3, 0.1, 0.2])
    assert float(conformal_quantile(scores, 1e-12)) == pytest.approx(0.1)


def regression_of(num_outputs, size=300):
    torch.manual_seed(0)
    model = nn.Linear(3, num_outputs).double().eval()
    x = torch.randn(size, 3).double()
    y = model(x).detach() + torch.randn(size, num_outputs).double()
    la = Laplace(model, "regression", sigma=1.0).fit([(x[:100], y[:100])])
    return la, x[100:], y[100:]


def test_targets_of_one_output_may_lack_its_dimension():
    la, x, y = regression_of(1)
    intervals = Conformal(la).calibrate([(x, y[:, 0])]).predict(x)
    assert torch.equal(intervals.covers(y[:, 0]), intervals.covers(y))
    assert intervals.covers(y).shape == (200, 1)
    with pytest.raises(ValueError, match="a target for each interval"):
        intervals.covers(y[:50])


def test_reports_of_several_outputs_are_compared_whatever_is_covered():
    """By chance all outputs of an example are covered, or none."""
    la, x, y = regression_of(2)
    conformal = Conformal(la).calibrate([(x[:150], y[:150])], level=0.6)
    wider = Conformal(la).calibrate([(x[:150], y[:150])], level=0.95)
    test = [(x[150:156], torch.stack([y[150:156, 0], y[150:156, 0]], 1))]
    far = [(x[150:156], y[150:156] + 100)]
    for first, second in ((conformal, wider), (wider, conformal)):
        difference = compare(first.evaluate(test), second.evaluate(test))["coverage"]
        assert difference.low <= difference <= difference.high
    assert conformal.evaluate(far)["coverage"] == 0


def test_groups_are_those_of_the_targets_that_count():
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double().eval()
    x = torch.randn(300, 3).double()
    y = torch.randint(3, (300,))
    la = Laplace(model).fit([(x[:100], y[:100])])
    y[150:180] = -100

    def groups(x):
        return (x[:, 0] > 0).long()

    conformal = Conformal(la, groups=groups).calibrate([(x[100:], y[100:])])
    counted = y[100:] != -100
    expected = Conformal(la, groups=groups).calibrate([(x[100:][counted], y[100:][counted])])
    assert conformal.quantiles.keys() == expected.quantiles.keys() == {0, 1}
    for group, quantile in expected.quantiles.items():
        assert torch.equal(conformal.quantiles[group], quantile)
    report = conformal.evaluate([(x[100:], y[100:])])
    assert report == expected.evaluate([(x[100:][counted], y[100:][counted])])


@pytest.mark.parametrize("groups", [None, halves])
def test_a_batch_of_ignored_targets_only_does_not_count(groups):
    torch.manual_seed(0)
    x = torch.randn(300, 3).double()
    y = torch.randint(3, (300,))
    la = Laplace(nn.Linear(3, 3).double().eval()).fit([(x[:100], y[:100])])
    held_out = [(x[100:200], y[100:200])]
    test = [(x[200:], y[200:])]
    ignored = x[:9], torch.full((9,), -100)
    conformal = Conformal(la, groups=groups).calibrate(held_out)
    expected = conformal.evaluate(test)
    assert conformal.evaluate([ignored, *test, ignored]) == expected
    again = Conformal(la, groups=groups).calibrate([ignored, *held_out, ignored])
    assert again.evaluate(test) == expected


def test_labels_of_sets_have_the_forms_of_targets():
    contains = torch.tensor([[True, False], [True, True], [False, True]])
    sets = ClassSets(contains)
    expected = torch.tensor([True, True, False])
    for labels in (
        torch.tensor([0, 1, 0]),
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([[0], [1], [0]]),
    ):
        assert torch.equal(sets.covers(labels), expected)
    with pytest.raises(ValueError, match=r"shape \(2,\), but the sets have shape \(3,\)"):
        sets.covers(torch.tensor([0, 1]))


@pytest.mark.parametrize("label", [-100, 3])
def test_labels_that_are_not_classes_are_named_with_the_remedy(label):
    contains = torch.tensor([[[True, False, False], [False, True, True]]])
    labels = torch.tensor([[1, label]])
    sets = ClassSets(contains)
    with pytest.raises(ValueError, match=f"contains {label}, but the classes are 0 to 2. For ign"):
        sets.covers(labels)
    labels = torch.tensor([[0, -100]])
    assert sets.covers(labels.clamp_min(0))[labels >= 0].tolist() == [True]
