"""Training with `DebiasedHessianFree`, and with its single-batch form on the same examples.

Every step uses new examples. The single-batch form uses them as one batch. The debiased form
computes directions on one half of them, and step sizes, damping and line search on the other half
(Eq. 8). Each form trains once as intended, and once without damping and line search ("bare").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.paper.common import Row, Trained, judge, load, write
from examples.paper.common import Settings as Shared
from examples.paper.plots import lines_figure
from examples.paper.problems import decay_groups
from laplace_debias.optim import DebiasedHessianFree


@dataclass(kw_only=True)
class Settings(Shared):
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
    start = load(replace(settings, recipe={**settings.recipe, "epochs": 0, "cycles": ()}))
    rows: list[Row] = []
    for draw in tqdm(range(settings.draws), "runs", disable=not settings.progress):
        for variant in ("damped", "bare") if settings.bare else ("damped",):
            for method in ("single-batch", "debiased"):
                of_run = {"variant": variant, "method": method, "draw": draw}
                model = start.problem.initial_model(settings.seed + draw).to(settings.device)
                trained = replace(start, model=model.train())
                found = train_run(trained, settings, variant == "damped", method, draw)
                rows += [of_run | row for row in found]
    table = ends(rows)
    metrics = ("train_loss", "test_loss", "test_accuracy")
    figure = lines_figure(rows, "variant", metrics, "step", "Step")
    title = "The last step, mean over runs"
    write(settings, {"results": rows, "ends": table}, {"hessian_free": figure}, title)
    return table


def train_run(
    trained: Trained, settings: Settings, damped: bool, method: str, draw: int
) -> list[Row]:
    """Train one network and measure it; a run ends early if its loss is not finite."""
    model, decay = trained.model, trained.recipe.penalty
    optimizer = DebiasedHessianFree(
        decay_groups(model.parameters(), decay),
        damping=settings.damping if damped else 0.0,
        max_iter=settings.max_iter,
        adapt_damping=damped,
        line_search=damped,
    )
    parts = {"train": trained.train, "test": trained.test}

    def closure(indices: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        x, y = trained.batch(trained.train, indices)

        def evaluate() -> tuple[Tensor, Tensor]:
            outputs = model(x)
            return nn.functional.cross_entropy(outputs, y), outputs

        return evaluate

    def record(step: int) -> bool:
        model.eval()
        rows.append({"step": step, **judge(trained, 0.0, parts, decay)})
        model.train()
        return math.isfinite(rows[-1]["train_loss"])

    rows: list[Row] = []
    record(0)
    generator = torch.Generator().manual_seed(settings.seed + draw)
    order = torch.empty(0, dtype=torch.int64)
    size = settings.batch_size
    for step in range(1, settings.steps + 1):
        if len(order) < size:
            order = torch.randperm(len(trained.train), generator=generator)
        chosen, order = order[:size], order[size:]
        batches = (chosen,) if method == "single-batch" else chosen.tensor_split(2)
        try:
            optimizer.step(*map(closure, batches))
        except ValueError as error:
            # The loss has overflowed, which may happen in a run without damping and line search.
            if "NaN or Inf" not in str(error):
                raise
            rows.append({**rows[-1], "step": step, "train_loss": math.inf, "test_loss": math.inf})
            return rows
        due = step % settings.evaluate_every == 0 or step == settings.steps
        if due and not record(step):
            return rows
    return rows


def ends(rows: list[Row]) -> list[Row]:
    """Return means over the ends of runs, and the largest training loss relative to the start."""
    table = []
    for variant, method in dict.fromkeys((row["variant"], row["method"]) for row in rows):
        of_kind = [r for r in rows if (r["variant"], r["method"]) == (variant, method)]
        runs = [
            [r for r in of_kind if r["draw"] == draw]
            for draw in dict.fromkeys(r["draw"] for r in of_kind)
        ]
        metrics = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
        means = {m: sum(run[-1][m] for run in runs) / len(runs) for m in metrics}
        worst = max(row["train_loss"] / run[0]["train_loss"] for run in runs for row in run)
        table.append({"variant": variant, "method": method, **means, "greatest loss": worst})
    return table
