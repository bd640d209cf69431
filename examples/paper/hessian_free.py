"""Training with `DebiasedHessianFree`, and with its single-batch form on the same examples.

Every step uses new examples. The single-batch form uses them as one batch. The debiased form
computes directions on one half of them, and step sizes, damping and line search on the other half
(Eq. 8). Each form trains once as intended, and once without damping and line search ("bare").
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.paper.common import (
    ExperimentSettings,
    Row,
    Trained,
    distinct,
    load,
    loss_and_accuracy,
    select,
    write,
)
from examples.paper.plots import lines_figure
from examples.paper.problems import decay_groups
from laplace_debias.optim import DebiasedHessianFree


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The training of the network.

    Attributes:
        recipe: Changes of the problem's recipe; here, only the weight decay has an effect.
        batch_size: Examples per step; the debiased form computes directions on half of them.
        steps: Steps of each run.
        draws: Runs of each kind, with different initial weights and orders of examples.
        damping: λ at the start of the damped runs.
        max_iter: Largest number of iterations of conjugate gradients per step.
        bare: Whether to also train without damping and line search.
        evaluate_every: Steps from one measurement of the network to the next.
    """

    output: Path = Path("results/hessian_free")
    batch_size: int = 100
    steps: int = 60
    draws: int = 3
    damping: float = 1.0
    max_iter: int = 20
    bare: bool = True
    evaluate_every: int = 1


def run(settings: Settings) -> list[Row]:
    """Train; return a row for each variant and method, with means over the ends of runs."""
    if settings.checkpoint is not None:
        raise ValueError("every run begins with random weights: leave checkpoint out")
    untrained = load(replace(settings, recipe={**settings.recipe, "epochs": 0, "cycles": ()}))
    variants = ["damped"]
    if settings.bare:
        variants.append("bare")
    rows: list[Row] = []
    for draw in tqdm(range(settings.draws), "runs", disable=not settings.progress):
        for variant in variants:
            for method in ("single-batch", "debiased"):
                model = untrained.problem.initial_model(settings.seed + draw).to(settings.device)
                trained = replace(untrained, model=model.train())
                is_damped = variant == "damped"
                labels = {"variant": variant, "method": method, "draw": draw}
                run_rows = train_run(trained, settings, is_damped, method, draw)
                rows += [labels | row for row in run_rows]
    table = ends(rows)
    metrics = ("train_loss", "test_loss", "test_accuracy")
    figure = lines_figure(rows, "variant", metrics, x="step", label="Step")
    title = "The last step, mean over runs"
    write(settings, {"results": rows, "ends": table}, {"hessian_free": figure}, title)
    return table


def train_run(
    trained: Trained, settings: Settings, is_damped: bool, method: str, draw: int
) -> list[Row]:
    """Train one network and measure it; a run ends early if its loss is not finite.

    Args:
        trained: A network with random weights in training mode, which is changed, and its data.
        settings: The training.
        is_damped: Whether to use damping and line search.
        method: "single-batch" or "debiased".
        draw: The index of the run, for the order of the examples.

    Returns:
        A row for each measured step, from the network before training (step 0).
    """
    model = trained.model
    decay = trained.recipe.penalty
    optimizer = DebiasedHessianFree(
        decay_groups(model.parameters(), decay),
        damping=settings.damping if is_damped else 0.0,
        max_iter=settings.max_iter,
        adapt_damping=is_damped,
        line_search=is_damped,
    )
    data = {"train": trained.train, "test": trained.test}
    rows: list[Row] = []

    def record(step: int) -> bool:
        """Measure the network and its last step; return whether its training loss is finite."""
        model.eval()
        measures = loss_and_accuracy(trained, 0.0, data, decay)
        model.train()
        last_step = optimizer.last_step
        ratio = math.nan if last_step is None else last_step.reduction_ratio
        rows.append({"step": step, **measures, "reduction_ratio": ratio})
        return math.isfinite(rows[-1]["train_loss"])

    def closure(indices: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        x, y = trained.batch(trained.train, indices)

        def evaluate() -> tuple[Tensor, Tensor]:
            outputs = model(x)
            return nn.functional.cross_entropy(outputs, y), outputs

        return evaluate

    record(0)
    generator = torch.Generator().manual_seed(settings.seed + draw)
    unused = torch.empty(0, dtype=torch.int64)
    for step in range(1, settings.steps + 1):
        if len(unused) < settings.batch_size:
            unused = torch.randperm(len(trained.train), generator=generator)
        indices = unused[: settings.batch_size]
        unused = unused[settings.batch_size :]
        try:
            if method == "single-batch":
                optimizer.step(closure(indices))
            else:
                first_half, second_half = indices.tensor_split(2)
                optimizer.step(closure(first_half), closure(second_half))
        except ValueError as error:
            # The loss has overflowed, which may happen in a run without damping and line search.
            if "NaN or Inf" not in str(error):
                raise
            rows.append({**rows[-1], "step": step, "train_loss": math.inf, "test_loss": math.inf})
            return rows
        is_measured = step % settings.evaluate_every == 0 or step == settings.steps
        if is_measured and not record(step):
            return rows
    return rows


def ends(rows: list[Row]) -> list[Row]:
    """Summarise the runs of each variant and method.

    Returns:
        A row for each variant and method, with means over the ends of the runs, the largest
        training loss relative to the start, and the median reduction ratio of all measured steps.
    """
    table = []
    for variant, method in distinct(rows, "variant", "method"):
        runs_rows = select(rows, variant=variant, method=method)
        runs = [select(runs_rows, draw=draw) for (draw,) in distinct(runs_rows, "draw")]
        line: Row = {"variant": variant, "method": method}
        for metric in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            line[metric] = sum(run[-1][metric] for run in runs) / len(runs)
        line["greatest loss"] = max(
            row["train_loss"] / run[0]["train_loss"] for run in runs for row in run
        )
        ratios = [row["reduction_ratio"] for run in runs for row in run[1:]]
        line["reduction ratio"] = statistics.median(ratios)
        table.append(line)
    return table
