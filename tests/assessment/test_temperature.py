"""Temperature scaling: the exact optimum, by scipy and by its derivative."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional as F

from laplace_debias.assessment.predictions import ClassPredictions
from laplace_debias.assessment.temperature import BOUNDS, fit_temperature
from laplace_debias.curvature.losses.likelihoods import Categorical


def problem(kind, seed=0, n=80, scale=4.0):
    """Logits of overconfident predictions `z`, and their targets."""
    g = torch.Generator().manual_seed(seed)
    outputs = {"classification": 4, "binary": 1, "multilabel": 3}[kind]
    z = scale * torch.randn(n, outputs, generator=g, dtype=torch.float64)
    if kind == "classification":
        right = z.argmax(1)
        random_class = torch.randint(outputs, (n,), generator=g)
        return z, torch.where(torch.rand(n, generator=g) < 0.6, right, random_class)
    y = (z + 4 * torch.randn(z.shape, generator=g, dtype=torch.float64) > 0).double()
    return z, y[:, 0] if kind == "binary" else y


def nll(z, y, kind, temperature):
    """The mean loss at a temperature, computed example by example."""
    total = 0.0
    for row, label in zip(z, y, strict=True):
        row = row / temperature
        if kind == "classification":
            total += math.log(sum(math.exp(v - row[label]) for v in row))
        else:
            for v, target in zip(row, label.reshape(-1), strict=True):
                total += math.log1p(math.exp(-v)) if target else math.log1p(math.exp(v))
    return total / len(z)


@pytest.mark.parametrize("kind", ["classification", "binary", "multilabel"])
def test_the_optimum_is_that_of_a_search_over_a_loop(kind):
    z, y = problem(kind)
    temperature = fit_temperature(z, y, kind)
    best = minimize_scalar(
        lambda log: nll(z, y, kind, math.exp(log)), bounds=(-5, 5), method="bounded"
    )
    assert math.log(temperature) == pytest.approx(best.x, abs=1e-4)
    assert temperature > 1.5  # The logits were too large.
    assert temperature not in BOUNDS


def test_the_derivative_is_zero_at_the_optimum():
    z, y = problem("classification", seed=1)
    best = math.log(fit_temperature(z, y, "classification"))
    log = torch.tensor(best, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.cross_entropy(z / log.exp(), y), log)
    assert abs(float(slope)) < 1e-10


@pytest.mark.parametrize(("sign", "end"), [(1, 0), (-1, 1)])
def test_examples_that_are_all_right_or_all_wrong_have_their_optimum_at_an_end(sign, end):
    z, _ = problem("classification")
    temperature = fit_temperature(sign * z, z.argmax(1), "classification")
    assert temperature == BOUNDS[end]


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="no validation examples"):
        fit_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "classification")
    with pytest.raises(ValueError, match="not finite"):
        fit_temperature(torch.full((2, 3), torch.nan), torch.zeros(2).long(), "classification")


def test_tempered_classes_are_normalised_and_keep_their_order():
    z, _ = problem("classification")
    log_probs = ClassPredictions(z.log_softmax(1)).scaled(2.5, Categorical()).log_probs
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(len(z), dtype=torch.float64))
    torch.testing.assert_close(log_probs, (z / 2.5).log_softmax(1))
