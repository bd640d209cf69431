"""A trained network becomes Bayesian: wrap, fit, tune, predict, evaluate, save.

Run with `python examples/quickstart.py`; it takes a few seconds and downloads nothing.
"""

import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from laplace_debias import Laplace
from laplace_debias.problems import DIGITS_RECIPE, corrupt, digits, digits_net, train


def main() -> None:
    """Train a small network on handwritten digits and ask it how sure it is."""
    torch.manual_seed(0)
    data = digits()
    model = digits_net()
    train(model, data.train, DIGITS_RECIPE)

    # Directions of the curvature from one batch of 64 images, magnitudes from another.
    loader = DataLoader(data.train, batch_size=64, shuffle=True)
    la = Laplace(model, params="weights").fit(loader, mode="debiased")
    tuned = la.tune(DataLoader(data.val, batch_size=100))
    print(f"prior precision {tuned.prior_precision:.3g}, validation NLL {tuned.value:.4f}")

    # A clean image and the same one under severe noise.
    clean = data.test
    noisy = clean.with_images(corrupt(clean.images, severity=5, kind="gaussian_noise"))
    for name, images in (("clean", clean), ("noisy", noisy)):
        x, _ = images.batch(torch.arange(100))
        certain = la.predict(x, method="map").entropy().mean()
        bayesian = la.predict(x).entropy().mean()
        print(f"{name}: mean entropy {certain:.3f} nats as trained, {bayesian:.3f} Bayesian")

    report = la.evaluate(
        DataLoader(clean, batch_size=100), ood={"noisy": DataLoader(noisy, batch_size=100)}
    )
    print({key: round(value, 4) for key, value in report.items()})

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        la.save(path)
        again = Laplace.load(path, model)
        torch.testing.assert_close(again.predict(x).probs, la.predict(x).probs)


if __name__ == "__main__":
    main()
