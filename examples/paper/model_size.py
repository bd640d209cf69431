"""Figure 22: the bias of mini-batch curvature against the number of parameters."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from examples.paper.common import Row, load, write
from examples.paper.networks import conv_net
from examples.paper.plots import trend_figure
from examples.paper.problems import train
from examples.paper.quadratics import BiasSettings, bias_rows, summary_of


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """What to measure; the networks are trained here.

    Attributes:
        problem: The problem whose data and recipe are used for ConvNets of all sizes.
        models: The (depth, width) of each ConvNet.
        batch_size: Examples of a mini-batch.
    """

    output: Path = Path("results/model_size")
    problem: str = "convnet-digits"
    models: tuple[tuple[int, int], ...] = ((1, 16), (1, 32), (2, 16), (2, 32), (4, 16), (4, 32))
    batch_size: int = 128
    draws: int = 3


def run(settings: Settings) -> list[Row]:
    """Train ConvNets of several sizes and measure the bias on each."""
    if settings.checkpoint is not None:
        raise ValueError("all networks are trained here: leave checkpoint out")
    trained = load(replace(settings, recipe={"epochs": 0, "cycles": ()}))
    recipe = replace(trained.problem.recipe, **settings.recipe)
    (_, channels, size, _), classes = trained.test.pixels.shape, len(trained.test.classes)
    table: list[Row] = []
    summary: list[Row] = []
    for depth, width in settings.models:
        torch.manual_seed(settings.seed)
        model = conv_net(depth, width, classes, channels, size).to(settings.device)
        train(model, trained.train, recipe, settings.seed, settings.progress)
        number = sum(p.numel() for p in model.parameters())
        network = {"depth": depth, "width": width, "parameters": number}
        of_size = replace(trained, model=model, recipe=recipe)
        rows = bias_rows(of_size, settings.batch_size, settings)
        table += [network | row for row in rows]
        summary += [network | row for row in summary_of(rows) if row["quantity"] == "curvature"]
    figure = trend_figure(summary, "parameters", "Number of parameters")
    tables, pictures = {"results": table, "summary": summary}, {"model_size": figure}
    write(settings, tables, pictures, "Relative error of the curvature")
    return summary
