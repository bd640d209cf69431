"""A trained network becomes Bayesian: wrap, fit, tune, predict, evaluate, save.

Run with `python examples/quickstart.py`; it takes a few seconds and downloads nothing.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from laplace_debias import Laplace

EPOCHS = 40


def digits() -> TensorDataset:
    """Handwritten digits, 8 × 8 pixels with mean 0 and variance 1, in a random order."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(x))
    return TensorDataset(((x - 0.3053) / 0.3760)[order], torch.tensor(labels)[order])


def network() -> nn.Sequential:
    """A small all-convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 10, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def train_network(model: nn.Module, data: Dataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained until it is over-confident."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    """Train a small network on handwritten digits, and compare its certainty with a posterior's."""
    torch.manual_seed(0)
    training, validation, test = random_split(digits(), [1000, 297, 500])
    model = train_network(network(), training, EPOCHS)

    # The directions of the curvature come from one batch of 64 images, the magnitudes from another.
    loader = DataLoader(training, batch_size=64, shuffle=True)
    la = Laplace(model, params="weights").fit(loader, mode="debiased")
    # These are clean images, and the same images with severe noise.
    x_test, y_test = test[:]
    noisy = x_test + torch.randn(x_test.shape)
    inputs = {"clean": x_test, "noisy": noisy}
    as_trained = {name: la.predict(x, method="map").entropy().mean() for name, x in inputs.items()}

    tuned = la.tune(DataLoader(validation, batch_size=100))
    print(f"prior precision {tuned.prior_precision:.3g}, validation NLL {tuned.value:.4f}")
    for name, x in inputs.items():
        bayesian = la.predict(x).entropy().mean()
        print(
            f"{name}: mean entropy {as_trained[name]:.3f} nats as trained, {bayesian:.3f} Bayesian"
        )

    ood = {"noisy": DataLoader(TensorDataset(noisy, y_test), batch_size=100)}
    report = la.evaluate(DataLoader(test, batch_size=100), ood=ood)
    print({key: round(value, 4) for key, value in report.items()})

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        la.save(path)
        loaded = Laplace.load(path, model)
        torch.testing.assert_close(loaded.predict(x_test).probs, la.predict(x_test).probs)


if __name__ == "__main__":
    main()
