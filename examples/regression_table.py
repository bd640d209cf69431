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


def evaluate(marginals: Distribution, y: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """Compute the NLL, the RMSE, and the coverage and mean width of the 95 % intervals.

    Args:
        marginals: Predictive distributions of standardised targets.
        y: Standardised targets, `[N, 1]`.
        unit: The standard deviation of the targets. The results are in the unit of the table.
    """
    low, high = marginals.icdf(torch.tensor([0.025, 0.975]).view(2, 1, 1))
    nll = unit.log() - marginals.log_prob(y).mean()  # for y in the table's unit, not standardised
    rmse = (marginals.mean - y).square().mean().sqrt() * unit
    covered = ((low <= y) & (y <= high)).float().mean()
    return {
        "NLL (nats)": nll,
        "RMSE": rmse,
        "in the 95 % intervals": covered,
        "mean width": (high - low).mean() * unit,
    }


def evaluate_split(epochs: int) -> dict[str, dict[str, Tensor]]:
    """Train on 240 patients, hold out 60, and evaluate each method on 142."""
    features, progress = load_diabetes(return_X_y=True, scaled=False)
    x = torch.tensor(features).float()
    y = torch.tensor(progress).float()[:, None]
    train, held_out, test = torch.randperm(len(x)).split([240, 60, 142])
    # A single prior precision for all weights requires features and targets of the same scale.
    x = (x - x[train].mean(0)) / x[train].std(0)
    unit = y[train].std()
    y = (y - y[train].mean()) / unit

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
        sigma_train = residuals[train].square().mean().sqrt()
        sigma_held_out = residuals[held_out].square().mean().sqrt()
        mean = model(x[test])
    return {
        "network, σ of its own residuals": evaluate(Normal(mean, sigma_train), y[test], unit),
        "network, σ of 60 held-out patients": evaluate(Normal(mean, sigma_held_out), y[test], unit),
        "Laplace, σ tuned without them": evaluate(la.marginals(x[test]), y[test], unit),
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
    splits = [evaluate_split(options.epochs) for _ in range(options.splits)]
    averages: dict[str, dict[str, float]] = {}
    for method, metrics in splits[0].items():
        averages[method] = {
            name: float(torch.stack([split[method][name] for split in splits]).mean())
            for name in metrics
        }
        nll, rmse, covered, width = averages[method].values()
        print(
            f"{method:34s}: NLL {nll:.3f}, RMSE {rmse:.1f}, {covered:.1%} in the 95 % intervals, "
            f"mean width {width:.0f}"
        )
    return averages


if __name__ == "__main__":
    main()
