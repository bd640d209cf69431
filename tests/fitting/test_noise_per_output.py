"""The noise of each output by held-out data, with the posterior as it is."""

import oracle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.laplace.tuning.output_noise import tune_output_noise

NOISES = (0.1, 0.5, 0.2)
CURVATURES = ["kfac", "full", "gp"]


def problem(seed=0, curvature="full", sigma=(0.3, 0.3, 0.3), **options):
    """A fit whose noise has the wrong ratios, and held-out data."""
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(120, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(120, 3, generator=g, dtype=torch.float64)
    y = model(x).detach() + torch.tensor(NOISES).double() * noise
    la = Laplace(model, "regression", curvature, sigma=list(sigma), **options)
    return la.fit([(x[:40], y[:40])]), x[40:], y[40:]


def dense_covariances(la, x, delta):
    """J P⁻¹ Jᵀ with the GGN at the noise of the curvature, without noise."""
    names = la.param_names
    sigma = la.likelihood.curvature_sigma
    J = oracle.flat_jacobian(la.model, x, names)
    train = problem_inputs()
    precision = 40 * oracle.ggn(la.model, train, "regression", names, sigma)
    precision += delta * torch.eye(J.shape[2], dtype=J.dtype)
    return oracle.functional_covariance(J, torch.linalg.inv(precision))


def problem_inputs():
    g = torch.Generator().manual_seed(0)
    return torch.randn(120, 2, generator=g, dtype=torch.float64)[:40]


def nll(mean, covariances, y, sigma):
    totals = covariances + torch.diag_embed(sigma.square().expand_as(mean))
    return -torch.distributions.MultivariateNormal(mean, totals).log_prob(y).mean()


def test_no_other_noises_have_a_lower_nll_under_the_dense_posterior():
    la, x, y = problem()
    tuned = la.tune([(x[:30], y[:30]), (x[30:], y[30:])], sigma="per_output")
    mean = la.model(x).detach()
    covariances = dense_covariances(la, x, tuned.prior_precision).detach()
    sigma = torch.tensor(tuned.sigma, dtype=torch.float64)
    best = nll(mean, covariances, y, sigma)
    torch.testing.assert_close(torch.tensor(tuned.value, dtype=torch.float64), best)
    # A grid around the choice, coarse and fine.
    for width, points in ((0.5, 9), (0.02, 3)):
        factors = torch.linspace(-width, width, points, dtype=torch.float64).exp()
        grid = torch.cartesian_prod(factors, factors, factors)
        values = torch.stack([nll(mean, covariances, y, sigma * factor) for factor in grid])
        assert float(values.min()) >= float(best) - 1e-12
        assert torch.equal(grid[int(values.argmin())], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_posterior_is_that_of_the_common_factor(curvature):
    la, x, y = problem(curvature=curvature)
    data = [(x, y)]
    common, *_ = problem(curvature=curvature)
    expected = common.tune(data, sigma=True)
    tuned = la.tune(data, sigma="per_output")
    assert tuned.prior_precision == expected.prior_precision
    assert tuned.value < expected.value - 0.1
    assert f"is {expected.value:.4g}" in tuned.message
    assert torch.equal(la.functional(x)[1], common.functional(x)[1])
    assert torch.equal(la.log_marginal_likelihood(), common.log_marginal_likelihood())
    torch.testing.assert_close(la.sigma, torch.tensor(tuned.sigma, dtype=torch.float64))
    torch.testing.assert_close(la.likelihood.curvature_sigma, common.sigma)
    assert la.evaluate(data)["nll"] == pytest.approx(tuned.value, rel=1e-9)
    _, covariance = la.functional(x)
    variances = covariance.diagonal(dim1=1, dim2=2) + la.sigma.square()
    torch.testing.assert_close(la.predict(x).variance, variances)
    torch.testing.assert_close(la.marginals(x).variance, variances)
    assert la.evaluate(data)["nll"] < common.evaluate(data)["nll"]


def test_a_noise_that_is_right_but_for_a_factor_changes_little():
    la, x, y = problem(sigma=[3 * noise for noise in NOISES])
    tuned = la.tune([(x, y)], sigma="per_output")
    torch.testing.assert_close(torch.tensor(tuned.sigma), torch.tensor(NOISES), rtol=0.25, atol=0.0)


def test_it_is_saved_updated_tuned_and_fitted_again(tmp_path):
    la, x, y = problem()
    data = DataLoader(TensorDataset(x, y), batch_size=32)
    la.tune(data, sigma="per_output")
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", la.model)
    assert torch.equal(loaded.predict(x).variance, la.predict(x).variance)
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    # New data are measured at the noise of the earlier data.
    at_curvature_sigma = Laplace(
        la.model, "regression", "full", sigma=la.likelihood.curvature_sigma
    )
    at_curvature_sigma.prior_precision = la.prior_precision
    at_curvature_sigma.fit([(problem_inputs(), 0 * y[:40])]).update([(x, y)])
    updated = loaded.update([(x, y)])
    oracle.close(updated.functional(x)[1], at_curvature_sigma.functional(x)[1], 1e-10)
    assert torch.equal(updated.sigma, la.sigma)
    # A common factor forgets the noises per output.
    again = problem()[0]
    expected = again.tune(data, sigma=True)
    tuned = la.tune(data, sigma=True)
    assert tuned.sigma == pytest.approx(expected.sigma, rel=1e-6)
    assert tuned.prior_precision == pytest.approx(expected.prior_precision, rel=1e-6)
    assert la.evaluate(data)["nll"] == pytest.approx(tuned.value, rel=1e-9)
    # A new fit has the noises per output in its curvature, too.
    la.tune(data, sigma="per_output")
    sigma = la.sigma.clone()
    la.fit([(x, y)])
    assert torch.equal(la.likelihood.curvature_sigma, sigma)
    fresh = Laplace(la.model, "regression", "full", sigma=sigma)
    fresh.prior_precision = la.prior_precision
    oracle.close(la.functional(x)[1], fresh.fit([(x, y)]).functional(x)[1], 1e-10)


def test_a_single_output_has_the_noise_of_the_lowest_nll():
    g = torch.Generator().manual_seed(1)
    model = nn.Linear(2, 1).double().eval()
    x = torch.randn(90, 2, generator=g, dtype=torch.float64)
    y = model(x).detach() + 0.2 * torch.randn(90, 1, generator=g, dtype=torch.float64)
    la = Laplace(model, "regression", "full", sigma=1.0).fit([(x[:40], y[:40])])
    tuned = la.tune([(x[40:], y[40:])], sigma="per_output")
    best = tuned.value
    noise = tune_output_noise(la.fitted, [Batch(x[40:], y[40:])], tuned.prior_precision)
    torch.testing.assert_close(noise.sigma, la.sigma, rtol=1e-5, atol=0)
    mean, covariance = la.functional(x[40:])
    for factor in (0.9, 1.1):
        assert nll(mean, covariance, y[40:], factor * la.sigma) > best


@pytest.mark.parametrize("sigma", [None, True, "per_output"])
def test_targets_of_a_single_output_may_have_no_dimension_for_it(sigma):
    g = torch.Generator().manual_seed(1)
    model = nn.Linear(2, 1).double().eval()
    x = torch.randn(90, 2, generator=g, dtype=torch.float64)
    y = model(x).detach()[:, 0] + 0.2 * torch.randn(90, generator=g, dtype=torch.float64)
    la, reference = [Laplace(model, "regression", "full").fit([(x[:40], y[:40])]) for _ in range(2)]
    with_dimension = reference.tune([(x[40:], y[40:, None])], sigma=sigma)
    tuned = la.tune([(x[40:70], y[40:70]), (x[70:], y[70:])], sigma=sigma)
    assert tuned.value == pytest.approx(with_dimension.value, rel=1e-10)
    expected = torch.tensor(tuned.value, dtype=torch.float64)
    mean, covariance = la.functional(x[40:])
    torch.testing.assert_close(nll(mean, covariance, y[40:, None], la.sigma), expected)


def test_what_cannot_be_tuned_is_refused_before_work_starts():
    la, x, y = problem()
    data = [(x, y)]
    variance = la.predict(x).variance
    cases = [
        (lambda: la.tune(data, sigma="per output"), ValueError, "Unknown sigma='per output'"),
        (lambda: la.tune(data, sigma="per_output", grid=[1.0]), ValueError, "Remove `grid="),
        (lambda: la.tune(iter(data), sigma="per_output"), TypeError, "reads the data twice"),
        (lambda: la.tune(method="marglik", sigma="per_output"), ValueError, "held-out data"),
        (lambda: la.tune_evidence(sigma="per_output"), TypeError, "sigma"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    zero = y.clone()
    zero[:, 1] = la.model(x)[:, 1].detach()
    with pytest.raises(ValueError, match=r"residuals of outputs \[1\] .* are zero"):
        la.tune([(x, zero)], sigma="per_output")
    assert torch.equal(la.predict(x).variance, variance)
    binary = Laplace(nn.Linear(2, 1).double(), "binary").fit([(x, (y[:, 0] > 0).double())])
    with pytest.raises(ValueError, match="but the likelihood is Bernoulli"):
        binary.tune([(x, (y[:, 0] > 0).double())], sigma="per_output")


@pytest.mark.parametrize("fits_too", [False, True])
def test_the_noise_is_tuned_in_inference_mode(fits_too):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    x = torch.randn(120, 3).double()
    y = model(x).detach() + torch.randn(120, 2).double()

    def tuned(*modes):
        la = Laplace(model, "regression")
        with modes[0]:
            la.fit([(x[:60], y[:60])])
        with modes[1]:
            la.tune([(x[60:], y[60:])], sigma="per_output")
        return la.likelihood.sigma

    plain = torch.inference_mode(False)
    first = torch.inference_mode() if fits_too else torch.inference_mode(False)
    torch.testing.assert_close(tuned(first, torch.inference_mode()), tuned(plain, plain))
