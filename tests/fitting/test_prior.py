"""The temperature of the likelihood and the mean of the prior, against dense float64 matrices."""

import math

import oracle
import pytest
import torch
from safetensors import safe_open
from torch import nn

from laplace_debias import Laplace
from laplace_debias.laplace.state.fitted import checked_temperature
from laplace_debias.laplace.state.prior import prior_mean_from

DELTA, NUM_DATA, T = 0.7, 40, 0.3


def fitted(name="mlp_tanh", **options):
    model, x, y, likelihood, sigma = oracle.SMALL_MODELS[name]()
    options = {"prior_precision": DELTA, "sigma": sigma, **options}
    return Laplace(model, likelihood, **options).fit_batches([(x, y)], num_data=NUM_DATA), x, y


def dense_curvature(la):
    return [block.to_dense() for block in la.posterior.curvature.blocks.values()]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["prior_precision", "prior_mean", "temperature"])
def test_none_is_no_prior_and_no_temperature(name):
    la, _, _ = fitted()
    posterior = la.posterior
    with pytest.raises(TypeError, match=rf"{name}.*None"):
        setattr(la, name, None)
    assert la.posterior is posterior


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
@pytest.mark.parametrize("name", ["mlp_tanh", "regression_per_output"])
def test_the_temperature_divides_the_curvature(name, curvature):
    la, x, y = fitted(name, curvature=curvature, temperature=T)
    precision = oracle.posterior_precision(dense_curvature(la), NUM_DATA / T, DELTA)
    assert_close(la.posterior.precision.to_dense(), precision)
    covariance = torch.linalg.inv(precision)
    assert_close(la.posterior.covariance.to_dense(), covariance)
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    assert_close(la.functional(x)[1], oracle.functional_covariance(J, covariance))
    root = la.posterior.scale.to_dense()
    assert_close(root @ root.T, covariance)
    nll = oracle.nll(la_likelihood(name), la.model(x), y, oracle.SMALL_MODELS[name]()[4])
    theta = oracle.flat_parameters(la.model, la.param_names)
    expected = oracle.log_marginal_likelihood(
        nll.sum() * NUM_DATA / len(x) / T, theta, precision, torch.full_like(theta, DELTA)
    )
    assert_close(la.log_marginal_likelihood(), expected.detach())


def la_likelihood(name):
    return oracle.SMALL_MODELS[name]()[3]


def test_the_closed_form_of_a_last_layer_has_the_temperature():
    la, x, _ = fitted(params="last_layer", temperature=T)
    precision = oracle.posterior_precision(dense_curvature(la), NUM_DATA / T, DELTA)
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    expected = oracle.functional_covariance(J, torch.linalg.inv(precision))
    assert_close(la.functional(x)[1], expected)
    variances = expected.diagonal(dim1=1, dim2=2)
    logits = la.model(x).detach() / (1 + math.pi / 8 * variances).sqrt()
    assert_close(la.predict(x, link="probit").probs, logits.softmax(1))


MEANS = {
    "a number": lambda model: 0.4,
    "a vector": lambda model: torch.linspace(-1, 1, sum(p.numel() for p in model.parameters())),
}


