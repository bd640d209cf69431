"""What the processes of `processes.py` do: fits and the like of data that they share."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, ShardedBatches

SIZE = 37
BATCH = 16


class Net(nn.Module):
    """A convolution in groups, a depthwise one, a normalisation, two linear layers."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.depthwise = nn.Conv2d(4, 4, 2, groups=4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.depthwise(self.grouped(x).tanh()).tanh().flatten(1)
        return self.head(self.hidden(self.norm(h)).tanh())


def network():
    torch.manual_seed(3)
    net = Net().double().eval()
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net


def examples(size=SIZE):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(size, 2, 4, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=g))


def loader(size=SIZE, batch=BATCH, **options):
    data = examples(size)
    return DataLoader(data, batch_sampler=ShardedBatches(data, batch, **options))


def laplace(curvature="kfac", **options):
    if curvature == "lowrank":
        options["rank"] = 5
    return Laplace(network(), curvature=curvature, **options)


def numbers(la):
    """What a posterior is, whatever eigenvectors stand for it."""
    g = torch.Generator().manual_seed(2)
    V = torch.randn(len(la.mean), 3, generator=g, dtype=torch.float64)
    x, _ = examples(5)[:]
    return {
        "N": la.num_data,
        "C v": la.posterior.curvature @ V,
        "log evidence": la.log_marginal_likelihood(),
        "covariance": la.functional(x)[1],
    }


def fit(rank, curvature, mode, options, fit_options, size=SIZE, batch=BATCH):
    """A fit of shared data."""
    g = torch.Generator().manual_seed(5)
    la = laplace(curvature, **options)
    la.fit(loader(size, batch), mode=mode, generator=g, **fit_options)
    return numbers(la)


def fits(rank, cases, size=SIZE, batch=BATCH):
    """Several of them, one after the other."""
    return [fit(rank, *case, size, batch) for case in cases]
