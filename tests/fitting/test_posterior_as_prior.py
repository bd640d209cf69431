"""A Gaussian prior with a precision of its own: an earlier posterior, or one per parameter."""

import math

import oracle
import pytest
import torch
from cases import others_slow
from torch import nn

from laplace_debias import Full, GaussianPrior, Laplace, Split, posterior_as_prior
from laplace_debias.curvature.fits.information import factor_eigenvalues

DELTA = 0.7
STRUCTURES = ["kfac", "ekfac", "diag", "lowrank", "full"]
# `lowrank` leaves out eigenvalues below 1e-7 of the largest one, in each of its decompositions.
TOLERANCES = {"lowrank": 1e-6}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def examples(size, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=g)


def precision(la):
    return la.posterior.precision.to_dense()


class FirstBatch(Full):
    """A plain fit that leaves out all batches but the first one."""

    def fit(self, prepared):
        (stream,) = prepared.streams
        return prepared.config.structure.fit(prepared.context, list(stream)[:1])


FIRST = examples(14, 1)
SECOND = examples(9, 2)
THIRD = examples(8, 21)


def laplace(curvature, model=None, **options):
    if curvature == "lowrank":
        options["rank"] = 60  # all directions
    if "prior" not in options:
        options["prior_precision"] = DELTA
    return Laplace(network() if model is None else model, curvature=curvature, **options)


def moved(seed=5):
    """The network with other parameters, as after further training."""
    model = network()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
    return model


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def dense_ggn(model, x):
    return oracle.ggn(model, x, "classification", names_of(model))


def log_evidence(model, x, y, mu, prior, posterior):
    """log p(D) by the Laplace approximation, written out for a dense prior precision."""
    theta = oracle.flat_parameters(model, names_of(model))
    nll = oracle.nll("classification", model(x), y).sum()
    step = theta - mu
    constant = len(theta) * math.log(2 * math.pi)
    log_prior = (torch.logdet(prior) - step @ prior @ step - constant) / 2
    return (-nll + log_prior + constant / 2 - torch.logdet(posterior) / 2).detach()


def test_the_penalty_is_the_quadratic_form_and_its_gradient():
    la = laplace("kfac").fit([FIRST])
    prior = posterior_as_prior(la)
    P = precision(la)
    model = moved()
    step = oracle.flat_parameters(model, names_of(model)).detach() - la.mean
    penalty = prior.penalty(model)
    penalty.backward()
    torch.testing.assert_close(penalty.detach(), step @ P @ step / 2)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(gradient, P @ step)
    assert prior.penalty(network()) == 0


@pytest.mark.parametrize("curvature", STRUCTURES)
def test_at_the_same_parameters_it_is_an_update(curvature):
    la = laplace(curvature).fit([FIRST])
    prior = posterior_as_prior(la)
    again = laplace(curvature, prior=prior).fit([SECOND])
    la.update([SECOND])
    oracle.close(precision(again), precision(la), 1e-12)
    oracle.close(again.functional(SECOND[0])[1], la.functional(SECOND[0])[1], 1e-12)


@pytest.mark.parametrize("curvature", ["full", "lowrank"])
def test_precision_and_evidence_are_those_of_the_dense_prior(curvature):
    la = laplace(curvature).fit([FIRST])
    model = moved()
    again = laplace(curvature, model, prior=posterior_as_prior(la)).fit([SECOND])
    identity = DELTA * torch.eye(len(la.mean), dtype=torch.float64)
    prior = 14 * dense_ggn(network(), FIRST[0]) + identity
    expected = prior + 9 * dense_ggn(model, SECOND[0])
    tolerance = TOLERANCES.get(curvature, 1e-10)
    oracle.close(precision(again), expected, tolerance)
    evidence = log_evidence(model, *SECOND, la.mean, prior, expected)
    torch.testing.assert_close(again.log_marginal_likelihood(), evidence, rtol=tolerance, atol=0)
    assert again.num_data == 9


def test_the_evidence_is_that_of_the_prior_whatever_the_structure():
    for curvature in STRUCTURES:
        la = laplace(curvature).fit([FIRST])
        model = moved()
        again = laplace(curvature, model, prior=posterior_as_prior(la)).fit([SECOND])
        evidence = log_evidence(model, *SECOND, la.mean, precision(la), precision(again))
        torch.testing.assert_close(again.log_marginal_likelihood(), evidence, rtol=1e-8, atol=0)
        # δ is part of the precision of both.
        evidence_at_higher_delta = log_evidence(
            model,
            *SECOND,
            la.mean,
            precision(la) + torch.eye(len(la.mean)),
            precision(again) + torch.eye(len(la.mean)),
        )
        at_higher_delta = again.log_marginal_likelihood(DELTA + 1)
        torch.testing.assert_close(at_higher_delta, evidence_at_higher_delta, rtol=1e-8, atol=0)


