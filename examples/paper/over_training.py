"""Figure 21: the bias of mini-batch quadratics over the course of training."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from examples.paper.common import Row, load, write
from examples.paper.plots import trend_figure
from examples.paper.problems import get_problem
from examples.paper.quadratics import BiasSettings, bias_rows, bias_summary


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """The epochs and mini-batches to measure; the network is trained here.

    Attributes:
        num_checkpoints: The number of epochs at which the bias is measured, spaced evenly on a
            logarithmic scale.
        batch_size: Examples of a mini-batch.
    """

    output: Path = Path("results/over_training")
    num_checkpoints: int = 6
    batch_size: int = 128
    draws: int = 3


def run(settings: Settings) -> list[Row]:
    """Train, and measure the bias at several epochs."""
    if settings.checkpoint is not None:
        raise ValueError("checkpoint is one point of a training: leave it out")
    recipe = replace(get_problem(settings.problem).recipe, **settings.recipe)
    num_intervals = max(settings.num_checkpoints - 1, 1)
    epochs = {
        round(recipe.num_epochs ** (number / num_intervals))
        for number in range(settings.num_checkpoints)
    }
    models: dict[int, nn.Module] = {}

    def keep(epoch: int, model: nn.Module) -> None:
        if epoch in epochs:
            models[epoch] = copy.deepcopy(model)

    trained = load(settings, keep)
    table: list[Row] = []
    summary: list[Row] = []
    for epoch, model in models.items():
        rows = bias_rows(replace(trained, model=model), settings.batch_size, settings)
        table += [{"epoch": epoch, **row} for row in rows]
        summary += [{"epoch": epoch, **row} for row in bias_summary(rows)]
    figure = trend_figure(summary, "epoch", "Epoch")
    tables = {"results": table, "summary": summary}
    title = "Relative errors on the mini-batch itself"
    write(settings, tables, {"over_training": figure}, title)
    return summary
