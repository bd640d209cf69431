"""Predictions that can be differentiated in their inputs, against finite differences."""

import pytest
import torch
from oracle import flat_jacobian, functional_covariance
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call, jacrev, vmap

from laplace_debias import Laplace, Mixture
from laplace_debias.curvature import Subnetwork
from laplace_debias.laplace.links import normal_points


def fitted(likelihood="classification", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(30, 4, dtype=torch.float64)
    y = torch.randint(3, (30,))
    if likelihood == "regression":
        y = torch.randn(30, 3, dtype=torch.float64)
        options["sigma"] = 0.5
    return Laplace(model, likelihood, prior_precision=0.8, **options).fit([(x, y)]), x


@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "kfac"},
        {"curvature": "ekfac"},
        {"curvature": "diag"},
        {"curvature": "lowrank", "rank": 5},
        {"curvature": "full"},
        {"params": "last_layer"},
    ],
)
def test_moments_are_those_of_functional_with_their_derivatives(options):
    la, x = fitted(**options)
    x = x[:3].clone().requires_grad_()
    mean, covariance = la.functional(x, differentiable=True)
    expected_mean, expected_covariance = la.functional(x.detach())
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(covariance, expected_covariance)
    assert gradcheck(lambda z: la.functional(z, differentiable=True), x)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("transform", [jacrev, vmap])
def test_transforms_of_torch_func_are_refused(transform, differentiable):
    la, x = fitted()

    def predict(z):
        return la.predict(z.view(-1, 4), differentiable=differentiable).probs

    with pytest.raises(TypeError, match=r"transformed by torch\.func .* differentiable=True"):
        transform(predict)(x[:2])


@pytest.mark.parametrize("link", ["pairwise", "probit", "bridge"])
def test_probabilities_have_the_derivatives_of_finite_differences(link):
    la, x = fitted()
    x = x[:3].clone().requires_grad_()
    probs = la.predict(x, link=link, differentiable=True).probs
    torch.testing.assert_close(probs, la.predict(x.detach(), link=link).probs)
    assert gradcheck(lambda z: la.predict(z, link=link, differentiable=True).probs, x)


def test_regressions_and_mixtures_have_derivatives():
    la, x = fitted("regression")
    x = x[:2].clone().requires_grad_()

    def moments(z):
        predictive = Mixture([la, la]).predict(z, differentiable=True)
        return predictive.mean, predictive.covariance_matrix

    torch.testing.assert_close(moments(x)[1], la.predict(x.detach()).covariance_matrix)
    assert gradcheck(moments, x)


def test_other_predictions_keep_no_graph_and_options_are_refused():
    la, x = fitted()
    x = x[:2].clone().requires_grad_()
    assert not la.predict(x).probs.requires_grad
    with pytest.raises(ValueError, match="the closed form"):
        la.predict(x, samples=3, differentiable=True)
    with pytest.raises(ValueError, match="the closed form"):
        la.predict(x, "map", differentiable=True)
    assert not la.sample_outputs(x, 3, "nn").requires_grad
    for method in ("glm", "glm-mc"):
        with pytest.raises(ValueError, match=r'samples of `method="nn"`.*`functional'):
            la.sample_outputs(x, 3, method, differentiable=True)
    with pytest.raises(ValueError, match="Remove `diagonal="):
        la.functional(x, diagonal=True, differentiable=True)


@pytest.mark.parametrize("make", ["load", "thin", "exact link"])
def test_what_is_made_in_inference_mode_can_be_differentiated_outside(make, tmp_path):
    la, x = fitted()
    link = None
    normal_points.cache_clear()
    with torch.inference_mode():
        if make == "load":
            la.save(tmp_path / "p.safetensors")
            la = Laplace.load(tmp_path / "p.safetensors", la.model)
        elif make == "thin":
            la.thin(x)
        else:
            link = "exact"
            la.predict(x, link=link)
    x = x[:3].clone().requires_grad_()
    probs = la.predict(x, differentiable=True, link=link).probs
    (gradient,) = torch.autograd.grad(probs[:, 0].sum(), x)
    assert gradient.isfinite().all()
    theta = la.posterior.mean.clone().requires_grad_()
    la.posterior.log_prob(theta).backward()


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def fitted_to_sequences():
    """A posterior of a network with a recurrent layer, which vmap cannot run, and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, 2, dtype=torch.float64)
    y = torch.randn(8, 2, dtype=torch.float64)
    return Laplace(LastState().double().eval(), "regression", sigma=1.0).fit([(x, y)]), x


def test_layers_that_cannot_be_vectorised_are_differentiated_one_example_after_the_other():
    la, x = fitted_to_sequences()
    covariance = la.functional(x[:3], differentiable=True)[1]
    torch.testing.assert_close(covariance, la.functional(x[:3])[1])
    inputs = x[:2].clone().requires_grad_()
    assert gradcheck(lambda x: la.functional(x, differentiable=True)[1], inputs)


class Scaled(nn.Module):
    """A network whose outputs are multiplied by a learnt number without dimensions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.layer(x).tanh() * self.log_scale.exp()


