"""What posteriors predict over a grid of prior precisions, and the metrics of it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias import metrics
from laplace_debias.experiments.posteriors.fitting import Name
from laplace_debias.experiments.shared.methods import MAP, METHODS
from laplace_debias.experiments.shared.store import Row
from laplace_debias.laplace import Laplace, predict_grids
from laplace_debias.problems import Images

METRICS = ("nll", "ece", "accuracy", "auroc")

Grid = Callable[[Name], Sequence[float | None]]
"""From a method and its draw to the prior precisions δ; the MAP has the single one None."""

Tensors = dict[str, Tensor]
Keep = Callable[[str, Callable[[], Tensors]], Tensors]
"""From a part's name and what computes it to the part: `Store.tensors`, or `not_kept`."""


def not_kept(name: str, compute: Callable[[], Tensors]) -> Tensors:
    """Computes a part of a run that is not stored."""
    return compute()


def same_grid(prior_precisions: Sequence[float]) -> Grid:
    """The same prior precisions for every posterior."""
    return lambda name: (None,) if name[0] == MAP else prior_precisions


def severity_name(severity: int) -> str:
    """What a data set of corrupted test images is called."""
    return f"severity {severity}"


def predict_all(
    model: nn.Module,
    posteriors: Callable[[], Mapping[Name, Laplace]],
    grid: Grid,
    data: Mapping[str, Images],
    chunk_size: int,
    keep: Keep = not_kept,
    progress: bool = False,
) -> dict[str, dict[Name, Tensor]]:
    """Probabilities of the MAP and of every posterior on each data set.

    Args:
        model: The trained network, in evaluation mode.
        posteriors: Returns the fitted posteriors; not called where all predictions are stored.
        grid: The P prior precisions of each posterior.
        data: The data sets by name.
        chunk_size: Images predicted and stored at a time.
        keep: Stores each chunk.
        progress: Whether to show a progress bar.

    Returns:
        By data set, then by method and draw, float64 `[P, n, C]` on the CPU.
    """
    parameter = next(model.parameters())

    @torch.no_grad()
    def of_map(x: Tensor) -> Tensor:
        return model(x.to(parameter)).softmax(1).double().cpu()[None]

    def of_all(images: Images, part: Tensor) -> Tensors:
        fitted = posteriors()
        x, _ = images.batch(part)
        found = {f"{MAP}/0": of_map(x)}
        points = [torch.tensor(grid(name), dtype=torch.float64) for name in fitted]
        predicted = predict_grids(list(fitted.values()), x, points)
        for (method, draw), of_grid in zip(fitted, predicted, strict=True):
            probs = [predictive.probs.double().cpu() for predictive in of_grid]  # type: ignore[attr-defined]
            found[f"{method}/{draw}"] = torch.stack(probs)
        return found

    collected: dict[str, dict[Name, Tensor]] = {}
    total = sum(len(images) for images in data.values())
    with tqdm(total=total, desc="predict", unit="image", disable=not progress) as bar:
        for name, images in data.items():
            parts: list[Tensors] = []
            for number, part in enumerate(torch.arange(len(images)).split(chunk_size)):

                def compute(images: Images = images, part: Tensor = part) -> Tensors:
                    return of_all(images, part)

                parts.append(keep(f"{name.replace(' ', '-')}-{number:04d}", compute))
                bar.update(len(part))
            collected[name] = {
                (method, int(draw)): torch.cat([p[f"{method}/{draw}"] for p in parts], dim=1)
                for method, _, draw in (label.rpartition("/") for label in parts[0])
            }
    return collected


def measured(
    name: str,
    probs: Mapping[Name, Tensor],
    labels: Tensor,
    grid: Grid,
    clean: Mapping[Name, Tensor] | None = None,
) -> list[Row]:
    """Metrics of every posterior on one data set.

    Args:
        name: Of the data set.
        probs: Probabilities `[P, n, C]` by method and draw.
        labels: `[n]`.
        grid: The P prior precisions of each posterior.
        clean: Probabilities `[P, m, C]` on clean images where these are corrupted; None elsewhere.

    Returns:
        A row per method, draw and prior precision (None for the MAP): accuracy, NLL (nats), ECE,
        Brier score and the AUROC of the entropy between clean images (0) and these (1).
    """
    rows = []
    for method, draw in sorted(probs, key=lambda key: (METHODS.index(key[0]), key[1])):
        for index, delta in enumerate(grid((method, draw))):
            of_point = probs[method, draw][index]
            auroc = None
            if clean is not None:
                scores = metrics.entropy(clean[method, draw][index]), metrics.entropy(of_point)
                auroc = metrics.auroc(*scores).item()
            rows.append(
                {
                    "data": name,
                    "method": method,
                    "draw": draw,
                    "prior_precision": delta,
                    **_metrics(of_point, labels),
                    "auroc": auroc,
                }
            )
    return rows


def _metrics(probs: Float[Tensor, "n classes"], labels: Int64[Tensor, " n"]) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(probs, labels).item(),
        "nll": metrics.nll(probs, labels).item(),
        "ece": metrics.ece(probs, labels).item(),
        "brier": metrics.brier(probs, labels).item(),
    }
