"""What the processes of `processes.py` do with `laplace_debias.training`."""

import torch
from spectra import generator
from torch import nn

from laplace_debias import Laplace
from laplace_debias.training import OnlineCurvature, marginal_likelihood_training


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(rank):
    """Those of one process, as many as its rank and three."""
    made = []
    for number in range(rank + 3):
        g = generator(10 * rank + number)
        x = torch.randn(6, 4, generator=g, dtype=torch.float64)
        made.append((x, torch.randint(3, (6,), generator=g)))
    return made


def online(rank, folder, fisher):
    """The posterior of a process's own batches, and that of its saved and loaded state."""
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