def test_kfac_adds_the_factors_of_all_tasks_one_after_the_other():
    models = [network(), moved(5), moved(6)]
    la = laplace("kfac", models[0]).fit([FIRST])
    for model, data in zip(models[1:], (SECOND, THIRD), strict=True):
        la = laplace("kfac", model, prior=posterior_as_prior(la)).fit([data])
    fits = [
        laplace("kfac", model).fit([data])
        for model, data in zip(models, (FIRST, SECOND, THIRD), strict=True)
    ]
    sizes = [14, 9, 8]
    for name, block in la.posterior.curvature.blocks.items():
        factors_G = 0
        factors_A = 0
        for size, fit in zip(sizes, fits, strict=True):
            task_block = fit.posterior.curvature.blocks[name]
            trace_A = fit.posterior.factor_scales[name].trace_A
            eigenvalues_G, eigenvalues_A = factor_eigenvalues(task_block, trace_A)
            factors_G = factors_G + size * task_block.U_G @ eigenvalues_G.diag() @ task_block.U_G.T
            factors_A = factors_A + size * task_block.U_A @ eigenvalues_A.diag() @ task_block.U_A.T
        expected = torch.kron(factors_G, factors_A) / 31
        actual = la.posterior.curvature_weight * block.to_dense()
        oracle.close(actual, expected, 1e-10)


@pytest.mark.parametrize("curvature", ["diag", "full"])
def test_one_precision_per_parameter(curvature):
    model = moved()
    g = torch.Generator().manual_seed(3)
    size = sum(parameter.numel() for parameter in model.parameters())
    mu = torch.randn(size, generator=g, dtype=torch.float64)
    P = 0.5 + torch.rand(size, generator=g, dtype=torch.float64)
    prior = GaussianPrior(mu, P, names_of(model))
    theta = oracle.flat_parameters(model, names_of(model))
    torch.testing.assert_close(prior.penalty(model), (P * (theta - mu) ** 2).sum() / 2)
    la = laplace(curvature, model, prior=prior).fit([SECOND])
    ggn = 9 * dense_ggn(model, SECOND[0])
    if curvature == "diag":
        ggn = ggn.diagonal().diag()
    oracle.close(precision(la), ggn + P.diag(), 1e-10)
    evidence = log_evidence(model, *SECOND, mu, P.diag(), ggn + P.diag())
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-10, atol=0)


