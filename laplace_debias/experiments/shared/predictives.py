"""What the experiments ask of posteriors: probabilities over a grid of δ, and their metrics."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace_debias import metrics
from laplace_debias.laplace import Laplace, predict_grids

Name = tuple[str, int]
"""A method and its draw."""

Grid = Sequence[float | None]
"""Prior precisions; the MAP has none."""

Predict = Callable[[Tensor, Mapping[Name, Grid]], dict[Name, Tensor]]
"""From inputs `[B, ...]` and grids to the probabilities of each posterior, `[P, B, C]`."""


def grid_predict(posteriors: Mapping[Name, Laplace]) -> Predict:
    """Predicts with several posteriors of one model, which share the backward passes.

    Args:
        posteriors: Fitted approximations.
    """

    def predict(x: Tensor, grids: Mapping[Name, Grid]) -> dict[Name, Tensor]:
        points = [torch.tensor(grids[name], dtype=torch.float64) for name in posteriors]
        predicted = predict_grids(list(posteriors.values()), x, points)
        return {
            name: torch.stack([_probabilities(p) for p in of_grid])
            for name, of_grid in zip(posteriors, predicted, strict=True)
        }

    return predict


def map_predict(model: nn.Module) -> Predict:
    """Predicts with the network itself, the same at every prior precision.

    Args:
        model: The trained network, in evaluation mode.
    """
    parameter = next(model.parameters())

    @torch.no_grad()
    def predict(x: Tensor, grids: Mapping[Name, Grid]) -> dict[Name, Tensor]:
        probs = model(x.to(parameter)).softmax(1).double().cpu()
        return {name: probs.expand(len(grid), -1, -1) for name, grid in grids.items()}

    return predict


def classification_metrics(
    probs: Float[Tensor, "n classes"], labels: Int64[Tensor, " n"]
) -> dict[str, float]:
    """Accuracy, NLL (nats), ECE and Brier score of probabilities."""
    functions = {
        "accuracy": metrics.accuracy,
        "nll": metrics.nll,
        "ece": metrics.ece,
        "brier": metrics.brier,
    }
    return {name: function(probs, labels).item() for name, function in functions.items()}


def _probabilities(predictive: Distribution) -> Tensor:
    return predictive.probs.double().cpu()  # type: ignore[attr-defined]
