"""Likelihoods: what rounding does, their predictives, and what they refuse."""

import re

import pytest
import torch
from torch import nn

from laplace_debias.curvature.losses.base import Uniforms
from laplace_debias.curvature.losses.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    likelihood_from,
)
from laplace_debias.curvature.losses.likelihoods.named import LIKELIHOODS_OF_LOSSES


@pytest.mark.parametrize("scale", [30.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_root_survives_saturated_logits(scale, dtype):
    """Probabilities down to underflow, in every order of the classes."""
    logits = scale * torch.randn(200, 7, dtype=dtype)
    logits[:7] = scale * torch.eye(7, dtype=dtype)
    root = Categorical().hessian_root(logits)
    product = torch.einsum("kbi,kbj->bij", root, root)
    p = logits.softmax(-1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    assert root.shape[0] == 6
    torch.testing.assert_close(product, expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_drawn_gradients_are_those_of_labels_with_the_probabilities_of_the_softmax(scale):
    logits = scale * torch.randn(4, 5).double()
    outputs = logits.repeat_interleave(50_000, 0).requires_grad_()
    uniforms = torch.rand(len(outputs), 5).double()
    likelihood = Categorical(ignore_index=2)
    labels = likelihood.sample(outputs.detach(), uniforms)
    nll = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
    (expected,) = torch.autograd.grad(nll, outputs)
    gradients = likelihood.drawn_gradient(outputs.detach(), uniforms)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-15)
    frequencies = torch.nn.functional.one_hot(labels, 5).view(4, -1, 5).double().mean(1)
    p = logits.softmax(-1)
    deviations = (frequencies - p).abs()
    assert (deviations <= 5 * (p * (1 - p) / 50_000).sqrt() + 1e-4).all()


def test_keyed_uniforms_are_uniform_and_independent_of_the_cut():
    like = torch.empty(20_000, 2)
    uniforms = Uniforms(5, 0, 0)(like)
    chunks = [Uniforms(5, 0, first)(like[:7000]) for first in (0, 7000, 14000)]
    assert torch.equal(uniforms, torch.cat(chunks)[:20_000])
    counts = torch.histc(uniforms, 20, 0, 1)
    chi_squared = ((counts - 2000).square() / 2000).sum()
    assert chi_squared < 46  # 99.95 % quantile for 19 degrees of freedom
    column = uniforms[:, 0]
    independent_columns = [
        uniforms[:, 1],
        Uniforms(6, 0, 0)(like)[:, 0],
        Uniforms(5, 1, 0)(like)[:, 0],
        uniforms.roll(1, 0)[:, 0],
    ]
    for independent in independent_columns:
        correlation = torch.corrcoef(torch.stack([column, independent]))[0, 1]
        assert correlation.abs() < 4.5 / 20_000**0.5


def split_mix(seed, keys):
    """A number in (0, 1): SplitMix64's finaliser applied once per key, in Python's integers."""
    state = seed % 2**64
    for key in keys:
        state = (state + (key + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return ((state >> 11) + 0.5) / 2**53


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1, -7])
def test_keyed_uniforms_are_those_of_splitmix64(seed):
    expected = [[split_mix(seed, (2, row, column)) for column in range(4)] for row in range(3, 8)]
    numbers = Uniforms(seed, 2, 3)(torch.empty(5, 4))
    assert numbers.tolist() == expected


def test_keyed_uniforms_of_entries_that_count_are_those_without_the_others():
    counted = torch.tensor([[True, False, True, True], [False, True, False, True]])
    numbers = Uniforms(5, 0, 0)(torch.empty(2, 4), counted)
    without_others = Uniforms(5, 0, 0)(torch.empty(2, 3))
    assert torch.equal(numbers[0, counted[0]], without_others[0])
    assert torch.equal(numbers[1, counted[1]], without_others[1, :2])


def test_probit_predictive_of_a_logit_is_close_to_the_integral():
    """MacKay's approximation of E[sigmoid(f)] is known to be good to about 0.02."""
    mean = torch.linspace(-4, 4, 9).double()[:, None]
    for variance in (0.1, 1.0, 9.0):
        samples = mean + variance**0.5 * torch.randn(200_000, 9, 1).double()
        integral = Bernoulli().mixture(samples).probs
        closed = Bernoulli().predictive(mean, torch.full((9, 1, 1), variance).double()).probs
        assert (closed - integral).abs().max() < 0.025
        assert (Bernoulli().predictive(mean, None).probs - integral).abs().max() > 0.003


def test_categorical_predictive_divides_each_logit_by_its_own_spread():
    mean = torch.tensor([[2.0, -1.0, 0.5]])
    covariance = torch.diag(torch.tensor([8.0, 0.0, 2.0]) / torch.pi)[None]
    logits = torch.tensor([[2 / 2**0.5, -1.0, 0.5 / 1.25**0.5]])
    torch.testing.assert_close(Categorical().predictive(mean, covariance).probs, logits.softmax(-1))
    torch.testing.assert_close(Categorical().predictive(mean, None).probs, mean.softmax(-1))


def test_gaussian_predictive_adds_the_noise():
    likelihood = Gaussian([0.5, 2.0])
    covariance = torch.tensor([[[1.0, 0.2], [0.2, 3.0]]], dtype=torch.float64)
    mean = torch.zeros(1, 2, dtype=torch.float64)
    expected = covariance + torch.diag(torch.tensor([0.25, 4.0], dtype=torch.float64))
    torch.testing.assert_close(likelihood.predictive(mean, covariance).covariance_matrix, expected)
    samples = torch.linalg.cholesky(covariance[0]) @ torch.randn(2, 200_000).double()
    mixture = likelihood.mixture(samples.T[:, None])
    torch.testing.assert_close(mixture.covariance_matrix, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "error", "message"),
    [
        (Categorical(), (4, 3), torch.tensor([0, 1, 2, 3]), ValueError, "between 0 and 2"),
        (Categorical(), (4, 3), torch.tensor([0, 1, 2, -1]), ValueError, "-1"),
        (Categorical(), (4, 3), torch.tensor([-100, 2, 5, 2]), ValueError, "got 5"),
        (Categorical(), (4, 3), torch.tensor([-100, -3, -3, -2]), ValueError, "got -3"),
        (Categorical(), (4, 3), torch.rand(4), TypeError, "integers"),
        (Categorical(), (4, 3), torch.zeros(4, 3, dtype=torch.long), ValueError, "one class label"),
        (Categorical(), (4, 1), torch.zeros(4, dtype=torch.long), ValueError, "binary"),
        (Bernoulli(), (4, 1), torch.tensor([0.0, 1.0, 2.0, 1.0]), ValueError, "0 or 1"),
        (Bernoulli(), (4, 2), torch.zeros(4), ValueError, "classification"),
        (Bernoulli(), (4, 1), torch.zeros(3), ValueError, "shape"),
        (Gaussian(), (4, 2), torch.zeros(4), ValueError, "shape"),
        (Gaussian(), (4, 2), torch.zeros(4, 2, dtype=torch.long), TypeError, "floating"),
        (Gaussian(), (4, 2), torch.full((4, 2), torch.nan), ValueError, "NaN"),
        (Gaussian([1.0, 1.0]), (4, 3), torch.zeros(4, 3), ValueError, "entries"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, outputs, targets, error, message):
    with pytest.raises(error, match=message):
        likelihood.check(torch.zeros(outputs), targets)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), [1.0, 0.0]])
def test_sigma_must_be_positive(sigma):
    with pytest.raises(ValueError, match="sigma"):
        Gaussian(sigma)


def test_likelihood_names():
    assert isinstance(likelihood_from("binary"), Bernoulli)
    assert likelihood_from("regression", 0.3).sigma == 0.3
    with pytest.raises(ValueError, match="Unknown likelihood 'gamma'"):
        likelihood_from("gamma")
    with pytest.raises(ValueError, match="Did you mean 'classification'"):
        likelihood_from("clasification")
    with pytest.raises(ValueError, match="`sigma` applies only"):
        likelihood_from("classification", 0.3)


def test_a_loss_is_translated_to_a_likelihood(unchecked):
    for loss, advice in LIKELIHOODS_OF_LOSSES.items():
        (name, *_) = re.findall('"([a-z]+)"', advice)
        likelihood_from(name)
        with pytest.raises(ValueError, match=re.escape(f"For {loss}, use {advice}.")):
            likelihood_from(getattr(nn, loss)())
