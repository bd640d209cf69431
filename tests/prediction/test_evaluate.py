"""`Laplace.evaluate` and `Laplace.uncertainty`, against values computed from predictions."""

import math

import pytest
import torch
from spectra import generator as seed
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Mixture, OneArgument, metrics

DATA = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=DATA)
Y = torch.randn(40, 2, generator=DATA)
LABELS = torch.randint(3, (40,), generator=DATA)


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def regression(**options):
    return Laplace(network(2), "regression", sigma=0.7, **options).fit_batches([(X, Y)])


def classification():
    return Laplace(network(3)).fit_batches([(X, LABELS)])


def test_a_regression_is_reported_as_its_gaussian():
    la = regression()
    report = la.evaluate([(X[:15], Y[:15]), (X[15:], Y[15:])], {"far": [(30 * X[:9], Y[:9])]})
    predictive = la.predict(X)
    expected = metrics.evaluate_regression(
        predictive.mean,
        predictive.variance.sqrt(),
        Y,
        {"far": la.predict(30 * X[:9]).variance.sqrt()},
        log_probs=predictive.log_prob(Y),
    )
    assert list(report) == list(expected)
    for name, entry in report.items():
        expected_entry = expected[name]
        assert (entry.value, entry.low, entry.high) == pytest.approx(
            (expected_entry.value, expected_entry.low, expected_entry.high), rel=1e-4, nan_ok=True
        )
    assert report["auroc_far"] > 0.9


def test_options_of_intervals_have_an_effect():
    for la, y in ((regression(), Y), (classification(), LABELS)):
        data = [(X, y)]
        report = la.evaluate(data)
        assert report["nll"].is_known
        without_intervals = la.evaluate(data, intervals=False)
        assert not any(entry.is_known for entry in without_intervals.values())
        values = {name: entry.value for name, entry in report.items()}
        assert {name: entry.value for name, entry in without_intervals.items()} == values
        narrow = la.evaluate(data, level=0.5)
        assert narrow["nll"].high - narrow["nll"].low < report["nll"].high - report["nll"].low
    assert regression().evaluate([(X, Y)], level=0.5)["coverage"] < report_coverage()


def report_coverage():
    return regression().evaluate([(X, Y)])["coverage"]


def test_bad_options_are_refused_before_anything_is_predicted():
    la = classification()
    with pytest.raises(ValueError, match="`level` is 95"):
        la.evaluate([(X * math.nan, LABELS)], level=95)


def test_the_interval_of_several_labels_is_over_examples():
    y = (Y > 0).float()
    la = Laplace(network(2), "multilabel").fit_batches([(X, y)])
    report = la.evaluate([(X, y)])
    nlls = -la.predict(X).log_prob(y).double()
    assert report["nll"].value == pytest.approx(nlls.mean().item())
    half_width = 2.02 * nlls.std().item() / math.sqrt(40)
    assert report["nll"].high - report["nll"].low == pytest.approx(2 * half_width, rel=0.05)


def test_uncertainty_of_classes_is_that_of_draws_of_the_logits():
    la = classification()
    uncertainty = la.uncertainty(X, samples=64, generator=seed())
    total = la.predict(X, samples=64, generator=seed()).entropy()
    torch.testing.assert_close(uncertainty.total, total)
    torch.testing.assert_close(uncertainty.aleatoric + uncertainty.epistemic, uncertainty.total)
    mean, covariance = la.functional(X)
    logits = torch.distributions.MultivariateNormal(
        mean.double(), covariance.double() + 1e-12 * torch.eye(3)
    ).sample((20_000,))
    expected = Categorical(logits=logits).entropy().mean(0)
    aleatoric = la.uncertainty(X, samples=20_000, generator=seed()).aleatoric
    torch.testing.assert_close(aleatoric.double(), expected, rtol=0, atol=0.01)


