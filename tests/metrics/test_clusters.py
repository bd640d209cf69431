"""Intervals for examples with several rows, against resampling, formulas and simulation."""

import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from laplace_debias import metrics
from laplace_debias.metrics import METRICS
from laplace_debias.metrics.clusters import by_example
from laplace_debias.metrics.intervals import (
    mean_interval,
    paired_proportions_interval,
    proportion_interval,
)
from laplace_debias.metrics.statistics import Proportion, with_examples

CLASSIFICATION_METRICS = ("accuracy", "nll", "brier", "overconfidence", "aurc")
OOD_METRICS = ("auroc", "aupr_out", "aupr_in", "fpr95")
# The intervals of these fractions depend on how often rows are repeated: they account for the
# uncertainty of the variance over examples only if examples have several rows, because the variance
# of independent rows follows from the fraction.
FRACTIONS = {"accuracy", "exact_match", "fpr95", "fpr95_far"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def dependent(num_examples, generator, shift=0.0, rows=None):
    """Predictions `[n, 3]` of two networks, labels and examples `[n]`; rows of an example agree."""
    if rows is None:
        rows = torch.randint(1, 9, (num_examples,), generator=generator)
    examples = torch.arange(num_examples).repeat_interleave(rows)
    logits = torch.randn(num_examples, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    noise = torch.randn(2, len(examples), 3, generator=generator, dtype=torch.float64)
    a, b = (2.6 + shift) * logits[examples] + 0.3 * noise
    return a.softmax(1), (0.9 * b).softmax(1), labels[examples], examples


def statistics_of(a, labels, examples, far, far_examples):
    """The statistics of all metrics with intervals, by name."""
    found = {name: METRICS[name].statistic(a, labels) for name in CLASSIFICATION_METRICS}
    scores = metrics.entropy(a), metrics.entropy(far)
    return with_examples(found, examples) | {
        name: METRICS[name].statistic(*scores, examples, far_examples) for name in OOD_METRICS
    }


def statistics_of_drawn(num_examples, generator):
    """Draw ID and OOD examples, and return the statistics of two networks."""
    a, b, labels, examples = dependent(num_examples, generator)
    far_a, far_b, _, far_examples = dependent(num_examples, generator, shift=-1.5)
    return (
        statistics_of(a, labels, examples, far_a, far_examples),
        statistics_of(b, labels, examples, far_b, far_examples),
    )


def ends(interval):
    return [interval.value, interval.low, interval.high]


def check_not_narrower(repeated, single):
    """Repeated rows change neither a value nor whether its interval is known, or narrow it."""
    assert repeated.value == pytest.approx(single.value)
    assert repeated.is_known == single.is_known
    if single.is_known:
        assert repeated.low <= single.low + 1e-9
        assert repeated.high >= single.high - 1e-9


def test_repeated_rows_of_an_example_do_not_narrow_an_interval():
    a, b, labels, _ = dependent(50, seeded(), rows=torch.ones(50, dtype=torch.long))
    far = dependent(30, seeded(1), rows=torch.ones(30, dtype=torch.long))[0]
    examples = torch.arange(50).repeat_interleave(40)
    ood_examples = {"far": torch.arange(30).repeat_interleave(40)}

    def repeated(values):
        return values.repeat_interleave(40, dim=0)

    single = [metrics.evaluate(probs, labels, {"far": far}) for probs in (a, b)]
    multiple = [
        metrics.evaluate(
            repeated(probs),
            repeated(labels),
            {"far": repeated(far)},
            examples=examples,
            ood_examples=ood_examples,
        )
        for probs in (a, b)
    ]
    pairs = [*zip(single, multiple, strict=True)]
    pairs.append((metrics.compare(*single), metrics.compare(*multiple)))
    for expected, report in pairs:
        for name in set(expected) - {"smooth_ece", "ece_equal_mass", "aurc"} - FRACTIONS:
            assert ends(report[name]) == pytest.approx(ends(expected[name]), nan_ok=True), name
        check_not_narrower(report["fpr95_far"], expected["fpr95_far"])
        # Ranks within equally confident rows change the area a little.
        assert ends(report["aurc"]) == pytest.approx(ends(expected["aurc"]), abs=0.01)

    by_score = metrics.evaluate_ood(metrics.entropy(a), metrics.entropy(far))
    by_repeated_score = metrics.evaluate_ood(
        repeated(metrics.entropy(a)),
        repeated(metrics.entropy(far)),
        examples_id=examples,
        examples_ood=ood_examples["far"],
    )
    for name in set(by_score) - FRACTIONS:
        assert ends(by_repeated_score[name]) == pytest.approx(ends(by_score[name])), name
    check_not_narrower(by_repeated_score["fpr95"], by_score["fpr95"])


def test_repeated_rows_do_not_narrow_the_intervals_of_numbers_and_labels():
    generator = seeded()
    mean, targets = torch.randn(2, 50, 2, generator=generator, dtype=torch.float64)
    deviation = 0.5 + torch.rand(50, 2, generator=generator, dtype=torch.float64)
    far = 2 * deviation[:30]
    log_probs = -(mean - targets).square().sum(1)
    levels = torch.rand(50, 2, generator=generator, dtype=torch.float64)
    labels = (targets > 0).long()
    examples = torch.arange(50).repeat_interleave(7)
    ood_examples = {"far": torch.arange(30).repeat_interleave(7)}

    def evaluate(function, *arguments, **options):
        """The report on single rows, and on repeated ones."""
        single = function(*arguments, {"far": far_of[function]}, **options)
        repeated = function(
            *(values.repeat_interleave(7, dim=0) for values in arguments),
            {"far": far_of[function].repeat_interleave(7, dim=0)},
            **{name: values.repeat_interleave(7, dim=0) for name, values in options.items()},
            examples=examples,
            ood_examples=ood_examples,
        )
        return single, repeated

    far_of = {
        metrics.evaluate_regression: far,
        metrics.evaluate_numbers: far,
        metrics.evaluate_multilabel: far / 4,
    }
    for single, repeated in (
        evaluate(metrics.evaluate_regression, mean, deviation, targets),
        evaluate(metrics.evaluate_numbers, mean, deviation, targets, log_probs, levels=levels),
        evaluate(metrics.evaluate_multilabel, mean.sigmoid(), labels),
    ):
        assert single.keys() == repeated.keys()
        check_not_narrower(repeated["fpr95_far"], single["fpr95_far"])
        for name in set(single) - FRACTIONS:
            assert ends(repeated[name]) == pytest.approx(ends(single[name]), nan_ok=True), name


def test_repeated_rows_of_a_fraction_have_the_interval_of_korn_and_graubard():
    """The variances of rows and of their mean have n - 1 and k - 1 degrees of freedom."""
    k, n = 12, 84
    a, _, labels, _ = dependent(k, seeded(), rows=torch.ones(k, dtype=torch.long))
    b = a.roll(1, 1)
    examples = torch.arange(k).repeat_interleave(7)
    reports = [
        metrics.evaluate(
            probs.repeat_interleave(7, dim=0), labels.repeat_interleave(7), examples=examples
        )
        for probs in (a, b)
    ]
    right_a, right_b = (metrics.accuracy(probs, labels, reduction="none") for probs in (a, b))
    share = right_a.mean().item()
    assert 0 < share < 1
    variance_of_rows = share * (1 - share) * n / (n - 1)
    variance_of_mean = share * (1 - share) / (k - 1)
    ratio = stats.t.ppf(0.975, n - 1) / stats.t.ppf(0.975, k - 1)
    size = variance_of_rows / variance_of_mean * ratio**2
    expected = proportion_interval(share * size, size, 0.95)
    assert ends(reports[0]["accuracy"]) == pytest.approx([share, *expected])
    difference = right_a - right_b
    expected = paired_proportions_interval(difference, size, 0.95)
    compared = metrics.compare(*reports)["accuracy"]
    assert ends(compared) == pytest.approx([difference.mean().item(), *expected])


def test_examples_with_one_row_each_have_the_interval_of_independent_rows():
    a, b, labels, _ = dependent(12, seeded(), rows=torch.ones(12, dtype=torch.long))
    with_names, without = (
        [metrics.evaluate(probs, labels, examples=examples) for probs in (a, b)]
        for examples in (torch.arange(12).flip(0), None)
    )
    for name in ("accuracy", "nll", "overconfidence"):
        assert ends(with_names[0][name]) == pytest.approx(ends(without[0][name])), name
        compared = metrics.compare(*with_names)[name]
        assert ends(compared) == pytest.approx(ends(metrics.compare(*without)[name])), name


@pytest.mark.usefixtures("unchecked")
def test_intervals_of_fractions_of_five_examples_cover_the_truth():
    """With a normal quantile instead of Student's, the coverage would be 86 % instead of 95 %."""
    examples = torch.arange(5).repeat_interleave(20)
    generator = np.random.default_rng(0)
    shares = generator.beta(2, 2, (1000, 5))  # the rows of an example have a correlation of 0.2
    hits = generator.random((1000, 100)) < shares.repeat(20, axis=1)
    covered = 0
    for values in torch.from_numpy(hits).double():
        interval = Proportion(values.mean().item(), values, examples=examples).interval(0.95)
        covered += interval.low <= 0.5 <= interval.high
    # The fraction in 1000 simulations has a standard error of 0.7 %.
    assert 930 <= covered <= 970, covered


def test_the_standard_error_of_a_mean_is_that_of_a_ratio():
    """The dense formula: residuals s − r c of the sums s and counts c of the examples."""
    a, b, labels, examples = dependent(200, seeded())
    losses = (b / a)[torch.arange(len(labels)), labels].log()
    membership = (examples == torch.arange(200)[:, None]).double()
    sums = membership @ losses
    counts = membership.sum(1)
    ratio = sums.sum() / counts.sum()
    residuals = sums - ratio * counts
    variance = residuals.square().sum() * 200 / 199 / counts.sum() ** 2
    influence = by_example(losses, examples)
    torch.testing.assert_close(influence.var() / 200, variance)
    a_report, b_report = (metrics.evaluate(x, labels, examples=examples) for x in (a, b))
    difference = metrics.compare(a_report, b_report)["nll"]
    expected = mean_interval(ratio.item(), influence, 0.95)
    assert ends(difference) == pytest.approx([ratio.item(), *expected])


def test_standard_errors_are_those_of_resampled_examples():
    """The bootstrap draws whole examples; all of their rows count as often as the example."""
    generator = seeded()
    a, _, labels, examples = dependent(150, generator)
    far, _, _, far_examples = dependent(150, generator, shift=-1.5)
    rows_of = [torch.nonzero(examples == example)[:, 0] for example in range(150)]
    far_rows_of = [torch.nonzero(far_examples == example)[:, 0] for example in range(150)]
    draws = []
    for _ in range(300):
        drawn, far_drawn = torch.randint(150, (2, 150), generator=generator).tolist()
        rows = torch.cat([rows_of[example] for example in drawn])
        far_rows = torch.cat([far_rows_of[example] for example in far_drawn])
        resampled = statistics_of(a[rows], labels[rows], None, far[far_rows], None)
        draws.append([statistic.value for statistic in resampled.values()])
    deviations = np.std(draws, axis=0, ddof=1)
    found = statistics_of(a, labels, examples, far, far_examples)
    for (name, statistic), deviation in zip(found.items(), deviations, strict=True):
        interval = statistic.interval(0.95)
        # The bootstrap of 300 draws has a standard error of 4 %. The slope of FPR95 is estimated.
        tolerance = 0.3 if name == "fpr95" else 0.15
        half_width = (interval.high - interval.low) / 2
        assert half_width == pytest.approx(1.96 * deviation, rel=tolerance), name


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_intervals_of_dependent_rows_cover_the_truth():
    """The truth is that of many examples. If rows counted as independent, few intervals would."""
    generator = seeded()
    truth, true_reference = statistics_of_drawn(50_000, generator)
    true_differences = {
        name: statistic.difference(true_reference[name], 0.95).value
        for name, statistic in truth.items()
    }
    hits = {name: [] for name in truth}
    for _ in range(300):
        drawn, reference = statistics_of_drawn(100, generator)
        for name, statistic in drawn.items():
            interval = statistic.interval(0.95)
            difference = statistic.difference(reference[name], 0.95)
            hits[name].append(
                [
                    interval.low <= truth[name].value <= interval.high,
                    difference.low <= true_differences[name] <= difference.high,
                ]
            )
    # The fraction in 300 simulations has a standard error of 1.3 %.
    for name, covered in hits.items():
        assert min(np.mean(covered, axis=0)) >= 0.95 - 3 * 0.013, name


def test_a_proportion_of_0_or_1_has_the_interval_of_as_many_examples():
    probs = torch.tensor([[0.9, 0.1]]).repeat(60, 1)
    labels = torch.zeros(60, dtype=torch.long)
    examples = torch.arange(60) // 3
    for labels_of_all, single in ((labels, labels[:20]), (labels + 1, labels[:20] + 1)):
        report = metrics.evaluate(probs, labels_of_all, examples=examples)
        expected = metrics.evaluate(probs[:20], single)
        assert ends(report["accuracy"]) == ends(expected["accuracy"])


def test_equal_fractions_of_every_example_are_not_more_precise_than_independent_rows():
    probs = torch.tensor([[0.9, 0.1]]).repeat(60, 1)
    labels = torch.arange(60) % 2
    report = metrics.evaluate(probs, labels, examples=torch.arange(60) // 2)
    assert ends(report["accuracy"]) == ends(metrics.evaluate(probs, labels)["accuracy"])


def test_the_examples_of_one_report_are_enough_to_compare():
    a, b, labels, examples = dependent(50, seeded())
    far = {"far": b}
    a_report, b_report = (
        metrics.evaluate(probs, labels, far, examples=examples, ood_examples={"far": examples})
        for probs in (a, b)
    )
    expected = metrics.compare(a_report, b_report)
    a_rows, b_rows = (metrics.evaluate(probs, labels, far) for probs in (a, b))
    for difference in (metrics.compare(a_report, b_rows), metrics.compare(a_rows, b_report)):
        # The number of examples also determines how the slope for FPR95 is estimated.
        for name in set(expected) - {"fpr95_far"}:
            assert ends(difference[name]) == pytest.approx(ends(expected[name]), nan_ok=True)


def test_rows_of_a_report_of_an_earlier_version_are_independent():
    a, b, labels, _ = dependent(50, seeded())
    expected = metrics.evaluate(a, labels, {"far": b})
    report = pickle.loads(pickle.dumps(expected))
    for statistic in report._statistics.values():
        vars(statistic).pop("examples")
        vars(statistic).pop("examples_ood", None)
    copied = pickle.loads(pickle.dumps(report))
    other = metrics.evaluate(b, labels, {"far": a})
    for name, interval in metrics.compare(expected, other).items():
        found = metrics.compare(copied, other)[name]
        assert ends(found) == pytest.approx(ends(interval), nan_ok=True)


def test_rows_of_a_single_example_count_once():
    """Their mean has no variance over examples, so they seemed to be independent."""
    a, _, labels, _ = dependent(100, seeded(), rows=torch.ones(100, dtype=torch.long))
    of_one_example = metrics.evaluate(a, labels, examples=torch.zeros(100, dtype=torch.long))
    single = metrics.evaluate(a[:1], a[:1].argmax(1))
    accuracy = of_one_example["accuracy"]
    assert accuracy.high - accuracy.low > 0.9 * (single["accuracy"].high - single["accuracy"].low)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_wrong_examples_are_refused():
    a, b, labels, examples = dependent(20, seeded())
    for wrong in (examples[1:], examples.double(), examples[:, None]):
        with pytest.raises(ValueError, match=r"`examples` has shape.*int64"):
            metrics.evaluate(a, labels, examples=wrong)
        with pytest.raises(ValueError, match=r"`ood_examples\['far'\]` has shape"):
            metrics.evaluate(a, labels, {"far": b}, ood_examples={"far": wrong})
        with pytest.raises(ValueError, match="`examples_ood` has shape"):
            metrics.evaluate_ood(a[:, 0], b[:, 0], examples_ood=wrong)
    with pytest.raises(ValueError, match=r"`ood_examples` has \['near'\]"):
        metrics.evaluate(a, labels, {"far": b}, ood_examples={"near": examples})
