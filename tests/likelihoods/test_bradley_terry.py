"""Reward models fitted to preferences, against dense derivatives of the rewards."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from laplace_debias import Laplace
from laplace_debias.curvature import BradleyTerry


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    a, b = torch.randn(2, 30, 4, dtype=torch.float64)
    return model, a, b, torch.randint(2, (30,))


def reward_gradients(model, x):
    """Gradients of the rewards in all parameters, `[B, D]`."""
    names = list(dict(model.named_parameters()))

    def rewards(*values):
        return functional_call(model, dict(zip(names, values, strict=True)), (x,))[:, 0]

    values = tuple(parameter.detach() for parameter in model.parameters())
    jacobians = torch.autograd.functional.jacobian(rewards, values)
    return torch.cat([jacobian.flatten(1) for jacobian in jacobians], dim=1)


def test_the_posterior_is_that_of_logistic_differences_of_rewards():
    model, a, b, y = problem()
    la = Laplace(BradleyTerry(model), "binary", curvature="full", prior_precision=0.7)
    la.fit([((a[:11], b[:11]), y[:11]), ((a[11:], b[11:]), y[11:])])
    J = reward_gradients(model, a) - reward_gradients(model, b)
    p = (model(a) - model(b)).sigmoid().detach()
    precision = (J * p * (1 - p)).T @ J + 0.7 * torch.eye(J.shape[1], dtype=torch.float64)
    torch.testing.assert_close(la.posterior.precision.to_dense(), precision)
    mean, variance = la.functional((a, b))
    torch.testing.assert_close(mean, (model(a) - model(b)).detach())
    expected = (J @ torch.linalg.inv(precision) * J).sum(1)
    torch.testing.assert_close(variance.flatten(), expected)
    # Single inputs have a reward, with its own gradient.
    mean, variance = la.functional(a)
    single = reward_gradients(model, a)
    torch.testing.assert_close(mean, model(a).detach())
    expected = (single @ torch.linalg.inv(precision) * single).sum(1)
    torch.testing.assert_close(variance.flatten(), expected)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag"])
def test_every_curvature_predicts_tunes_and_is_saved(curvature, tmp_path):
    model, a, b, y = problem()
    data = [((a, b), y)]
    la = Laplace(BradleyTerry(model), "binary", curvature=curvature).fit(data)
    la.tune(data)
    probs = la.predict((a, b)).probs
    swapped = la.predict((b, a)).probs
    torch.testing.assert_close(probs.flatten() + swapped.flatten(), torch.ones(30).double())
    assert la.evaluate(data)["nll"] > 0
    la.save(tmp_path / "rewards.safetensors")
    loaded = Laplace.load(tmp_path / "rewards.safetensors", BradleyTerry(model))
    torch.testing.assert_close(loaded.predict((a, b)).probs, probs)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_networks_with_several_outputs_are_refused():
    _, a, b, y = problem()
    with pytest.raises(ValueError, match=r"Use a network with one output"):
        Laplace(BradleyTerry(nn.Linear(4, 2).double()), "binary").fit([((a, b), y)])
    with pytest.raises(TypeError, match="model must be Module"):
        BradleyTerry(torch.sigmoid)
