"""Uncertainty taken apart, and scores of it."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from laplace_debias import metrics


def test_epistemic_uncertainty_is_the_mean_divergence_from_the_mixture():
    """Mutual information by another formula, I = E KL(p_s ‖ p̄)."""
    probs = torch.randn(30, 7, 4, dtype=torch.float64).softmax(-1)
    found = metrics.uncertainty(probs)
    mixture = Categorical(probs.mean(0))
    torch.testing.assert_close(found.total, mixture.entropy())
    torch.testing.assert_close(found.aleatoric, Categorical(probs).entropy().mean(0))
    divergence = kl_divergence(Categorical(probs), Categorical(probs.mean(0).expand(30, 7, 4)))
    torch.testing.assert_close(found.epistemic, divergence.mean(0))


def test_certain_samples_that_agree_or_differ():
    agree = torch.tensor([[1.0, 0.0]]).expand(4, 1, 2)
    assert [part.item() for part in metrics.uncertainty(agree)] == [0, 0, 0]
    differ = torch.tensor([[0.0], [1.0]])
    total, aleatoric, epistemic = metrics.uncertainty(differ)
    assert (total.item(), aleatoric.item()) == (pytest.approx(math.log(2)), 0)
    assert epistemic.item() == pytest.approx(math.log(2))


def test_scores_are_higher_where_less_is_known():
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    torch.testing.assert_close(metrics.max_probability(probs), torch.tensor([0.1, 0.5]))


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