def test_one_precision_per_parameter_with_blocks_in_another_order():
    model = moved().requires_grad_(True)
    names = names_of(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    P = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    prior = GaussianPrior(torch.zeros(size, dtype=torch.float64), P, names)
    la = laplace("diag", model, prior=prior, joint=True).fit([SECOND])
    assert la.posterior.order is not None
    expected = 9 * dense_ggn(model, SECOND[0]).diagonal() + P
    oracle.close(precision(la).diagonal(), expected, 1e-10)


@pytest.mark.parametrize("curvature", others_slow(STRUCTURES, "kfac", "full"))
def test_files_keep_the_prior(curvature, tmp_path):
    la = laplace(curvature).fit([FIRST])
    model = moved()
    again = laplace(curvature, model, prior=posterior_as_prior(la)).fit([SECOND])
    again.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(precision(loaded), precision(again))
    assert torch.equal(loaded.log_marginal_likelihood(), again.log_marginal_likelihood())
    loaded.update([THIRD])
    again.update([THIRD])
    oracle.close(precision(loaded), precision(again), 1e-12)


def test_updates_of_a_fit_with_a_prior_are_the_fit_to_all_data():
    prior = posterior_as_prior(laplace("kfac").fit([FIRST]))
    updated = laplace("kfac", moved(), prior=prior).fit([SECOND]).update([THIRD])
    fitted = laplace("kfac", moved(), prior=prior).fit([SECOND, THIRD])
    oracle.close(precision(updated), precision(fitted), 1e-10)
    evidence = fitted.log_marginal_likelihood()
    torch.testing.assert_close(updated.log_marginal_likelihood(), evidence, rtol=1e-10, atol=0)


def test_a_temperature_divides_only_the_new_data():
    la = laplace("full", temperature=0.5).fit([FIRST])
    model = moved()
    prior = posterior_as_prior(la)
    again = laplace("full", model, prior=prior, temperature=2.0).fit([SECOND])
    expected = precision(la) + 9 / 2 * dense_ggn(model, SECOND[0])
    oracle.close(precision(again), expected, 1e-10)
    with pytest.raises(ValueError, match=r"from 2 to 1.*Fit again"):
        again.temperature = 1.0


def test_tuning_chooses_the_part_that_all_parameters_share():
    prior = posterior_as_prior(laplace("kfac").fit([FIRST]))
    la = laplace("kfac", moved(), prior=prior).fit([SECOND])
    identity = torch.eye(len(la.mean), dtype=torch.float64)
    weights = precision(la) - DELTA * identity
    tuned = la.tune([examples(120, 4)])
    delta = float(la.prior_precision)
    assert delta == tuned.prior_precision
    oracle.close(precision(la), weights + delta * identity, 1e-10)
    with pytest.raises(ValueError, match=r"Use `tune\(loader\)"):
        la.tune_evidence()


@pytest.mark.usefixtures("unchecked")  # passes wrong shapes
def test_what_does_not_fit_is_refused_before_work_starts():
    la = laplace("kfac").fit([FIRST])
    prior = posterior_as_prior(la)
    model = network()
    size = len(la.mean)
    names = names_of(model)
    ones = torch.ones(size, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="not fitted yet"):
        posterior_as_prior(laplace("kfac"))
    with pytest.raises(ValueError, match='Use a different curvature, such as "lowrank"'):
        posterior_as_prior(Laplace(network(), curvature="gp").fit([FIRST]))
    with pytest.raises(ValueError, match="Use the same `curvature="):
        Laplace(model, curvature="full", prior=prior)
    with pytest.raises(ValueError, match="Pass the names of the prior's parameters to `params="):
        Laplace(model, params="weights", prior=prior)
    with pytest.raises(ValueError, match=r"Otherwise pass a prior of the last layer's parameters"):
        Laplace(model, params="last_layer", prior=prior).fit([SECOND])
    with pytest.raises(ValueError, match="Remove `prior_precision="):
        Laplace(model, prior=prior, prior_precision=2.0)
    with pytest.raises(ValueError, match='so it requires `mode="full"'):
        Laplace(model, prior=prior).fit([FIRST, SECOND], mode="debiased", num_data=9)
    with pytest.raises(ValueError, match='so it requires `mode="full"'):
        Laplace(model, prior=prior).fit(Split([FIRST], [SECOND]))
    # A fit with such a prior never calls the `fit` of a scheme.
    with pytest.raises(ValueError, match='so it requires `mode="full"'):
        Laplace(model, prior=prior).fit(FirstBatch([FIRST, SECOND]))
    with pytest.raises(ValueError, match='Use curvature="diag" or "full"'):
        Laplace(model, prior=GaussianPrior(0 * ones, ones, names))
    with pytest.raises(ValueError, match="must be positive"):
        GaussianPrior(ones, 0 * ones, names)
    with pytest.raises(ValueError, match="one number per parameter"):
        GaussianPrior(ones, ones[:-1], names)
    with pytest.raises(ValueError, match="NaN or Inf"):
        GaussianPrior(ones * math.inf, ones, names)
    with pytest.raises(ValueError, match="of the same sizes, dtype and device"):
        prior.penalty(network().float())


def test_why_the_noise_cannot_be_tuned_after_earlier_data():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double().eval()
    x = torch.randn(60, 3).double()
    y = model(x).detach() + torch.randn(60, 1).double()
    first = Laplace(model, "regression").fit([(x[:30], y[:30])])
    la = Laplace(model, "regression", prior=posterior_as_prior(first)).fit([(x[30:], y[30:])])
    with pytest.raises(ValueError, match="after a fit with `prior=`"):
        la.tune([(x, y)], sigma=True)
    (note,) = (note for note in la.tune([(x, y)]).notes if "was not specified" in note)
    assert "sigma=True" not in note
    assert "Laplace(..., sigma=)" in note


def test_a_prior_names_the_parameters_of_the_last_layer():
    prior = posterior_as_prior(Laplace(network(), params="last_layer").fit([FIRST]))
    la = Laplace(moved(), params="last_layer", prior=prior)
    assert la.param_names == ["2.weight", "2.bias"]
    expected = Laplace(moved(), params=["2.weight", "2.bias"], prior=prior).fit([SECOND])
    assert precision(la.fit([SECOND])).equal(precision(expected))


def test_what_is_said_of_a_prior_holds_for_one_precision_per_parameter():
    """Such a prior is not an earlier posterior and has no earlier data."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double().eval()
    x = torch.randn(60, 3).double()
    data = [(x, model(x).detach() + torch.randn(60, 1).double())]
    mean = torch.zeros(4, dtype=torch.float64)
    prior = GaussianPrior(mean, 1 + torch.arange(4).double(), names_of(model))
    la = Laplace(model, "regression", curvature="full", sigma=1.0, prior=prior).fit(data)
    assert "prior: the one passed as `prior=`" in repr(la)
    with pytest.raises(ValueError, match=r"`tune_evidence` does not support .* `prior="):
        la.tune_evidence()
    with pytest.raises(ValueError, match="precision of this prior does not change with the noise"):
        la.tune(data, sigma=True)
