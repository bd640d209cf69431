"""Networks of random layers of every kind, against dense Jacobians by autograd."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from laplace_debias import Laplace

D = 3


class Gated(nn.Module):
    """A module whose parameters belong to no layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(D, D))
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return x * torch.sigmoid(x @ self.weight + self.bias)


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Scaled(nn.Module):
    """A module with a keyword argument, and outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(D))
        self.layer = nn.Linear(D, D)

    def forward(self, x, *, factor):
        y = self.layer(x) * self.gamma * factor
        return {"values": y, "others": [y.mean(), y.sum(-1)]}


class OfDict(nn.Module):
    """A module that uses single outputs of `Scaled`."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, x):
        outputs = self.inner(x, factor=torch.ones(D, dtype=x.dtype))
        return outputs["values"] + outputs["others"][1].unsqueeze(-1)


class Merged(nn.Module):
    """Positions that are merged into the examples, for a convolution and for a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.layer = nn.Linear(D, D)
        self.embedding = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        y = self.conv(x.reshape(-1, 1, D)).view(x.shape) + self.embedding
        return self.layer(y.reshape(-1, D)).view(x.shape)


class PositionsFirst(nn.Module):
    """Layers whose first dimension is that of the positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(self.layer(x.transpose(0, 1).contiguous())).transpose(0, 1)


class OutsideOfItsLayer(nn.Module):
    """A layer that is never called, whose weight is used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D, bias=False)

    def forward(self, x):
        return F.linear(x, self.layer.weight.T @ self.layer.weight)


class Recurrent(nn.Module):
    """A recurrent layer, which `vmap` does not follow."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class InPlace(nn.Module):
    """A module that computes in place."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(D))

    def forward(self, x):
        x = x.clone()
        x.mul_(self.gamma)
        x += 1
        return x


class Caching(nn.Module):
    """A module that caches its result for the next pass, as some vision transformers do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, D))
        self.kept = {}

    def forward(self, x):
        length = x.shape[1]
        if length not in self.kept:
            self.kept[length] = 2 * self.table[:length]
        return x + self.kept[length]


class Counting(nn.Module):
    """A module that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(D))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return x * self.gamma


class Head(nn.Module):
    """A linear layer, and a temperature that is a single number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 3)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.layer(x.mean(1)) / self.temperature


LAYERS = [
    *(Gated, Twice, OfDict, Merged, PositionsFirst, OutsideOfItsLayer, Recurrent, InPlace),
    *(Caching, Counting, lambda: parametrizations.spectral_norm(nn.Linear(D, D))),
]


def forget(model):
    """Empty the caches of the `Caching` modules."""
    for module in model.modules():
        if isinstance(module, Caching):
            module.kept = {}


def jacobian(model, x, parameters):
    """Compute the Jacobians `[B, C, D]` one by one, with each example beside its copy."""
    rows = []
    for index in range(len(x)):
        forget(model)
        outputs = model(torch.cat([x[index : index + 1]] * 2))[0]
        for output in outputs:
            gradients = torch.autograd.grad(output, parameters, retain_graph=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    forget(model)
    return torch.stack(rows).unflatten(0, (len(x), -1))


def output_hessian(model, x):
    """The Hessians `[B, C, C]` of cross-entropy in the outputs."""
    p = model(x).softmax(1).detach()
    forget(model)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(s, marks=pytest.mark.slow) for s in range(12, 40))]
)
def test_diagonal_and_covariance_are_those_of_dense_jacobians(seed):
    torch.manual_seed(seed)
    chance = random.Random(seed)
    layers = [chance.choice(LAYERS)() for _ in range(chance.choice([1, 2, 3]))]
    model = nn.Sequential(*layers, Head()).double().eval()
    length = chance.choice([1, 2, 3, 4])
    sizes = chance.choice([[2, 3], [1, 4], [5], [1]])
    batches = [(torch.randn(b, length, D).double(), torch.randint(3, (b,))) for b in sizes]
    la = Laplace(
        model, curvature="diag", prior_precision=0.5, memory_bound=chance.choice([None, 3000])
    ).fit(batches)
    names = [name for name, _ in model.named_parameters()]
    assert la.param_names == names
    parameters = [model.get_parameter(name) for name in names]
    precision = 0.5 + sum(
        torch.einsum("bcd,bce,bed->d", J, output_hessian(model, x), J)
        for x, J in ((x, jacobian(model, x, parameters)) for x, _ in batches)
    )
    x = torch.randn(3, length, D).double()
    J = jacobian(model, x, parameters)
    forget(model)
    variances = la.functional(x, diagonal=True)[1]
    torch.testing.assert_close(variances, (J.square() / precision).sum(-1))
    la = Laplace(
        model,
        curvature=chance.choice(["kfac", "ekfac", "full", "lowrank"]),
        fisher=chance.choice(["mc", "exact", "empirical"]),
    ).fit(batches)
    covariance = la.posterior.covariance.to_dense()
    torch.testing.assert_close(la.functional(x)[1], J @ covariance @ J.mT)
