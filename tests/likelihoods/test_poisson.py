"""Counts: the Poisson likelihood in posteriors, predictions, operators, files and programs."""

import math

import oracle
import pytest
import scipy.stats
import torch
from oracle import close
from torch import nn
from torch.distributions import Poisson as PoissonDistribution

from laplace_debias import Laplace, Likelihood, Mixture, Poisson
from laplace_debias.curvature import GGN, EmpiricalFisher, Fisher, Hessian
from laplace_debias.curvature.losses.likelihoods import poisson
from laplace_debias.curvature.losses.likelihoods.poisson import PoissonLogNormal

N = 30
DELTA = 0.8


def network(num_outputs=2):
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs)
    return nn.Sequential(*layers).double().eval()


def examples(num_outputs=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(6, (N, num_outputs), generator=generator)


@pytest.fixture(scope="module")
def la():
    return Laplace(network(), "poisson", "full", prior_precision=DELTA).fit_batches([examples()])


def dense(num_outputs=2):
    """Jacobians, rates and the posterior precision, by the equations."""
    model = network(num_outputs)
    x, _ = examples(num_outputs)
    J = oracle.flat_jacobian(model, x, [name for name, _ in model.named_parameters()])
    rates = model(x).detach().exp()
    ggn = torch.einsum("nci,nc,ncj->ij", J, rates, J)
    return J, rates, ggn + DELTA * torch.eye(len(ggn)).double()


def test_the_posterior_and_its_evidence_are_the_dense_ones(la):
    x, y = examples()
    model = network()
    J, rates, P = dense()
    close(la.posterior.precision.to_dense(), P)
    nll = -PoissonDistribution(rates).log_prob(y.double()).sum()
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    evidence = oracle.log_marginal_likelihood(nll, theta, P, torch.full_like(theta, DELTA))
    close(la.log_marginal_likelihood(), evidence)
    mean, covariance = la.functional(x)
    close(mean, model(x).detach())
    close(covariance, J @ torch.linalg.inv(P) @ J.mT)


def test_the_predictive_has_the_moments_of_a_log_normal_mixture(la):
    x, _ = examples()
    J, _, P = dense()
    m = network()(x).detach()
    v = (J @ torch.linalg.inv(P) @ J.mT).diagonal(dim1=-2, dim2=-1)
    predictive = la.predict(x)
    assert predictive.batch_shape == (N,)
    assert predictive.event_shape == (2,)
    # E[λ] + Var[λ] by quadrature on a fine grid of the log-rate.
    grid = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    weights = (-grid.square() / 2).exp()
    weights = weights / weights.sum()
    rates = (m.unsqueeze(-1) + v.sqrt().unsqueeze(-1) * grid).exp()
    mean = rates @ weights
    close(predictive.mean, mean)
    close(predictive.variance, mean + rates.square() @ weights - mean.square())
    uncertainty = la.uncertainty(x)
    close(uncertainty.aleatoric, mean)
    close(uncertainty.epistemic, rates.square() @ weights - mean.square())
    close(uncertainty.total, predictive.variance)


def test_the_network_itself_has_intervals(la):
    """They were missing, so a comparison with the posterior had no coverage."""
    x, y = examples()
    rates = network()(x).detach().exp().numpy()
    counts = la.predict(x, method="map").base_dist
    close(counts.mean, torch.from_numpy(rates))
    close(counts.variance, torch.from_numpy(rates))
    low, high = (torch.from_numpy(scipy.stats.poisson.ppf(p, rates)) for p in (0.025, 0.975))
    close(counts.icdf(torch.tensor(0.025)), low)
    close(counts.icdf(torch.tensor(0.975)), high)
    report = la.evaluate([(x, y)], method="map")
    is_covered = (low <= y) & (y <= high)
    assert report["coverage"] == pytest.approx(is_covered.double().mean().item())
    assert set(report) == set(la.evaluate([(x, y)]))


LOG_MEANS = torch.tensor([-3.0, 0.0, 1.5, 5.0, 7.0, 2.0, 0.0], dtype=torch.float64)
LOG_VARIANCES = torch.tensor([0.5, 1e-3, 2.0, 1.0, 0.01, 3.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("count", [0.0, 1.0, 3.0, 20.0, 150.0, 1200.0])
def test_probabilities_of_counts_are_integrals_over_the_log_rate(count):
    grid = torch.linspace(-60, 60, 600001, dtype=torch.float64)
    spacing = 120 / 600000
    log_rates = LOG_MEANS.unsqueeze(1) + LOG_VARIANCES.sqrt().unsqueeze(1) * grid
    log_normal = -grid.square() / 2 - 0.5 * math.log(2 * math.pi)
    log_joint = count * log_rates - log_rates.exp() - math.lgamma(count + 1) + log_normal
    expected = torch.logsumexp(log_joint, 1) + math.log(spacing)
    rates = log_rates.exp().clamp_max(1e300)
    below = torch.special.gammaincc(torch.tensor(count + 1).double(), rates)
    cdf = (below * log_normal.exp()).sum(1) * spacing
    counts = PoissonLogNormal(LOG_MEANS, LOG_VARIANCES)
    value = torch.tensor(count).double()
    torch.testing.assert_close(counts.log_prob(value), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(counts.cdf(value), cdf, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [0, 5, 1000])
@pytest.mark.parametrize(("mean", "variance"), [(64, 25.0), (100, 25.0), (200, 400.0), (90, 4.0)])
def test_the_density_of_a_mean_far_above_the_count(count, mean, variance):
    """Newton's method went one unit of the log-rate a step, and ended before it was there."""
    log_rates = torch.linspace(-120, 20, 1_000_001, dtype=torch.float64)
    log_joint = (
        count * log_rates
        - log_rates.exp()
        - math.lgamma(count + 1)
        - (log_rates - mean).square() / (2 * variance)
        - 0.5 * math.log(2 * math.pi * variance)
    )
    expected = torch.logsumexp(log_joint, 0) + math.log(140 / 1_000_000)
    counts = PoissonLogNormal(torch.tensor(mean).double(), torch.tensor(variance).double())
    log_prob = counts.log_prob(torch.tensor(count).double())
    torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variance", [2.0, 20.0, 100.0, 1000.0])
@pytest.mark.parametrize("mean", [-30, -5, 0, 6, 12])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_probability_of_a_small_count_with_a_large_variance(mean, variance, count):
    """The integrand is half of a Gaussian, which ends within one unit of the log-rate."""
    log_rates = torch.linspace(mean - 300, mean + 300, 1_000_001, dtype=torch.float64)
    log_normal = (
        -(log_rates - mean).square() / (2 * variance)
        - 0.5 * math.log(2 * math.pi * variance)
        + math.log(600 / 1_000_000)
    )
    rates = log_rates.exp()
    log_poisson = count * log_rates - rates - math.lgamma(count + 1)
    below = torch.special.gammaincc(torch.tensor(count + 1.0).double(), rates)
    counts = PoissonLogNormal(torch.tensor(mean).double(), torch.tensor(variance).double())
    value = torch.tensor(count).double()
    expected = torch.logsumexp(log_normal + log_poisson, 0)
    torch.testing.assert_close(counts.log_prob(value), expected, rtol=0, atol=2e-7)
    expected = (log_normal.exp() * below).sum()
    torch.testing.assert_close(counts.cdf(value), expected, rtol=0, atol=2e-7)


def test_the_derivatives_of_a_log_probability_are_its_differences():
    mean = torch.tensor([0.0, 2.0, -3.0, 5.0, -400.0]).double().requires_grad_()
    variance = torch.tensor([1.0, 50.0, 0.2, 1e-3, 9.0]).double().requires_grad_()
    count = torch.tensor([0.0, 0.0, 2.0, 140.0, 0.0]).double()

    def log_prob(log_mean, log_variance):
        return PoissonLogNormal(log_mean, log_variance, validate_args=False).log_prob(count)

    assert torch.autograd.gradcheck(log_prob, (mean, variance), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("level", [0.99999, 1 - 1e-9])
def test_a_quantile_far_in_the_tail_of_tiny_rates_is_zero(level):
    counts = PoissonLogNormal(torch.tensor(-30.0).double(), torch.tensor(4.0).double())
    assert counts.icdf(torch.tensor(level, dtype=torch.float64)) == 0


def test_quantiles_are_the_smallest_counts():
    counts = PoissonLogNormal(LOG_MEANS, LOG_VARIANCES)
    probabilities = torch.tensor([0.025, 0.5, 0.975]).double().unsqueeze(1)
    quantiles = counts.icdf(probabilities)
    assert (counts.cdf(quantiles) >= probabilities).all()
    assert (counts.cdf(quantiles - 1) < probabilities).all()
    # Without a variance it is the Poisson distribution.
    expected = scipy.stats.poisson(1.0).ppf(probabilities[:, 0])
    assert quantiles[:, -1].tolist() == expected.tolist()
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        counts.icdf(torch.tensor(1.0))


@pytest.fixture
def few_steps(monkeypatch):
    """Makes a bisection that does not end an error."""

    def counted(cdf, probabilities):
        num_steps = 0

        def cdf_of_step(counts):
            nonlocal num_steps
            num_steps += 1
            assert num_steps < 400, "the bisection does not end"
            return cdf(counts)

        return smallest_count(cdf_of_step, probabilities)

    smallest_count = poisson.smallest_count
    monkeypatch.setattr(poisson, "smallest_count", counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_mean", [17.0, 19.0, 30.0, 36.0, 60.0, 80.0])
@pytest.mark.parametrize("variance", [1e-4, 0.3, 4.0])
def test_quantiles_of_large_counts_are_log_normal(few_steps, dtype, log_mean, variance):
    """Neighbouring counts of float32 are more than 1 apart, and the counts' noise is small."""
    counts = PoissonLogNormal(torch.tensor(log_mean).to(dtype), torch.tensor(variance).to(dtype))
    probabilities = torch.tensor([0.025, 0.5, 0.975]).double()
    deviation = math.sqrt(variance + math.exp(-log_mean))
    expected = (log_mean + deviation * torch.special.ndtri(probabilities)).exp()
    quantiles = torch.stack([counts.icdf(probability) for probability in probabilities])
    assert quantiles.dtype == dtype
    torch.testing.assert_close(quantiles.double(), expected, rtol=2e-5, atol=0)


def test_a_quantile_in_single_precision_is_the_smallest_of_its_counts(few_steps):
    """The quantile in double precision lies between two counts, and is rounded up."""
    rounded = PoissonLogNormal(torch.tensor(19.0), torch.tensor(0.3))
    variance = rounded.log_variance.double()
    exact = PoissonLogNormal(torch.tensor(19.0).double(), variance)
    for probability in torch.linspace(0.01, 0.99, 20):
        count = rounded.icdf(probability)
        below = count.nextafter(torch.tensor(0.0))
        assert below.double() < exact.icdf(probability.double()) <= count.double()


def test_quantiles_of_a_mixture_of_large_counts(few_steps):
    rates = torch.tensor([[2e8], [5e8]])
    mixture = Poisson().marginal_mixture(rates.log())
    expected = scipy.stats.poisson(rates[0].log().exp().double().numpy()).ppf(0.95)
    (quantile,) = mixture.icdf(torch.tensor([0.475]))
    assert quantile.item() == pytest.approx(float(expected[0]), rel=1e-7)


def test_labels_of_large_rates_are_drawn(few_steps):
    log_rates = torch.tensor([[40.0, 85.0]]).double()
    drawn = Poisson().sample(log_rates, torch.tensor([[0.5, 0.9]]).double())
    torch.testing.assert_close(drawn.log(), log_rates)


def test_draws_have_the_moments():
    torch.manual_seed(0)
    counts = PoissonLogNormal(LOG_MEANS[:2], LOG_VARIANCES[:2])
    draws = counts.sample((200_000,))
    error = counts.variance.sqrt() / 200_000**0.5
    assert ((draws.mean(0) - counts.mean).abs() < 4 * error).all()
    assert ((draws.var(0) / counts.variance - 1).abs() < 0.05).all()


def test_labels_of_the_monte_carlo_fisher_are_poisson_quantiles():
    uniforms = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0)).double()
    log_rates = torch.tensor([-2.0, 1.0, 6.0]).double().expand(2000, 3)
    drawn = Poisson().sample(log_rates, uniforms)
    expected = scipy.stats.poisson(log_rates.exp().numpy()).ppf(uniforms.numpy())
    assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize("method", ["glm", "glm-mc", "nn"])
def test_samples_give_the_equal_mixture(la, method):
    x, y = examples()
    generator = torch.Generator().manual_seed(3)
    predictive = la.predict(x, method, 50, generator)
    if method == "glm-mc":
        J, _, _ = dense()
        draws = la.sample(50, generator.manual_seed(3)) - la.mean
        rates = (network()(x).detach() + torch.einsum("ncd,sd->snc", J, draws)).exp()
        close(predictive.mean, rates.mean(0))
        close(predictive.variance, rates.mean(0) + rates.var(0, unbiased=False))
        log_probs = torch.logsumexp(PoissonDistribution(rates).log_prob(y.double()), 0) - math.log(
            50
        )
        close(predictive.log_prob(y.double()), log_probs.sum(-1))
    marginals = la.marginals(x, method, 50, generator.manual_seed(3))
    medians = marginals.icdf(torch.tensor(0.5))
    assert (marginals.cdf(medians) >= 0.5).all()
    assert (marginals.cdf(medians - 1) < 0.5).all()


@pytest.mark.parametrize("operator", [Hessian, GGN, Fisher, EmpiricalFisher])
def test_operators_are_the_dense_ones(operator):
    model = network()
    x, y = examples()
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach() for p in model.parameters()]
    sizes = [value.numel() for value in values]

    def outputs_of_vector(vector):
        entries = vector.split(sizes)
        shaped = {n: p.view(v.shape) for n, p, v in zip(names, entries, values, strict=True)}
        return torch.func.functional_call(model, shaped, (x,))

    def loss(vector):
        f = outputs_of_vector(vector)
        return (f.exp() - y * f).sum() / N

    vector = torch.cat([value.flatten() for value in values])
    J, rates, P = dense()
    if operator is Hessian:
        expected = torch.func.hessian(loss)(vector)
    elif operator is EmpiricalFisher:
        gradients = torch.einsum("nc,ncd->nd", rates - y, J)
        expected = gradients.mT @ gradients / N
    else:
        expected = (P - DELTA * torch.eye(len(P)).double()) / N
    close(operator(model, Poisson(), [(x, y)]).to_dense(), expected)


def test_it_is_evaluated_tuned_and_mixed(la):
    x, y = examples()
    report = la.evaluate([(x[:9], y[:9]), (x[9:], y[9:])], ood={"far": [(3 * x, y)]})
    predictive = la.predict(x)
    nll = -predictive.log_prob(y).mean()
    rmse = (predictive.mean - y).square().mean().sqrt()
    assert float(report["nll"]) == pytest.approx(float(nll), rel=1e-9)
    assert float(report["rmse"]) == pytest.approx(float(rmse), rel=1e-9)
    assert float(report["mae"]) == pytest.approx(float((predictive.mean - y).abs().mean()))
    ends = la.marginals(x)
    is_within = (ends.icdf(torch.tensor(0.025)) <= y) & (y <= ends.icdf(torch.tensor(0.975)))
    assert float(report["coverage"]) == pytest.approx(float(is_within.double().mean()))
    far = la.predict(3 * x).variance.mean(1)
    near = predictive.variance.mean(1)
    auroc = (far.unsqueeze(1) > near).double().mean()
    assert float(report["auroc_far"]) == pytest.approx(float(auroc), rel=1e-6)
    tuned = Laplace(network(), "poisson").fit_batches([(x, y)])
    result = tuned.tune([(x, y)])
    assert result.link is None
    best = -tuned.predict(x).log_prob(y).mean()
    assert result.value == pytest.approx(float(best), rel=1e-9)
    with pytest.raises(ValueError, match="Use one of nll"):
        tuned.tune([(x, y)], metric="brier")
    with pytest.raises(ValueError, match="`link='probit'` computes probabilities"):
        tuned.predict(x, link="probit")
    mixture = Mixture([la, tuned])
    uncertainties = [member.uncertainty(x) for member in mixture.members]
    means = torch.stack([member.predict(x).mean for member in mixture.members])
    total = torch.stack([uncertainty.total for uncertainty in uncertainties]).mean(0) + means.var(
        0, unbiased=False
    )
    close(mixture.uncertainty(x).total, total)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.float64])
def test_a_single_output_and_any_dtype_of_counts(dtype):
    x, y = examples(1)
    single = [
        Laplace(network(1), "poisson", "full", prior_precision=DELTA)
        .fit_batches([(x, targets.to(dtype))])
        .posterior.precision.to_dense()
        for targets in (y, y[:, 0])
    ]
    close(single[0], dense(1)[2])
    assert torch.equal(*single)


def test_a_file_and_a_program_have_it(la, tmp_path):
    x, y = examples()
    la.save(tmp_path / "counts.safetensors")
    loaded = Laplace.load(tmp_path / "counts.safetensors", network())
    assert isinstance(loaded.likelihood, Poisson)
    assert "likelihood: poisson" in repr(loaded)
    close(loaded.predict(x).variance, la.predict(x).variance)
    last = Laplace(network(), "poisson", params="last_layer").fit_batches([(x, y)])
    last.export(tmp_path / "counts.pt2", x)
    answers = torch.export.load(tmp_path / "counts.pt2").module()(x[:4])
    assert list(answers) == ["mean", "variance"]
    close(answers["mean"], last.predict(x[:4]).mean)
    close(answers["variance"], last.predict(x[:4]).variance)


class Exposed(Poisson):
    """A likelihood of a user's own: counts of twice the rate."""

    def __init__(self, exposure=2.0):
        self.exposure = exposure

    def nll(self, outputs, targets):
        return super().nll(outputs + math.log(self.exposure), targets)

    def hessian_root(self, outputs):
        return super().hessian_root(outputs + math.log(self.exposure))

    def marginals(self, mean, variances):
        return super().marginals(mean + math.log(self.exposure), variances)

    def exported(self, mean, covariance):
        return super().exported(mean + math.log(self.exposure), covariance)

    def options(self):
        return {"exposure": self.exposure}


def test_a_likelihood_of_ones_own_is_saved_and_exported(tmp_path):
    x, y = examples()
    la = Laplace(network(), Exposed(), params="last_layer").fit_batches([(x, y)])
    la.save(tmp_path / "own.safetensors", own_likelihood=True)
    loaded = Laplace.load(tmp_path / "own.safetensors", network(), likelihood=Exposed())
    close(loaded.predict(x).mean, la.predict(x).mean)
    la.export(tmp_path / "own.pt2", x)
    answers = torch.export.load(tmp_path / "own.pt2").module()(x)
    close(answers["mean"], la.predict(x).mean)
    assert "likelihood: Exposed" in repr(la)
    assert Exposed.name is None
    assert Likelihood.name is None


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.zeros(N, 3), ValueError, r"shape of the outputs, \(30, 2\), got \(30, 3\)"),
        (torch.full((N, 2), 0.5), ValueError, "whole numbers of at least 0"),
        (torch.full((N, 2), -1), ValueError, "whole numbers of at least 0"),
        (torch.full((N, 2), torch.nan), ValueError, "whole numbers of at least 0"),
        (torch.ones(N, 2, dtype=torch.bool), TypeError, "Use `targets.long"),
    ],
)
def test_other_targets_are_refused(targets, error, message):
    with pytest.raises(error, match=message):
        Laplace(network(), "poisson").fit_batches([(examples()[0], targets)])


def test_rates_out_of_range_are_refused():
    model = network()
    nn.init.constant_(model[2].bias, 1e3)
    with pytest.raises(ValueError, match=r"rate exp\(1e\+03\) is out of the range.*logarithms"):
        Laplace(model, "poisson").fit_batches([examples()])


def test_counts_of_a_certain_rate_are_those_of_torch():
    """Without a covariance no integral is computed, and the same seed draws the same counts."""
    torch.manual_seed(0)
    outputs = torch.randn(50, 2, dtype=torch.float64)
    certain = Poisson().predictive(outputs, None)
    expected = PoissonDistribution(outputs.exp())
    counts = torch.poisson(outputs.exp())
    torch.testing.assert_close(certain.base_dist.log_prob(counts), expected.log_prob(counts))
    cdf = torch.from_numpy(scipy.stats.poisson.cdf(counts, outputs.exp()))
    torch.testing.assert_close(certain.base_dist.cdf(counts), cdf)
    torch.manual_seed(1)
    drawn = certain.sample((3,))
    torch.manual_seed(1)
    assert torch.equal(drawn, expected.sample((3,)))
