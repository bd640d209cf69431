"""Several labels on one network: independent Bernoullis, against dense matrices in float64.

The reference is written from the equations: Jacobians by `torch.func`, one example after the other,
and of each label p, p (1 − p) and p − y. A network of networks side by side, one per label, must
give what each of them gives as `"binary"`.
"""

import math

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from dense_curvature import dense_curvature
from sklearn.metrics import accuracy_score, hamming_loss
from torch import nn
from torch.distributions import Bernoulli as TorchBernoulli
from torchmetrics.functional.classification import (
    binary_auroc,
    multilabel_accuracy,
    multilabel_exact_match,
)

from laplace_debias import Laplace, metrics
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Likelihood,
    MultiLabel,
    likelihood_from,
)

N = 7
NUM_LABELS = 3
DELTA = 0.6
RANK = 5
CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, NUM_LABELS)).double().eval()


def examples(size=N, num_labels=NUM_LABELS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (size, num_labels), generator=generator)


class Recorded(MultiLabel):
    """Keeps the labels that are drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def sample(self, outputs, uniforms):
        labels = super().sample(outputs, uniforms)
        assert torch.equal(labels.bool(), uniforms < 1 / (1 + (-outputs).exp()))
        self.drawn.append(labels)
        return labels


# ------------------------------------------------------------------------ the dense reference


def dense_columns(model, x, y, fisher, drawn):
    """`[N, K, C]`: example by example vectors whose outer products are to make the curvature."""
    p = 1 / (1 + (-model(x).detach()).exp())
    if fisher == "empirical":
        return (p - y)[:, None]
    return torch.stack([p - labels for labels in drawn], dim=1) / len(drawn) ** 0.5


def close(actual, expected, tolerance=1e-9):
    assert actual.shape == expected.shape
    assert expected.abs().max() > 1e-6
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize(
    ("curvature", "fisher"), one_axis_at_a_time(CURVATURES, ["mc", "empirical"])
)
def test_every_curvature_is_that_of_drawn_and_of_given_labels(curvature, fisher):
    model = network()
    x, y = examples()
    likelihood = Recorded()
    options = {}
    if fisher == "mc":
        options["mc_samples"] = 2
    if curvature == "lowrank":
        options["rank"] = RANK
    la = Laplace(
        model,
        likelihood,
        curvature,
        fisher=fisher,
        prior_precision=DELTA,
        backend="hooks",
        **options,
    )
    la.fit_batches([(x[:4], y[:4]), (x[4:], y[4:])], num_data=40)
    drawn = None
    if fisher == "mc":
        # Drawn batch by batch, sample by sample; EKFAC's second pass draws the same labels again.
        drawn = [torch.cat(likelihood.drawn[k:4:2]) for k in range(2)]
    C = dense_curvature(la, curvature, x, dense_columns(model, x, y, fisher, drawn), RANK)
    P = 40 * C + DELTA * torch.eye(len(C)).double()
    close(la.posterior.precision.to_dense(), P)
    # The predictive of a label has the label's logit, shrunk by the logit's variance.
    mean, variances = la.functional(x, diagonal=True)
    expected = (mean / (1 + math.pi / 8 * variances).sqrt()).sigmoid()
    close(la.predict(x).mean, expected)


# -------------------------------------------------------------- one network for each label


def single(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()


def test_one_label_is_the_binary_likelihood():
    x, y = examples(12, 1)
    model = single(0)
    multilabel, binary = (
        Laplace(model, name).fit_batches([(x, y)]) for name in ("multilabel", "binary")
    )
    close(multilabel.predict(x).mean[:, 0], binary.predict(x).probs)
    report = multilabel.evaluate([(x, y)])
    expected = binary.evaluate([(x, y)])
    for name in ("accuracy", "nll", "ece", "brier", "mean_entropy"):
        assert report[name] == pytest.approx(expected[name], rel=1e-6)


# ------------------------------------------------------------------------- the likelihood


def test_saturated_logits_keep_their_digits():
    f = torch.tensor([[-80.0, 40.0]])
    expected = torch.tensor([-80.0, -40.0], dtype=torch.float64).exp()
    root = MultiLabel().hessian_root(f).square().sum(0)[0].double()
    torch.testing.assert_close(root, expected, rtol=1e-5, atol=0)
    assert MultiLabel().hessian_trace(f).item() == pytest.approx(expected.sum().item(), rel=1e-9)
    # In float32 uniforms close to 1 and a sigmoid of 40 are both 1.
    labels = MultiLabel().sample(f, torch.tensor([[1e-12, 1 - 1e-12]], dtype=torch.float64))
    assert labels.tolist() == [[0.0, 1.0]]


def test_predictives_average_label_by_label():
    x, y = examples()
    model = network()
    la = Laplace(model, "multilabel", prior_precision=DELTA).fit_batches([(x, y)])
    for method in ("glm", "glm-mc", "nn"):
        seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
        predictive = la.predict(x, method, samples=6, generator=seeds[0])
        assert (predictive.batch_shape, predictive.event_shape) == ((N,), (NUM_LABELS,))
        if method == "nn":
            expected = torch.zeros(N, NUM_LABELS).double()
            for theta in la.sample(6, seeds[1]):
                entries_of_parameters = theta.split([p.numel() for p in model.parameters()])
                values = {
                    name: entries.view_as(p)
                    for (name, p), entries in zip(
                        model.named_parameters(), entries_of_parameters, strict=True
                    )
                }
                expected += torch.func.functional_call(model, values, (x,)).sigmoid().detach() / 6
            close(predictive.mean, expected)
    certain = la.predict(x, "map")
    close(certain.mean, model(x).sigmoid().detach())
    close(certain.variance, (certain.mean * (1 - certain.mean)))
    assert certain.log_prob(y.double()).shape == certain.entropy().shape == (N,)


def test_probit_is_close_to_the_integral():
    mean = torch.linspace(-4, 4, 9).double()[None]
    variances = torch.linspace(0.1, 9, 9).double()
    draws = mean + variances.sqrt() * torch.randn(200_000, 1, 9).double()
    closed = MultiLabel().predictive(mean, variances.diag()[None]).mean
    assert (closed - MultiLabel().mixture(draws).mean).abs().max() < 0.025


def test_labels_at_positions():
    """Each token has several labels; padded ones are ignored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    x = torch.randn(5, 3, 4).double()
    y = torch.randint(2, (5, 3, 2))
    y[0, 2] = -100
    y[3, 1] = -100
    la = Laplace(model, "multilabel", "full", prior_precision=DELTA).fit_batches([(x, y)])
    expected = torch.zeros(len(la.mean), len(la.mean)).double()
    for n in range(5):
        J = oracle.flat_jacobian(model, x[n], la.param_names)
        p = model(x[n]).sigmoid().detach()
        for t in range(3):
            if (n, t) not in ((0, 2), (3, 1)):
                expected += J[t].T @ torch.diag(p[t] * (1 - p[t])) @ J[t]
    close(la.posterior.precision.to_dense(), expected + DELTA * torch.eye(len(la.mean)).double())
    assert la.predict(x).batch_shape == (5, 3)
    counted = y[..., 0] != -100
    log_probs = la.predict(x).log_prob(y.clamp_min(0).double())[counted]
    report = la.evaluate([(x, y)], ood={"far": [(9 * x, y)]})
    assert report["nll"] == pytest.approx(-log_probs.mean().item())
    assert la.tune([(x, y)], grid=[DELTA]).value == pytest.approx(report["nll"])


