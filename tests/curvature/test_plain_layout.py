"""Networks that need images as they are: a fit tries `channels_last` first."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g.view(-1).view(g.shape)


def network(double, flatten):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Identity(), nn.Conv2d(4, 5, 2), nn.Identity(), nn.Linear(80, 3)
    layers[1].forward, layers[3].forward = double, flatten
    return nn.Sequential(*layers).eval()


PLAIN = lambda x: 2 * x, lambda x: x.flatten(1)
CASES = {"forward": (PLAIN[0], lambda x: x.view(len(x), -1)), "backward": (Doubled.apply, PLAIN[1])}


@pytest.mark.parametrize("case", CASES)
def test_views_of_images_and_of_gradients_are_fitted(case):
    model, x, y = network(*CASES[case]), torch.randn(6, 2, 7, 7), torch.randint(3, (6,))
    with pytest.raises(RuntimeError, match="view"):
        model(x.contiguous(memory_format=torch.channels_last)).sum().backward()
    fits = [Laplace(of, backend="hooks").fit_batches([(x, y)]) for of in (model, network(*PLAIN))]
    torch.testing.assert_close(fits[0].functional(x), fits[1].functional(x))
