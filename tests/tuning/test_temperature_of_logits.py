"""One rule for the tuned temperature, and the laws of total variance and entropy, beside loops.

The reference takes the same draws as the package, from a generator in the same state, and pushes
them through the network one by one.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

from laplace_debias import Laplace, Link, Mixture
from laplace_debias.laplace.prediction.predictive import DEFAULT_SAMPLES

same = torch.testing.assert_close
SAMPLED = ["glm", "glm-mc", "nn"]
DISCRETE = ["classification", "binary", "multilabel"]
NUM_OUTPUTS = {
    "classification": 3,
    "binary": 1,
    "multilabel": 3,
    "regression": 2,
    "heteroscedastic": 4,
}


def seed(number=0):
    return torch.Generator().manual_seed(number)


def data(likelihood, size=30):
    g = seed(7)
    x = torch.randn(size, 4, generator=g, dtype=torch.float64)
    y = {
        "classification": torch.randint(3, (size,), generator=g),
        "binary": torch.randint(2, (size,), generator=g),
        "multilabel": torch.randint(2, (size, 3), generator=g).double(),
        "regression": torch.randn(size, 2, generator=g, dtype=torch.float64),
        "heteroscedastic": torch.randn(size, 2, generator=g, dtype=torch.float64),
    }[likelihood]
    return x, y


def member(likelihood, number, link=None, hidden=5, **options):
    torch.manual_seed(number)
    outputs = NUM_OUTPUTS[likelihood]
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    if likelihood == "regression":
        options["sigma"] = 0.3 + 0.2 * number
    la = Laplace(model.eval(), likelihood, prior_precision=3.0, **options)
    la.fit([data(likelihood)])
    la.link = link
    return la


def members(likelihood):
    links = [Link("probit", 2.5), None, Link("exact", 0.6)]
    if likelihood in ("regression", "heteroscedastic"):
        links = [None, None, None]
    return [
        member(likelihood, 1, links[0]),
        member(likelihood, 2, links[1], hidden=7, curvature="ekfac"),
        member(likelihood, 3, links[2], params="last_layer"),
    ]


def temperature(la):
    return 1.0 if la.link is None else la.link.temperature


def with_parameters(la, vector):
    """The Bayesian parameters of one vector, by their names."""
    values = {}
    start = 0
    for name in la.param_names:
        parameter = la.model.get_parameter(name).detach()
        values[name] = vector[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return values


def draws_of_outputs(la, x, method, num_samples, generator):
    """The outputs at each draw, `[S, B, C]`, undivided."""
    if method == "glm":
        mean, covariance = la.functional(x)
        values, vectors = torch.linalg.eigh(covariance)
        shape = (num_samples, *mean.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        rows = []
        for n in range(len(x)):
            root = vectors[n] @ values[n].clamp_min(0).sqrt().diag()
            rows.append(mean[n] + noise[:, n] @ root.T)
        return torch.stack(rows, 1)
    outputs = []
    mean_parameters = with_parameters(la, la.mean)
    for vector in la.sample(num_samples, generator):
        drawn = with_parameters(la, vector)
        if method == "nn":
            outputs.append(functional_call(la.model, drawn, (x,)))
            continue
        step = {name: drawn[name] - mean_parameters[name] for name in mean_parameters}
        value, product = jvp(
            lambda p, la=la: functional_call(la.model, p, (x,)), (mean_parameters,), (step,)
        )
        outputs.append(value + product)
    return torch.stack(outputs).detach()


def probabilities(likelihood, logits):
    """Probabilities with classes last: of labels `[..., C, 2]`, of one label `[..., 2]`."""
    if likelihood == "classification":
        return logits.softmax(-1)
    p = logits.sigmoid()
    probs = torch.stack([1 - p, p], -1)
    return probs[..., 0, :] if likelihood == "binary" else probs


def entropy(likelihood, probs):
    """`−Σ p log p` in nats, summed over the labels of an example."""
    entropies = -(probs * probs.log()).sum(-1)
    return entropies.sum(-1) if likelihood == "multilabel" else entropies


def plain(likelihood, predictive):
    """A predictive's probabilities as `probabilities` has them."""
    if likelihood == "classification":
        return predictive.probs
    p = predictive.mean
    return torch.stack([1 - p, p], -1)


