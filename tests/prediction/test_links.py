"""Links: from Gaussian logits to probabilities, beside draws and closed forms in float64."""

import math
from unittest import mock

import oracle
import pytest
import torch
from spectra import generator
from torch import nn

from laplace_debias import Laplace, Link
from laplace_debias.curvature.losses.likelihoods import Bernoulli, Categorical, MultiLabel
from laplace_debias.laplace import links
from laplace_debias.laplace.functional import linearised
from laplace_debias.laplace.links import BRIDGES, FORMULAS, exact

same = torch.testing.assert_close
WITHOUT_THE_COMMON_PART = pytest.mark.parametrize("name", ["pairwise", "exact"])


def gaussians(num_classes, batch=20, scale=1.0, seed=0, rank=None):
    """Means and covariances of rank C, or less."""
    g = generator(seed)
    mean = 2 * torch.randn(batch, num_classes, generator=g, dtype=torch.float64)
    shape = (batch, num_classes, rank or num_classes)
    root = torch.randn(shape, generator=g, dtype=torch.float64) / math.sqrt(shape[-1])
    return mean, scale**2 * root @ root.mT


def drawn(mean, covariance, num_draws=100_000):
    """The expected softmax over independent draws, in pairs of opposite sign."""
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT  # Smooth.
    total = torch.zeros_like(mean)
    noise = torch.randn(num_draws, mean.shape[-1], generator=generator(9), dtype=torch.float64)
    for z in noise.split(5000):
        steps = torch.einsum("...ij,sj->s...i", root, z)
        total += (mean + steps).softmax(-1).sum(0) + (mean - steps).softmax(-1).sum(0)
    return total / (2 * num_draws)


def logits_at_one(name, mean, covariance):
    """The logits of classes by a formula, at temperature 1."""
    return FORMULAS[name].softmax(mean, covariance, [1.0])[0]


def divergence(p, q):
    return (p * (p.log() - q.log())).sum(-1).mean().item()


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_two_classes_are_the_binary_case_of_their_difference(scale):
    mean, covariance = gaussians(2, 50, scale)
    d = mean[:, 0] - mean[:, 1]
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    expected = (d / (1 + torch.pi / 8 * variance).sqrt()).sigmoid()
    same(logits_at_one("pairwise", mean, covariance).softmax(-1)[:, 0], expected)
    # The integral, on a grid of ±10 standard deviations.
    z = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    weights = (-z.square() / 2).exp() / (-z.square() / 2).exp().sum()
    integral = ((d[:, None] + variance.sqrt()[:, None] * z).sigmoid() * weights).sum(1)
    same(exact(mean, covariance).softmax(-1)[:, 0], integral, rtol=0, atol=1e-3)
    assert (
        logits_at_one("probit", mean, covariance).softmax(-1)[:, 0] - expected
    ).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("num_classes", "scale", "largest_divergence"),
    [(2, 1, 1e-4), (10, 1, 4e-4), (10, 3, 4e-3), (100, 1, 1e-2)],
)
def test_exact_is_near_a_hundred_thousand_draws(num_classes, scale, largest_divergence):
    mean, covariance = gaussians(num_classes, 8, scale)
    expected = drawn(mean, covariance)
    log_probs = exact(mean, covariance)
    assert 0 <= divergence(expected, log_probs.exp()) < largest_divergence
    same(log_probs.exp().sum(-1), torch.ones(8).double())
    divergences = [
        divergence(expected, logits_at_one(n, mean, covariance).softmax(-1)) for n in FORMULAS
    ]
    assert min(divergences) == divergences[list(FORMULAS).index("exact")]


@WITHOUT_THE_COMMON_PART
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_all_logits_have_in_common_cancels(name, dtype):
    mean, covariance = gaussians(6)
    # Entries that single precision holds beside a million.
    covariance = (covariance * 8).round() / 8
    expected = logits_at_one(name, mean, covariance).softmax(-1)
    # Half of them: covariances that no sum of squares makes, which a float32 sum may be, too.
    v = torch.arange(6.0).double() / 8
    across = v + v.unsqueeze(-1)
    for common in (torch.tensor(1e6).double(), across, across + 1e6):
        logits = logits_at_one(name, (mean + 3).to(dtype), (covariance + common).to(dtype))
        assert logits.dtype == dtype
        same(logits.softmax(-1).double(), expected, rtol=0, atol=1e-4)
    probs = logits_at_one("probit", mean, covariance + 1e6).softmax(-1)
    assert (probs - expected).abs().max() > 0.1