def test_the_scores_of_classes_are_those_of_the_functional_gaussian():
    la = classification()
    scores = la.uncertainty(X, samples=64, generator=seed()).scores
    probs = la.predict(X, samples=64, generator=seed()).probs
    torch.testing.assert_close(scores["max_probability"], 1 - probs.amax(1))
    mean, covariance = la.functional(X)
    torch.testing.assert_close(scores["energy"], -mean.exp().sum(1).log())
    logits = torch.distributions.MultivariateNormal(
        mean.double(), covariance.double() + 1e-12 * torch.eye(3)
    ).sample((20_000,))
    top, second = mean.topk(2).indices.T[:, None, :, None].expand(-1, 20_000, -1, 1)
    flipped = (logits.gather(2, second) > logits.gather(2, top)).double().mean(0)[:, 0]
    torch.testing.assert_close(scores["instability"].exp().double(), flipped, rtol=0, atol=0.02)
    variances = (logits - logits.mean(2, keepdim=True)).var(0).mean(1)
    torch.testing.assert_close(scores["variance"].double(), variances, rtol=0.1, atol=0)


@pytest.mark.parametrize("likelihood", ["classification", "binary", "multilabel"])
def test_every_score_separates_foreign_inputs(likelihood):
    """By the area of the pairs in the right order."""
    targets = {"binary": (Y > 0).long()[:, 0], "multilabel": (Y > 0).float()}
    la = Laplace(network(1 if likelihood == "binary" else 2), likelihood)
    y = targets.get(likelihood, targets["binary"])
    la.fit_batches([(X, y)])
    far = [(4 * X, y)]
    scores = la.uncertainty(X, generator=seed()).scores
    assert {"energy", "max_logit"} <= set(scores) or likelihood != "classification"
    for name in scores:
        report = la.evaluate([(X, y)], {"far": far}, generator=seed(), score=name)
        outside = la.uncertainty(4 * X, generator=seed()).scores[name]
        inside = la.uncertainty(X, generator=seed()).scores[name]
        pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside)
        if name in ("variance", "instability", "energy", "max_logit"):  # Nothing is drawn.
            assert report["auroc_far"] == pytest.approx(pairs.mean().item(), abs=1e-6)
        assert report["nll"] == pytest.approx(la.evaluate([(X, y)])["nll"])
        assert report["auroc_far"].low <= report["auroc_far"] <= report["auroc_far"].high


def test_a_score_that_there_is_not_is_refused():
    la = classification()
    far = {"far": [(X, LABELS)]}
    with pytest.raises(
        ValueError, match=r"`score='margin'` is not available .* Use one of entropy"
    ):
        la.evaluate([(X, LABELS)], far, score="margin")
    with pytest.raises(ValueError, match="Pass `ood"):
        la.evaluate([(X, LABELS)], score="energy")
    with pytest.raises(ValueError, match=r"score='energy'.*Remove `score="):
        regression().evaluate([(X, Y)], far, score="energy")


@pytest.mark.parametrize("method", ["glm-mc", "nn"])
def test_uncertainty_of_weight_samples_falls_as_the_prior_tightens(method):
    la = classification()
    loose = la.uncertainty(X, method, samples=50, generator=seed()).epistemic
    la.prior_precision = 1e8
    tight = la.uncertainty(X, method, samples=50, generator=seed()).epistemic
    assert loose.mean() > 1e-3
    assert tight.max() < 1e-5


def test_uncertainty_of_a_regression_is_its_variance():
    la = regression()
    uncertainty = la.uncertainty(X)
    torch.testing.assert_close(uncertainty.total, la.predict(X).variance)
    torch.testing.assert_close(uncertainty.aleatoric, torch.full((40, 2), 0.49))
    torch.testing.assert_close(uncertainty.epistemic, la.functional(X, diagonal=True)[1])
    drawn = la.uncertainty(X, samples=20_000, generator=seed())
    torch.testing.assert_close(drawn.epistemic, uncertainty.epistemic, rtol=0.1, atol=1e-3)
    torch.testing.assert_close(drawn.aleatoric, uncertainty.aleatoric)


def test_uncertainty_of_one_and_of_several_labels():
    y = (Y > 0).float()
    multilabel = Laplace(network(2), "multilabel").fit_batches([(X, y)])
    uncertainty = multilabel.uncertainty(X, samples=64, generator=seed())
    probs = multilabel.predict(X, samples=64, generator=seed()).mean
    pairs = torch.stack([probs, 1 - probs], -1)
    torch.testing.assert_close(uncertainty.total, torch.special.entr(pairs).sum((1, 2)))
    binary = Laplace(network(1), "binary").fit_batches([(X, y[:, 0])])
    uncertainty = binary.uncertainty(X, samples=64, generator=seed())
    total = binary.predict(X, samples=64, generator=seed()).entropy()
    torch.testing.assert_close(uncertainty.total, total)


