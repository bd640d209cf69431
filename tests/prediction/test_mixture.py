"""Mixtures of posteriors against a loop over their members."""

import copy
import math

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
    """Three posteriors, which differ in architecture, curvature and parameters."""
    return [
        member(likelihood, 1),
        member(likelihood, 2, hidden=7, curvature="ekfac"),
        member(likelihood, 3, params="last_layer", prior_precision=4.0),
    ]


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("method", ["glm", "map"])
def test_a_mixture_is_the_mean_of_its_members(likelihood, method):
    las = members(likelihood)
    x, y = data(likelihood, 6, seed=1)
    mixed = Mixture(las).predict(x, method)
    predictives = [la.predict(x, method) for la in las]
    assert type(mixed) is type(predictives[0])
    assert mixed.batch_shape == predictives[0].batch_shape
    if likelihood != "regression":
        target = y if likelihood != "binary" else y.double()
        expected = sum(torch.exp(predictive.log_prob(target)) for predictive in predictives) / 3
        if likelihood != "multilabel":
            torch.testing.assert_close(mixed.log_prob(target).exp(), expected)
        probs = [
            getattr(predictive, "base_dist", predictive).probs
            for predictive in (mixed, *predictives)
        ]
        torch.testing.assert_close(probs[0], sum(probs[1:]) / 3)
        return
    mean = sum(predictive.mean for predictive in predictives) / 3
    torch.testing.assert_close(mixed.mean, mean)
    second_moments = sum(
        predictive.covariance_matrix + predictive.mean[:, :, None] * predictive.mean[:, None, :]
        for predictive in predictives
    )
    expected = second_moments / 3 - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(mixed.covariance_matrix, expected)


def test_probabilities_near_one_keep_their_digits():
    las = [member("binary", seed) for seed in (1, 2)]
    for la in las:
        la.model[2].bias.data += 60
    las = [Laplace(la.model, "binary", params="last_layer", prior_precision=1e6) for la in las]
    x, y = data("binary")
    mixture = Mixture([la.fit([(x, y)]) for la in las])
    log_prob = mixture.predict(x).log_prob(torch.zeros(len(x)).double())
    assert log_prob.max() < -40
    expected = torch.stack([la.predict(x).log_prob(torch.zeros(len(x)).double()) for la in las])
    torch.testing.assert_close(log_prob, expected.logsumexp(0) - torch.tensor(2.0).log())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_member_is_itself(likelihood):
    la = member(likelihood, 1)
    x, y = data(likelihood, seed=1)
    mixture = Mixture([la])
    sample_mixture = mixture.predict(x).sample
    sample_member = la.predict(x).sample
    torch.manual_seed(0)
    drawn = sample_mixture()
    torch.manual_seed(0)
    torch.testing.assert_close(drawn, sample_member())
    for key, value in la.evaluate([(x, y)]).items():
        assert mixture.evaluate([(x, y)])[key] == pytest.approx(value, rel=1e-9), key
    mixture_uncertainty, uncertainty = (
        predictor.uncertainty(x, generator=torch.Generator().manual_seed(0))
        for predictor in (mixture, la)
    )
    for actual, expected in zip(mixture_uncertainty, uncertainty, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_members_that_disagree_are_uncertain_of_their_parameters(likelihood):
    las = members(likelihood)
    x, _ = data(likelihood, seed=1)
    uncertainty = Mixture(las).uncertainty(
        x, samples=400, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(uncertainty.total, uncertainty.aleatoric + uncertainty.epistemic)
    means = [la.uncertainty(x, samples=400).epistemic.mean() for la in las]
    assert uncertainty.epistemic.mean() > 1.02 * sum(means) / 3


def test_a_regression_takes_its_variance_apart():
    las = members("regression")
    x, _ = data("regression", seed=1)
    uncertainty = Mixture(las).uncertainty(x)
    variances = Mixture(las).predict(x).variance
    torch.testing.assert_close(uncertainty.total, variances)
    noise = sum(la.likelihood.sigma.double().square() for la in las) / 3
    torch.testing.assert_close(uncertainty.aleatoric, noise.expand(uncertainty.aleatoric.shape))


def test_evaluation_takes_foreign_inputs():
    las = members("classification")
    x, y = data("classification", seed=1)
    report = Mixture(las).evaluate([(x, y)], ood={"far": [(5 + x, y)]})
    probs = Mixture(las).predict(x).probs
    assert report["nll"] == pytest.approx(-probs.log()[range(len(y)), y].mean().item())
    assert any("far" in key for key in report)


def test_an_attribute_of_the_members_is_explained():
    mixture = Mixture([Laplace(nn.Linear(2, 3)).fit([(torch.randn(9, 2), torch.arange(9) % 3)])])
    for name in ("tune", "save", "export", "prior_precision"):
        with pytest.raises(AttributeError, match=f"has no '{name}'.* of each of its `members`"):
            getattr(mixture, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = mixture.no_such


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
    la_of_two_classes = Laplace(nn.Linear(4, 2).double().eval())
    la_of_two_classes.fit([(data("classification")[0], torch.arange(40) % 2)])
    mixture = Mixture([la, la_of_two_classes])
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
    las = []
    for likelihood in (first, second, copy.deepcopy(first)):
        torch.manual_seed(1)
        model = nn.Linear(4, 1 if kind == "binary" else 3).double().eval()
        las.append(Laplace(model, likelihood).fit([data(kind)]))
    with pytest.raises(ValueError, match=f"member 2 has {match}.*the same options"):
        Mixture(las[:2])
    assert len(Mixture([las[0], las[2]]).members) == 2


def test_members_need_not_have_options_that_a_file_can_hold():
    """A mixture is not saved, but members were refused because infinity is not valid JSON."""
    la = Laplace(nn.Linear(4, 3).double().eval(), OwnLikelihood(math.inf))
    la.fit([data("classification")])
    assert len(Mixture([la, la]).members) == 2


def test_noises_of_a_regression_are_each_members_own():
    las = [member("regression", seed) for seed in (1, 2)]
    assert las[0].sigma != las[1].sigma
    assert len(Mixture(las).members) == 2


class Rates(Gaussian):
    """A user's likelihood whose predictive is of counts."""

    def predictive(self, mean, covariance):
        return Poisson(mean.exp())


def test_a_predictive_that_cannot_be_mixed_is_refused_by_name():
    las = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        la = Laplace(nn.Linear(4, 3).double().eval(), Rates(1.0))
        las.append(la.fit([data("regression")]))
    with pytest.raises(NotImplementedError, match="type Poisson is not supported"):
        Mixture(las).predict(data("regression")[0])
