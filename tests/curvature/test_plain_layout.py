"""Networks that need images as they are: a fit tries `channels_last` first."""

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


class Network(nn.Sequential):
    def forward(self, x, doubled=Doubled.apply):
        hidden = doubled(self[0](x)).relu()
        return self[2](self[1](hidden).view(len(x), -1))


def test_views_of_images_and_of_gradients_are_fitted():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 2), nn.Linear(80, 3)
    x, y = torch.randn(6, 2, 7, 7), torch.randint(3, (6,))
    expected = nn.Sequential(
        layers[0], nn.Identity(), nn.ReLU(), layers[1], nn.Flatten(), layers[2]
    )
    expected[1].forward = lambda h: 2 * h
    found = []
    for model in (Network(*layers), expected):
        la = Laplace(model.eval()).fit_batches([(x, y)])
        found.append(la.functional(x))
    torch.testing.assert_close(found[0], found[1])
