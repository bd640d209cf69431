"""Weight decay acts on the same parameters in quadratics, measurements and training."""

import dataclasses

import pytest
import torch
from rich.console import Console
from torch import nn

from laplace_debias.curvature.network.weight_decay import decay_groups, decay_mask
from laplace_debias.experiments.bias.cuts import cut_along
from laplace_debias.experiments.optimisation import hessian_free as hf
from laplace_debias.experiments.shared import setup
from laplace_debias.experiments.shared.judge import Judge
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.experiments.shared.setup import Trained, load_trained
from laplace_debias.experiments.shared.store import Store
from laplace_debias.problems import get_problem, training, wide_resnet
from laplace_debias.quadratic import Quadratic

DECAY = 0.3
WRN = get_problem("wrn101-digits")


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return perturbed(wide_resnet(10, 1, 10, in_channels=1))


def network() -> nn.Module:
    """Parameters of the same kinds in fewer layers, whose products take a tenth of the time."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    layers = (nn.Conv2d(1, 3, 3, stride=2), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model = nn.Sequential(*layers)
    model(WRN.data().train.batch(torch.arange(2))[0])
    return perturbed(model)


def perturbed(model: nn.Module) -> nn.Module:
    """Scales and shifts differ from their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def trained_penalty(model: nn.Module) -> torch.Tensor:
    """The change that a step of the recipe's optimizer makes where the loss is flat, β θ."""
    recipe = dataclasses.replace(WRN.recipe, weight_decay=DECAY, momentum=0.0)
    parameters = list(model.parameters())
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    optimizer = training._optimizer(parameters, recipe)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    change = before - nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(before, parameters)
    optimizer.zero_grad()
    return change


def batch(number: int = 6):
    x, y = WRN.data().train.batch(torch.arange(number))
    return x.double(), y


def test_the_mask_is_what_training_shrinks():
    model = resnet()
    mask = decay_mask(model.parameters())
    assert torch.equal(mask, trained_penalty(model) != 0)
    assert 0 < (~mask).sum() < mask.sum()
    # Scales of normalisations are called `weight` too.
    scales = [p for name, p in model.named_parameters() if name.endswith("norm1.weight")]
    assert scales
    decayed = {id(p) for p in decay_groups(model.parameters(), DECAY)[0]["params"]}
    assert not decayed & {id(p) for p in scales}


@pytest.mark.parametrize("curvature", ["ggn", pytest.param("hessian", marks=pytest.mark.slow)])
def test_quadratics_have_the_penalty_of_training(curvature):
    model = network()
    penalty = trained_penalty(model)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    plain, decayed = (
        Quadratic.from_data(model, WRN.loss, [batch()], curvature, weight_decay=decay)
        for decay in (0.0, DECAY)
    )
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(decayed.gradient - plain.gradient, penalty, **close)
    torch.testing.assert_close(decayed.value - plain.value, penalty @ theta / 2, **close)
    d = torch.randn_like(theta)
    bent = decayed.matrix @ d - plain.matrix @ d
    torch.testing.assert_close(bent, DECAY * (penalty != 0) * d, rtol=1e-6, atol=1e-9)
    everything = Quadratic.from_data(
        model, WRN.loss, [batch()], curvature, weight_decay=DECAY, decay_biases=True
    )
    torch.testing.assert_close(everything.gradient - plain.gradient, DECAY * theta, **close)


def test_cuts_and_the_judge_have_it_too():
    model = network()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    value = trained_penalty(model) @ theta / 2
    trained = Trained(WRN, model, WRN.data(), DECAY)
    V = torch.eye(len(theta), 2, dtype=torch.float64)
    plain, decayed = (cut_along(trained, batch(), "ggn", decay, V) for decay in (0.0, DECAY))
    torch.testing.assert_close(decayed.value - plain.value, value, rtol=1e-9, atol=0)
    few = WRN.data().train.subset(torch.arange(5))
    losses = [Judge(model, few, few, decay, 5)()["train_loss"] for decay in (0.0, DECAY)]
    assert losses[1] - losses[0] == pytest.approx(float(value), rel=1e-9)


def test_hessian_free_decays_the_weights_alone(monkeypatch):
    seen = []

    class SeenError(Exception):
        pass

    def spy(groups, **options):
        seen.extend(groups)
        raise SeenError

    monkeypatch.setattr(hf, "DebiasedHessianFree", spy)
    settings = hf.HessianFreeSettings(problem="wrn101-digits", progress=False, device="cpu")
    with pytest.raises(SeenError):
        hf.train_run(WRN, WRN.data(), settings, hf.DAMPED, hf.SINGLE, 0)
    assert [group["weight_decay"] for group in seen] == [5e-4, 0.0]
    assert {p.dim() for p in seen[0]["params"]} == {2, 4}
    assert {p.dim() for p in seen[1]["params"]} == {1}


@pytest.mark.parametrize("name", ["vit-cifar10", "vit-little-imagenet"])
def test_decoupled_decay_is_no_penalty(name):
    recipe = get_problem(name).recipe
    assert recipe.weight_decay > 0
    assert recipe.penalty == 0
    assert WRN.recipe.penalty == WRN.recipe.weight_decay > 0


def test_a_network_trained_with_decoupled_decay_has_no_beta(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "trained_model", lambda *_: resnet())
    for optimizer, expected in (("nadamw", 0.0), ("sgd", 0.05)):
        settings = setup.ExperimentSettings(
            output=tmp_path / optimizer,
            problem="wrn101-digits",
            recipe=RecipeChanges(optimizer=optimizer, weight_decay=0.05),
            device="cpu",
        )
        trained = load_trained(settings, Store(settings.output), Console())
        assert trained.weight_decay == expected
