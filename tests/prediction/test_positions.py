"""Intervals of `evaluate` for outputs with positions: only examples are independent."""

import numpy as np
import pytest
import torch
from torch import nn

from laplace_debias import Conformal, Laplace, Mixture, metrics

POSITIONS = 6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def classifier():
    torch.manual_seed(0)
    return Laplace(nn.Linear(4, 3).double().eval()).fit([batch(60, generator(1))])


def batch(num_examples, generator, ignored=0.0):
    """Inputs `[B, T, 4]` whose positions are equal, and labels, some of which are ignored."""
    x = torch.randn(num_examples, 1, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((2 * x[:, 0, :3]).softmax(1), 1, generator=generator)
    labels = labels.repeat(1, POSITIONS)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return x.repeat(1, POSITIONS, 1), labels


def ends(interval):
    return [interval.value, interval.low, interval.high]


def check_same(report, expected):
    assert report.keys() == expected.keys()
    for name, interval in expected.items():
        assert ends(report[name]) == pytest.approx(ends(interval), nan_ok=True), name


def check_fraction(repeated, single):
    """Compare the interval of repeated positions with that of one position.

    It may be a little wider, because the variance over examples is estimated from the examples.
    """
    assert repeated.value == pytest.approx(single.value)
    assert repeated.low < single.low + 1e-9
    assert repeated.high > single.high - 1e-9
    assert repeated.high - repeated.low < 1.1 * (single.high - single.low)


@pytest.mark.parametrize("score", [None, "instability"])
def test_examples_are_those_of_the_targets_that_count(score):
    """The loader is split within the data; some examples have no target, or not their first."""
    la = classifier()
    x, labels = batch(50, generator(2), ignored=0.4)
    labels[:3] = -100
    far = 3 * batch(30, generator(3))[0]
    counted = labels != -100
    examples = torch.arange(50)[:, None].expand(-1, POSITIONS)
    ood_examples = torch.arange(30).repeat_interleave(POSITIONS)
    for predictor in (la, Mixture([la, la])):
        report = predictor.evaluate(
            [(x[:2], labels[:2]), (x[2:20], labels[2:20]), (x[20:], labels[20:])],
            {"far": [far[:7], far[7:]]},
            score=score,
        )
        expected = metrics.evaluate(
            predictor.predict(x).probs[counted],
            labels[counted],
            {"far": predictor.predict(far).probs.flatten(0, 1)},
            examples=examples[counted],
            ood_examples={"far": ood_examples},
        )
        if score is not None:
            of_score = metrics.evaluate_ood(
                predictor.uncertainty(x).scores[score][counted],
                predictor.uncertainty(far).scores[score].flatten(),
                examples_id=examples[counted],
                examples_ood=ood_examples,
            )
            for name, interval in of_score.items():
                expected[f"{name.removesuffix('_out')}_far"] = interval
        check_same(report, expected)


def test_one_position_is_the_same_as_none():
    """Equal to the last bit, also if each example has one position that is not ignored."""
    la = classifier()
    x, labels = batch(50, generator(2))
    far = 3 * batch(30, generator(3))[0][:, 0]
    expected = la.evaluate([(x[:, 0], labels[:, 0])], {"far": [far]}, method="map")
    single = [(x[:, :1], labels[:, :1])]
    report = la.evaluate(single, {"far": [far[:, None]]}, method="map")
    assert repr(report.rows()) == repr(expected.rows())
    labels[:, 1:] = -100
    report = la.evaluate([(x, labels)], {"far": [far]}, method="map")
    assert repr(report.rows()) == repr(expected.rows())


@pytest.mark.parametrize("likelihood", ["regression", "poisson", "multilabel", "binary"])
def test_every_likelihood_counts_examples(likelihood):
    """Repeated positions have the intervals of one position; those of fractions may be wider."""
    torch.manual_seed(0)
    outputs = 1 if likelihood == "binary" else 2
    model = nn.Linear(4, outputs).double().eval()
    x = torch.randn(40, 1, 4, generator=generator(1), dtype=torch.float64)
    y = torch.randint(2, (40, 1, outputs), generator=generator(2)).double()
    options = {"sigma": 0.5} if likelihood == "regression" else {}
    la = Laplace(model, likelihood, **options).fit([(x, y)])
    far = 3 * x[:25]
    single = la.evaluate([(x, y)], {"far": [far]})
    repeated = la.evaluate(
        [(x.repeat(1, POSITIONS, 1), y.repeat(1, POSITIONS, 1))],
        {"far": [far.repeat(1, POSITIONS, 1)]},
    )
    assert single.keys() == repeated.keys()
    fractions = {"accuracy", "exact_match"} & set(single)
    # Its interval depends on how often rows are repeated, as that of other fractions.
    value, low, high = ends(repeated["fpr95_far"])
    expected_value, expected_low, expected_high = ends(single["fpr95_far"])
    assert value == pytest.approx(expected_value)
    assert low <= expected_low + 1e-9
    assert high >= expected_high - 1e-9
    for name in set(single) - fractions - {"fpr95_far", "aurc", "smooth_ece", "ece_equal_mass"}:
        assert ends(repeated[name]) == pytest.approx(ends(single[name]), nan_ok=True), name
    for name in fractions:
        check_fraction(repeated[name], single[name])


@pytest.mark.usefixtures("unchecked")
def test_intervals_cover_the_truth():
    """If positions counted as independent, many intervals would miss it."""
    la = classifier()
    data = generator(4)
    truth = la.evaluate([batch(100_000, data, ignored=0.3)], method="map", intervals=False)
    names = ["accuracy", "nll", "brier", "overconfidence"]
    hits = []
    for _ in range(100):
        report = la.evaluate([batch(100, data, ignored=0.3)], method="map")
        hits.append([report[name].low <= truth[name] <= report[name].high for name in names])
    # The fraction in 100 simulations has a standard error of 2.2 %.
    assert (np.mean(hits, axis=0) >= 0.95 - 3 * 0.022).all(), np.mean(hits, axis=0)


def test_intervals_of_conformal_sets_count_examples():
    la = classifier()
    x, labels = batch(50, generator(2))

    def first_group(inputs):
        return (inputs[..., 0] > 0).long().flatten()

    for groups in (None, first_group):
        conformal = Conformal(la, groups=groups).calibrate([batch(80, generator(3))], 0.8)
        single = conformal.evaluate([(x[:, :1], labels[:, :1])])
        repeated = conformal.evaluate([(x, labels)])
        coverage = {name for name in single if name.startswith("coverage")}
        for name in coverage:
            check_fraction(repeated[name], single[name])
        check_same(
            {name: repeated[name] for name in repeated.keys() - coverage},
            {name: single[name] for name in single.keys() - coverage},
        )
