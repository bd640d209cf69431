"""A network, examples and batches for posteriors in function space, per likelihood."""

import torch
from torch import nn

SIZE = 24
NUM_OUTPUTS = {"regression": 2, "classification": 3, "binary": 1}


def network(likelihood):
    torch.manual_seed(0)
    layers = nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, NUM_OUTPUTS[likelihood])
    return nn.Sequential(*layers).double().eval()


def examples(likelihood, size=SIZE, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    if likelihood == "regression":
        return x, torch.randn(size, 2, generator=g, dtype=torch.float64)
    return x, torch.randint(max(2, NUM_OUTPUTS[likelihood]), (size,), generator=g)


def batches(x, y, sizes=(10, 14)):
    """Batches of two sizes."""
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
