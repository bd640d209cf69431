"""A comparison of posteriors of a small network: from few examples in two ways, and from all.

The mini-batch posterior takes the directions and the magnitudes of the curvature from the same 32
images, so the magnitudes are too large. The debiased posterior takes the directions from 16 of
these images and the magnitudes from the other 16. How far is each posterior from the posterior of
all 1,000 images?

Run with `make demo`; it takes half a minute. The table and the picture are in results/demo.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, Link, metrics
from laplace_debias.report.style import OKABE_ITO, save, style_axes
from laplace_debias.sources.corruptions import corrupt

EPOCHS = 40
DRAWS = 5
EXAMPLES = 32  # in a mini-batch; all 1,000 images are the full batch
PRIOR_PRECISIONS = (0.001, 0.00562, 0.0316, 0.178, 1.0, 5.62, 31.6, 178.0, 1000.0)
LINK = Link("pairwise")  # at temperature 1, so that only the curvature differs
MAP = "MAP"
MINI_BATCH = "mini-batch"
DEBIASED = "debiased"
FULL_BATCH = "full-batch"
COLOURS = {
    MAP: "#7F7F7F",
    MINI_BATCH: OKABE_ITO["orange"],
    DEBIASED: OKABE_ITO["blue"],
    FULL_BATCH: OKABE_ITO["black"],
}

Row = dict[str, Any]
"""A row of the table: `method`, `draw`, `prior_precision`, and `nll` on the test images."""


@dataclass(frozen=True)
class Fit:
    """A posterior that was fitted by a method, and the index of the mini-batch drawn for it."""

    method: str
    draw: int
    la: Laplace


def noisy_digits() -> list[TensorDataset]:
    """Return digits that are corrupted to make them hard: 1,000, 200 and 500 images."""
    raw = load_digits()
    pixels = torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None]
    images = TensorDataset(corrupt(pixels, severity=5) / 255, torch.from_numpy(raw.target).long())
    order = torch.randperm(len(pixels))
    return [TensorDataset(*images[indices]) for indices in order[:1700].split([1000, 200, 500])]


def train_network(data: TensorDataset) -> nn.Module:
    """Train a network with too many weights for the images, so that it is over-confident."""
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 96, 2),
        nn.ReLU(),
        nn.Conv2d(96, 96, 1),
        nn.ReLU(),
        nn.Conv2d(96, 10, 1),
        nn.Flatten(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def fit_posteriors(model: nn.Module, data: TensorDataset) -> list[Fit]:
    """Fit posteriors to mini-batches, by both methods, and one to all data."""
    fits = []
    for draw in range(DRAWS):
        x, y = data[torch.randperm(len(data))[:EXAMPLES]]
        half = EXAMPLES // 2
        mini_batch = Laplace(model, params="weights")
        mini_batch.fit_batches([(x, y)], num_data=len(data))
        debiased = Laplace(model, params="weights")
        debiased.fit_batches([(x[:half], y[:half])], [(x[half:], y[half:])], num_data=len(data))
        fits += [Fit(MINI_BATCH, draw, mini_batch), Fit(DEBIASED, draw, debiased)]
    batches = [data[indices] for indices in torch.arange(len(data)).split(100)]
    full_batch = Laplace(model, params="weights").fit_batches(batches, num_data=len(data))
    return [*fits, Fit(FULL_BATCH, 0, full_batch)]


def evaluate(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Compute metrics of predictions on the test images."""
    return {"nll": float(metrics.nll(probs, y)), "ece": float(metrics.ece(probs, y))}


def distance_from_full_batch(rows: list[Row], method: str) -> float:
    """Average |NLL − NLL of the full batch| over prior precisions and draws, in nats."""
    full_batch = {row["prior_precision"]: row["nll"] for row in rows if row["method"] == FULL_BATCH}
    distances = [
        abs(row["nll"] - full_batch[row["prior_precision"]])
        for row in rows
        if row["method"] == method
    ]
    return sum(distances) / len(distances)


def main() -> dict[str, float]:
    """Train, fit, predict at every prior precision; return mean distances to full-batch."""
    torch.manual_seed(0)
    train, validation, test = noisy_digits()
    model = train_network(train)
    x, y = test[:]
    with torch.no_grad():
        map_metrics = evaluate(model(x).softmax(1), y)
    rows: list[Row] = []
    tuned_metrics = {MAP: [map_metrics], MINI_BATCH: [], DEBIASED: [], FULL_BATCH: []}
    for fit in fit_posteriors(model, train):
        sweep = fit.la.tune([(x, y)], grid=PRIOR_PRECISIONS, link=LINK)
        for score in sweep.table:
            row = {"prior_precision": score["prior_precision"], "nll": score["nll"]}
            rows.append({"method": fit.method, "draw": fit.draw, **row})
        fit.la.tune([validation[:]], grid=PRIOR_PRECISIONS, link=LINK)
        tuned_metrics[fit.method].append(evaluate(fit.la.predict(x).probs, y))

    folder = Path("results/demo")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {len(train)} images")
    print("At the prior precision of the least validation NLL, on test images:")
    for method, draws in tuned_metrics.items():
        nll = sum(draw["nll"] for draw in draws) / len(draws)
        ece = sum(draw["ece"] for draw in draws) / len(draws)
        print(f"{method:10}  NLL {nll:.3f}  ECE {ece:.3f}")
    distances = {
        method: distance_from_full_batch(rows, method) for method in (MINI_BATCH, DEBIASED)
    }
    print(
        f"From the same {EXAMPLES} images the debiased posterior's NLL is {distances[DEBIASED]:.3f}"
        f" nats from full-batch's, the mini-batch's {distances[MINI_BATCH]:.3f}: mean over prior "
        f"precisions and {DRAWS} draws."
    )
    draw_nll(map_metrics["nll"], rows, folder / "prior_precision.png")
    print(f"Picture: {folder / 'prior_precision.png'}")
    return distances


def draw_nll(map_nll: float, rows: list[Row], path: Path) -> None:
    """Draw the NLL against the prior precision, with a line for each posterior."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.axhline(map_nll, color=COLOURS[MAP], linestyle="--", label=MAP)
    for method in (MINI_BATCH, DEBIASED, FULL_BATCH):
        num_draws = 1 if method == FULL_BATCH else DRAWS
        for draw in range(num_draws):
            nll = [row["nll"] for row in rows if row["method"] == method and row["draw"] == draw]
            label = method if draw == 0 else None
            ax.plot(PRIOR_PRECISIONS, nll, "o-", ms=3, color=COLOURS[method], label=label)
    ax.set(xscale="log", xlabel="Prior precision δ", ylabel="NLL (nats) ↓")
    ax.legend(frameon=False)
    style_axes(ax)
    save(figure, path)


if __name__ == "__main__":
    main()
