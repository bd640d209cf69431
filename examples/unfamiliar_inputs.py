"""Entropies of digits and of images that show none: a network, its tempered version, a posterior.

The network is trained on few digits, of which one in ten has a random label. Images with shuffled
pixels serve as unfamiliar inputs. A temperature makes the network's probabilities less certain
everywhere; the posterior is less certain where the training data say little. With clean labels
(`--noise 0`) the three are about equal.

Run with `python examples/unfamiliar_inputs.py`; it takes 15 seconds on one core and downloads
nothing. Picture in results/unfamiliar_inputs.png.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset, random_split

from laplace_debias import Laplace, metrics
from laplace_debias.assessment.temperature import fit_temperature

# The text and the bars are legible on both white and black.
TEXT_COLOUR = "#808080"
DIGITS_COLOUR = "#3a8fd0"
SHUFFLED_COLOUR = "#e8772e"
MAX_ENTROPY = 2.3026  # the entropy of a guess among ten classes, in nats

Scores = dict[str, dict[str, float]]
"""The NLL and the AUROC of each method."""


class Predictions(NamedTuple):
    """Predictive distributions of a method for test digits, and for the digits shuffled."""

    digits: Categorical
    shuffled: Categorical


def noisy_digits(noise: float) -> TensorDataset:
    """Handwritten digits; a share of the labels is drawn at random."""
    pixels, labels = load_digits(return_X_y=True)
    labels = torch.tensor(labels)
    is_random = torch.rand(len(labels)) < noise
    labels[is_random] = torch.randint(10, (int(is_random.sum()),))
    return TensorDataset(torch.tensor(pixels / 16).float(), labels)


def train_network(data: TensorDataset, epochs: int) -> nn.Module:
    """Return your network; here, a small network that is trained as usual."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def predict(seed: int, noise: float, epochs: int) -> tuple[dict[str, Predictions], Tensor]:
    """Return the predictions of each method for test digits, and the labels of these digits."""
    torch.manual_seed(seed)
    train, validation, test = random_split(noisy_digits(noise), [500, 300, 997])
    with torch.enable_grad():
        model = train_network(train, epochs)
    images, labels = test[:]
    shuffled = images.gather(1, torch.rand(images.shape).argsort(1))

    la = Laplace(model, likelihood="classification", params="last_layer")
    la.fit(DataLoader(train, batch_size=100))
    la.tune(DataLoader(validation, batch_size=100))

    validation_images, validation_labels = validation[:]
    temperature = fit_temperature(model(validation_images), validation_labels, "classification")
    logits = model(images)
    shuffled_logits = model(shuffled)
    predictions = {
        "network": Predictions(
            digits=Categorical(logits=logits), shuffled=Categorical(logits=shuffled_logits)
        ),
        "temperature": Predictions(
            digits=Categorical(logits=logits / temperature),
            shuffled=Categorical(logits=shuffled_logits / temperature),
        ),
        "Laplace": Predictions(digits=la.predict(images), shuffled=la.predict(shuffled)),
    }
    return predictions, labels


def compute_scores(predictions: dict[str, Predictions], labels: Tensor) -> Scores:
    """Compute the test NLL, and the AUROC of the entropy for shuffled digits, of each method."""
    return {
        method: {
            "nll": float(metrics.nll(digits.probs, labels)),
            "auroc": float(metrics.auroc(digits.entropy(), shuffled.entropy())),
        }
        for method, (digits, shuffled) in predictions.items()
    }


def draw(predictions: dict[str, Predictions], scores: Scores, path: Path) -> None:
    """Draw a histogram of the entropies for each method."""
    titles = {
        "network": "network",
        "temperature": "temperature scaling",
        "Laplace": "Laplace, last layer",
    }
    bins = torch.linspace(0, MAX_ENTROPY, 24).numpy()
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots(1, len(predictions), sharey=True)
    for ax, (method, (digits, shuffled)) in zip(axes, predictions.items(), strict=True):
        for name, predictive, colour in (
            ("test digits", digits, DIGITS_COLOUR),
            ("shuffled digits", shuffled, SHUFFLED_COLOUR),
        ):
            entropies = predictive.entropy().numpy()
            share = torch.full((len(entropies),), 1 / len(entropies)).numpy()
            ax.hist(entropies, bins, weights=share, color=colour, alpha=0.75, label=name)
        title = f"{titles[method]}\nAUROC {scores[method]['auroc']:.2f}"
        ax.set_title(title, color=TEXT_COLOUR, fontsize=13)
        ax.set_xlabel("entropy (nats)", color=TEXT_COLOUR, fontsize=12)
        ax.tick_params(colors=TEXT_COLOUR, labelsize=11)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["bottom", "left"]].set_color(TEXT_COLOUR)
    axes[0].set_ylabel("share of images", color=TEXT_COLOUR, fontsize=12)
    axes[-1].legend(frameon=False, labelcolor=TEXT_COLOUR, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, transparent=True)


def main(arguments: Sequence[str] | None = None) -> Scores:
    """Compare the methods on a few seeds and draw the first; return the means over seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60, help="epochs of training")
    parser.add_argument("--noise", type=float, default=0.1, help="share of random labels")
    parser.add_argument("--seeds", type=int, default=5, help="number of splits and networks")
    parser.add_argument("--picture", type=Path, default=Path("results/unfamiliar_inputs.png"))
    options = parser.parse_args(arguments)

    scores_by_seed = []
    for seed in range(options.seeds):
        predictions, labels = predict(seed, options.noise, options.epochs)
        scores = compute_scores(predictions, labels)
        scores_by_seed.append(scores)
        for method, values in scores.items():
            print(f"seed {seed}, {method}: NLL {values['nll']:.3f}, AUROC {values['auroc']:.3f}")
        if seed == 0:
            draw(predictions, scores, options.picture)

    means = {
        method: {
            name: sum(scores[method][name] for scores in scores_by_seed) / options.seeds
            for name in ("nll", "auroc")
        }
        for method in scores_by_seed[0]
    }
    for method, values in means.items():
        print(f"mean, {method}: NLL {values['nll']:.3f}, AUROC {values['auroc']:.3f}")
    print(f"Picture: {options.picture}")
    return means


if __name__ == "__main__":
    main()