@pytest.mark.parametrize("likelihood", DISCRETE)
@pytest.mark.parametrize("method", SAMPLED)
def test_the_temperature_divides_the_logits_of_every_draw(likelihood, method):
    la = member(likelihood, 1, Link("probit", 2.5))
    x, _ = data(likelihood)
    logits = draws_of_outputs(la, x, method, 20, seed()) / 2.5
    probs = probabilities(likelihood, logits)
    predictive = la.predict(x, method, 20, seed())
    same(plain(likelihood, predictive), probs.mean(0))
    uncertainty = la.uncertainty(x, method, 20, seed())
    total = entropy(likelihood, probs.mean(0))
    aleatoric = entropy(likelihood, probs).mean(0)
    same(uncertainty.total, total)
    same(uncertainty.aleatoric, aleatoric)
    same(uncertainty.epistemic, total - aleatoric)
    same(uncertainty.total, predictive.entropy())
    # Without the temperature, the probabilities are different.
    la.link = None
    assert (la.predict(x, method, 20, seed()).mean - predictive.mean).abs().max() > 0.01 or (
        likelihood == "classification"
        and (la.predict(x, method, 20, seed()).probs - predictive.probs).abs().max() > 0.01
    )


@pytest.mark.parametrize("likelihood", DISCRETE)
def test_the_temperature_divides_the_logits_of_the_trained_network(likelihood):
    la = member(likelihood, 1, Link("probit", 2.5))
    x, _ = data(likelihood)
    expected = probabilities(likelihood, la.model(x).detach() / 2.5)
    same(plain(likelihood, la.predict(x, "temperature")), expected)
    tuned = [la for la in members(likelihood) if la.link is not None]
    assert len(tuned) == 2
    probs_of_members = [
        probabilities(likelihood, la.model(x).detach() / la.link.temperature) for la in tuned
    ]
    same(plain(likelihood, Mixture(tuned).predict(x, "temperature")), sum(probs_of_members) / 2)


@pytest.mark.parametrize("likelihood", DISCRETE)
@pytest.mark.parametrize("several", [False, True])
def test_scores_of_the_closed_form_are_those_of_predict(likelihood, several):
    if several:
        predictor = Mixture(members(likelihood))
    else:
        predictor = member(likelihood, 1, Link("probit", 2.5))
    x, y = data(likelihood)
    scores = predictor.uncertainty(x, generator=seed()).scores
    predictive = predictor.predict(x)
    same(scores["entropy"], predictive.entropy())
    if likelihood != "multilabel":
        same(scores["max_probability"], 1 - plain(likelihood, predictive).amax(-1))
    far = {"far": [(3 * x.flip(1), y)]}
    named = predictor.evaluate([(x, y)], far, score="entropy")
    default = predictor.evaluate([(x, y)], far)
    assert named["auroc_far"] == pytest.approx(default["auroc_far"], abs=1e-9)


def test_scores_are_those_of_the_link_that_evaluate_takes():
    la = member("classification", 1)
    x, y = data("classification")
    far = {"far": [(3 * x.flip(1), y)]}
    link = Link("exact", 5.0)
    named = la.evaluate([(x, y)], far, score="entropy", link=link)
    default = la.evaluate([(x, y)], far, link=link)
    assert named["auroc_far"] == pytest.approx(default["auroc_far"], abs=1e-9)
    plain_report = la.evaluate([(x, y)], far, score="entropy")
    assert plain_report["auroc_far"] != pytest.approx(default["auroc_far"], abs=1e-3)


@pytest.mark.parametrize("likelihood", DISCRETE)
@pytest.mark.parametrize("method", SAMPLED)
@pytest.mark.parametrize("num_samples", [None, 15])
def test_a_mixture_takes_the_entropy_of_all_its_draws_apart(likelihood, method, num_samples):
    las = members(likelihood)
    x, _ = data(likelihood)
    generator = seed()
    draws = []
    for la in las:
        outputs = draws_of_outputs(la, x, method, num_samples or DEFAULT_SAMPLES, generator)
        draws.append(probabilities(likelihood, outputs / temperature(la)))
    probs = torch.cat(draws)
    total = entropy(likelihood, probs.mean(0))
    aleatoric = entropy(likelihood, probs).mean(0)
    uncertainty = Mixture(las).uncertainty(x, method, num_samples, seed())
    same(uncertainty.total, total)
    same(uncertainty.aleatoric, aleatoric)
    same(uncertainty.epistemic, total - aleatoric)
    same(uncertainty.scores["mutual_information"], total - aleatoric)


