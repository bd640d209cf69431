"""The decomposition of uncertainty, and scores of it."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from laplace_debias import metrics


def test_epistemic_uncertainty_is_the_mean_divergence_from_the_mixture():
    """The mutual information is computed by another formula, I = E KL(p_s ‖ p̄)."""
    probs = torch.randn(30, 7, 4, dtype=torch.float64).softmax(-1)
    uncertainty = metrics.uncertainty(probs)
    mixture = Categorical(probs.mean(0))
    torch.testing.assert_close(uncertainty.total, mixture.entropy())
    torch.testing.assert_close(uncertainty.aleatoric, Categorical(probs).entropy().mean(0))
    divergence = kl_divergence(Categorical(probs), Categorical(probs.mean(0).expand(30, 7, 4)))
    torch.testing.assert_close(uncertainty.epistemic, divergence.mean(0))


def test_certain_samples_that_agree_or_differ():
    agree = torch.tensor([[1.0, 0.0]]).expand(4, 1, 2)
    assert [entropy.item() for entropy in metrics.uncertainty(agree)] == [0, 0, 0]
    differ = torch.tensor([[0.0], [1.0]])
    total, aleatoric, epistemic = metrics.uncertainty(differ)
    assert (total.item(), aleatoric.item()) == (pytest.approx(math.log(2)), 0)
    assert epistemic.item() == pytest.approx(math.log(2))
    five_examples = metrics.uncertainty(agree.expand(4, 5, 2))
    fields = ", ".join(f"{name}=[5] 0 … 0" for name in ("total", "aleatoric", "epistemic"))
    assert repr(five_examples) == f"Uncertainty({fields})"


def test_scores_are_higher_where_less_is_known():
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    torch.testing.assert_close(metrics.max_probability(probs), torch.tensor([0.1, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_probability_does_not_tie_where_it_rounds_to_one(dtype):
    """Logits are exact in both dtypes, so that the expected score is that of float64."""
    margins = torch.linspace(10, 40, 300, dtype=torch.float64)
    logits = torch.stack([margins, torch.zeros_like(margins), torch.ones_like(margins)], 1).float()
    log_probs = logits.double().log_softmax(1)
    expected = log_probs[:, 1:].logsumexp(1).exp()
    scores = metrics.max_probability(logits.to(dtype).softmax(1))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)
    certain = scores[150:]
    uncertain = scores[:150]
    assert metrics.auroc(certain, uncertain) == 1


def moments(n=6, classes=4, seed=0):
    """Mean and covariance of Gaussian logits with a large common part."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    root = torch.randn(n, classes, classes, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT + 50


def test_the_instability_is_how_often_the_runner_up_wins():
    mean, covariance = moments()
    drawn = torch.distributions.MultivariateNormal(mean, covariance).sample((40_000,))
    for row, (top, second) in enumerate(mean.topk(2).indices.tolist()):
        share = (drawn[:, row, second] > drawn[:, row, top]).double().mean().item()
        instability = metrics.instability(mean, covariance)[row].exp().item()
        assert instability == pytest.approx(share, abs=4 * math.sqrt(share / 40_000))


def test_the_instability_tells_safe_decisions_apart():
    mean = torch.tensor([[60.0, 0.0], [90.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    covariance = torch.eye(2).repeat(4, 1, 1)
    covariance[3] = 1.0  # Both logits move together.
    instability = metrics.instability(mean, covariance)
    assert 0 > instability[0] > instability[1] > -math.inf
    assert instability[2].exp() == pytest.approx(0.5)
    assert instability[3] == -math.inf


def test_what_all_logits_have_in_common_does_not_count():
    mean, covariance = moments()
    drawn = torch.distributions.MultivariateNormal(mean, covariance).sample((40_000,))
    expected = (drawn - drawn.mean(-1, keepdim=True)).var(0).mean(-1)
    torch.testing.assert_close(metrics.logit_variance(covariance), expected, rtol=0.05, atol=0)
    for score in (metrics.logit_variance, lambda sigma: metrics.instability(mean, sigma)):
        torch.testing.assert_close(score(covariance + 1000), score(covariance))


def test_energy_and_the_largest_logit():
    mean, _ = moments()
    expected = [-math.log(sum(math.exp(f) for f in row)) for row in mean.tolist()]
    assert metrics.energy(mean).tolist() == pytest.approx(expected)
    assert metrics.max_logit(mean).tolist() == [-max(row) for row in mean.tolist()]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m, s: metrics.energy([0.0]), TypeError, "`logits` is a list"),
        (lambda m, s: metrics.max_logit(m / 0), ValueError, "`logits` contains NaN or Inf"),
        (lambda m, s: metrics.logit_variance(s[0, 0]), ValueError, r"`covariance` has shape \[4\]"),
        (lambda m, s: metrics.logit_variance(s[..., :3]), ValueError, r"of shape \[6, 3, 3\]"),
        (lambda m, s: metrics.instability(m, s[:2]), ValueError, r"of shape \[6, 4, 4\]"),
        (lambda m, s: metrics.instability(m, [1.0]), TypeError, "`covariance` is a list"),
        (lambda m, s: metrics.instability(m[:, :1], s[:, :1, :1]), ValueError, "two classes"),
    ],
)
def test_scores_refuse_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call(*moments())


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"samples, n, classes"):
        metrics.uncertainty(torch.ones(3))
    with pytest.raises(ValueError, match="at least one sample"):
        metrics.uncertainty(torch.ones(0, 3, 2))
    with pytest.raises(ValueError, match="is empty"):
        metrics.uncertainty(torch.ones(2, 0, 2))
    with pytest.raises(ValueError, match="softmax"):
        metrics.uncertainty(torch.full((2, 3, 2), 2.0))
    with pytest.raises(TypeError, match="tensor"):
        metrics.uncertainty([[0.5, 0.5]])
