"""Classification in ten lines: what a trained network predicts for images that show no digits.

Run with `python examples/classification.py`; it takes seconds and downloads nothing.
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from laplace_debias import Laplace


def train_network(data: TensorDataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained as usual."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=50, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()  # Laplace rejects networks with active dropout or batch statistics


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Train a network and run the ten lines; return the printed numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=100, help="epochs of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the network")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    pixels, digits = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(digits))
    train, val, test = random_split(images, [1000, 300, 497])
    model = train_network(train, options.epochs)
    # Images with shuffled pixels are as bright as digits, but show none.
    x_test, y_test = test[:]
    no_digits = [(x_test[:, torch.randperm(64)], y_test)]

    # The ten lines.
    la = Laplace(model, likelihood="classification")
    la.fit(DataLoader(train, batch_size=100))
    held_out = DataLoader(test, batch_size=100)
    ood = {"no_digits": no_digits}
    reports = {"network": la.evaluate(held_out, ood, method="map")}
    tuned = la.tune(DataLoader(val, batch_size=100))  # held-out images choose the prior precision
    reports["Laplace"] = la.evaluate(held_out, ood)
    entropies = la.predict(x_test).entropy()  # a torch.distributions.Categorical
    unsure = entropies.argmax()

    print(f"prior precision {tuned.prior_precision:.3g}, chosen on {len(val)} validation images")
    for name, metrics in reports.items():
        print(
            f"{name}: accuracy {metrics['accuracy']:.3f}, NLL {metrics['nll']:.4f}, "
            f"ECE {metrics['ece']:.4f}; AUROC of its entropy for images that are no digits "
            f"{metrics['auroc_no_digits']:.3f}"
        )
    first, second = la.predict(x_test[unsure, None]).probs[0].topk(2).indices.tolist()
    print(
        f"the test image it is least sure of: a {y_test[unsure]}, taken for {first} or {second} "
        f"with {entropies[unsure]:.2f} nats of entropy"
    )
    return reports


if __name__ == "__main__":
    main()
