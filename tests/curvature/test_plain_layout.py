"""Networks that work only in the plain memory layout; a fit tries `channels_last` first."""

import pytest
import torch
from oracle import close, flat_jacobian, loss_hessian
from torch import nn

from laplace_debias import Laplace


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g.view(-1).view(g.shape)


def double_with_hook(x):
    """Double values and gradients; the hook on the gradients needs the plain layout."""
    z = 2 * x
    if z.requires_grad:
        z.register_hook(lambda g: g.view(-1).view(g.shape))
    return z


def network(double, flatten):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Identity(), nn.Conv2d(4, 5, 2), nn.Identity(), nn.Linear(80, 3)
    layers[1].forward = double
    layers[3].forward = flatten
    return nn.Sequential(*layers).eval()


PLAIN = lambda x: 2 * x, lambda x: x.flatten(1)
CASES = {
    "forward": (PLAIN[0], lambda x: x.view(len(x), -1)),
    "backward": (Doubled.apply, PLAIN[1]),
    "hook": (double_with_hook, PLAIN[1]),
}


@pytest.mark.parametrize("case", CASES)
def test_views_of_images_and_of_gradients_are_fitted(case):
    model = network(*CASES[case])
    x = torch.randn(6, 2, 7, 7)
    y = torch.randint(3, (6,))
    with pytest.raises(RuntimeError, match="view"):
        model(x.contiguous(memory_format=torch.channels_last)).sum().backward()
    fits = [Laplace(net, backend="hooks").fit_batches([(x, y)]) for net in (model, network(*PLAIN))]
    torch.testing.assert_close(fits[0].functional(x), fits[1].functional(x))


class Windows(nn.Module):
    """Features of the windows of an image, which are read in the order of memory."""

    def __init__(self, feature_scale=1.0):
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 3)
        self.features = nn.Linear(18, 3)
        self.features.weight.data *= feature_scale

    def forward(self, x):
        batch, channels, height, width = x.shape
        image = channels * height * width
        channel = height * width
        windows = x.as_strided(
            (batch, height - 2, width - 2, channels, 3, 3), (image, width, 1, channel, width, 1)
        )
        z = self.features(windows.flatten(3)).tanh().mean((1, 2))
        return self.head(self.convolution(x).tanh().mean((2, 3))) + z


class Ramp(nn.Module):
    """A weighted sum of the numbers that a layer returns, in the order of memory.

    Images of size 3 leave the layer one position, which has the same order in every layout.
    """

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        z = self.convolution(x)
        size = z[0].numel()
        z = z.as_strided((len(z), size), (size, 1)) * torch.linspace(1, 2, size).double()
        return self.head(z.unflatten(1, (4, -1)).tanh().mean(2))


class Sloping(torch.autograd.Function):
    """An elementwise product whose backward pass reads the gradients in the order of memory."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(slope)
        return x * slope

    @staticmethod
    def backward(ctx, g):
        _, channels, height, width = g.shape
        strides = channels * height * width, height * width, width, 1
        return g.as_strided(g.shape, strides) * ctx.saved_tensors[0], None


class Sloped(nn.Module):
    """A network whose derivative, but not its outputs, depends on the order of memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.second = nn.Conv2d(4, 3, 2)
        self.head = nn.Linear(3, 3)
        self.register_buffer("slope", torch.rand(4, 4, 4))

    def forward(self, x):
        z = Sloping.apply(self.first(x), self.slope)
        return self.head(self.second(z).tanh().mean((2, 3)))


class Asserting(Sloped):
    """A network that insists on contiguous images."""

    def forward(self, x):
        assert x.is_contiguous()
        return self.head(self.second(self.first(x) * self.slope).tanh().mean((2, 3)))


ORDERS = {
    "inputs": Windows,
    "inputs of a layer whose weights are zero": lambda: Windows(feature_scale=0.0),
    "larger images only": Ramp,
    "gradients": Sloped,
    "an assertion": Asserting,
}


@pytest.mark.parametrize("case", ORDERS)
def test_models_that_read_the_order_of_memory_are_fitted_in_the_plain_layout(case):
    """The reference runs images as they are."""
    model = ORDERS[case]().double().eval()
    sizes = (3, 6) if case == "larger images only" else (6, 6)
    batches = [(torch.randn(5, 2, n, n).double(), torch.randint(3, (5,))) for n in sizes]
    la = Laplace(model, curvature="full", backend="hooks").fit(batches)
    expected = 0
    for x, _ in batches:
        J = flat_jacobian(model, x, la.param_names)
        H = loss_hessian("classification", model(x))
        expected = expected + sum(J[n].T @ H[n] @ J[n] for n in range(5)) / 10
    close(la.posterior.curvature.to_dense(), expected)


def test_images_are_converted_to_channels_last_otherwise():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double().eval()
    converted = []
    model[0].register_forward_hook(
        lambda _, inputs, __: converted.append(
            inputs[0].is_contiguous(memory_format=torch.channels_last)
        )
    )
    x = torch.randn(5, 2, 6, 6).double()
    y = torch.randint(3, (5,))
    Laplace(model, curvature="diag").fit([(x, y)])
    assert any(converted)