# ------------------------------------------------------------------------ metrics and files


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_metrics_are_those_of_the_labels(dtype):
    probs = torch.rand(50, 4).to(dtype)
    y = torch.randint(2, (50, 4))
    foreign_probs = torch.rand(30, 4).to(dtype) * 0.2 + 0.4
    report = metrics.evaluate_multilabel(probs, y, {"other": foreign_probs})
    p = probs.double()
    truth = y.numpy()
    prediction = (probs > 0.5).numpy()
    assert report["accuracy"] == pytest.approx(1 - hamming_loss(truth, prediction), rel=1e-6)
    torchmetrics_accuracy = multilabel_accuracy(probs, y, 4, average="micro")
    assert report["accuracy"] == pytest.approx(torchmetrics_accuracy.item(), rel=1e-6)
    assert report["exact_match"] == pytest.approx(accuracy_score(truth, prediction), rel=1e-6)
    assert report["exact_match"] == pytest.approx(multilabel_exact_match(probs, y, 4).item())
    assert 0 < report["exact_match"] < report["accuracy"]
    log_probs = TorchBernoulli(p).log_prob(y.double()).sum(1)
    assert report["nll"] == pytest.approx(-log_probs.mean().item(), rel=1e-5)
    assert report["brier"] == pytest.approx(2 * (p - y).square().mean().item(), rel=1e-5)
    assert report["ece"] == pytest.approx(
        metrics.ece(probs.flatten(), y.flatten()).item(), rel=1e-6
    )
    entropies = [TorchBernoulli(t.double()).entropy().sum(1) for t in (probs, foreign_probs)]
    assert report["mean_entropy"] == pytest.approx(entropies[0].mean().item(), rel=1e-5)
    is_ood = torch.cat([torch.zeros(50), torch.ones(30)]).long()
    area = binary_auroc(torch.cat(entropies) / 4, is_ood)
    assert report["auroc_other"] == pytest.approx(area.item(), rel=1e-5)
    assert set(report) >= {"aupr_other", "fpr95_other"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("probs", "labels", "ood", "says"),
    [
        (torch.rand(4), torch.ones(4).long(), None, r"Pass \[n, labels\]"),
        (torch.rand(4, 2) + 1, torch.ones(4, 2).long(), None, "sigmoid"),
        (torch.rand(4, 2), torch.ones(4).long(), None, "the shape of `probs`"),
        (torch.rand(4, 2), torch.full((4, 2), 2), None, "must be between 0 and 1"),
        (torch.rand(4, 2), torch.ones(4, 2).long(), torch.rand(4, 3), "has 3 labels"),
    ],
)
def test_metrics_refuse_what_is_no_table_of_labels(probs, labels, ood, says):
    with pytest.raises(ValueError, match=says):
        metrics.evaluate_multilabel(probs, labels, None if ood is None else {"other": ood})


