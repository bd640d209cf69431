"""The last layer of a timm network: how Laplace changes the metrics on held-out images.

timm's smallest EfficientNet is trained briefly on a few of scikit-learn's digits, enlarged to 32 ×
32 RGB pixels. With your own network, `timm.create_model(..., checkpoint_path=...)` replaces the
training.

Run with `python examples/timm_last_layer.py`; it takes seconds and downloads nothing.
"""

import argparse
from collections.abc import Sequence

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from laplace_debias import Laplace


def drawn_digits() -> TensorDataset:
    """Return the 8 × 8 digits as images `[3, 32, 32]` with values from −1 to 1."""
    pixels, digits = load_digits(return_X_y=True)
    small = torch.tensor(pixels / 8 - 1).float().reshape(-1, 1, 8, 8)
    images = nn.functional.interpolate(small, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.tensor(digits))


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Train briefly, fit and tune the last layer, compare; return the printed numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--architecture", default="test_efficientnet", help="name of a timm architecture"
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs of training")
    parser.add_argument("--train", type=int, default=300, help="training images")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the network")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    digits = drawn_digits()
    sizes = [options.train, 300, len(digits) - options.train - 300]
    train, val, test = random_split(digits, sizes)

    model = timm.create_model(options.architecture, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(options.epochs):
        for x, y in DataLoader(train, batch_size=25, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()  # uses the batch statistics from training

    # The last layer is found by tracing the outputs back, whatever its name is in the architecture.
    la = Laplace(model, params="last_layer").fit(DataLoader(train, batch_size=100))
    held_out = DataLoader(test, batch_size=200)
    reports = {"before": la.evaluate(held_out, method="map")}
    tuned = la.tune(DataLoader(val, batch_size=100))
    reports["after"] = la.evaluate(held_out)
    print(
        f"{options.architecture}: {', '.join(la.param_names)}, {len(la.mean):,} of "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; "
        f"prior precision {tuned.prior_precision:.3g}"
    )
    results = {}
    for name, metrics in reports.items():
        results[name] = {key: float(metrics[key]) for key in ("accuracy", "nll", "ece")}
        shown = ", ".join(f"{key} {value:.4f}" for key, value in results[name].items())
        print(f"{name}: {shown} on {len(test)} held-out images")
    return results


if __name__ == "__main__":
    main()