@pytest.mark.parametrize("likelihood", ["regression", "heteroscedastic"])
@pytest.mark.parametrize("method", SAMPLED)
def test_a_mixture_takes_the_variance_of_all_its_draws_apart(likelihood, method):
    las = members(likelihood)
    x, _ = data(likelihood)
    generator = seed()
    means = []
    noise = []
    for la in las:
        outputs = draws_of_outputs(la, x, method, 15, generator)
        means.append(outputs[..., :2])
        if likelihood == "regression":
            noise.append(la.sigma.double().square().expand(means[-1].shape))
        else:
            noise.append(outputs[..., 2:].exp())
    means = torch.cat(means)
    noise = torch.cat(noise)
    epistemic = (means - means.mean(0)).square().mean(0)
    uncertainty = Mixture(las).uncertainty(x, method, 15, seed())
    same(uncertainty.aleatoric, noise.mean(0))
    same(uncertainty.epistemic, epistemic)
    same(uncertainty.total, noise.mean(0) + epistemic)
    same(uncertainty.total, Mixture(las).predict(x, method, 15, seed()).variance)


@pytest.mark.parametrize("likelihood", ["regression", "heteroscedastic"])
def test_a_mixture_in_closed_form_takes_its_variance_apart(likelihood):
    las = members(likelihood)
    x, _ = data(likelihood)
    uncertainty = Mixture(las).uncertainty(x)
    means = torch.stack([la.model(x).detach()[:, :2] for la in las])
    variance_between = (means - means.mean(0)).square().mean(0)
    variance_within = sum(la.functional(x, diagonal=True)[1][:, :2] for la in las) / 3
    same(uncertainty.epistemic, variance_within + variance_between)
    same(uncertainty.total, Mixture(las).predict(x).variance)
    same(uncertainty.aleatoric, uncertainty.total - uncertainty.epistemic)


def test_scores_of_a_mixture_of_classes_are_those_of_its_gaussians():
    """Over half a million draws of the logits, each divided by its member's temperature."""
    las = members("classification")
    x, _ = data("classification", 6)
    scores = Mixture(las).uncertainty(x, generator=seed()).scores
    draws = []
    means = []
    for number, la in enumerate(las):
        mean, covariance = la.functional(x)
        means.append(mean / temperature(la))
        values, vectors = torch.linalg.eigh(covariance)
        noise = torch.randn(200_000, 6, 3, generator=seed(number), dtype=torch.float64)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        steps = torch.einsum("bij,sbj->sbi", root, noise) / temperature(la)
        draws.append(means[-1] + steps)
    logits = torch.cat(draws)
    means = torch.stack(means)
    apart = logits - logits.mean(-1, keepdim=True)
    same(scores["variance"], apart.var(0).mean(-1), rtol=0.02, atol=0)
    first, second = means.mean(0).topk(2).indices.T
    rows = torch.arange(6)
    flipped = (logits[:, rows, second] > logits[:, rows, first]).double().mean(0)
    same(scores["instability"].exp(), flipped, rtol=0, atol=0.005)
    energies = [-math.log(sum(math.exp(f) for f in row)) for row in means.flatten(0, 1).tolist()]
    same(scores["energy"], torch.tensor(energies, dtype=torch.float64).view(3, 6).mean(0))
    same(scores["max_logit"], -means.amax(-1).mean(0))


@pytest.mark.parametrize("likelihood", ["binary", "multilabel"])
def test_scores_of_a_mixture_of_labels_are_those_of_its_gaussians(likelihood):
    las = members(likelihood)
    x, _ = data(likelihood, 6)
    scores = Mixture(las).uncertainty(x, generator=seed()).scores
    means = []
    variances = []
    for la in las:
        mean, variance = la.functional(x, diagonal=True)
        means.append(mean / temperature(la))
        variances.append(variance / temperature(la) ** 2)
    means = torch.stack(means)
    variances = torch.stack(variances)
    total = variances.mean(0) + (means - means.mean(0)).square().mean(0)
    same(scores["variance"], total.mean(-1))
    # The probability that the posterior's logit has the other sign than the mean.
    signed = means * means.mean(0).sign()
    flips = torch.distributions.Normal(signed, variances.sqrt()).cdf(torch.zeros(()).double())
    same(scores["instability"].exp(), flips.mean(0).amax(-1))
    assert "energy" not in scores


@pytest.mark.parametrize("likelihood", DISCRETE)
def test_a_mixture_of_one_has_the_scores_of_its_member(likelihood):
    la = member(likelihood, 1, Link("probit", 2.5))
    x, _ = data(likelihood)
    mixture_scores = Mixture([la]).uncertainty(x, generator=seed()).scores
    scores = la.uncertainty(x, generator=seed()).scores
    assert list(mixture_scores) == list(scores)
    for name, score in scores.items():
        same(mixture_scores[name], score, rtol=0, atol=0)
    mean, covariance = la.functional(x)
    if likelihood == "classification":
        same(scores["energy"], -(mean / 2.5).logsumexp(-1))
        centred = covariance / 2.5**2
        common = centred.sum((-2, -1)) / 3
        same(scores["variance"], (centred.diagonal(dim1=-2, dim2=-1).sum(-1) - common) / 3)
