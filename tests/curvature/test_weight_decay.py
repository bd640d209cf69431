"""Weight decay acts on the same parameters in quadratics, measurements and training."""

from functools import partial

import pytest
import torch
from torch import nn

from examples.paper.networks import wide_resnet
from examples.paper.problems import decay_groups
from laplace_debias.curvature import GGN, KFAC, EmpiricalFisher, Hessian
from laplace_debias.quadratic import Quadratic
from laplace_debias.quadratic.objective import decay_mask

DECAY = 0.3


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return perturbed(wide_resnet(10, 1, 10, in_channels=1))


def network() -> nn.Module:
    """Parameters of the same kinds in fewer layers, whose products take a tenth of the time."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    layers = (nn.Conv2d(1, 3, 3, stride=2), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model = nn.Sequential(*layers)
    model(torch.randn(2, 1, 8, 8))
    return perturbed(model)


def perturbed(model: nn.Module) -> nn.Module:
    """Move all parameters, also scales and shifts, from their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def trained_penalty(model: nn.Module) -> torch.Tensor:
    """The change by one optimizer step where the loss is flat, β θ."""
    parameters = list(model.parameters())
    initial = nn.utils.parameters_to_vector(parameters).detach().clone()
    optimizer = torch.optim.SGD(decay_groups(parameters, DECAY), lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    change = initial - nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(initial, parameters)
    optimizer.zero_grad()
    return change


def batch(number: int = 6):
    torch.manual_seed(1)
    return torch.randn(number, 1, 8, 8).double(), torch.randint(10, (number,))


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
        Quadratic.from_data(model, nn.CrossEntropyLoss(), [batch()], curvature, weight_decay=decay)
        for decay in (0.0, DECAY)
    )
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(decayed.gradient - plain.gradient, penalty, **close)
    torch.testing.assert_close(decayed.value - plain.value, penalty @ theta / 2, **close)
    d = torch.randn_like(theta)
    bent = decayed.matrix @ d - plain.matrix @ d
    torch.testing.assert_close(bent, DECAY * (penalty != 0) * d, rtol=1e-6, atol=1e-9)
    everything = Quadratic.from_data(
        model, nn.CrossEntropyLoss(), [batch()], curvature, weight_decay=DECAY, decay_biases=True
    )
    torch.testing.assert_close(everything.gradient - plain.gradient, DECAY * theta, **close)


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(self.scale * outputs, targets)


def test_a_penalty_within_the_loss_is_refused():
    """The derivatives are with respect to the outputs, so the penalty would be missing."""
    model = network()

    def penalised(outputs, targets):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return nn.functional.cross_entropy(outputs, targets) + 0.1 * penalty

    empirical_kfac = partial(KFAC, fisher="empirical")
    for function in (Hessian, GGN, EmpiricalFisher, empirical_kfac, Quadratic.from_data):
        with pytest.raises(ValueError, match=r"depends on the model's parameters.*weight_decay="):
            function(model, penalised, [batch()], reduction="mean")
    GGN(model, ScaledLoss(), [batch()])
    Quadratic.from_data(model, ScaledLoss(), [batch()])


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_the_loss_may_use_parameters_that_are_not_selected():
    """They are constants, so the derivatives are those of the loss with the numbers."""
    model = network()
    model.register_parameter("log_scale", nn.Parameter(torch.tensor(0.5, dtype=torch.float64)))
    names = ["4.weight", "4.bias"]
    for function in (Hessian, GGN, EmpiricalFisher, partial(KFAC, fisher="empirical")):
        matrices = []
        for log_scale in (model.log_scale, model.log_scale.detach()):

            def scaled(outputs, targets, log_scale=log_scale):
                return nn.functional.cross_entropy(log_scale.exp() * outputs, targets)

            operator = function(model, scaled, [batch()], params=names, reduction="mean")
            matrices.append(operator.to_dense())
        torch.testing.assert_close(*matrices, rtol=0, atol=0)
        assert matrices[0].norm() > 0


def test_quadratics_may_use_parameters_that_are_not_selected():
    model = network()
    quadratics = []
    for bias in (model[0].bias, model[0].bias.detach()):

        def shifted(outputs, targets, bias=bias):
            return nn.functional.cross_entropy(outputs * bias.sum(), targets)

        quadratics.append(
            Quadratic.from_data(
                model, shifted, [batch()], params=["4.weight", "4.bias"], reduction="mean"
            )
        )
    torch.testing.assert_close(quadratics[0].gradient, quadratics[1].gradient, rtol=0, atol=0)
    assert quadratics[0].gradient.norm() > 0
