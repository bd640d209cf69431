"""Tuning σ of a regression with the prior precision, against the evidence of dense matrices."""

import math
import warnings

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from scipy.optimize import minimize
from torch import nn

from laplace_debias import Auto, Gaussian, Laplace

CURVATURES = ["full", "kfac", "ekfac", "diag", "lowrank"]


def problem(noise=0.1, num_outputs=1, dtype=torch.float64, num_data=60):
    """A network that was trained on noisy data, so that it is near the best one."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 2, generator=g, dtype=torch.float64)
    y = torch.sin(2 * x).sum(1, keepdim=True) * torch.arange(1.0, num_outputs + 1)
    y = y + noise * torch.randn(num_data, num_outputs, generator=g, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, num_outputs)).double()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = (model(x) - y).square().sum() / noise**2 + 0.1 * penalty
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.to(dtype).eval(), x.to(dtype), y.to(dtype)


def fitted(curvature="full", sigma=1.0, data=None, **options):
    model, x, y = problem() if data is None else data
    options |= {"rank": 6} if curvature == "lowrank" else {}
    la = Laplace(model, "regression", curvature, sigma=sigma, backend="hooks", **options)
    return la.fit_batches([(x, y)]), x, y


def dense_evidence(model, x, y, sigma, delta):
    """Log evidence of the GGN posterior, computed by the dense reference."""
    names = [name for name, _ in model.named_parameters()]
    P = posterior_precision(len(x) * oracle.ggn(model, x, "regression", names, sigma), delta)
    return evidence_of(model, x, y, names, P, sigma, delta)


def posterior_precision(ggn, delta):
    return ggn + delta * torch.eye(len(ggn)).double()


def evidence_of(model, x, y, names, P, sigma, delta):
    nll = oracle.nll("regression", model(x), y, sigma).sum()
    theta = oracle.flat_parameters(model, names)
    return oracle.log_marginal_likelihood(nll, theta, P, torch.full_like(theta, delta)).item()


def test_it_is_the_maximum_of_the_dense_evidence():
    la, x, y = fitted()
    tuned = la.tune(method="marglik", sigma=True)
    assert la.likelihood.sigma.item() == tuned.sigma
    assert la.prior_precision.item() == pytest.approx(tuned.prior_precision)
    dense = dense_evidence(la.model, x, y, tuned.sigma, tuned.prior_precision)
    assert tuned.value == pytest.approx(dense, rel=1e-9)
    assert la.log_marginal_likelihood().item() == pytest.approx(dense, rel=1e-9)

    names = la.param_names
    unit = len(x) * oracle.ggn(la.model, x, "regression", names, 1.0)

    def loss(logs):
        sigma, delta = logs.exp().tolist()
        P = posterior_precision(unit / sigma**2, delta)
        return -evidence_of(la.model, x, y, names, P, sigma, delta)

    best = minimize(
        lambda logs: loss(torch.as_tensor(logs)), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-9, "maxiter": 400},
    )  # fmt: skip
    assert tuned.value == pytest.approx(-best.fun, rel=1e-7)
    assert math.log(tuned.sigma) == pytest.approx(best.x[0], abs=2e-3)
    assert math.log(tuned.prior_precision) == pytest.approx(best.x[1], abs=2e-2)
    # And it finds the noise of the data.
    assert tuned.sigma == pytest.approx(0.1, rel=0.25)
    assert tuned.value == max(row["log_marginal_likelihood"] for row in tuned.table)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "fisher", "mode"),
    one_axis_at_a_time(CURVATURES, ["exact", "mc"], ["full", "debiased", "crossfit"]),
)
def test_what_is_tuned_is_a_fit_with_that_sigma(curvature, fisher, mode):
    """They have the same posterior, evidence, predictions and optimum, for every kind of fit."""
    data = problem()
    model, x, y = data
    options = {"rank": 6} if curvature == "lowrank" else {}

    def fit(sigma, delta=1.0):
        la = Laplace(
            model, "regression", curvature, sigma=sigma, fisher=fisher, prior_precision=delta,
            **options,
        )  # fmt: skip
        batches = [(x[:30], y[:30]), (x[30:], y[30:])]
        generator = torch.Generator().manual_seed(1)
        return la.fit(batches, mode=mode, num_data=60, generator=generator)

    la = fit(1.0)
    tuned = la.tune(method="marglik", sigma=True)
    again = fit(tuned.sigma, tuned.prior_precision)
    actual = la.posterior.precision.to_dense()
    expected = again.posterior.precision.to_dense()
    assert (actual - expected).abs().max() <= 1e-8 * expected.abs().max()
    for evidence in (again.log_marginal_likelihood().item(), tuned.value):
        assert la.log_marginal_likelihood().item() == pytest.approx(evidence, rel=1e-8)
    torch.testing.assert_close(la.predict(x).variance, again.predict(x).variance, rtol=1e-7, atol=0)
    # A start from elsewhere reaches the same optimum, and no nearby sigma and prior are better.
    elsewhere = fit(0.03).tune(method="marglik", sigma=True)
    assert elsewhere.sigma == pytest.approx(tuned.sigma, rel=1e-3)
    for factor in (0.9, 1.1):
        neighbours = [fit(tuned.sigma * factor, tuned.prior_precision), fit(tuned.sigma)]
        neighbours[1].prior_precision = tuned.prior_precision * factor**2
        for neighbour in neighbours:
            assert neighbour.log_marginal_likelihood() < tuned.value
    assert la.tune(method="marglik").prior_precision == pytest.approx(
        tuned.prior_precision, rel=1e-2
    )


def test_one_sigma_an_output_keeps_its_ratios():
    data = problem(num_outputs=2)
    la, x, y = fitted(sigma=[2.0, 0.5], data=data)
    tuned = la.tune(method="marglik", sigma=True)
    assert tuned.sigma[0] / tuned.sigma[1] == pytest.approx(4.0)
    again = fitted(sigma=tuned.sigma, data=data)[0]
    again.prior_precision = tuned.prior_precision
    assert again.log_marginal_likelihood().item() == pytest.approx(tuned.value, rel=1e-9)
    sigma = torch.tensor(tuned.sigma, dtype=torch.float64)
    dense = dense_evidence(data[0], x, y, sigma, tuned.prior_precision)
    assert tuned.value == pytest.approx(dense, rel=1e-9)


def test_positions_count_as_targets():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    x = torch.randn(40, 3, 2).double()
    y = 0.3 * torch.randn(40, 3, 2).double()
    la, flat = (
        Laplace(model, "regression", "full", sigma=1.0).fit_batches([batch])
        for batch in ((x, y), (x.flatten(0, 1), y.flatten(0, 1)))
    )
    tuned = la.tune(method="marglik", sigma=True)
    tuned_flat = flat.tune(method="marglik", sigma=True)
    assert tuned.sigma == pytest.approx(tuned_flat.sigma, rel=1e-6)
    assert tuned.value == pytest.approx(tuned_flat.value, rel=1e-9)


def test_small_residuals_survive_single_precision():
    """At sigma = 1, rounding would lose them beside the constant of a float32 log-density."""
    data = problem(noise=1e-4)
    model, x, y = data
    residuals = 1e-4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    target = model(x).detach() + residuals.double()
    exact = fitted("kfac", data=(model, x, target))[0].tune(method="marglik", sigma=True)
    la, _, _ = fitted("kfac", data=(model.float(), x.float(), target.float()))
    tuned = la.tune(method="marglik", sigma=True)
    assert tuned.sigma == pytest.approx(exact.sigma, rel=1e-2)
    assert 1e-5 < tuned.sigma < 2e-4


def test_the_file_has_what_was_tuned_and_can_be_tuned(tmp_path):
    la, x, _ = fitted("kfac")
    la.save(tmp_path / "first.safetensors")
    expected = la.tune_evidence(sigma=True)
    later = Laplace.load(tmp_path / "first.safetensors", la.model)
    assert later.tune_evidence(sigma=True) == expected
    la.save(tmp_path / "tuned.safetensors")
    loaded = Laplace.load(tmp_path / "tuned.safetensors", la.model)
    assert loaded.likelihood.sigma == la.likelihood.sigma
    torch.testing.assert_close(loaded.predict(x).variance, la.predict(x).variance)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()


def test_the_noise_of_a_curvature_that_does_not_go_with_it_is_not_tuned(tmp_path):
    la, _, _ = fitted("kfac", fisher="empirical")
    la.save(tmp_path / "empirical.safetensors")
    for posterior in (la, Laplace.load(tmp_path / "empirical.safetensors", la.model)):
        with pytest.raises(
            ValueError, match=r'`sigma=True` does not work after a fit with `fisher="empirical"'
        ):
            posterior.tune_evidence(sigma=True)
        assert posterior.tune_evidence().sigma is None


def test_an_assumed_sigma_is_told_once_and_not_after_tuning():
    model, x, y = problem()
    with pytest.warns(UserWarning, match=r"sigma=1.0 is assumed.*sigma=True") as caught:
        la = Laplace(model, "regression").fit_batches([(x, y)])
    assert len(caught) == 1
    la.tune(method="marglik", sigma=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit_batches([(x, y)])
        for likelihood in (Gaussian(1.0), Gaussian([1.0])):
            Laplace(model, likelihood).fit_batches([(x, y)])
    with pytest.warns(UserWarning, match="is assumed"):
        Laplace(model, Gaussian()).fit_batches([(x, y)])


def test_a_noise_that_was_not_given_is_tuned_every_time(tmp_path):
    model, x, y = problem()
    held_out = [(x + 0.1, y + torch.randn_like(y))]

    def unspecified():
        with pytest.warns(UserWarning, match="is assumed"):
            return Laplace(model, "regression").fit_batches([(x, y)])

    expected = unspecified().tune(held_out)
    la = unspecified()
    by_evidence = la.tune_evidence().sigma
    assert by_evidence != pytest.approx(expected.sigma, rel=0.1)
    la.save(tmp_path / "tuned.safetensors")
    for posterior in (la, Laplace.load(tmp_path / "tuned.safetensors", model)):
        assert posterior.tune(held_out).sigma == pytest.approx(expected.sigma, rel=1e-6)
    la.fit_batches([(x, y)])
    assert la.tune(held_out).sigma == pytest.approx(expected.sigma, rel=1e-6)


def test_a_noise_that_was_given_is_tuned_only_on_request():
    la, x, y = fitted(sigma=2.0)
    assert la.tune_evidence().sigma is None
    tuned = la.tune_evidence(sigma=True).sigma
    assert la.tune([(x, y + torch.randn_like(y))]).sigma is None
    assert la.sigma == tuned


def test_what_cannot_be_tuned_says_so():
    la, x, y = fitted()
    with pytest.raises(ValueError, match="does not use `loader"):
        la.tune([(x, y)], method="marglik", sigma=True)
    binary = Laplace(la.model, "binary").fit_batches([(x, (y > 0).double())])
    with pytest.raises(ValueError, match="noise of a regression, but the likelihood is Bernoulli"):
        binary.tune(method="marglik", sigma=True)
    perfect = Laplace(la.model, "regression", sigma=1.0).fit_batches([(x, la.model(x).detach())])
    likelihood = perfect.likelihood
    prior_precision = perfect.prior_precision.clone()
    with pytest.raises(ValueError, match="the noise cannot be estimated"):
        perfect.tune(method="marglik", sigma=True)
    assert (likelihood, prior_precision) == (perfect.likelihood, perfect.prior_precision)


def test_a_temperature_and_a_mean_of_the_prior_are_part_of_the_evidence():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    x = torch.randn(30, 2).double()
    y = model(x).detach() + 0.3 * torch.randn(30, 1).double()
    options = {"likelihood": "regression", "temperature": 2.0, "prior_mean": 0.3}
    la = Laplace(model, sigma=1.0, **options).fit([(x, y)])
    tuned = la.tune(method="marglik", sigma=True)
    best = float(la.log_marginal_likelihood())

    def evidence(sigma, delta):
        fitted = Laplace(model, sigma=sigma, prior_precision=delta, **options).fit([(x, y)])
        return float(fitted.log_marginal_likelihood())

    sigma = float(tuned.sigma)
    delta = float(tuned.prior_precision)
    assert evidence(sigma, delta) == pytest.approx(best, rel=1e-9)
    for factor in (0.97, 1.03):
        assert evidence(factor * sigma, delta) < best
        assert evidence(sigma, factor * delta) < best


# ------------------------------------------------------- a noise for each output, if none was given

SCALES = torch.tensor([0.05, 0.5, 5.0], dtype=torch.float64)


def scaled_problem(num_data=400):
    """A network whose three outputs have noises of three scales, and held-out data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(2 * num_data, 2).double()
    y = model(x).detach() + SCALES * torch.randn(2 * num_data, 3).double()
    return model, (x[:num_data], y[:num_data]), (x[num_data:], y[num_data:])


