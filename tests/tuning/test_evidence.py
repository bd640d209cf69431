"""Prior precisions by the marginal likelihood, a kind or a block: against it, densely."""

import math

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from scipy.optimize import minimize
from torch import nn

from laplace_debias import Laplace
from laplace_debias.laplace.tuning.evidence import BOUNDS


class Mixed(nn.Module):
    """Layers of several kinds, and a parameter of none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.norm = nn.LayerNorm(3)
        self.table = nn.Embedding(5, 3)
        self.shift = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x, tokens):
        h = self.conv(x).tanh().mean(-1) + self.table(tokens).mean(1) + self.shift
        return self.head(self.norm(h))


def mixed():
    torch.manual_seed(0)
    model = Mixed().double().eval()
    with torch.no_grad():
        model.norm.weight.normal_()
        model.norm.bias.normal_()
    x = (torch.randn(60, 2, 4).double(), torch.randint(5, (60, 2)))
    return model, x, torch.randint(2, (60,))


KINDS = {
    "conv.weight": "convolution", "norm.weight": "normalisation", "norm.bias": "normalisation",
    "conv.bias": "bias", "head.bias": "bias", "table.weight": "embedding", "shift": "other",
    "head.weight": "linear",
}  # fmt: skip


def dense_evidence(la, groups, nll):
    """From the log of δ of every group to the log evidence, of dense matrices alone.

    The curvature is that of the posterior's own dense matrix at δ = 1; everything else is written
    out here: which parameters are in a group, the prior, the determinant.
    """
    la.prior_precision = 1.0
    NC = la.posterior.precision.to_dense() - torch.eye(len(la.mean)).double()
    owner = torch.cat(
        [
            torch.full((la.model.get_parameter(name).numel(),), groups[name])
            for name in la.param_names
        ]
    )

    def evidence(logs):
        deltas = torch.as_tensor(logs, dtype=torch.float64).exp()[owner]
        P = NC + torch.diag(deltas)
        return oracle.log_marginal_likelihood(nll, la.mean, P, deltas).item()

    return evidence


@pytest.mark.parametrize(
    ("curvature", "per"), one_axis_at_a_time(["kfac", "ekfac", "diag"], ["block", "kind"])
)
def test_it_is_the_maximum_of_the_dense_evidence(curvature, per):
    model, x, y = mixed()
    la = Laplace(model, curvature=curvature).fit_batches([(x, y)])
    if per == "kind":
        names = list(dict.fromkeys(KINDS[name] for name in la.param_names))
        groups = {name: names.index(KINDS[name]) for name in la.param_names}
    else:
        names = la.block_names
        groups = {name: names.index(name) for name in la.param_names}
    nll = nn.functional.cross_entropy(model(*x), y, reduction="sum").detach()
    evidence = dense_evidence(la, groups, nll)

    tuning = la.tune(method="marglik", per=per)
    assert [row["name"] for row in tuning.table] == names
    logs = [math.log(row["prior_precision"]) for row in tuning.table]
    assert la.prior_precision.tolist() == tuning.prior_precision
    assert tuning.value == pytest.approx(evidence(logs), rel=1e-10)
    assert la.log_marginal_likelihood().item() == pytest.approx(evidence(logs), rel=1e-10)
    by_name = {row["name"]: row["prior_precision"] for row in tuning.table}
    for name, delta in zip(la.block_names, tuning.prior_precision, strict=True):
        assert delta == by_name[KINDS[name] if per == "kind" else name]

    best = minimize(
        lambda log_deltas: -evidence(log_deltas), [0.0] * len(names), method="L-BFGS-B",
        bounds=[tuple(math.log(bound) for bound in BOUNDS)] * len(names),
    )  # fmt: skip
    assert tuning.value == pytest.approx(-best.fun, rel=1e-7)
    assert tuning.value >= -best.fun - 1e-9
    assert logs == pytest.approx(best.x.tolist(), abs=0.02)
    # Sharper than differences of the dense evidence: no step along any of them is better.
    for index in range(len(logs)):
        for step in (-0.01, 0.01):
            neighbour = list(logs)
            neighbour[index] += step
            assert evidence(neighbour) < tuning.value
    with_one_precision = (
        Laplace(model, curvature=curvature).fit_batches([(x, y)]).tune(method="marglik")
    )
    assert with_one_precision.value < tuning.value


def test_a_temperature_and_a_mean_of_the_prior_are_seen():
    model, x, y = mixed()
    mu = 0.3
    la = Laplace(model, temperature=2.0, prior_mean=mu).fit_batches([(x, y)])
    tuning = la.tune(method="marglik", per="block")
    best = la.log_marginal_likelihood().item()
    assert best == pytest.approx(tuning.value)
    deltas = torch.tensor(tuning.prior_precision, dtype=torch.float64)
    for index in range(len(deltas)):
        for factor in (0.98, 1.02):
            neighbour = deltas.clone()
            neighbour[index] *= factor
            assert la.log_marginal_likelihood(neighbour).item() < best
    with_default_prior = Laplace(model).fit_batches([(x, y)]).tune(method="marglik", per="block")
    assert with_default_prior.prior_precision != pytest.approx(tuning.prior_precision, rel=0.05)


class Dead(nn.Module):
    """A layer behind a ReLU that is off, one at zero, and one as usual."""

    def __init__(self):
        super().__init__()
        self.off = nn.Linear(3, 4)
        self.on = nn.Linear(3, 4, bias=False)
        self.zero = nn.Linear(4, 2, bias=False)
        self.head = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.off.bias.fill_(-100.0)
            self.zero.weight.zero_()

    def forward(self, x):
        h = self.off(x).relu() + self.on(x).tanh()
        return self.head(h) + self.zero(h)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_blocks_without_curvature_or_at_the_priors_mean_are_told(likelihood):
    torch.manual_seed(0)
    model = Dead().double().eval()
    x = torch.randn(40, 3).double()
    if likelihood == "classification":
        y = torch.randint(2, (40,))
        sigma = None
        arguments = {"method": "marglik", "sigma": None}
    else:
        y = model(x).detach() + 0.3 * torch.randn(40, 2)
        sigma = 1.0
        arguments = {"method": "marglik", "sigma": True}
    la = Laplace(model, likelihood, sigma=sigma).fit_batches([(x, y)])
    with_one_precision = (
        Laplace(model, likelihood, sigma=sigma).fit_batches([(x, y)]).tune(**arguments)
    )
    tuning = la.tune(**arguments, per="block")
    by_name = {row["name"]: row["prior_precision"] for row in tuning.table}
    assert by_name["off.weight"] == by_name["off.bias"]
    # With a noise they are the ends of two searches.
    assert by_name["off.bias"] == pytest.approx(with_one_precision.prior_precision, rel=1e-3)
    assert by_name["zero.weight"] == BOUNDS[1]
    assert by_name["on.weight"] != pytest.approx(with_one_precision.prior_precision, rel=1e-3)
    assert "off.weight, off.bias: there is almost no curvature" in tuning.message
    assert "zero.weight: the parameters are almost equal to" in tuning.message
    assert torch.tensor(tuning.prior_precision).isfinite().all()
    assert la.functional(x)[1].isfinite().all()
    by_kind = la.tune(**arguments, per="kind")
    assert {row["name"] for row in by_kind.table} == {"linear", "bias"}


def test_prior_precisions_of_blocks_are_the_best_at_the_noise_that_is_best_with_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    x = torch.randn(50, 2).double()
    y = model(x).detach() + 0.2 * torch.randn(50, 1).double()

    def fit(sigma, deltas=1.0):
        delta = torch.as_tensor(deltas, dtype=torch.float64)
        la = Laplace(model, "regression", sigma=sigma, prior_precision=delta)
        return la.fit_batches([(x, y)])

    la = fit(1.0)
    tuning = la.tune_evidence(sigma=True, per="block")
    assert tuning.sigma == fit(1.0).tune_evidence(sigma=True).sigma != 1.0
    refitted = fit(tuning.sigma, tuning.prior_precision)
    assert refitted.log_marginal_likelihood().item() == pytest.approx(tuning.value, rel=1e-9)
    assert la.log_marginal_likelihood().item() == pytest.approx(tuning.value, rel=1e-9)

    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    NC = fit(tuning.sigma).posterior.precision.to_dense() - torch.eye(sum(sizes)).double()
    theta = oracle.flat_parameters(model, names)
    nll = oracle.nll("regression", model(x), y, tuning.sigma).sum().detach()

    def evidence(logs):
        prior = torch.as_tensor(logs).double().exp().repeat_interleave(torch.tensor(sizes))
        return oracle.log_marginal_likelihood(nll, theta, NC + torch.diag(prior), prior).item()

    best = minimize(lambda log_deltas: -evidence(log_deltas), [0.0] * 4, method="L-BFGS-B")
    logs = [math.log(delta) for delta in tuning.prior_precision]
    assert tuning.value == pytest.approx(evidence(logs), rel=1e-9)
    assert tuning.value == pytest.approx(-best.fun, rel=1e-7)
    assert logs == pytest.approx(best.x.tolist(), abs=0.02)


def test_a_file_has_the_prior_precisions_of_all_blocks(tmp_path):
    model, x, y = mixed()
    la = Laplace(model).fit_batches([(x, y)])
    la.tune(method="marglik", per="kind")
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded.prior_precision, la.prior_precision)
    torch.testing.assert_close(loaded.predict(x).probs, la.predict(x).probs, rtol=1e-12, atol=0)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    again = loaded.tune(method="marglik", per="kind")
    assert again.prior_precision == la.prior_precision.tolist()


def test_flat_of_the_marginal_likelihood_is_within_half_a_nat():
    model, x, y = mixed()
    la = Laplace(model).fit_batches([(x, y)])
    tuning = la.tune(method="marglik")
    low, high = tuning.flat
    for end in tuning.flat:
        lost = tuning.value - la.log_marginal_likelihood(end).item()
        assert lost == pytest.approx(0.5, abs=1e-5)
    assert low < tuning.prior_precision < high
    assert "worse by at most half a nat" in tuning.message


def test_what_does_not_go_together_is_refused():
    model, x, y = mixed()
    la = Laplace(model).fit_batches([(x, y)])
    with pytest.raises(ValueError, match="'kind', 'block' or None"):
        la.tune(method="marglik", per="layer")
    with pytest.raises(ValueError, match="Use tune_evidence"):
        la.tune([(x, y)], per="kind")
    for curvature in ("full", "lowrank"):
        dense = Laplace(nn.Linear(4, 2).double(), curvature=curvature)
        dense.fit_batches([(torch.randn(20, 4).double(), torch.randint(2, (20,)))])
        with pytest.raises(ValueError, match="all parameters as one block"):
            dense.tune(method="marglik", per="kind")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_table_has_each_value_once_as_plain_numbers(likelihood):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    x = torch.randn(40, 3).double()
    y = model(x).argmax(1) if likelihood == "classification" else torch.randn(40, 2).double()
    la = Laplace(model, likelihood).fit([(x, y)])
    tuned = la.tune_evidence()
    values = [tuned.prior_precision, tuned.value]
    values += [value for row in tuned.table for value in row.values()]
    assert {type(value) for value in values} == {float}
    rows = [tuple(row.values()) for row in tuned.table]
    assert len(set(rows)) == len(rows)
    (best,) = (row for row in tuned.table if row["prior_precision"] == tuned.prior_precision)
    assert best["log_marginal_likelihood"] == tuned.value
    assert tuned.value == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-12)


@pytest.mark.parametrize("curvature", ["full", "kfac"])
@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_optimum_does_not_depend_on_the_unit_of_the_targets(curvature, unit):
    """In units of the targets u, the last layer is multiplied by u, and its δ by u⁻².

    The search ended at 1e-8, far from the optimum of a network for targets in the millions.
    """
    torch.manual_seed(0)
    x = torch.randn(50, 3).double()
    y = torch.randn(50, 2).double()
    model = nn.Linear(3, 2).double()
    las = []
    for factor in (1.0, unit):
        scaled = nn.Linear(3, 2).double()
        scaled.load_state_dict({k: factor * value for k, value in model.state_dict().items()})
        la = Laplace(scaled, "regression", curvature, sigma=0.5 * factor)
        las.append(la.fit([(x, factor * y)]))
    reference, la = las
    per = "block" if curvature == "kfac" else None
    change = 100 * math.log(unit)
    for options in ({}, {"per": per}, {"per": per, "sigma": True}):
        expected = reference.tune_evidence(**options)
        tuned = la.tune_evidence(**options)
        deltas = torch.as_tensor(tuned.prior_precision).double() * unit**2
        torch.testing.assert_close(
            deltas, torch.as_tensor(expected.prior_precision).double(), rtol=5e-3, atol=0
        )
        assert tuned.value == pytest.approx(expected.value - change, abs=1e-4)
        assert not tuned.notes
