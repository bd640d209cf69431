"""A likelihood is a loss: operators of it have the units of the posterior's curvature."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from laplace_debias import Bernoulli, Categorical, Gaussian, Laplace, MultiLabel, Quadratic
from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher, Hessian

N, POSITIONS = 7, 2


def generator(seed):
    return torch.Generator().manual_seed(seed)


def network(num_outputs):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()
    g = generator(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model.eval()


def data(likelihood, shape):
    g = generator(1)
    x = torch.randn(*shape, 4, generator=g, dtype=torch.float64)
    if isinstance(likelihood, Categorical):
        y = torch.randint(3, shape, generator=g)
        y[0] = -100
    elif isinstance(likelihood, Gaussian):
        y = torch.randn(*shape, 3, generator=g, dtype=torch.float64)
    else:
        size = 1 if isinstance(likelihood, Bernoulli) else 3
        y = torch.randint(2, (*shape, size), generator=g).double()
    return x, y


CASES = {
    "classification": (Categorical(), 3),
    "regression": (Gaussian(0.5), 3),
    "regression, one sigma an output": (Gaussian([0.5, 1.0, 2.0]), 3),
    "binary": (Bernoulli(), 1),
    "multilabel": (MultiLabel(), 3),
}
SHAPES = {"one position": (N,), "positions": (N, POSITIONS)}
cases = pytest.mark.parametrize(("likelihood", "num_outputs"), CASES.values(), ids=CASES)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def mean_nll(model, likelihood, x, y):
    """The loss that the operators are of, as a function of the flattened parameters."""
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def value(theta):
        parts = theta.split(sizes)
        parameters = {
            name: part.view_as(p)
            for name, part, p in zip(names, parts, model.parameters(), strict=True)
        }
        outputs = functional_call(model, parameters, (x,)).flatten(0, -2)
        rows = y.flatten(0, outputs.ndim - 3 + x.ndim - 1) if x.ndim > 2 else y
        return likelihood.nll(outputs, rows).sum() / len(x)

    return value, torch.cat([p.detach().flatten() for p in model.parameters()])


@cases
@shapes
def test_the_hessian_is_that_of_the_mean_negative_log_likelihood(likelihood, num_outputs, shape):
    model, (x, y) = network(num_outputs), data(likelihood, shape)
    value, theta = mean_nll(model, likelihood, x, y)
    operator = Hessian(model, likelihood, [(x[:4], y[:4]), (x[4:], y[4:])])
    torch.testing.assert_close(operator.to_dense(), hessian(value, theta), rtol=1e-9, atol=1e-9)


@cases
@shapes
def test_ggn_and_ekfac_are_the_curvature_of_the_posterior(likelihood, num_outputs, shape):
    model, (x, y) = network(num_outputs), data(likelihood, shape)
    batches = [(x, y)]
    la = Laplace(model, likelihood, curvature="full", prior_precision=3.0).fit_batches(batches)
    G = GGN(model, likelihood, batches).to_dense()
    expected = N * G + 3.0 * torch.eye(len(G), dtype=G.dtype)
    found = la.posterior.precision @ torch.eye(len(G), dtype=G.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for kind, curvature in ((KFAC, "kfac"), (EKFAC, "ekfac")):
        la = Laplace(model, likelihood, curvature=curvature).fit_batches(batches)
        blocks = kind(model, likelihood, batches).blocks.blocks
        for name, block in la.posterior.curvature.blocks.items():
            torch.testing.assert_close(blocks[name].to_dense(), block.to_dense())


@cases
def test_the_empirical_fisher_is_that_of_the_gradients(likelihood, num_outputs):
    model, (x, y) = network(num_outputs), data(likelihood, (N,))
    operator = EmpiricalFisher(model, likelihood, [(x, y)])
    expected = 0
    for n in range(N):
        value, theta = mean_nll(model, likelihood, x[n : n + 1], y[n : n + 1])
        g = torch.func.grad(value)(theta)
        expected = expected + torch.outer(g, g) / N
    torch.testing.assert_close(operator.to_dense(), expected, rtol=1e-9, atol=1e-9)


def test_a_quadratic_of_a_likelihood_has_its_value():
    likelihood = Gaussian(0.5)
    model, (x, y) = network(3), data(likelihood, (N,))
    value, theta = mean_nll(model, likelihood, x, y)
    quadratic = Quadratic.from_data(model, likelihood, [(x, y)])
    torch.testing.assert_close(quadratic.value, value(theta))


def test_its_sum_is_refused_with_what_to_do():
    likelihood = Categorical()
    with pytest.raises(ValueError, match=r"mean over examples.*multiply the operator by N"):
        GGN(network(3), likelihood, [data(likelihood, (N,))], reduction="sum")


def test_targets_that_do_not_fit_are_refused_before_any_work():
    x, _ = data(Categorical(), (N,))
    with pytest.raises(ValueError, match="must lie in 0"):
        GGN(network(3), Categorical(), [(x, torch.full((N,), 3))])
