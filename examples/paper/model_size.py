"""Figure 22: the bias of mini-batch curvature against the number of parameters."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from examples.paper.common import Row, load, select, write
from examples.paper.networks import conv_net
from examples.paper.plots import trend_figure
from examples.paper.problems import train
from examples.paper.quadratics import BiasSettings, bias_rows, bias_summary


@dataclass(kw_only=True)
class Settings(BiasSettings):
    """The networks and mini-batches to measure; the networks are trained here.

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
    _, channels, image_size, _ = trained.test.pixels.shape
    num_classes = len(trained.test.classes)
    table: list[Row] = []
    summary: list[Row] = []
    for depth, width in settings.models:
        torch.manual_seed(settings.seed)
        model = conv_net(depth, width, num_classes, channels, image_size).to(settings.device)
        train(model, trained.train, recipe, settings.seed, settings.progress)
        trained_model = replace(trained, model=model, recipe=recipe)
        rows = bias_rows(trained_model, settings.batch_size, settings)
        num_parameters = sum(p.numel() for p in model.parameters())
        network = {"depth": depth, "width": width, "parameters": num_parameters}
        table += [network | row for row in rows]
        summary += [network | row for row in select(bias_summary(rows), quantity="curvature")]
    figure = trend_figure(summary, "parameters", "Number of parameters")
    tables = {"results": table, "summary": summary}
    write(settings, tables, {"model_size": figure}, "Relative error of the curvature")
    return summary
