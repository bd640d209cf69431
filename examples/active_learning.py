"""Active learning: which images to label next, by mutual information (BALD) or at random.

The mutual information of the label and the parameters is high where plausible networks disagree,
not where all of them say that an image is ambiguous (Houlsby et al., 2011; Gal et al., 2017). Both
ways begin with the same images and train the same network anew after every ten new labels.

Run with `python examples/active_learning.py`; picture in results/active_learning.png.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """A small network, from the same start every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def mutual_information(la: Laplace, x: Tensor, samples: int = 100) -> Tensor:
    """Entropy of the mean prediction less the mean entropy of the predictions, nats, `[n]`."""
    mean, covariance = la.functional(x)  # Gaussian logits: drawing them needs no further pass
    spread = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(mean.shape[1]))
    noise = torch.randn(samples, *mean.shape)
    probs = (mean + torch.einsum("nij,snj->sni", spread, noise)).softmax(-1)
    return Categorical(probs.mean(0)).entropy() - Categorical(probs).entropy().mean(0)


def accuracies(way: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Test accuracy before and after each round."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    labelled, pool, test = order.split([options.start, 1200 - options.start, len(x) - 1200])
    curve = []
    for _ in range(options.rounds + 1):
        model = trained(x[labelled], y[labelled], options.steps)
        curve.append(float((model(x[test]).argmax(1) == y[test]).float().mean()))
        if way == "BALD":
            # Few labels leave nothing to hold out: the marginal likelihood needs no other data.
            la = Laplace(model, params="last_layer")
            la.fit(DataLoader(TensorDataset(x[labelled], y[labelled]), batch_size=100))
            la.tune_evidence()
            best = mutual_information(la, x[pool]).argsort(descending=True)[: options.chosen]
        else:
            best = torch.arange(options.chosen)  # the pool is in random order
        rest = torch.ones(len(pool), dtype=torch.bool).scatter(0, best, False)
        labelled, pool = torch.cat([labelled, pool[best]]), pool[rest]
    return curve


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Learn both ways with several seeds; returns their curves, `[seeds][rounds + 1]`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="repetitions with other images")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of labelling")
    parser.add_argument("--start", type=int, default=20, help="labelled images at first")
    parser.add_argument("--chosen", type=int, default=10, help="images labelled in a round")
    parser.add_argument("--steps", type=int, default=100, help="steps of a training")
    parser.add_argument("--picture", type=Path, default=Path("results/active_learning.png"))
    options = parser.parse_args(arguments)
    found = {
        way: [accuracies(way, seed, options) for seed in range(options.seeds)]
        for way in ("random", "BALD")
    }
    labels = [options.start + options.chosen * number for number in range(options.rounds + 1)]
    curves = {way: torch.tensor(values) for way, values in found.items()}
    print("test accuracy, mean of the seeds, with so many labels:")
    for number in range(0, options.rounds + 1, max(1, options.rounds // 5)):
        values = ", ".join(f"{way} {curve[:, number].mean():.3f}" for way, curve in curves.items())
        print(f"{labels[number]:4d}: {values}")
    gain = (curves["BALD"] - curves["random"])[:, -1]
    print(
        f"BALD less random at {labels[-1]} labels: {gain.mean():+.3f}, by seed "
        + ", ".join(f"{value:+.3f}" for value in gain)
    )
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    ax = figure.subplots()
    for (way, curve), colour in zip(curves.items(), ("#7F7F7F", "#0072B2"), strict=True):
        ax.plot(labels, curve.T, color=colour, alpha=0.25, linewidth=1)
        ax.plot(labels, curve.mean(0), color=colour, label=f"{way}, mean of {options.seeds}")
    ax.set(xlabel="Labelled images", ylabel="Test accuracy ↑")
    ax.legend(frameon=False)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=150)
    print(f"Picture: {options.picture}")
    return found


if __name__ == "__main__":
    main()