def as_vector(mean, model):
    size = sum(p.numel() for p in model.parameters())
    return torch.as_tensor(mean, dtype=torch.float64).expand(size)


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("joint", [False, True])
def test_the_prior_mean_enters_the_marginal_likelihood_alone(kind, joint):
    model = oracle.SMALL_MODELS["mlp_tanh"]()[0]
    mean = MEANS[kind](model)
    deltas = torch.linspace(0.3, 2.0, 3 if joint else 6, dtype=torch.float64)
    la, x, y = fitted(prior_mean=mean, joint=joint, prior_precision=deltas)
    plain, _, _ = fitted(joint=joint, prior_precision=deltas)
    assert torch.equal(la.predict(x).probs, plain.predict(x).probs)
    assert torch.equal(la.mean, plain.mean)
    sizes = [block.shape[0] for block in la.posterior.curvature.blocks.values()]
    by_block = [d.expand(n) for n, d in zip(sizes, deltas, strict=True)]
    precision = oracle.posterior_precision(
        dense_curvature(la), NUM_DATA, [float(delta) for delta in deltas]
    )
    # The blocks' entries in their order: with `joint` a row of the weight, then its bias's entry.
    theta = oracle.flat_parameters(la.model, la.param_names) - as_vector(mean, la.model)
    order = la.posterior.order
    nll = oracle.nll("classification", la.model(x), y).sum() * NUM_DATA / len(x)
    expected = oracle.log_marginal_likelihood(
        nll, theta if order is None else theta[order], precision, torch.cat(by_block)
    )
    assert_close(la.log_marginal_likelihood(), expected.detach())


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_tune_by_the_marginal_likelihood_finds_the_optimum_of_both(temperature):
    """With P = (1/T + δ) I the optimum is in closed form, δ (1/T + δ) = (D / T) / ‖θ* − μ‖²."""
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.eye(2).double()
    y = torch.zeros(2, 1).double()
    mean = torch.tensor([0.5, -2.0]).double()
    la = Laplace(model, "regression", prior_mean=mean, temperature=temperature)
    la.fit_batches([(x, y)])
    distance = (model.weight.detach().flatten() - mean).square().sum().item()
    curvature = 1 / temperature
    expected = (-curvature + math.sqrt(curvature**2 + 8 * curvature / distance)) / 2
    tuned = la.tune(method="marglik", sigma=False)
    assert tuned.prior_precision == pytest.approx(expected, rel=1e-2)


