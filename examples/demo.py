"""A comparison of posteriors of a small network: from few examples in two ways, and from all.

The mini-batch posterior takes the directions and the magnitudes of the curvature from the same 32
images, so the magnitudes are too large. The debiased posterior takes the directions from 16 of
these images and the magnitudes from the other 16. How far is each posterior from the posterior of
all 1,000 images?

Run with `make demo`; it takes half a minute. The table and the picture are in results/demo.
"""

import csv
from pathlib import Path

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
MAP, MINI, DEBIASED, FULL = METHODS = ("MAP", "mini-batch", "debiased", "full-batch")
COLOURS = {MAP: "#7F7F7F"} | {
    method: OKABE_ITO[name]
    for method, name in ((MINI, "orange"), (DEBIASED, "blue"), (FULL, "black"))
}

Row = dict[str, str | int | float]


def noisy_digits() -> list[TensorDataset]:
    """Return digits that are corrupted to make them hard: 1,000, 200 and 500 images."""
    raw = load_digits()
    pixels = torch.from_numpy(np.rint(raw.images * (255 / 16)).astype(np.uint8))[:, None]
    images = TensorDataset(corrupt(pixels, severity=5) / 255, torch.from_numpy(raw.target).long())
    order = torch.randperm(len(pixels))
    return [TensorDataset(*images[part]) for part in order[:1700].split([1000, 200, 500])]


def trained(data: TensorDataset) -> nn.Module:
    """Train a network with too many weights for the images, so that it is over-confident."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 24, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 96, 2), nn.ReLU(), nn.Conv2d(96, 96, 1), nn.ReLU()),
        *(nn.Conv2d(96, 10, 1), nn.Flatten()),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def posteriors(model: nn.Module, data: TensorDataset) -> dict[tuple[str, int], Laplace]:
    """Return all fits, by method and draw."""
    found = {}

    def fit(*batches: list[tuple[Tensor, Tensor]]) -> Laplace:
        return Laplace(model, params="weights").fit_batches(*batches, num_data=len(data))

    for draw in range(DRAWS):
        x, y = data[torch.randperm(len(data))[:EXAMPLES]]
        half = EXAMPLES // 2
        found[MINI, draw] = fit([(x, y)])
        found[DEBIASED, draw] = fit([(x[:half], y[:half])], [(x[half:], y[half:])])
    found[FULL, 0] = fit([data[part] for part in torch.arange(len(data)).split(100)])
    return found


def measured(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Compute metrics of predictions on the test images."""
    return {"nll": float(metrics.nll(probs, y)), "ece": float(metrics.ece(probs, y))}


def main() -> dict[str, float]:
    """Train, fit, predict at every prior precision; return mean distances to full-batch."""
    torch.manual_seed(0)
    train, validation, test = noisy_digits()
    model = trained(train)
    x, y = test[:]
    with torch.no_grad():
        at_the_mode = measured(model(x).softmax(1), y)
    rows, tuned = list[Row](), {MAP: [at_the_mode]}
    for (method, draw), la in posteriors(model, train).items():
        for row in la.tune([(x, y)], grid=PRIOR_PRECISIONS, link=LINK).table:
            of_row = {name: row[name] for name in ("prior_precision", "nll")}
            rows.append({"method": method, "draw": draw, **of_row})
        la.tune([validation[:]], grid=PRIOR_PRECISIONS, link=LINK)
        tuned.setdefault(method, []).append(measured(la.predict(x).probs, y))

    folder = Path("results/demo")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train)} images")
    print("At the prior precision of the least validation NLL, on test images:")
    for method, of_method in tuned.items():
        means = {k: sum(row[k] for row in of_method) / len(of_method) for k in ("nll", "ece")}
        print(f"{method:10}  NLL {means['nll']:.3f}  ECE {means['ece']:.3f}")
    full = {row["prior_precision"]: row["nll"] for row in rows if row["method"] == FULL}
    gaps = {
        method: [abs(r["nll"] - full[r["prior_precision"]]) for r in rows if r["method"] == method]
        for method in (MINI, DEBIASED)
    }
    distances = {method: sum(values) / len(values) for method, values in gaps.items()}
    print(
        f"From the same {EXAMPLES} images the debiased posterior's NLL is {distances[DEBIASED]:.3f}"
        f" nats from full-batch's, the mini-batch's {distances[MINI]:.3f}: mean over prior "
        f"precisions and {DRAWS} draws."
    )
    draw_nll(at_the_mode["nll"], rows, folder / "prior_precision.png")
    print(f"Picture: {folder / 'prior_precision.png'}")
    return distances


def draw_nll(at_the_mode: float, rows: list[Row], path: Path) -> None:
    """Draw the NLL against the prior precision, with a line for each posterior."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.axhline(at_the_mode, color=COLOURS[MAP], linestyle="--", label=MAP)
    for method in METHODS[1:]:
        for draw in range(DRAWS):
            chosen = [r for r in rows if (r["method"], r["draw"]) == (method, draw)]
            nll = [row["nll"] for row in chosen]
            label = method if draw == 0 else None
            ax.plot(
                PRIOR_PRECISIONS[: len(nll)], nll, "o-", ms=3, color=COLOURS[method], label=label
            )
    ax.set(xscale="log", xlabel="Prior precision δ", ylabel="NLL (nats) ↓")
    ax.legend(frameon=False)
    style_axes(ax)
    save(figure, path)


if __name__ == "__main__":
    main()
