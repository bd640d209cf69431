import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from laplace_debias import metrics
from laplace_debias.metrics.ood import label_entropy

CLASSIFICATION = [metrics.accuracy, metrics.nll, metrics.ece, metrics.brier]
OOD = [metrics.auroc, metrics.aupr, metrics.fpr95]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def predictions(generator, n=400, classes=5, dtype=torch.float64):
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=dtype)
    labels = torch.multinomial((0.6 * logits).softmax(1), 1, generator=generator)[:, 0]
    return logits.softmax(1), labels


def scores(generator, num_id=300, num_ood=200):
    scores_id = torch.randn(num_id, generator=generator)
    scores_ood = 1 + torch.randn(num_ood, generator=generator)
    return scores_id, scores_ood


def ece_by_loop(probs, labels, num_bins):
    """Bins [lower, upper); a confidence of 1 belongs to the last one."""
    bins = [[] for _ in range(num_bins)]
    for row, label in zip(probs.tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        index = min(int(confidence * num_bins), num_bins - 1)
        bins[index].append((confidence, row.index(confidence) == label))
    filled = [np.array(members, dtype=float) for members in bins if members]
    return sum(
        len(members) / len(probs) * abs(members[:, 0].mean() - members[:, 1].mean())
        for members in filled
    )


def fpr95_by_threshold(scores_id, scores_ood):
    """The false positive rate if as few OOD examples as possible, but 95 %, are detected."""
    detected = math.ceil(0.95 * len(scores_ood) - 1e-9)
    threshold = scores_ood.sort(descending=True).values[detected - 1]
    return (scores_id >= threshold).double().mean().item()


def test_accuracy_nll_and_brier_equal_a_loop_over_the_examples(generator):
    probs, labels = predictions(generator)
    pairs = [(np.array(row), y) for row, y in zip(probs.tolist(), labels.tolist(), strict=True)]
    assert metrics.accuracy(probs, labels).item() == pytest.approx(
        np.mean([row.argmax() == y for row, y in pairs]), abs=1e-12
    )
    assert metrics.nll(probs, labels).item() == pytest.approx(
        np.mean([-math.log(row[y]) for row, y in pairs]), rel=1e-12
    )
    assert metrics.brier(probs, labels).item() == pytest.approx(
        np.mean([((row - np.eye(5)[y]) ** 2).sum() for row, y in pairs]), rel=1e-12
    )


@pytest.mark.parametrize("num_bins", [1, 4, 15])
def test_ece_equals_a_loop_over_the_bins(generator, num_bins):
    probs, labels = predictions(generator)
    probs[:20] = torch.eye(5, dtype=probs.dtype)[0]
    assert metrics.ece(probs, labels, num_bins).item() == pytest.approx(
        ece_by_loop(probs, labels, num_bins), abs=1e-6
    )


def test_reliability_curve_gives_the_ece(generator):
    probs, labels = predictions(generator)
    curve = metrics.reliability_curve(probs, labels, 15)
    gaps = (curve.accuracy - curve.confidence).abs().nan_to_num()
    expected = metrics.ece(probs, labels, 15)
    torch.testing.assert_close((curve.fraction * gaps).sum(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(curve.fraction.sum(), torch.ones((), dtype=torch.float64))
    right = (curve.accuracy * curve.fraction).nansum()
    torch.testing.assert_close(right, metrics.accuracy(probs, labels))


def test_reliability_curve_puts_certainty_into_the_last_bin():
    curve = metrics.reliability_curve(torch.eye(3), torch.arange(3), 4)
    assert curve.fraction.tolist() == [0, 0, 0, 1]
    assert curve.accuracy[:3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_and_right_is_perfect(dtype):
    probs = torch.eye(4, dtype=dtype)
    labels = torch.arange(4)
    assert [metric(probs, labels).item() for metric in CLASSIFICATION] == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_and_wrong_is_worst_and_finite(dtype):
    probs = torch.eye(4, dtype=dtype)
    labels = (torch.arange(4) + 1) % 4
    assert metrics.accuracy(probs, labels) == 0
    assert metrics.nll(probs, labels).item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))
    assert metrics.ece(probs, labels) == 1
    assert metrics.brier(probs, labels) == 2


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_classification_metrics_do_not_see_the_order_of_examples_or_classes(generator, metric):
    probs, labels = predictions(generator)
    examples = torch.randperm(len(probs), generator=generator)
    classes = torch.randperm(5, generator=generator)
    renamed = classes.argsort()[labels]
    expected = metric(probs, labels)
    torch.testing.assert_close(metric(probs[examples], labels[examples]), expected)
    torch.testing.assert_close(metric(probs[:, classes], renamed), expected)


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_probabilities_of_class_one_mean_the_same_as_two_columns(generator, metric):
    p = torch.rand(100, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (100,), generator=generator, dtype=torch.uint8)
    torch.testing.assert_close(metric(p, labels), metric(torch.stack([1 - p, p], 1), labels))
    torch.testing.assert_close(metrics.entropy(p), metrics.entropy(1 - p))


@pytest.mark.parametrize("metric", CLASSIFICATION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_precision(generator, metric, dtype):
    probs, labels = predictions(generator)
    value = metric(probs.to(dtype), labels)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(metric(probs, labels).item(), abs=0.02)


def test_rounding_above_one_is_not_taken_for_a_logit():
    probs = torch.tensor([[1 + 2e-7, 0.0], [0.0, 1.0]])
    assert metrics.ece(probs, torch.tensor([0, 1])).item() == pytest.approx(0, abs=1e-6)


def test_nll_has_the_gradient_of_its_formula():
    probs = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    metrics.nll(probs, torch.tensor([1, 0])).backward()
    expected = torch.tensor([[0, -1 / 1.6], [-1.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(probs.grad, expected)


def test_entropy_equals_that_of_torch_distributions(generator):
    probs, _ = predictions(generator)
    expected = torch.distributions.Categorical(probs).entropy()
    torch.testing.assert_close(metrics.entropy(probs), expected)
    labels = torch.distributions.Independent(torch.distributions.Bernoulli(probs=probs), 1)
    torch.testing.assert_close(label_entropy(probs), labels.entropy())
    assert metrics.entropy(torch.eye(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("digits", [0, 1, 6])
def test_ood_metrics_equal_scikit_learn_with_and_without_ties(generator, digits):
    scores_id, scores_ood = (x.round(decimals=digits) for x in scores(generator))
    target = [0] * len(scores_id) + [1] * len(scores_ood)
    joined = torch.cat([scores_id, scores_ood]).numpy()
    assert metrics.auroc(scores_id, scores_ood).item() == pytest.approx(
        roc_auc_score(target, joined), abs=1e-6
    )
    assert metrics.aupr(scores_id, scores_ood).item() == pytest.approx(
        average_precision_score(target, joined), abs=1e-6
    )
    assert metrics.fpr95(scores_id, scores_ood).item() == pytest.approx(
        fpr95_by_threshold(scores_id, scores_ood), abs=1e-6
    )


@pytest.mark.parametrize("num_ood", [1, 19, 20, 21, 100])
def test_fpr95_detects_just_enough(generator, num_ood):
    scores_id, scores_ood = scores(generator, 97, num_ood)
    assert metrics.fpr95(scores_id, scores_ood).item() == pytest.approx(
        fpr95_by_threshold(scores_id, scores_ood), abs=1e-6
    )


def test_ood_metrics_are_perfect_and_worst_at_the_ends():
    low = torch.arange(5.0)
    high = low + 10
    assert [metric(low, high).item() for metric in OOD] == [1, 1, 0]
    assert metrics.auroc(high, low) == 0
    assert metrics.fpr95(high, low) == 1
    constant = torch.zeros(5)
    assert [metric(constant, constant).item() for metric in OOD] == [0.5, 0.5, 1]


@pytest.mark.parametrize("metric", OOD)
def test_ood_metrics_see_only_the_order_of_the_scores(generator, metric):
    scores_id, scores_ood = scores(generator)
    expected = metric(scores_id, scores_ood)
    for monotone in (lambda s: 1e4 + 100 * s.double(), lambda s: 1e-6 * s, torch.exp):
        torch.testing.assert_close(metric(monotone(scores_id), monotone(scores_ood)), expected)


def test_evaluate_gathers_the_single_metrics(generator):
    probs, labels = predictions(generator)
    noise = (0.3 * torch.randn(70, 5, generator=generator, dtype=torch.float64)).softmax(1)
    result = metrics.evaluate(probs, labels, {"noise": noise})
    entropy_id = metrics.entropy(probs)
    entropy_ood = metrics.entropy(noise)
    expected = {metric.__name__: metric(probs, labels).item() for metric in CLASSIFICATION}
    expected["mean_entropy"] = entropy_id.mean().item()
    expected |= {
        f"{metric.__name__}_noise": metric(entropy_id, entropy_ood).item() for metric in OOD
    }
    further_names = [
        "overconfidence",
        "ece_equal_mass",
        "smooth_ece",
        "mce",
        "classwise_ece",
        "aurc",
    ]
    expected |= {name: getattr(metrics, name)(probs, labels).item() for name in further_names}
    expected["aupr_in_noise"] = metrics.aupr_in(entropy_id, entropy_ood).item()
    assert result == expected
    assert all(isinstance(value, float) for value in result.values())
    report_without_ood = metrics.evaluate(probs, labels)
    assert set(report_without_ood) == {
        "accuracy",
        "nll",
        "ece",
        "brier",
        "mean_entropy",
        *further_names,
    }


HALVES = torch.full((4, 2), 0.5)
LABELS = torch.tensor([0, 1, 0, 1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.evaluate, metrics.reliability_curve])
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.empty(0, 2), torch.empty(0, dtype=torch.long), "`probs` is empty"),
        (torch.full((4, 2), math.nan), LABELS, "NaN"),
        (torch.tensor([[1.5, -0.5]] * 4), LABELS, "softmax"),
        (torch.tensor([[-1e-3, 1.0]] * 4), LABELS, "which are not probabilities"),
        (torch.tensor([[math.inf, 0.0]] * 4), LABELS, "which are not probabilities"),
        (torch.tensor([[0.5, 0.4998]] * 4), LABELS, "must sum to 1"),
        (torch.ones(4, 2).long(), LABELS, "dtype torch.int64"),
        (torch.ones(4, 1), LABELS, "at least two classes"),
        (torch.full((4, 3, 2), 0.5), LABELS, "flatten"),
        (torch.tensor(0.5), LABELS, "has shape"),
        (torch.full((4,), 1.5), LABELS, "sigmoid"),
        (HALVES, LABELS[:3], "`labels` has 3"),
        (HALVES, LABELS + 1, "labels` are between 1 and 2"),
        (HALVES, -LABELS, "labels` are between -1 and 0"),
        (HALVES, LABELS.float(), "labels.long"),
        (HALVES, LABELS.bool(), "labels.long"),
        (HALVES, LABELS[:, None], "must have shape \\[n\\]"),
        (HALVES[..., None].expand(4, 2, 3), LABELS[:, None].expand(4, 3), "flatten examples and"),
        (HALVES, LABELS.to("meta"), "Move one of them"),
    ],
)
def test_bad_predictions_and_labels_are_refused(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="as_tensor"):
        metrics.nll(HALVES.numpy(), LABELS)
    with pytest.raises(TypeError, match="as_tensor"):
        metrics.nll(HALVES, LABELS.tolist())


def test_rows_normalised_to_single_precision_pass():
    assert metrics.nll(torch.tensor([[0.5, 0.49995]] * 4), LABELS).isfinite()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("metric", OOD)
@pytest.mark.parametrize(
    ("scores_ood", "message"),
    [
        (torch.empty(0), "`scores_ood` is empty"),
        (torch.tensor([0.0, math.nan]), "`scores_ood` contains NaN"),
        (torch.tensor([0, 1]), "floating point"),
        (HALVES, "one score per example"),
    ],
)
def test_bad_scores_are_refused(metric, scores_ood, message):
    with pytest.raises(ValueError, match=message):
        metric(torch.rand(3), scores_ood)


def test_evaluate_refuses_ood_sets_of_other_classes_by_name():
    with pytest.raises(ValueError, match=r"ood\['noise'\]` has 4 classes, but `probs` has 2"):
        metrics.evaluate(HALVES, LABELS, {"noise": torch.full((3, 4), 0.25)})
    with pytest.raises(ValueError, match=r"ood\['noise'\]` is empty"):
        metrics.evaluate(HALVES, LABELS, {"noise": torch.empty(0, 2)})