def test_both_may_be_set_without_a_refit():
    la, x, _ = fitted()
    la.temperature = T
    la.prior_mean = 0.4
    expected, _, _ = fitted(temperature=T, prior_mean=0.4)
    assert la.temperature == T
    assert float(la.prior_mean) == 0.4
    assert torch.equal(la.predict(x).probs, expected.predict(x).probs)
    assert torch.equal(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    la.prior_precision = 2.0
    assert la.posterior.temperature == T
    assert float(la.posterior.prior_mean) == 0.4
    la.temperature = 1.0
    la.prior_mean = 0.0
    la.prior_precision = DELTA
    plain, _, _ = fitted()
    assert torch.equal(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    assert repr(la) == repr(plain)


def test_a_last_layer_that_a_fit_finds_takes_them_too():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.first = nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.first(x).tanh())

    model = Own().double()
    x = torch.randn(6, 5).double()
    y = torch.randint(3, (6,))
    mean = torch.cat([torch.ones(12), torch.zeros(3)])
    la = Laplace(model, params="last_layer", prior_mean=mean, temperature=T)
    assert "prior mean: one for each parameter" in repr(la)
    assert_close(la.prior_mean, mean.double())
    la.fit_batches([(x, y)])
    assert_close(la.prior_mean, mean.double())
    assert la.posterior.temperature == T


@pytest.mark.parametrize("prior_mean", [0.0, 0.4, torch.linspace(-1, 1, 95)])
@pytest.mark.parametrize("temperature", [1.0, T])
def test_files_and_repr_have_them(prior_mean, temperature, tmp_path):
    la, x, _ = fitted(prior_mean=prior_mean, temperature=temperature)
    la.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert_close(again.functional(x)[1], la.functional(x)[1])
    assert again.temperature == temperature
    assert torch.equal(again.prior_mean, la.prior_mean)
    again.fit_batches([(x, torch.zeros(6, dtype=torch.long))])
    assert again.posterior.temperature == temperature
    assert repr(la) == repr(Laplace.load(tmp_path / "posterior.safetensors", la.model))
    assert ("temperature: 0.3" in repr(la)) == (temperature == T)
    assert ("prior mean: " in repr(la)) == (prior_mean is not 0.0)  # noqa: F632
    with safe_open(tmp_path / "posterior.safetensors", "pt") as file:
        # Only files that need these entries have them, so that earlier versions read all others.
        assert ("temperature" in file.metadata()["header"]) == (temperature == T)
        assert ("prior_mean" in file.keys()) == (prior_mean is not 0.0)  # noqa: F632, SIM118


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "positive and finite, got 0"),
        ({"temperature": math.inf}, ValueError, "positive and finite, got inf"),
        ({"temperature": math.nan}, ValueError, "positive and finite, got nan"),
        ({"prior_mean": torch.zeros(3)}, ValueError, r"has shape \(3,\)\. .*each of the 95"),
        ({"prior_mean": math.nan}, ValueError, "`prior_mean` contains NaN"),
    ],
)
def test_what_is_out_of_range_is_refused(options, error, message):
    model = oracle.SMALL_MODELS["mlp_tanh"]()[0]
    with pytest.raises(error, match=message):
        Laplace(model, **options)
    la, _, _ = fitted()
    evidence = la.log_marginal_likelihood()
    ((name, value),) = options.items()
    with pytest.raises(error, match=message):
        setattr(la, name, value)
    assert torch.equal(la.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize("value", ["map", None, [0.1], True, {"0.weight": torch.zeros(6, 5)}])
def test_what_is_no_number_is_refused(value):
    """These functions accept any type; those with annotations raise earlier in these tests."""
    with pytest.raises(
        TypeError, match=r"`prior_mean` is a .*Pass a number, or a tensor.*torch\.cat"
    ):
        prior_mean_from(value, torch.device("cpu"))
    with pytest.raises(TypeError, match=r"temperature`? "):
        checked_temperature(value)


def test_a_precision_out_of_range_names_the_block_and_keeps_the_posterior():
    la, _, _ = fitted()
    evidence = la.log_marginal_likelihood()
    with pytest.raises(
        ValueError, match=r"prior precision of 0\.weight is 0\.7, which is too small"
    ):
        la.temperature = 1e-308
    with pytest.raises(ValueError, match="prior's mean is too far"):
        la.prior_mean = 1e154
    assert torch.equal(la.log_marginal_likelihood(), evidence)


def test_what_is_set_during_a_fit_holds_for_it():
    """The loader sets the attributes while the fit reads data, as another thread may do."""
    la, x, y = fitted()
    mean = torch.linspace(-1, 1, len(la.mean), dtype=torch.float64)

    class Setting(list):
        def __iter__(self):
            la.prior_precision = 3.0
            la.temperature = T
            la.prior_mean = mean
            return super().__iter__()

    la.fit_batches(Setting([(x, y)]), num_data=NUM_DATA)
    expected, _, _ = fitted(prior_precision=3.0, temperature=T, prior_mean=mean)
    assert (la.prior_precision, la.temperature) == (3.0, T)
    assert torch.equal(la.prior_mean, mean)
    assert torch.equal(la.functional(x)[1], expected.functional(x)[1])
    assert la.log_marginal_likelihood() == expected.log_marginal_likelihood()


def test_what_is_set_during_a_search_is_kept():
    la, x, y = fitted()
    targets = y
    mean = torch.linspace(-1, 1, len(la.mean), dtype=torch.float64)

    class Setting(list):
        def __iter__(self):
            la.temperature = T
            la.prior_mean = mean
            return super().__iter__()

    tuned = la.tune(Setting([(x, targets)]))
    assert la.temperature == T
    assert torch.equal(la.prior_mean, mean)
    assert float(la.prior_precision) == float(tuned)


@pytest.mark.parametrize("curvature", ["kfac", "full", "lowrank"])
def test_the_log_density_of_parameters_is_that_of_the_dense_gaussian(curvature):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x = torch.randn(20, 3, dtype=torch.float64)
    la = Laplace(model.double().eval(), curvature=curvature, prior_precision=0.6)
    la.fit([(x, torch.randint(2, (20,)))])
    dense = torch.distributions.MultivariateNormal(
        la.mean, precision_matrix=la.posterior.precision.to_dense()
    )
    parameters = la.sample(5).requires_grad_()
    values = la.posterior.log_prob(parameters)
    torch.testing.assert_close(values, dense.log_prob(parameters))
    torch.testing.assert_close(la.posterior.log_prob(parameters[0]), values[0])
    (gradient,) = torch.autograd.grad(values.sum(), parameters)
    (expected,) = torch.autograd.grad(dense.log_prob(parameters).sum(), parameters)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(ValueError, match=r"has shape \(3,\). Pass a tensor of shape \[..., 26\]"):
        la.posterior.log_prob(torch.ones(3))