EXPECTED_SOFTMAX = [name for name in FORMULAS if name not in BRIDGES]


@pytest.mark.parametrize("name", FORMULAS)
def test_classes_permute_and_zero_covariance_is_the_softmax(name):
    mean, covariance = gaussians(7)
    order = torch.randperm(7, generator=generator())
    probs = logits_at_one(name, mean, covariance).softmax(-1)
    permuted = logits_at_one(name, mean[:, order], covariance[:, order][:, :, order]).softmax(-1)
    same(permuted, probs[:, order])
    if name in BRIDGES:
        return
    for scale in (0.0, 1e-30):
        same(logits_at_one(name, mean, covariance * scale).softmax(-1), mean.softmax(-1))


@pytest.mark.parametrize("name", FORMULAS)
def test_batch_dimensions_and_large_logits(name):
    mean, covariance = gaussians(4, 6, rank=1)
    logits = logits_at_one(name, mean.view(2, 3, 4), covariance.view(2, 3, 4, 4))
    for n in range(6):
        same(logits[n // 3, n % 3], logits_at_one(name, mean[n : n + 1], covariance[n : n + 1])[0])
    for dtype in (torch.float32, torch.float64):
        for factor in (1e-30, 1.0, 1e4):
            log_p = logits_at_one(name, (mean * 1e4).to(dtype), (covariance * factor).to(dtype))
            assert log_p.log_softmax(-1).isfinite().all()


def fitted(likelihood="classification", num_outputs=None, **options):
    model, x, y, _, _ = oracle.SMALL_MODELS["mlp_tanh"]()
    if likelihood == "regression":
        y = torch.zeros(len(x), 4).double()
    if likelihood in ("binary", "multilabel"):
        model = nn.Sequential(model, nn.Linear(4, num_outputs).double()).eval()
        y = torch.randint(2, (len(x), num_outputs), generator=generator())
    options = {"prior_precision": 0.7, **options}
    return Laplace(model, likelihood, **options).fit_batches([(x, y)]), x, y


def test_predict_takes_the_formula_of_the_functional_covariance():
    la, x, _ = fitted()
    mean, covariance = la.functional(x)
    variances = covariance.diagonal(dim1=1, dim2=2)
    expected = {
        "pairwise": logits_at_one("pairwise", mean, covariance),
        "exact": exact(mean, covariance),
        "probit": mean / (1 + torch.pi / 8 * variances).sqrt(),
    }
    for name, logits in expected.items():
        same(la.predict(x, link=name).probs, logits.softmax(-1))
        link = Link(name, 1.7)
        tempered = logits_at_one(name, mean / 1.7, covariance / 1.7**2).softmax(-1)
        same(la.predict(x, link=link).probs, tempered)
    same(la.predict(x).probs, expected["pairwise"].softmax(-1))
    la.prior_precision = 1e12
    same(la.predict(x, link=Link("pairwise", 1.7)).probs, (mean / 1.7).softmax(-1))


@pytest.mark.parametrize(("likelihood", "size"), [("binary", 1), ("multilabel", 3)])
def test_labels_that_apply_or_not_are_choices_of_two(likelihood, size):
    la, x, _ = fitted(likelihood, size)
    mean, covariance = la.functional(x)
    variances = covariance.diagonal(dim1=1, dim2=2)
    for name in EXPECTED_SOFTMAX:
        probs = la.predict(x, link=Link(name, 1.3)).mean.view(-1, size)
        for label in range(size):
            logits = torch.stack([torch.zeros(len(x)).double(), mean[:, label] / 1.3], 1)
            sigma = torch.zeros(len(x), 2, 2).double()
            sigma[:, 1, 1] = variances[:, label] / 1.3**2
            same(probs[:, label], logits_at_one(name, logits, sigma).softmax(-1)[:, 1])
    same(la.predict(x).mean, la.predict(x, link="probit").mean, rtol=0, atol=0)
    with mock.patch.object(linearised, "moments", wraps=linearised.moments) as moments:
        la.predict(x, link="exact")
    assert moments.call_args.kwargs["kind"] == "variances"


def bridge_by_definition(mean, covariance, is_normalised):
    """The Dirichlet parameters of one example, class by class."""
    C = len(mean)
    total = sum(covariance[i][j] for i in range(C) for j in range(C))
    rows = [sum(covariance[i]) for i in range(C)]
    mu = [mean[i] - rows[i] * sum(mean) / total for i in range(C)]
    variances = [covariance[i][i] - rows[i] * rows[i] / total for i in range(C)]
    if is_normalised:
        scale = sum(variances) / C / math.sqrt(C / 2)
        mu = [m / math.sqrt(scale) for m in mu]
        variances = [v / scale for v in variances]
    sum_of_inverses = sum(math.exp(-m) for m in mu)
    return [
        (1 - 2 / C + math.exp(m) / C**2 * sum_of_inverses) / v
        for m, v in zip(mu, variances, strict=True)
    ]


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("name", BRIDGES)
def test_bridges_are_those_of_their_definition(name, num_classes):
    mean, covariance = gaussians(num_classes)
    alpha = torch.tensor(
        [
            bridge_by_definition(m, s, name == "bridge_norm")
            for m, s in zip(mean.tolist(), covariance.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    logits = logits_at_one(name, mean, covariance)
    same(logits.softmax(-1), alpha / alpha.sum(-1, keepdim=True))
    same(logits.exp(), alpha)


@pytest.mark.parametrize("name", BRIDGES)
def test_predict_and_tune_take_the_bridges(name):
    la, x, y = fitted()
    same(la.predict(x, link=name).probs, logits_at_one(name, *la.functional(x)).softmax(-1))
    la.tune([(x, y)], link=name)
    assert la.link.name == name
    binary, x, _ = fitted("binary", 1)
    with pytest.raises(
        ValueError, match=r"applies only to mutually exclusive classes.*Use \"probit\" or"
    ):
        binary.predict(x, link=name)


def test_the_default_looks_at_the_outputs():
    classes = Categorical()
    assert links.default_link(classes, torch.Size([8, 100])) == Link("pairwise")
    assert links.default_link(classes, torch.Size([8, 101])) == Link("probit")
    assert links.default_link(classes, torch.Size([8, 5, 10])) == Link("probit")
    assert links.default_link(Bernoulli(), torch.Size([8, 1])) == Link("probit")
    assert links.default_link(MultiLabel(), torch.Size([8, 3])) == Link("probit")
    regression, x, _ = fitted("regression")
    assert links.default_link(regression.likelihood, torch.Size([8, 4])) is None
    assert regression.predict(x).mean.shape == (len(x), 4)


def test_a_chosen_link_is_set_saved_loaded_and_told(tmp_path):
    la, x, y = fitted()
    plain = la.predict(x).probs
    assert la.link is None
    assert "link" not in repr(la)
    la.link = Link("exact", 1.25)
    expected = la.predict(x, link=Link("exact", 1.25)).probs
    same(la.predict(x).probs, expected, rtol=0, atol=0)
    nll = -expected.log().gather(1, y[:, None]).mean().item()
    assert la.evaluate([(x, y)])["nll"] == pytest.approx(nll)
    assert "link: exact at temperature 1.25" in repr(la)
    la.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert again.link == Link("exact", 1.25)
    same(again.predict(x).probs, expected)
    la.link = "probit"
    same(la.predict(x).probs, la.predict(x, link="probit").probs, rtol=0, atol=0)
    la.link = None
    same(la.predict(x).probs, plain, rtol=0, atol=0)


def test_a_link_that_has_no_use_is_refused():
    la, x, y = fitted()
    with pytest.raises(ValueError, match="Unknown link='laplace'"):
        la.predict(x, link="laplace")
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="Pass a positive number"):
            Link("probit", wrong)
    for options in ({"method": "nn"}, {"samples": 5}, {"method": "map"}):
        with pytest.raises(ValueError, match="applies only to the closed form"):
            la.predict(x, link="probit", **options)
    regression, x, y = fitted("regression")
    for call in (
        lambda: regression.predict(x, link="probit"),
        lambda: regression.tune([(x, y)], link="probit"),
        lambda: regression.evaluate([(x, y)], link="probit"),
        lambda: setattr(regression, "link", "probit"),
    ):
        with pytest.raises(ValueError, match="but Gaussian has no classes"):
            call()


def test_the_default_link_does_not_depend_on_earlier_predictions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    data = [(torch.randn(20, 3), torch.randint(4, (20,)))]
    one_position = torch.randn(2, 3)
    five_positions = torch.randn(4, 5, 3)
    la = Laplace(model, prior_precision=0.1).fit(data)
    expected = Laplace(model, prior_precision=0.1).fit(data).predict(five_positions).probs
    la.predict(one_position)
    assert torch.equal(la.predict(five_positions).probs, expected)
