"""A likelihood is a loss, whose operators have the scale of the posterior's curvature."""

import hand_likelihoods as hand
import pytest
import torch
from spectra import generator
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from laplace_debias import Laplace, Quadratic
from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher, Hessian

N, POSITIONS = 7, 2


def network(num_outputs):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()
    g = generator(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model.eval()


# For each likelihood, the plain case and the one with most arguments.
MOST_ARGUMENTS = (
    *("class weights and smoothing", "soft, weights, smoothing", "binary", "several labels"),
    *("label weights", "heteroscedastic"),
)
CASES = hand.STANDARD | {name: hand.CASES[name] for name in MOST_ARGUMENTS}


def case(name, shape):
    """The likelihood, a network, inputs of a shape, and targets."""
    likelihood, num_outputs, targets, _ = CASES[name]
    x = torch.randn(*shape, 4, generator=generator(1), dtype=torch.float64)
    return likelihood, network(num_outputs), x, targets(*shape, generator=generator(2))


SHAPES = {"one position": (N,), "positions": (N, POSITIONS)}
cases = pytest.mark.parametrize("name", CASES)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def mean_nll(model, likelihood, x, y):
    """Return the mean loss as a function of the flattened parameters, and these parameters."""
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def mean_loss(theta):
        values = theta.split(sizes)
        parameters = {
            name: value.view_as(parameter)
            for name, value, parameter in zip(names, values, model.parameters(), strict=True)
        }
        outputs = functional_call(model, parameters, (x,)).flatten(0, -2)
        rows = y.flatten(0, outputs.ndim - 3 + x.ndim - 1) if x.ndim > 2 else y
        return likelihood.nll(outputs, rows).sum() / len(x)

    return mean_loss, torch.cat([p.detach().flatten() for p in model.parameters()])


@cases
@shapes
def test_the_hessian_is_that_of_the_mean_negative_log_likelihood(name, shape):
    likelihood, model, x, y = case(name, shape)
    value, theta = mean_nll(model, likelihood, x, y)
    operator = Hessian(model, likelihood, [(x[:4], y[:4]), (x[4:], y[4:])])
    torch.testing.assert_close(operator.to_dense(), hessian(value, theta), rtol=1e-9, atol=1e-9)


@cases
@shapes
def test_ggn_and_ekfac_are_the_curvature_of_the_posterior(name, shape):
    likelihood, model, x, y = case(name, shape)
    batches = [(x, y)]
    la = Laplace(model, likelihood, curvature="full", prior_precision=3.0).fit_batches(batches)
    G = GGN(model, likelihood, batches).to_dense()
    expected = N * G + 3.0 * torch.eye(len(G), dtype=G.dtype)
    precision = la.posterior.precision @ torch.eye(len(G), dtype=G.dtype)
    torch.testing.assert_close(precision, expected, rtol=1e-9, atol=1e-9)
    for kind, curvature in ((KFAC, "kfac"), (EKFAC, "ekfac")):
        la = Laplace(model, likelihood, curvature=curvature).fit_batches(batches)
        blocks = kind(model, likelihood, batches).blocks.blocks
        for name, block in la.posterior.curvature.blocks.items():
            torch.testing.assert_close(blocks[name].to_dense(), block.to_dense())


@cases
def test_the_empirical_fisher_is_that_of_the_gradients(name):
    likelihood, model, x, y = case(name, (N,))
    operator = EmpiricalFisher(model, likelihood, [(x, y)])
    expected = 0
    for n in range(N):
        value, theta = mean_nll(model, likelihood, x[n : n + 1], y[n : n + 1])
        g = torch.func.grad(value)(theta)
        expected = expected + torch.outer(g, g) / N
    torch.testing.assert_close(operator.to_dense(), expected, rtol=1e-9, atol=1e-9)


def test_a_quadratic_of_a_likelihood_has_its_value():
    likelihood, model, x, y = case("regression", (N,))
    value, theta = mean_nll(model, likelihood, x, y)
    quadratic = Quadratic.from_data(model, likelihood, [(x, y)])
    torch.testing.assert_close(quadratic.value, value(theta))


def test_its_sum_is_refused_with_what_to_do():
    likelihood, model, x, y = case("classification", (N,))
    with pytest.raises(
        ValueError, match=r"mean over examples.*multiply the operator by the number"
    ):
        GGN(model, likelihood, [(x, y)], reduction="sum")


def test_targets_that_do_not_fit_are_refused_before_any_work():
    likelihood, model, x, _ = case("classification", (N,))
    with pytest.raises(ValueError, match="must be between 0"):
        GGN(model, likelihood, [(x, torch.full((N,), 3))])
