"""Ordered classes: cumulative logits in posteriors, predictions, files, programs and reports."""

import json
from dataclasses import replace

import a_run
import oracle
import pandas as pd
import pytest
import torch
from hand_likelihoods import THRESHOLDS, ordinal
from oracle import close
from torch import nn
from user_files import every as joined

from laplace_debias import Laplace, Ordinal
from laplace_debias.assessment import assess
from laplace_debias.assessment.methods import LAST_LAYER, NETWORK

N = 24
DELTA = 0.8


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()


def examples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (N,), generator=generator)


def cumulative(f):
    """P(y ≤ k) of outputs `[..., 1]`, written out, with both ends."""
    inner = torch.sigmoid(torch.tensor(THRESHOLDS, dtype=torch.float64) - f)
    return torch.cat([torch.zeros_like(f), inner, torch.ones_like(f)], -1)


@pytest.fixture(scope="module")
def la():
    fit = Laplace(network(), Ordinal(THRESHOLDS), "full", prior_precision=DELTA)
    return fit.fit_batches([examples()])


def dense():
    model = network()
    x, _ = examples()
    J = oracle.flat_jacobian(model, x, [name for name, _ in model.named_parameters()])
    bounds = cumulative(model(x).detach())
    probabilities = bounds.diff(dim=-1)
    scores = 1 - bounds[:, 1:] - bounds[:, :-1]
    information = (probabilities * scores.square()).sum(1)
    ggn = torch.einsum("nci,n,ncj->ij", J, information, J)
    return J, ggn + DELTA * torch.eye(len(ggn)).double()


def test_the_posterior_and_its_evidence_are_the_dense_ones(la):
    x, y = examples()
    model = network()
    J, P = dense()
    close(la.posterior.precision.to_dense(), P)
    nll = sum(ordinal(f, label) for f, label in zip(model(x).detach(), y, strict=True))
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    evidence = oracle.log_marginal_likelihood(nll, theta, P, torch.full_like(theta, DELTA))
    close(la.log_marginal_likelihood(), evidence)
    _, covariance = la.functional(x)
    close(covariance, J @ torch.linalg.inv(P) @ J.mT)


def test_the_predictive_shrinks_the_thresholds(la):
    x, _ = examples()
    mean, covariance = la.functional(x)
    scale = (1 + torch.pi / 8 * covariance[..., 0]).sqrt()
    inner = torch.sigmoid((torch.tensor(THRESHOLDS, dtype=torch.float64) - mean) / scale)
    expected = torch.cat([torch.zeros_like(mean), inner, torch.ones_like(mean)], -1).diff(dim=-1)
    close(la.predict(x).probs, expected)
    close(la.predict(x, method="map").probs, cumulative(network()(x).detach()).diff(dim=-1))
    generator = torch.Generator().manual_seed(0)
    sampled = la.predict(x, samples=20_000, generator=generator).probs
    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    weights = (-grid.square() / 2).exp()
    outputs = mean + covariance[..., 0].sqrt() * grid
    averaged = torch.einsum(
        "ngk,g->nk", cumulative(outputs.unsqueeze(-1)).diff(dim=-1), weights / weights.sum()
    )
    assert (sampled - averaged).abs().max() < 0.02
    assert (la.predict(x).probs - averaged).abs().max() < 0.03


def test_extreme_outputs_have_finite_losses_and_gradients():
    f = torch.tensor([[-800.0], [800.0], [0.0]]).double().requires_grad_()
    likelihood = Ordinal(THRESHOLDS)
    for label in range(4):
        losses = likelihood.nll(f, torch.full((3,), label))
        (gradient,) = torch.autograd.grad(losses.sum(), f)
        assert losses.isfinite().all()
        close(gradient, likelihood.gradient(f.detach(), torch.full((3,), label)))
    uniforms = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)).double()
    drawn = likelihood.sample(torch.full((20_000, 1), 0.4).double(), uniforms)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    expected = cumulative(torch.tensor([0.4]).double()).diff()
    assert (shares - expected).abs().max() < 0.015


def test_it_is_tuned_evaluated_saved_and_exported(tmp_path):
    x, y = examples()
    la = Laplace(network(), Ordinal(THRESHOLDS), params="last_layer").fit_batches([(x, y)])
    la.tune([(x, y)])
    report = la.evaluate([(x, y)])
    log_probs = la.predict(x).probs.log().gather(1, y.unsqueeze(1))
    assert report["nll"].value == pytest.approx(-float(log_probs.mean()))
    la.save(tmp_path / "grades.safetensors")
    loaded = Laplace.load(tmp_path / "grades.safetensors", network())
    assert loaded.likelihood.thresholds.tolist() == list(THRESHOLDS)
    close(loaded.predict(x).probs, la.predict(x).probs)
    la.export(tmp_path / "grades.pt2", x)
    answers = torch.export.load(tmp_path / "grades.pt2").module()(x[:5])
    close(answers["probs"], la.predict(x[:5]).probs)


def test_a_report(tmp_path):
    rows = a_run.loaded_rows(num_test=30, num_ood=10, num_outputs=1)
    thresholds = torch.tensor([-0.5, 0.5])

    def graded(batches):
        return [(x, torch.bucketize(y[:, 0], thresholds)) for x, y in batches]

    changes = {name: graded(getattr(rows, name)) for name in ("train", "validation", "test")}
    loaded = replace(rows, likelihood=Ordinal(thresholds), **changes)
    folder = assess(loaded, tmp_path / "run", (NETWORK, LAST_LAYER))
    table = pd.read_parquet(folder / "predictions/network/test.parquet")
    x, y = joined(loaded.test)
    f = loaded.model(x).detach().double()
    inner = torch.sigmoid(thresholds.double() - f)
    expected = torch.cat([torch.zeros_like(f), inner, torch.ones_like(f)], 1).diff(dim=1)
    actual = torch.tensor([list(row) for row in table["probs"]], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    rows = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["rows"]
    values = {(row["method"], row["metric"]): row["value"] for row in rows if row["set"] == "test"}
    nll = -expected.gather(1, y.unsqueeze(1)).log().mean()
    assert values["network", "nll"] == pytest.approx(float(nll), rel=1e-5)
    assert ("last-layer", "ece") in values


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        (None, "The ordinal likelihood has no thresholds"),
        ([1.0, 0.0], "increasing"),
        ([0.0, 0.0], "increasing"),
        ([], "increasing"),
        ([0.0, float("inf")], "finite"),
        ([[0.0], [1.0]], "increasing"),
    ],
)
@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_bad_thresholds_are_refused(thresholds, message):
    with pytest.raises(ValueError, match=message):
        Ordinal(thresholds)


def test_data_that_do_not_fit_are_refused():
    x, y = examples()
    cases = [
        (network(), y + 1, ValueError, "between 0 and 3"),
        (network(), y.double(), TypeError, "must be integers"),
        (network(), y.unsqueeze(1), ValueError, "one class label per example"),
        (nn.Linear(3, 4).double().eval(), y, ValueError, "needs one output"),
    ]
    for model, targets, error, message in cases:
        with pytest.raises(error, match=message):
            Laplace(model, Ordinal(THRESHOLDS)).fit_batches([(x, targets)])
