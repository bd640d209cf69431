"""A posterior and its user do not change each other's tensors."""

import pytest
import torch
from torch import nn

from laplace_debias import GaussianPrior, Laplace, Ordinal, posterior_as_prior


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


@pytest.fixture
def data():
    torch.manual_seed(1)
    return torch.randn(20, 3, dtype=torch.float64), torch.randint(3, (20,))


@pytest.mark.parametrize("memory_bound", [None, 2000])
def test_inducing_inputs_may_change_later(model, data, tmp_path, memory_bound):
    inducing = torch.randn(5, 3, dtype=torch.float64)
    la = Laplace(model, curvature="gp", inducing=inducing, memory_bound=memory_bound).fit([data])
    x = data[0][:4]
    expected = la.functional(x)[1]
    inducing.mul_(3)
    assert torch.equal(la.functional(x)[1], expected)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    torch.testing.assert_close(loaded.functional(x)[1], expected)


def test_an_augmented_assignment_sets_the_prior_precision_or_leaves_it(model, data):
    la = Laplace(model).fit([data])
    la.prior_precision *= 4
    expected = Laplace(model, prior_precision=4.0).fit([data])
    torch.testing.assert_close(la.functional(data[0])[1], expected.functional(data[0])[1])
    with pytest.raises(ValueError, match="must be positive"):
        la.prior_precision -= 5
    assert float(la.prior_precision) == 4


def test_a_change_of_one_posterior_does_not_change_those_made_from_it(model, data):
    la = Laplace(model).fit([data])
    prior = posterior_as_prior(la)
    continued = Laplace(model, prior=prior).fit([data])
    la.prior_precision *= 100
    assert float(continued.prior_precision) == 1
    assert float(Laplace(model, prior=prior).fit([data]).prior_precision) == 1


def test_attributes_are_copies(model, data):
    x = data[0]
    la = Laplace(model, "regression", sigma=1.0, prior_mean=0.5).fit([(x, torch.randn_like(x))])
    variance = la.predict(x).variance
    evidence = la.log_marginal_likelihood()
    for tensor in (la.sigma, la.mean, la.prior_mean, la.prior_precision):
        tensor.mul_(3)
    assert torch.equal(la.predict(x).variance, variance)
    assert torch.equal(la.log_marginal_likelihood(), evidence)


def test_the_mean_of_a_prior_stays_when_the_weights_are_trained():
    layer = nn.Linear(3, 3, bias=False).double()
    precision = torch.ones(9, dtype=torch.float64)
    prior = GaussianPrior(layer.weight.detach().flatten(), precision, ["weight"])
    with torch.no_grad():
        layer.weight.add_(1.0)
    precision.mul_(2)
    assert float(prior.penalty(layer).detach()) == pytest.approx(4.5)


def test_thresholds_may_change_later(data):
    thresholds = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    layer = nn.Linear(3, 1).double().eval()
    la = Laplace(layer, Ordinal(thresholds)).fit([data])
    expected = la.predict(data[0]).probs
    thresholds.mul_(3)
    assert torch.equal(la.predict(data[0]).probs, expected)
