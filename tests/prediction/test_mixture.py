"""Mixtures of posteriors against a loop over their members."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Poisson

from laplace_debias import Bernoulli, Categorical, Gaussian, Laplace, Mixture, MultiLabel

LIKELIHOODS = ["classification", "binary", "multilabel", "regression"]


def data(likelihood, size=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=g).double()
    y = {
        "classification": torch.randint(3, (size,), generator=g),
        "binary": torch.randint(2, (size,), generator=g),
        "multilabel": torch.randint(2, (size, 3), generator=g).double(),
        "regression": torch.randn(size, 3, generator=g).double(),
    }[likelihood]
    return x, y


def member(likelihood, seed, hidden=5, **options):
    torch.manual_seed(seed)
    outputs = 1 if likelihood == "binary" else 3
    layers = [nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs)]
    if likelihood == "regression":
        options.setdefault("sigma", 0.5 + seed)
    la = Laplace(nn.Sequential(*layers).double().eval(), likelihood, **options)
    return la.fit([data(likelihood)])


def members(likelihood):
    """Another architecture and another curvature among them."""
    return [
        member(likelihood, 1),
        member(likelihood, 2, hidden=7, curvature="ekfac"),
        member(likelihood, 3, params="last_layer", prior_precision=4.0),
    ]


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("method", ["glm", "map"])
def test_a_mixture_is_the_mean_of_its_members(likelihood, method):
    some, (x, y) = members(likelihood), data(likelihood, 6, seed=1)
    mixed, alone = Mixture(some).predict(x, method), [la.predict(x, method) for la in some]
    assert type(mixed) is type(alone[0])
    assert mixed.batch_shape == alone[0].batch_shape
    if likelihood != "regression":
        target = y if likelihood != "binary" else y.double()
        expected = sum(torch.exp(one.log_prob(target)) for one in alone) / 3
        if likelihood != "multilabel":
            torch.testing.assert_close(mixed.log_prob(target).exp(), expected)
        bare = [getattr(one, "base_dist", one).probs for one in (mixed, *alone)]
        torch.testing.assert_close(bare[0], sum(bare[1:]) / 3)
        return
    mean = sum(one.mean for one in alone) / 3
    torch.testing.assert_close(mixed.mean, mean)
    second = sum(
        one.covariance_matrix + one.mean[:, :, None] * one.mean[:, None, :] for one in alone
    )
    expected = second / 3 - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(mixed.covariance_matrix, expected)


def test_probabilities_near_one_keep_their_digits():
    some = [member("binary", seed) for seed in (1, 2)]
    for la in some:
        la.model[2].bias.data += 60
    some = [Laplace(la.model, "binary", params="last_layer", prior_precision=1e6) for la in some]
    x, y = data("binary")
    mixture = Mixture([la.fit([(x, y)]) for la in some])
    log_prob = mixture.predict(x).log_prob(torch.zeros(len(x)).double())
    assert log_prob.max() < -40
    expected = torch.stack([la.predict(x).log_prob(torch.zeros(len(x)).double()) for la in some])
    torch.testing.assert_close(log_prob, expected.logsumexp(0) - torch.tensor(2.0).log())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_member_is_itself(likelihood):
    la, (x, y) = member(likelihood, 1), data(likelihood, seed=1)
    mixture = Mixture([la])
    mixed, alone = mixture.predict(x).sample, la.predict(x).sample
    torch.manual_seed(0)
    drawn = mixed()
    torch.manual_seed(0)
    torch.testing.assert_close(drawn, alone())
    for key, value in la.evaluate([(x, y)]).items():
        assert mixture.evaluate([(x, y)])[key] == pytest.approx(value, rel=1e-9), key
    parts = [
        one.uncertainty(x, generator=torch.Generator().manual_seed(0)) for one in (mixture, la)
    ]
    for mine, theirs in zip(*parts, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_members_that_disagree_are_uncertain_of_their_parameters(likelihood):
    some, (x, _) = members(likelihood), data(likelihood, seed=1)
    found = Mixture(some).uncertainty(x, samples=400, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    alone = [la.uncertainty(x, samples=400).epistemic.mean() for la in some]
    assert found.epistemic.mean() > 1.02 * sum(alone) / 3


def test_a_regression_takes_its_variance_apart():
    some, (x, _) = members("regression"), data("regression", seed=1)
    found = Mixture(some).uncertainty(x)
    variances = Mixture(some).predict(x).variance
    torch.testing.assert_close(found.total, variances)
    noise = sum(la.likelihood.sigma.double().square() for la in some) / 3
    torch.testing.assert_close(found.aleatoric, noise.expand(found.aleatoric.shape))


def test_evaluation_takes_foreign_inputs():
    some, (x, y) = members("classification"), data("classification", seed=1)
    report = Mixture(some).evaluate([(x, y)], ood={"far": [(5 + x, y)]})
    probs = Mixture(some).predict(x).probs
    assert report["nll"] == pytest.approx(-probs.log()[range(len(y)), y].mean().item())
    assert any("far" in key for key in report)


def test_members_that_do_not_go_together_are_refused(unchecked):
    la = member("classification", 1)
    with pytest.raises(ValueError, match="has no members"):
        Mixture([])
    with pytest.raises(TypeError, match="Member 2 is a Linear"):
        Mixture([la, nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="Member 2 is not fitted"):
        Mixture([la, Laplace(la.model)])
    with pytest.raises(ValueError, match="Member 2 has the likelihood Gaussian"):
        Mixture([la, member("regression", 1)])
    two = Laplace(nn.Linear(4, 2).double().eval())
    two.fit([(data("classification")[0], torch.arange(40) % 2)])
    mixture = Mixture([la, two])
    for call in (mixture.predict, mixture.uncertainty):
        with pytest.raises(ValueError, match=r"shapes, \[\(40, 3\), \(40, 2\)\]. Use members"):
            call(data("classification")[0])


class OwnLikelihood(Categorical):
    """A user's likelihood, whose option a file would hold."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def options(self):
        return {"scale": self.scale}


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (Categorical(), Categorical(ignore_index=0), "ignore_index=0, .*ignore_index=-100"),
        (Categorical(), Categorical(class_weights=[1, 2, 0]), "class_weights=.*class_weights=None"),
        (Categorical(label_smoothing=0.1), Categorical(), "label_smoothing=0.0, .*smoothing=0.1"),
        (MultiLabel(), MultiLabel(positive_weights=[1, 1, 2]), "positive_weights="),
        (Bernoulli(2.0), Bernoulli(3.0), "positive_weight=3.0, .*positive_weight=2.0"),
        (OwnLikelihood(1.0), OwnLikelihood(2.0), "scale=2.0, .*scale=1.0"),
    ],
)
def test_members_with_other_options_of_their_likelihood_are_refused_by_name(first, second, match):
    kind = {Bernoulli: "binary", MultiLabel: "multilabel"}.get(type(first), "classification")
    some = []
    for likelihood in (first, second, copy.deepcopy(first)):
        torch.manual_seed(1)
        model = nn.Linear(4, 1 if kind == "binary" else 3).double().eval()
        some.append(Laplace(model, likelihood).fit([data(kind)]))
    with pytest.raises(ValueError, match=f"member 2 has {match}.*the same options"):
        Mixture(some[:2])
    assert len(Mixture([some[0], some[2]]).members) == 2


def test_noises_of_a_regression_are_each_members_own():
    some = [member("regression", seed) for seed in (1, 2)]
    assert some[0].sigma != some[1].sigma
    assert len(Mixture(some).members) == 2


class Rates(Gaussian):
    """A user's likelihood whose predictive is of counts."""

    def predictive(self, mean, covariance):
        return Poisson(mean.exp())


def test_a_predictive_that_cannot_be_mixed_is_refused_by_name():
    some = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        la = Laplace(nn.Linear(4, 3).double().eval(), Rates(1.0))
        some.append(la.fit([data("regression")]))
    with pytest.raises(NotImplementedError, match="type Poisson is not supported"):
        Mixture(some).predict(data("regression")[0])
