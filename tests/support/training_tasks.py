"""Tasks for the processes of `processes.py`, with `laplace_debias.training`."""

import torch
from spectra import generator
from torch import nn

from laplace_debias import Laplace
from laplace_debias.training import OnlineCurvature, marginal_likelihood_training


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(rank):
    """Return the batches of one process; their number is three plus its rank."""
    drawn = []
    for number in range(rank + 3):
        g = generator(10 * rank + number)
        x = torch.randn(6, 4, generator=g, dtype=torch.float64)
        drawn.append((x, torch.randint(3, (6,), generator=g)))
    return drawn


def online(rank, folder, fisher):
    """Return the precision of a training run's posterior, also after saving and loading."""
    model = network()
    options = {"fisher": fisher, "refresh": 2, "every": 1}
    collected = OnlineCurvature(model, **options, generator=generator(rank))
    for x, y in batches(rank):
        collected.update(x, y)
    path = f"{folder}/{rank}.pt"
    torch.save(collected.state_dict(), path)
    resumed = OnlineCurvature(model, **options)
    resumed.load_state_dict(torch.load(path))
    precisions = []
    x, y = batches(0)[0]
    for measured in (collected, resumed):
        measured.update(x, y)
        la: Laplace = measured.posterior(num_data=50)
        precisions.append(la.posterior.precision.to_dense())
    return precisions


def marginal_likelihood(rank):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    return marginal_likelihood_training(
        model, batches(rank), "classification", optimizer=optimizer, epochs=1
    )
