"""Links of many classes: temperatures that share a covariance, in blocks of few examples."""

import math

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.laplace import links
from laplace_debias.laplace.functional.linear_head import LinearHead
from laplace_debias.laplace.links import pairwise, tempered_pairwise

TEMPERATURES = [0.5, 1.0, 1.7, 4.0]


def moments(num_classes, batch, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(*batch, num_classes, generator=generator, dtype=torch.float64)
    root = torch.randn(*batch, num_classes, 4, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT + 50.0  # A large common variance cancels.
    return mean.to(dtype), covariance.to(dtype)


def dense_pairwise(mean, covariance, temperature):
    """The formula, one pair of classes after the other."""
    mu = mean.double() / temperature
    sigma = covariance.double() / temperature**2
    log_probs = torch.empty_like(mu)
    for k in range(len(mu)):
        exponents = []
        for i in range(len(mu)):
            variance = sigma[k, k] + sigma[i, i] - 2 * sigma[k, i]
            exponents.append((mu[i] - mu[k]) / math.sqrt(1 + math.pi / 8 * float(variance)))
        log_probs[k] = -torch.logsumexp(torch.stack(exponents), 0)
    return log_probs


@pytest.mark.parametrize("pairs_at_once", [1, 50, 2**20])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_every_temperature_is_that_of_the_formula_in_any_blocks(batch, pairs_at_once, monkeypatch):
    monkeypatch.setitem(links._PAIRS_AT_ONCE, "cpu", pairs_at_once)
    mean, covariance = moments(6, batch)
    logits = tempered_pairwise(mean, covariance, TEMPERATURES)
    assert logits.shape == (len(TEMPERATURES), *mean.shape)
    rows = mean.reshape(-1, 6)
    matrices = covariance.reshape(-1, 6, 6)
    for temperature, values in zip(TEMPERATURES, logits, strict=True):
        for row, matrix, actual in zip(rows, matrices, values.reshape(-1, 6), strict=True):
            expected = dense_pairwise(row, matrix, temperature)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pairwise(mean, covariance), logits[1], rtol=0, atol=0)


def test_single_precision_keeps_its_digits_beside_a_large_common_variance():
    mean, covariance = moments(6, (5,), torch.float32)
    logits = tempered_pairwise(mean, covariance, TEMPERATURES)
    assert logits.dtype == torch.float32
    for temperature, values in zip(TEMPERATURES, logits, strict=True):
        for row, matrix, actual in zip(mean, covariance, values, strict=True):
            expected = dense_pairwise(row, matrix, temperature)
            torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


def test_the_weights_of_a_last_layer_are_computed_once_for_all_chunks_of_inputs(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double().eval()
    x = torch.randn(30, 4, dtype=torch.float64)
    y = torch.randint(5, (30,))
    whole = Laplace(model, params="last_layer").fit_batches([(x, y)], num_data=30)
    in_chunks = Laplace(model, params="last_layer", memory_bound=2_000)
    in_chunks.fit_batches([(x, y)], num_data=30)
    num_passes = []
    model[0].register_forward_hook(lambda *_: num_passes.append(1))
    num_calls = []
    compute = LinearHead.variances

    def counted(self, *arguments):
        num_calls.append(1)
        return compute(self, *arguments)

    monkeypatch.setattr(LinearHead, "variances", counted)
    _, covariance = in_chunks.functional(x)
    assert len(num_passes) > 3
    assert len(num_calls) == 2  # The weight's and the bias's.
    torch.testing.assert_close(covariance, whole.functional(x)[1], rtol=1e-12, atol=1e-15)