def test_evaluate_and_tune_score_the_same_predictive():
    x, y = examples(30)
    model = network()
    la = Laplace(model, "multilabel").fit_batches([(x, y)])
    report = la.evaluate([(x[:11], y[:11]), (x[11:], y[11:])], ood={"far": [(5 * x, y)]})
    predictive = la.predict(x)
    expected = metrics.evaluate_multilabel(predictive.mean, y, {"far": la.predict(5 * x).mean})
    assert report == pytest.approx(expected, rel=1e-6)
    assert report["nll"] == pytest.approx(-predictive.log_prob(y.double()).mean().item())
    for metric in ("nll", "brier"):
        tuning = la.tune([(x, y)], metric, grid=[1.0, 50.0])
        assert tuning.table[0][metric] == pytest.approx(report[metric], rel=1e-6)
    # The labels of any real dtype are the same labels.
    la.prior_precision = 1.0
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.float32):
        assert la.evaluate([(x, y.to(dtype))]) == la.evaluate([(x, y)])
        again = Laplace(model, "multilabel").fit_batches([(x, y.to(dtype))])
        assert again.fitted.nll == la.fitted.nll


@pytest.mark.parametrize("likelihood", ["binary", "multilabel"])
def test_a_certain_mistake_costs_what_its_logit_says(likelihood):
    """In float32 a probability of σ(20) is 1, and 1 − p was nothing."""
    model = nn.Sequential(nn.Linear(1, 1)).eval()
    with torch.no_grad():
        model[0].weight.fill_(20.0)
        model[0].bias.zero_()
    x = torch.ones(2, 1)
    y = torch.tensor([[0.0], [1.0]])
    la = Laplace(model, likelihood).fit_batches([(x, y)])
    assert la.evaluate([(x, y)], method="map")["nll"] == pytest.approx(10.0, rel=1e-6)


# ---------------------------------------------------------------------------- bad input


def test_names():
    assert type(likelihood_from("multilabel")) is MultiLabel
    with pytest.raises(ValueError, match="'multilabel'"):
        likelihood_from("multi-label")
    with pytest.raises(ValueError, match="`sigma` applies only"):
        likelihood_from("multilabel", 0.1)


ONE_HOT = torch.eye(3)
MULTI_HOT = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
ADVICE = 'likelihood="multilabel"'


@pytest.mark.parametrize(
    ("likelihood", "targets", "error", "says", "says_not"),
    [
        (Bernoulli(), MULTI_HOT, ValueError, [ADVICE, "several labels can apply"], "argmax"),
        (Bernoulli(), MULTI_HOT, ValueError, ["If exactly one class applies"], "argmax"),
        (Categorical(), MULTI_HOT, TypeError, [ADVICE], "argmax"),
        (Categorical(), MULTI_HOT.long(), ValueError, [ADVICE], "argmax"),
        (Categorical(), 2 * ONE_HOT, TypeError, [ADVICE, "sum to 1"], "0 or 1"),
        (Categorical(), ONE_HOT.long(), ValueError, [ADVICE, "one-hot", "argmax"], "0 or 1"),
        (Categorical(), ONE_HOT.bool(), TypeError, [ADVICE, "argmax"], "0 or 1"),
        (Categorical(), torch.zeros(3), TypeError, ["targets.long()"], ADVICE),
        (MultiLabel(), torch.arange(3), ValueError, ['"classification"', "(3, 3)"], "argmax"),
        (MultiLabel(), torch.zeros(3, 2), ValueError, ["(3, 2)"], "classification"),
        (MultiLabel(), MULTI_HOT + 1, ValueError, ["0 or 1"], "argmax"),
        (MultiLabel(), MULTI_HOT * 0.3, ValueError, ["0 or 1"], "argmax"),
        (MultiLabel(), MULTI_HOT * math.nan, ValueError, ["0 or 1"], "argmax"),
        (MultiLabel(), MULTI_HOT - 101 * ONE_HOT, ValueError, ["some labels are known"], "argmax"),
    ],
)  # fmt: skip
def test_each_mistake_is_sent_to_the_right_likelihood(likelihood, targets, error, says, says_not):
    assert isinstance(likelihood, Likelihood)
    with pytest.raises(error) as caught:
        likelihood.check(torch.zeros(3, 3), targets)
    assert all(text in str(caught.value) for text in says)
    assert says_not not in str(caught.value)
