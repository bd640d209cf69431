"""BackPACK's stream: its convolution rule is replaced, its gaps are filled."""

import oracle
import pytest
import torch
from backpack import backpack, extend
from backpack.extensions import KFLR
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.layers.backends import uses_backpack


def test_a_convolution_with_36_positions_has_the_trace_of_the_exact_ggn():
    """Every position has outputs of its own: `expand` is exact, BackPACK 36 times too large."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.Flatten()).double().eval()
    x = torch.randn(5, 2, 6, 6).double()
    y = torch.randn(5, 108).double()
    exact = oracle.ggn_block(model, x, "regression", "0.weight", 1.0)
    la = Laplace(model, "regression", backend="backpack", sigma=1.0).fit_batches([(x, y)])
    ours = la.posterior.curvature.blocks["0.weight"].to_dense()
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)

    extended, loss = extend(model), extend(nn.MSELoss(reduction="sum"))
    with backpack(KFLR()):
        loss(extended(x), y).backward()
    G, A = model[0].weight.kflr
    # The loss has twice the curvature of ℓ, and is summed over 5 examples instead of averaged.
    ratio = torch.kron(G, A).trace() / (2 * 5 * exact.trace())
    assert ratio.item() == pytest.approx(36)


def test_auto_takes_backpack_unless_convolutions_run_on_a_processor():
    assert uses_backpack("auto", nn.Sequential(nn.Linear(3, 2)))
    convolutional = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    assert not uses_backpack("auto", convolutional)
    assert uses_backpack("backpack", convolutional)
    assert uses_backpack("auto", convolutional.to("meta"))


@pytest.mark.parametrize(
    "layer",
    [
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveMaxPool2d(2),
        nn.AvgPool2d(2),
        nn.BatchNorm2d(3),
        nn.Dropout(0.5),
        nn.ELU(),
        nn.GELU(),
        nn.Hardswish(),
        nn.Identity(),
        nn.LeakyReLU(0.2, inplace=True),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.SiLU(),
        nn.Softplus(),
        nn.Upsample(scale_factor=2),
        nn.ZeroPad2d(1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_parameter_free_layers_pass_the_columns_through(layer):
    """A frozen batch normalisation counts as a layer without parameters."""
    layer.requires_grad_(False)
    tail = [nn.Flatten(), nn.Identity(), nn.LazyLinear(3)]
    model = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.Tanh(), *tail).double().eval()
    x = torch.randn(4, 1, 8, 8).double()
    y = torch.randint(3, (4,))
    model(x)
    fits = [
        Laplace(model, backend=backend).fit_batches([(x, y)]).posterior.curvature.blocks
        for backend in ("backpack", "hooks")
    ]
    for name, block in fits[0].items():
        torch.testing.assert_close(
            block.to_dense(), fits[1][name].to_dense(), rtol=1e-10, atol=1e-14
        )


def test_nested_and_extended_models_are_taken_as_they_are():
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = extend(nn.Sequential(inner, nn.Linear(4, 2))).double().eval()
    x = torch.randn(6, 3).double()
    y = torch.randint(2, (6,))
    fits = [
        Laplace(model, backend=backend).fit_batches([(x, y)]).posterior.curvature.blocks
        for backend in ("backpack", "hooks")
    ]
    for name, block in fits[0].items():
        torch.testing.assert_close(block.to_dense(), fits[1][name].to_dense())
