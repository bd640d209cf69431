"""Error bars for a table: NLL and coverage of 95 % intervals on held-out patients.

The data is scikit-learn's diabetes data: ten features of 442 patients, and the progression of the
disease in a year. The residuals of a network on its training data are too small, because it was
fitted to them. A constant σ from held-out patients is honest. Laplace, with σ tuned by the marginal
likelihood, needs no held-out patients.

Run with `python examples/regression_table.py`; it takes seconds and downloads nothing.
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace

NAMES = ("NLL (nats)", "RMSE", "in the 95 % intervals", "mean width")


def judged(marginals: Distribution, y: Tensor, unit: Tensor) -> Tensor:
    """Compute NLL (nats), RMSE, coverage and mean width of 95 % intervals, in the table's unit."""
    low, high = marginals.icdf(torch.tensor([0.025, 0.975]).view(2, 1, 1))
    nll = unit.log() - marginals.log_prob(y).mean()  # for y in the table's unit, not standardised
    rmse = (marginals.mean - y).square().mean().sqrt() * unit
    covered = ((low <= y) & (y <= high)).float().mean()
    return torch.stack([nll, rmse, covered, (high - low).mean() * unit])


def one_split(epochs: int) -> dict[str, Tensor]:
    """Train on 240 patients, hold out 60, and evaluate on 142."""
    features, progress = load_diabetes(return_X_y=True, scaled=False)
    x, y = torch.tensor(features).float(), torch.tensor(progress).float()[:, None]
    train, held_out, test = torch.randperm(len(x)).split([240, 60, 142])
    # A single prior precision for all weights requires features and targets of the same scale.
    x = (x - x[train].mean(0)) / x[train].std(0)
    center, unit = y[train].mean(), y[train].std()
    y = (y - center) / unit

    data = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    la = Laplace(model.eval(), likelihood="regression", curvature="full", sigma=1.0).fit(data)
    la.tune_evidence(sigma=True)  # tunes σ and the prior precision without held-out data
    with torch.no_grad():
        residuals = model(x) - y
        own, honest = (residuals[part].square().mean().sqrt() for part in (train, held_out))
        mean = model(x[test])
    return {
        "network, σ of its own residuals": judged(Normal(mean, own), y[test], unit),
        "network, σ of 60 held-out patients": judged(Normal(mean, honest), y[test], unit),
        "Laplace, σ tuned without them": judged(la.marginals(x[test]), y[test], unit),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Evaluate on several splits, since 142 patients are few; return the printed averages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=100, help="epochs of training")
    parser.add_argument("--splits", type=int, default=5, help="random splits to average over")
    parser.add_argument("--seed", type=int, default=0, help="seed of the splits and the networks")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    splits = [one_split(options.epochs) for _ in range(options.splits)]
    found = {}
    for name in splits[0]:
        averages = torch.stack([split[name] for split in splits]).mean(0)
        found[name] = dict(zip(NAMES, averages.tolist(), strict=True))
        nll, rmse, covered, width = found[name].values()
        print(
            f"{name:34s}: NLL {nll:.3f}, RMSE {rmse:.1f}, {covered:.1%} in the 95 % intervals, "
            f"mean width {width:.0f}"
        )
    return found


if __name__ == "__main__":
    main()
