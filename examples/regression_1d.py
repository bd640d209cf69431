"""Regression with error bars: uncertainty grows where there is no data, also in a gap.

Run with `python examples/regression_1d.py`; picture in results/regression_1d.png.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

NOISE = 0.15  # standard deviation of the targets' noise, which is tuned below


def toy_data() -> tuple[Tensor, Tensor]:
    """Return a noisy sine, with a gap between −1 and 1."""
    x = torch.cat([torch.empty(60).uniform_(-4, -1), torch.empty(60).uniform_(1, 5)])[:, None]
    return x, x.sin() + NOISE * torch.randn_like(x)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, fit, tune the noise, and draw; return the printed numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the network")
    parser.add_argument("--picture", type=Path, default=Path("results/regression_1d.png"))
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    x, y = toy_data()
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(options.steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    # With so few parameters, the full matrix with all interactions between them is feasible.
    la = Laplace(model.eval(), likelihood="regression", curvature="full", sigma=1.0)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=20))
    tuned = la.tune_evidence(sigma=True)  # needs no held-out data

    places = {"at the data": -2.5, "in the gap": 0.0, "outside": 8.0}
    _, variance = la.functional(torch.tensor([[place] for place in places.values()]))
    deviations = dict(zip(places, variance.flatten().sqrt().tolist(), strict=True))
    print(f"noise: tuned {tuned.sigma:.3f}, true {NOISE}; prior {tuned.prior_precision:.3g}")
    for name, value in deviations.items():
        print(
            f"standard deviation of the network's output {name} (x = {places[name]}): {value:.3f}"
        )

    grid = torch.linspace(-6, 8, 400)[:, None]
    marginals = la.marginals(grid)  # includes the noise, so it predicts new targets y
    low, high = marginals.icdf(torch.tensor([0.025, 0.975]).view(2, 1, 1)).squeeze(-1)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.fill_between(grid[:, 0], low, high, alpha=0.3, linewidth=0, label="95 % interval of y")
    ax.plot(grid, marginals.mean, label="mean")
    ax.plot(grid, grid.sin(), "--", color="grey", linewidth=1, label="truth, without noise")
    ax.plot(x, y, ".", color="black", markersize=3, label="data")
    ax.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    ax.legend(frameon=False, loc="lower left")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=150)
    print(f"Picture: {options.picture}")
    return deviations | {"sigma": float(tuned.sigma)}


if __name__ == "__main__":
    main()