def test_the_trained_network_alone_has_no_epistemic_uncertainty():
    with pytest.raises(ValueError, match="no parameter uncertainty"):
        classification().uncertainty(X, "map")
    with pytest.raises(ValueError, match="samples"):
        classification().uncertainty(X, samples=0)


@pytest.mark.parametrize("score", [None, "entropy"])
@pytest.mark.parametrize("reads_once", [False, True])
def test_ignored_targets_are_no_in_distribution_examples(score, reads_once):
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double().eval()
    x = torch.randn(200, 3).double()
    y = torch.randint(3, (200,))
    la = Laplace(model).fit([(x[:100], y[:100])])
    y[150:] = -100
    x[150:] = 0
    batches = [(x[100:140], y[100:140]), (x[140:], y[140:])]
    data = (batch for batch in batches) if reads_once else batches
    far = {"far": [(5 * torch.randn(50, 3).double(), y[:50])]}
    expected = la.evaluate([(x[100:150], y[100:150])], far, score=score)
    report = la.evaluate(data, far, score=score)
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, nan_ok=True), name
        assert report[name].low == pytest.approx(value.low, nan_ok=True), name


FAR = 9 * torch.randn(20, 3, generator=DATA)
WITHOUT_TARGETS = {
    "tensors": [FAR[:8], FAR[8:]],
    "data set": DataLoader(TensorDataset(FAR), batch_size=8),
    "pairs": [(FAR, None)],
    "triples": [(FAR, None, torch.ones(20))],
    "mappings": [{"image": FAR}],
    "mappings with None": [{"image": FAR, "labels": None}],
}


@pytest.mark.parametrize("unlabelled", WITHOUT_TARGETS.values(), ids=WITHOUT_TARGETS)
def test_foreign_inputs_need_no_targets(unlabelled):
    la = classification()
    labelled = {"far": [(FAR, torch.zeros(20).long())]}
    for predictor in (la, Mixture([la, la])):
        for score in (None, "variance"):
            report = predictor.evaluate([(X, LABELS)], {"far": unlabelled}, score=score)
            expected = predictor.evaluate([(X, LABELS)], labelled, score=score)
            assert dict(report) == pytest.approx(dict(expected), rel=1e-6, nan_ok=True)
    with pytest.raises(TypeError, match=r"Batches must be pairs|Targets must be a tensor"):
        la.evaluate([X])


class Sum(nn.Linear):
    """A linear layer of the sum of two inputs."""

    def forward(self, a, b):
        return super().forward(a + b)


def test_several_foreign_inputs_without_targets():
    """A pair is inputs and targets; None says that there are no targets."""
    torch.manual_seed(0)
    data = [((X, X), LABELS)]
    la = Laplace(Sum(3, 3).eval()).fit(data)
    expected = la.evaluate(data, {"far": [((FAR, FAR), torch.zeros(20))]})
    for batch in (((FAR, FAR), None), {"a": FAR, "b": FAR}, [(FAR, FAR), None]):
        assert la.evaluate(data, {"far": [batch]}) == expected
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        la.evaluate(data, {"far": [(FAR, FAR)]})


class TakesMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, batch):
        return self.head(batch["x"])


@pytest.mark.usefixtures("unchecked")
def test_other_forms_of_foreign_inputs():
    torch.manual_seed(0)
    data = [(OneArgument(x=X), LABELS)]
    la = Laplace(TakesMapping().eval()).fit(data)
    expected = la.evaluate(data, {"far": [(OneArgument(x=FAR), torch.zeros(20))]})
    assert la.evaluate(data, {"far": [OneArgument(x=FAR)]}) == expected

    def read(batch):
        return batch[0], batch[1] if len(batch) > 1 else None

    la = Laplace(network(3), batch=read).fit([(X, LABELS)])
    expected = classification().evaluate([(X, LABELS)], {"far": [FAR]})
    assert la.evaluate([(X, LABELS)], {"far": [(FAR,)]}) == expected
    for batch in ((FAR, FAR, FAR, FAR), "text", FAR.numpy()):
        with pytest.raises(TypeError, match="Batches must be pairs"):
            classification().evaluate([(X, LABELS)], {"far": [batch]})
