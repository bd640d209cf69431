"""Posteriors of weighted, smoothed, soft and heteroscedastic likelihoods."""

import hand_likelihoods as hand
import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from dense_curvature import dense_curvature
from hand_likelihoods import CASES, W3
from oracle import close
from torch import nn
from torch.distributions import Normal

from laplace_debias import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Laplace
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.system.shown import html_table

N = 8
DELTA = 0.6
RANK = 5
CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")


def network(num_outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double().eval()


def case(name, *shape):
    likelihood, num_outputs, targets, ell = CASES[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    return network(num_outputs), x, targets(*shape, generator=generator), likelihood, ell


def split(x, y):
    return [(x[:3], y[:3]), (x[3:], y[3:])]


@pytest.mark.parametrize(("name", "curvature"), one_axis_at_a_time(CASES, CURVATURES))
def test_every_curvature_is_the_dense_one(name, curvature):
    model, x, y, likelihood, ell = case(name, N)
    options = {"rank": RANK} if curvature == "lowrank" else {}
    la = Laplace(model, likelihood, curvature, prior_precision=DELTA, backend="hooks", **options)
    la.fit_batches(split(x, y), num_data=40)
    f = model(x).detach()
    columns = torch.stack([hand.root(ell, *row) for row in zip(f, y, strict=True)])
    weights = torch.stack([hand.example_weight(name, *row) for row in zip(f, y, strict=True)])
    C = dense_curvature(la, curvature, x, columns, RANK, weights)
    P = 40 * C + DELTA * torch.eye(len(C)).double()
    close(la.posterior.precision.to_dense(), P)
    nll = sum(ell(*row) for row in zip(f, y, strict=True)) * 40 / N
    theta = oracle.flat_parameters(model, la.param_names)
    evidence = oracle.log_marginal_likelihood(nll, theta, P, torch.full_like(theta, DELTA))
    close(la.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize("name", CASES)
def test_backends_and_modes_agree(name):
    model, x, y, likelihood, _ = case(name, 40)
    for mode in ("debiased", "crossfit"):
        hooks, backpack = (
            Laplace(model, likelihood, backend=backend, memory_bound=bound)
            .fit([(x[:20], y[:20]), (x[20:], y[20:])], mode=mode, num_data=40)
            .functional(x)[1]
            for backend, bound in (("hooks", 2**27), ("backpack", 2**15))
        )
        close(hooks, backpack)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_empirical_and_drawn_curvature(name):
    """The bias of the last layer: mean outer products of the gradients in the outputs."""
    model, x, y, likelihood, ell = case(name, 20)
    f = model(x).detach()
    la = Laplace(model, likelihood, fisher="empirical").fit_batches([(x, y)])
    g = torch.stack([hand.gradient(ell, *row) for row in zip(f, y, strict=True)])
    close(la.posterior.curvature.blocks["2.bias"].to_dense(), g.T @ g / len(x))
    la = Laplace(model, likelihood, fisher="mc", mc_samples=1000, backend="hooks")
    la.fit_batches([(x, y)], generator=torch.Generator().manual_seed(0))
    exact = torch.stack([hand.hessian(ell, *row) for row in zip(f, y, strict=True)]).mean(0)
    drawn = la.posterior.curvature.blocks["2.bias"].to_dense()
    assert (drawn - exact).abs().max() < 0.06 * exact.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_the_curvature_of_an_example_is_the_trace_of_its_loss_hessian(name):
    """By which `mode="auto"` draws examples."""
    model, x, y, likelihood, ell = case(name, N)
    f = model(x).detach()
    loss = NegativeLogLikelihood(Laplace(model, likelihood).likelihood)
    traces = [hand.hessian(ell, *row).trace() for row in zip(f, y, strict=True)]
    close(loss.hessian_traces(f, loss.labels(y, f.ndim)), torch.stack(traces))


def test_the_trace_of_a_certain_example_keeps_its_digits():
    trace = Categorical().hessian_trace(torch.tensor([[30.0, 0.0, 0.0]]))
    torch.testing.assert_close(trace, torch.tensor([4 * torch.tensor(-30.0).double().exp()]))


@pytest.mark.parametrize("name", CASES)
def test_each_is_saved_and_loaded(name, tmp_path):
    model, x, y, likelihood, ell = case(name, N)
    path = tmp_path / "posterior.safetensors"
    la = Laplace(model, likelihood).fit_batches(split(x, y))
    la.save(path)
    loaded = Laplace.load(path, model)
    assert type(loaded.likelihood) is type(likelihood)
    f = model(x).detach()
    values = torch.stack([ell(*row) for row in zip(f, y, strict=True)])
    close(loaded.likelihood.nll(f, y), values)
    assert repr(loaded) == repr(la)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    # A fit with what was loaded is the same fit: no argument is lost.
    close(loaded.fit_batches(split(x, y)).functional(x)[1], la.functional(x)[1])


def test_the_noise_of_a_regression_is_at_hand():
    sigma = Laplace(network(4), "regression", sigma=[0.5, 1.0, 2.0, 3.0]).sigma
    assert sigma.tolist() == [0.5, 1.0, 2.0, 3.0]
    la = Laplace(network(4), "classification")
    assert not hasattr(la, "sigma")
    with pytest.raises(
        AttributeError, match=r"`sigma` exists only for .*, but the likelihood is Ca"
    ):
        _ = la.sigma


def test_each_prints_its_arguments_and_no_long_tensor():
    assert repr(Bernoulli()) == "Bernoulli()"
    assert repr(Gaussian(0.5)) == "Gaussian(sigma=0.5)"
    assert "[1000] 1 … 1" in repr(Categorical(class_weights=[1.0] * 1000))


def test_a_notebook_shows_a_table():
    """Every line of the text, with its special characters escaped."""
    la = Laplace(network(4), Categorical(label_smoothing=0.1), params="last_layer")
    html = la._repr_html_()
    for line in repr(la).splitlines()[1:-1]:
        name, _, text = line.strip().partition(": ")
        assert f"<td>{name}</td><td>{text}</td>" in html
    assert html_table([["<b>", 0, None, 1.23456]], ["a & b"]) == (
        "<table><thead><tr><th>a &amp; b</th></tr></thead>"
        "<tr><td>&lt;b&gt;</td><td>0</td><td></td><td>1.235</td></tr></table>"
    )


def test_what_they_print_as():
    texts = {
        Categorical(class_weights=W3, label_smoothing=0.1): "classification",
        Gaussian([0.5, 1.0]): "regression, a separate sigma for each of 2 outputs",
        Gaussian([0.5]): "regression, sigma = 0.5",
        Bernoulli(): "binary",
        HeteroscedasticGaussian(): "heteroscedastic",
    }
    for likelihood, text in texts.items():
        assert f"  likelihood: {text}\n" in repr(Laplace(network(4), likelihood))


def test_evaluate_and_tune_score_the_labels_without_weights():
    model, x, y, *_ = case("class weights", 30)
    plain, weighted = (
        Laplace(model, likelihood).fit_batches([(x, y)])
        for likelihood in (Categorical(), Categorical(class_weights=W3, label_smoothing=0.3))
    )
    for la in (plain, weighted):
        log_probs = la.predict(x).log_prob(y.clamp_min(0))[y != -100]
        assert la.evaluate([(x, y)])["nll"] == pytest.approx(-log_probs.mean().item())
    without_first_class = Categorical(class_weights=[0.0, 1.0, 1.0])
    report = (
        Laplace(model, without_first_class).fit_batches([(x, y)]).evaluate([(x, y)], method="map")
    )
    is_counted = (y != -100) & (y != 0)
    expected = (model(x).argmax(1) == y)[is_counted].double().mean().item()
    assert report["accuracy"] == pytest.approx(expected)


def test_soft_targets_are_not_scored():
    model, x, y, likelihood, _ = case("soft", N)
    la = Laplace(model, likelihood).fit_batches([(x, y)])
    for score in (la.evaluate, la.tune):
        with pytest.raises(ValueError, match=r"class indices.*argmax"):
            score([(x, y)])
    assert la.evaluate([(x, y.argmax(-1))])["nll"] > 0


# ------------------------------------------------------------------------- heteroscedastic


def heteroscedastic(num_data=60, **options):
    model, x, y, likelihood, _ = case("heteroscedastic", num_data)
    la = Laplace(model, likelihood, "full", prior_precision=2.0, **options)
    return la.fit_batches([(x, y)]), x, y


def test_its_predictive_has_the_moments_of_the_integral():
    la, x, _ = heteroscedastic()
    mean, covariance = la.functional(x)
    root = torch.linalg.cholesky(covariance)
    noise = torch.randn(50_000, 60, 4, 1, generator=torch.Generator().manual_seed(0)).double()
    f = mean + (root @ noise)[..., 0]
    predictive = la.predict(x)
    close(predictive.mean, mean[:, :2])
    expected = f[..., 2:].exp().mean(0) + f[..., :2].var(0)
    torch.testing.assert_close(predictive.variance, expected, rtol=0.05, atol=0)
    off = covariance[:, 0, 1]
    close(predictive.covariance_matrix[:, 0, 1], off)
    mixture = la.likelihood.mixture(f[:5000])
    torch.testing.assert_close(mixture.variance, expected, rtol=0.15, atol=0)
    marginals = la.marginals(x)
    close(marginals.mean, predictive.mean)
    close(marginals.variance, predictive.variance)
    certain = la.predict(x, "map")
    close(certain.variance, mean[:, 2:].exp())
    close(la.marginals(x, "map").variance, mean[:, 2:].exp())


def test_it_is_evaluated_and_tuned_on_its_targets():
    la, x, y = heteroscedastic()
    report = la.evaluate([(x[:7], y[:7]), (x[7:], y[7:])])
    mean = la.model(x).detach()[:, :2]
    assert report["rmse"] == pytest.approx((mean - y).square().mean().sqrt().item())
    assert report["nll"] == pytest.approx(-la.predict(x).log_prob(y).mean().item())
    tuning = la.tune([(x, y)], grid=[0.5, 5.0])
    assert tuning.value == min(row["nll"] for row in tuning.table)
    with pytest.raises(ValueError, match="half of the outputs"):
        la.evaluate([(x, torch.cat([y, y], 1))])


def test_a_mean_and_a_log_variance_for_each_target():
    """Outputs [B, C, 2] are the same likelihood as [B, 2C], target by target."""

    class Paired(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).unflatten(1, (2, 2)).mT

    la, x, y = heteroscedastic()
    paired = Laplace(
        Paired(la.model).eval(), la.likelihood, "full", prior_precision=2.0, class_dim=-1
    )
    paired.fit_batches([(x, y)])
    close(paired.posterior.precision.to_dense(), la.posterior.precision.to_dense())
    assert paired.fitted.nll == pytest.approx(la.fitted.nll)
    close(paired.predict(x).mean[..., 0], la.predict(x).mean)
    close(paired.predict(x).variance[..., 0], la.predict(x).variance)
    rmse = la.evaluate([(x, y)])["rmse"]
    assert paired.evaluate([(x, y)])["rmse"] == pytest.approx(rmse)


def test_one_target_may_have_no_dimension_of_its_own():
    model = network(2)
    x = torch.randn(9, 4).double()
    y = torch.randn(9).double()
    flat, column = (
        Laplace(model, "heteroscedastic").fit_batches([(x, t)]) for t in (y, y[:, None])
    )
    assert flat.log_marginal_likelihood() == column.log_marginal_likelihood()
    assert flat.evaluate([(x, y)]) == column.evaluate([(x, y[:, None])])


def test_a_noise_that_overflows_is_told():
    model = network(2)
    la = Laplace(model, "heteroscedastic", prior_precision=1e-6)
    la.fit_batches([(torch.randn(2, 4).double(), torch.randn(2, 1).double())])
    far = 1e4 * torch.randn(2, 4).double()
    with pytest.raises(ValueError, match="larger prior precision"):
        la.marginals(far)


# ------------------------------------------------------------------------------- marginals


def regression(sigma=0.3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    x = torch.randn(30, 4).double()
    y = torch.randn(30, 2).double()
    la = Laplace(model, "regression", sigma=sigma, **options)
    return la.fit_batches([(x, y)]), x, y


QUANTILES = torch.tensor([0.025, 0.3, 0.5, 0.9]).double()[:, None, None]


def test_marginals_are_those_of_the_predictive():
    la, x, y = regression([0.3, 0.7])
    predictive = la.predict(x)
    marginals = la.marginals(x)
    assert marginals.batch_shape == (30, 2)
    normal = Normal(predictive.mean, predictive.variance.sqrt())
    close(marginals.icdf(QUANTILES), normal.icdf(QUANTILES))
    close(marginals.cdf(y), normal.cdf(y))
    close(la.marginals(x, "map").stddev, torch.tensor([[0.3, 0.7]] * 30, dtype=torch.float64))


@pytest.mark.parametrize("method", ["glm", "glm-mc", "nn"])
@pytest.mark.parametrize("make", [regression, heteroscedastic])
def test_quantiles_of_a_mixture_are_where_its_distribution_function_is(method, make):
    la, x, y = make()
    x = x[:6]
    y = y[:6]
    options = {"method": method, "samples": 7}
    marginals = la.marginals(x, **options, generator=torch.Generator().manual_seed(0))
    predictive = la.predict(x, **options, generator=torch.Generator().manual_seed(0))
    # The same draws: the same moments, and the components' distribution functions averaged.
    close(marginals.mean, predictive.mean)
    close(marginals.variance, predictive.variance)
    quantiles = marginals.icdf(QUANTILES)
    assert quantiles.shape == (4, 6, 2)
    close(marginals.cdf(quantiles), QUANTILES.expand(4, 6, 2))
    assert (quantiles[1:] > quantiles[:-1]).all()
    h = 1e-6
    density = (marginals.cdf(y + h) - marginals.cdf(y - h)) / (2 * h)
    torch.testing.assert_close(marginals.log_prob(y).exp(), density, rtol=1e-5, atol=1e-6)


def test_a_mixture_of_one_is_a_normal():
    la, x, _ = regression()
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    mixture = la.marginals(x, "nn", 1, seeds[0])
    expected = Normal(la.predict(x, "nn", 1, seeds[1]).mean, 0.3).icdf(QUANTILES)
    close(mixture.icdf(QUANTILES), expected)


def test_what_has_no_quantiles_says_so():
    model, x, y, likelihood, _ = case("class weights", N)
    la = Laplace(model, likelihood).fit_batches([(x, y)])
    for method in ("glm", "nn", "map"):
        with pytest.raises(TypeError, match=r"no quantiles.*`predict`, which returns"):
            la.marginals(x, method)
    la, x, _ = regression()
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        la.marginals(x, "nn", 3).icdf(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Unknown method"):
        la.marginals(x, "sampling")
    with pytest.raises(ValueError, match="samples=3"):
        la.marginals(x, "map", 3)