@pytest.mark.parametrize("joint", [False, True])
def test_a_parameter_without_dimensions_is_part_of_the_jacobian(joint):
    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(Scaled().double().eval()).fit([(x, torch.randint(3, (20,)))])
    x = x[:3].clone().requires_grad_()
    _, covariance = la.functional(x, joint=joint, differentiable=True)
    J = flat_jacobian(la.model, x.detach(), la.param_names)
    expected = functional_covariance(J, la.posterior.covariance.to_dense())
    if joint:
        rows = J.flatten(0, 1)
        expected = (rows @ la.posterior.covariance.to_dense() @ rows.T).view(3, 3, 3, 3)
    torch.testing.assert_close(covariance.detach(), expected)
    assert gradcheck(lambda z: la.functional(z, joint=joint, differentiable=True), x)


# ------------------------------------------------------------------- networks with sampled weights


def seeded():
    return torch.Generator().manual_seed(7)


def outputs_by_autograd(la, x, samples):
    """The outputs at the sampled parameters, one network after the other."""
    outputs = []
    for theta in la.sample(samples, seeded()):
        values = {}
        for name in la.param_names:
            parameter = la.model.get_parameter(name)
            values[name] = theta[: parameter.numel()].view_as(parameter)
            theta = theta[parameter.numel() :]
        outputs.append(functional_call(la.model, values, x))
    return torch.stack(outputs)


def assert_gradients_through_sampled_networks(la, x):
    # The networks are evaluated in chunks of 8, so 20 samples are three chunks.
    draws = la.sample_outputs(x, 20, "nn", seeded(), differentiable=True)
    expected = outputs_by_autograd(la, x, 20)
    torch.testing.assert_close(draws, expected)
    torch.testing.assert_close(draws, la.sample_outputs(x.detach(), 20, "nn", seeded()))
    cotangent = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(draws, x, cotangent)
    (expected_gradient,) = torch.autograd.grad(expected, x, cotangent)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "kfac"},
        {"curvature": "ekfac"},
        {"curvature": "diag"},
        {"curvature": "lowrank", "rank": 5},
        {"curvature": "full"},
        {"params": "last_layer"},
        {"params": ["0.weight", "2.bias"], "curvature": "full"},
    ],
)
def test_sampled_networks_have_the_gradients_of_autograd(options):
    la, x = fitted(**options)
    assert_gradients_through_sampled_networks(la, x[:3].clone().requires_grad_())
    assert all(parameter.grad is None for parameter in la.model.parameters())


def test_a_sampled_subnetwork_has_the_gradients_of_autograd():
    la, x = fitted()
    subnetwork = Subnetwork(la.model, torch.tensor([0, 3, 17, 40]))
    la = Laplace(subnetwork, curvature="full").fit([(x, torch.randint(3, (30,)))])
    assert_gradients_through_sampled_networks(la, x[:3].clone().requires_grad_())


def test_sampled_layers_that_cannot_be_vectorised_have_the_gradients_of_autograd():
    la, x = fitted_to_sequences()
    assert_gradients_through_sampled_networks(la, x[:2].clone().requires_grad_())


def test_outputs_with_positions_of_sampled_networks_have_the_gradients_of_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(10, 5, 4, dtype=torch.float64)
    la = Laplace(model).fit([(x, torch.randint(3, (10, 5)))])
    assert_gradients_through_sampled_networks(la, x[:2].clone().requires_grad_())
    probs = la.predict(x[:2].clone().requires_grad_(), "nn", differentiable=True).probs
    assert probs.requires_grad


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("members", [1, 2])
def test_averages_over_sampled_networks_have_the_derivatives_of_finite_differences(
    likelihood, members
):
    la, x = fitted(likelihood)
    x = x[:2].clone().requires_grad_()
    predictor = Mixture([la] * members) if members > 1 else la

    def moments(z, differentiable=True):
        predicted = predictor.predict(z, "nn", 10, seeded(), differentiable=differentiable)
        if likelihood == "classification":
            return predicted.probs
        return predicted.mean, predicted.covariance_matrix

    torch.testing.assert_close(moments(x), moments(x.detach(), differentiable=False))
    assert gradcheck(moments, x)
