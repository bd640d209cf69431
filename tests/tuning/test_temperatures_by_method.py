"""The temperatures that `tune` sets for the closed form, for draws and for the network."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax
from torch import Tensor, nn

from laplace_debias import Laplace, Link
from laplace_debias.laplace.tuning.tune import TEMPERATURES


def overconfident(size: int = 400, params: str = "all") -> tuple[Laplace, Tensor, Tensor]:
    """A network whose logits are 2.5 times as large as those of its labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(size, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.mul_(8)
        probs = (model(x) / 2.5).softmax(1)
    y = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return Laplace(model, params=params).fit([(x[:100], y[:100])]), x, y


def best_temperature(log_probs_for, y: Tensor) -> float:
    """The temperature T whose log probabilities `log_probs_for(T)` have the lowest NLL."""
    losses = [float(F.nll_loss(log_probs_for(T), y)) for T in TEMPERATURES]
    return TEMPERATURES[min(range(len(losses)), key=losses.__getitem__)]


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_network_has_the_temperature_of_temperature_scaling(params: str):
    la, x, y = overconfident(params=params)
    outputs = la.model(x).detach()
    tuned = la.tune([(x, y)], grid=[0.05])  # A wide posterior, with a temperature of its own.
    expected = best_temperature(lambda T: (outputs / T).log_softmax(1), y)
    assert expected == pytest.approx(2.5, rel=0.2)
    assert la.link.network_temperature == expected
    probs = la.predict(x, method="temperature").probs
    torch.testing.assert_close(probs, (outputs / expected).softmax(1))
    torch.testing.assert_close(la.predict(x, method="map").probs, outputs.softmax(1))
    (scaling,) = (
        alternative
        for alternative in tuned.alternatives
        if alternative.name == "temperature scaling"
    )
    evaluated = la.evaluate([(x, y)], method="temperature")
    assert evaluated["nll"] == pytest.approx(scaling.value, rel=1e-9)


def miscalibrated(kind: str, temperature: float) -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose logits are `temperature` times as large as those of its labels."""
    torch.manual_seed(0)
    num_outputs = {"classification": 4, "positions": 4, "binary": 1, "multilabel": 3}[kind]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, num_outputs)).double().eval()
    shape = (200, 3, 4) if kind == "positions" else (500, 4)
    x = 3 * torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.mul_(5)
        logits = model(x)
        if kind in ("binary", "multilabel"):
            y = torch.bernoulli(logits.sigmoid())
        else:
            y = torch.distributions.Categorical(logits=logits).sample()
        model[2].weight.mul_(temperature)
        model[2].bias.mul_(temperature)
    return model, x, y


def scores(kind: str, metric: str, logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The metric of each label, computed with scipy."""
    if kind in ("binary", "multilabel"):
        if metric == "nll":
            return -log_expit(np.where(y == 1, logits, -logits))
        return 2 * (expit(logits) - y) ** 2
    log_probs = log_softmax(logits, -1)
    labels = np.eye(logits.shape[-1])[y]
    if metric == "nll":
        return -(labels * log_probs).sum(-1)
    return ((np.exp(log_probs) - labels) ** 2).sum(-1)


@pytest.mark.parametrize("temperature", [0.02, 0.1, 6.0, 12.0, 60.0])
@pytest.mark.parametrize(
    ("kind", "params", "metric"),
    [
        ("classification", "all", "nll"),
        ("classification", "all", "brier"),
        ("classification", "last_layer", "nll"),
        ("classification", "last_layer", "brier"),
        ("positions", "all", "nll"),
        ("binary", "all", "nll"),
        ("binary", "last_layer", "brier"),
        ("multilabel", "all", "brier"),
        ("multilabel", "last_layer", "nll"),
    ],
)
def test_the_network_has_the_best_of_all_temperatures(kind, params, metric, temperature):
    """The oracle is scipy's minimiser, applied to the logits."""
    model, x, y = miscalibrated(kind, temperature)
    likelihood = "classification" if kind == "positions" else kind
    la = Laplace(model, likelihood, params=params).fit([(x[:50], y[:50])])
    tuned = la.tune([(x[50:120], y[50:120]), (x[120:], y[120:])], metric)
    logits = model(x[50:]).detach().numpy()

    def score(log_temperature: float) -> float:
        tempered = logits / math.exp(log_temperature)
        return scores(kind, metric, tempered, y[50:].numpy()).mean()

    bounds = math.log(temperature / 4), math.log(temperature * 4)
    best = minimize_scalar(score, bounds=bounds, method="bounded", options={"xatol": 1e-8})
    chosen = la.link.network_temperature
    # Neighbours on the grid of temperatures differ by a factor of 2 ** (1 / 8).
    assert abs(math.log(chosen) - best.x) <= math.log(2) / 8
    assert score(math.log(chosen)) <= best.fun + 2e-3
    (row,) = (row for row in tuned.compared if row["name"] == "temperature scaling")
    assert row["temperature"] == chosen
    labels_per_example = 3 if (kind, metric) == ("multilabel", "nll") else 1
    assert row[metric] == pytest.approx(labels_per_example * score(math.log(chosen)), rel=1e-9)
    evaluated = la.evaluate([(x[50:], y[50:])], method="temperature")
    assert evaluated[metric] == pytest.approx(row[metric], rel=1e-6)


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_the_network_is_not_made_certain_if_all_examples_are_classified_correctly(params: str):
    """The NLL of these examples is lowest at the temperature 0."""
    la, x, _ = overconfident(params=params)
    y = la.model(x).argmax(1)
    tuned = la.tune([(x, y)])
    assert la.link.network_temperature == 1 / 4
    (row,) = (row for row in tuned.compared if row["name"] == "temperature scaling")
    assert row["temperature"] == 1 / 4


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_draws_have_the_best_temperature_of_the_pairwise_link_beside_a_probit(params: str):
    la, x, _ = overconfident(params=params)
    la.prior_precision = 0.05
    # Labels that are drawn from the probit link at a temperature, so that it is chosen.
    generator = torch.Generator().manual_seed(2)
    probs = la.predict(x, link=Link("probit", 0.5)).probs
    labels = torch.multinomial(probs, 50, replacement=True, generator=generator).flatten()
    inputs = x.repeat_interleave(50, 0)
    tuned = la.tune([(inputs, labels)], grid=[0.05])
    assert la.link.name == "probit"
    assert "probit: +" in tuned.message
    assert "probit, tempered" not in tuned.message  # the choice itself
    expected = best_temperature(
        lambda T: la.predict(inputs, link=Link("pairwise", T)).logits.log_softmax(1), labels
    )
    assert la.link.draw_temperature == expected != la.link.temperature
    # Averages over draws are better at this temperature than at that of the probit.
    nlls = {}
    for link in (la.link, Link("probit", la.link.temperature)):
        la.link = link
        predictive = la.predict(x, samples=2000, generator=torch.Generator().manual_seed(3))
        log_probs = predictive.logits.log_softmax(1).repeat_interleave(50, 0)
        nlls[link] = float(F.nll_loss(log_probs, labels))
    nll_with_draw_temperature, nll_with_link_temperature = nlls.values()
    assert nll_with_draw_temperature < nll_with_link_temperature


@pytest.mark.parametrize("method", ["glm", "glm-mc", "nn"])
def test_draws_are_divided_by_their_own_temperature(method: str):
    la, x, _ = overconfident()
    options = {"method": method, "samples": 20}
    la.link = Link("probit", 3.0, draw_temperature=1.5, network_temperature=0.7)
    probs = la.predict(x, **options, generator=torch.Generator().manual_seed(0)).probs
    uncertainty = la.uncertainty(x, **options, generator=torch.Generator().manual_seed(0))
    la.link = Link("probit", 1.5)
    expected_probs = la.predict(x, **options, generator=torch.Generator().manual_seed(0)).probs
    torch.testing.assert_close(probs, expected_probs, rtol=0, atol=0)
    expected_uncertainty = la.uncertainty(x, **options, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(uncertainty.total, expected_uncertainty.total, rtol=0, atol=0)


def test_a_link_that_is_passed_keeps_its_temperatures():
    la, x, y = overconfident()
    link = Link("probit", 3.0, draw_temperature=1.5, network_temperature=0.7)
    assert la.tune([(x, y)], link=link).link == link == la.link


def test_few_examples_leave_all_temperatures_at_one():
    la, x, y = overconfident()
    assert la.tune([(x[:90], y[:90])]).link == Link("pairwise")


def test_a_link_with_three_temperatures_is_saved(tmp_path):
    la, x, _ = overconfident()
    la.link = Link("probit", 3.0, draw_temperature=1.5, network_temperature=0.7)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert loaded.link == la.link
    expected = (la.model(x).detach() / 0.7).softmax(1)
    torch.testing.assert_close(loaded.predict(x, method="temperature").probs, expected)


def test_temperature_scaling_needs_a_temperature():
    la, x, y = overconfident()
    with pytest.raises(ValueError, match=r"none has been chosen. Call la\.tune"):
        la.predict(x, method="temperature")
    with pytest.raises(ValueError, match=r"none has been chosen. Call la\.tune"):
        la.evaluate([(x, y)], method="temperature")
    with pytest.raises(ValueError, match='`method="temperature"` predicts with a single value'):
        la.uncertainty(x, method="temperature")
    with pytest.raises(ValueError, match='`method="temperature"` is the trained network'):
        la.sample_outputs(x, 3, method="temperature")


def test_temperature_scaling_needs_logits():
    x = torch.randn(6, 2, dtype=torch.float64)
    la = Laplace(nn.Linear(2, 1).double(), "regression", sigma=1.0).fit([(x, x[:, :1])])
    for verb in (la.predict, la.marginals):
        with pytest.raises(ValueError, match="the outputs of Gaussian are not logits"):
            verb(x, method="temperature")


@pytest.mark.parametrize("name", ["draw_temperature", "network_temperature"])
def test_temperatures_must_be_positive(name: str):
    with pytest.raises(ValueError, match=r"link has the temperature -1.0. Pass a positive"):
        Link("probit", **{name: -1.0})