def fit_without_sigma(model, loader, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(model, "regression", options.pop("curvature", "kfac"))
        return la.fit(loader, **options)


@pytest.mark.parametrize("by_evidence", [False, True])
@pytest.mark.parametrize("curvature", ["full", "kfac", "diag"])
def test_a_noise_that_nobody_gave_is_found_for_each_output(curvature, by_evidence, tmp_path):
    """The fit with that noise and its dense evidence are the references."""
    model, (x, y), held_out = scaled_problem()
    with pytest.warns(UserWarning, match=r"residuals of each output: sigma=\[0.0") as caught:
        la = Laplace(model, "regression", curvature).fit([(x[:150], y[:150]), (x[150:], y[150:])])
    assert len(caught) == 1
    estimate = (y - model(x).detach()).square().mean(0).sqrt()
    torch.testing.assert_close(la.likelihood.sigma, estimate, rtol=1e-12, atol=0)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    tuned = la.tune_evidence() if by_evidence else la.tune([held_out])
    sigma = torch.tensor(tuned.sigma, dtype=torch.float64)
    assert sigma.tolist() == pytest.approx(SCALES.tolist(), rel=0.15)
    torch.testing.assert_close(sigma / sigma[0], estimate / estimate[0], rtol=1e-9, atol=0)
    again = Laplace(
        model, "regression", curvature, sigma=sigma, prior_precision=tuned.prior_precision
    ).fit([(x, y)])  # fmt: skip
    actual = la.posterior.precision.to_dense()
    expected = again.posterior.precision.to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
    evidence = again.log_marginal_likelihood().item()
    assert la.log_marginal_likelihood().item() == pytest.approx(evidence, rel=1e-9)
    if by_evidence:
        assert tuned.value == pytest.approx(evidence, rel=1e-9)
        tuned_later = loaded.tune_evidence()
    else:
        nll = -again.predict(held_out[0]).log_prob(held_out[1]).mean().item()
        assert tuned.value == pytest.approx(nll, rel=1e-9)
        tuned_later = loaded.tune([held_out])
    assert tuned_later.sigma == tuned.sigma
    if curvature == "full":
        dense = dense_evidence(model, x, y, sigma, tuned.prior_precision)
        assert evidence == pytest.approx(dense, rel=1e-9)


def test_every_way_to_fit_estimates_the_noise_of_each_output():
    model, (x, y), _ = scaled_problem()
    residuals = y - model(x).detach()

    def deviations(rows):
        return residuals[rows].square().mean(0).sqrt().tolist()

    batches = [(x[:100], y[:100]), (x[100:200], y[100:200]), (x[200:], y[200:])]
    read = {
        "full": slice(None),
        "mini": slice(100),
        "crossfit": slice(100),
        "debiased": slice(200),
    }
    for mode, rows in read.items():
        la = fit_without_sigma(model, batches, mode=mode, num_data=400)
        assert la.likelihood.sigma.tolist() == pytest.approx(deviations(rows))
    # An iterator is read once: its first batch is all that can be looked at before the fit.
    la = fit_without_sigma(model, iter(batches))
    assert la.likelihood.sigma.tolist() == pytest.approx(deviations(slice(100)))
    assert la.num_data == 400
    weighted = [(x[:100], y[:100], torch.arange(100).double())]
    la = fit_without_sigma(model, weighted, num_data=400)
    weights = torch.arange(100).double()
    expected = (weights @ residuals[:100].square() / weights.sum()).sqrt()
    assert la.likelihood.sigma.tolist() == pytest.approx(expected.tolist())


@pytest.mark.filterwarnings("ignore:The noise of the regression")
@pytest.mark.filterwarnings("ignore:The tolerance")
def test_a_fit_in_rounds_estimates_it_by_its_first_batch_and_continues_with_that():
    model, (x, y), _ = scaled_problem(8000)
    batches = [(x[i : i + 400], y[i : i + 400]) for i in range(0, 8000, 400)]
    expected = (y - model(x).detach())[:400].square().mean(0).sqrt().tolist()
    first = Laplace(model, "regression").fit(
        Auto(batches, tolerance=1e-6, examples=16), num_data=8000
    )
    assert first.likelihood.sigma.tolist() == pytest.approx(expected)
    batches[0] = (batches[0][0], batches[0][1] + 1)
    then = Laplace(model, "regression").fit(
        Auto(batches, tolerance=1e-6, examples=300, after=first.fit_report), num_data=8000
    )
    assert then.likelihood.sigma.tolist() == first.likelihood.sigma.tolist()


def test_one_noise_for_all_outputs_can_be_asked_for():
    model, train, held_out = scaled_problem()
    la = Laplace(model, "regression", sigma=1.0).fit([train])
    tuned = la.tune([held_out], sigma=True)
    assert isinstance(tuned.sigma, float)
    assert tuned.sigma == pytest.approx(float(SCALES.square().mean().sqrt()), rel=0.15)


def test_outputs_without_residuals_and_positions():
    model, (x, y), _ = scaled_problem()
    exact = torch.cat([model(x).detach()[:, :1], y[:, 1:]], 1)
    with pytest.warns(UserWarning, match=r"sigma=1\.0 is assumed"):
        la = Laplace(model, "regression").fit([(x, exact)])
    assert la.likelihood.sigma.tolist() == 1.0
    # Two positions of an example count like two examples.
    flat = fit_without_sigma(model, [(x, y)]).likelihood.sigma
    by_position = [(x.unflatten(0, (200, 2)), y.unflatten(0, (200, 2)))]
    torch.testing.assert_close(fit_without_sigma(model, by_position).likelihood.sigma, flat)
    moved = nn.Sequential(model, Moved())
    la = Laplace(moved, "regression", class_dim=1)
    with pytest.warns(UserWarning, match="estimated"):
        la.fit([(by_position[0][0], by_position[0][1].mT)])
    torch.testing.assert_close(la.likelihood.sigma, flat)


class Moved(nn.Module):
    """Outputs with the classes in dimension 1."""

    def forward(self, h):
        return h.mT


def test_a_noise_that_is_set_is_that_of_a_fit():
    model, x, y = problem()
    data = [(x, torch.cat([y, y + 1], dim=1))]
    model = torch.nn.Sequential(*model, torch.nn.Linear(1, 2).double()).eval()
    la = Laplace(model, "regression", sigma=[1.0, 2.0]).fit(data)
    la.prior_precision = 0.3
    la.sigma = [0.1, 0.2]
    expected = Laplace(model, "regression", sigma=[0.1, 0.2], prior_precision=0.3).fit(data)
    torch.testing.assert_close(la.predict(x).variance, expected.predict(x).variance)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    for sigma, message in (
        ([1.0, 1.0], "change by the same factor"),
        ([1.0, 2.0, 3.0], "has 3 entries, but had 2 entries at the fit"),
        (-1.0, "must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            la.sigma = sigma
    assert la.sigma.tolist() == [0.1, 0.2]
    unfitted = Laplace(model, "regression")
    unfitted.sigma = 0.5
    assert float(unfitted.fit(data).sigma) == 0.5


def test_a_noise_is_not_set_where_the_curvature_does_not_go_with_it():
    la, _, _ = fitted("kfac", fisher="empirical")
    with pytest.raises(ValueError, match="Fit again"):
        la.sigma = 0.5
    classifier = Laplace(torch.nn.Linear(2, 3).eval())
    with pytest.raises(ValueError, match="has no such noise"):
        classifier.sigma = 0.5
