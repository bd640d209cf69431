"""Beyond the paper: ways to get directions and magnitudes from the same few examples.

Every method uses the same 2b training examples of a draw. Methods with larger numbers in their
names, or with "all", also use further examples.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from examples.paper.common import FULL, MINI, Batch, Row, distances, load, write
from examples.paper.common import Settings as Shared
from examples.paper.laplace import measured, predicted
from examples.paper.plots import bars_figure
from laplace_debias import Laplace


@dataclass(kw_only=True)
class Settings(Shared):
    """The methods of the study, and the amounts of data.

    Attributes:
        batch_size: b, a multiple of 2; every method uses 2b examples.
        draws: How many times these examples are drawn; draws do not overlap each other or the
            reference.
        ekfac_draws: The number of draws in which EKFAC is also fitted.
        folds: Numbers of folds for cross-fitting.
        further_batches: The number of further magnitude batches of b examples.
        full_examples: The number of random training examples that represent the full batch.
        test_examples: The number of test images to predict.
        prior_precisions: The grid of δ.
        fisher: How the columns of the curvature are computed.
        chunk_size: Images per batch.
    """

    output: Path = Path("results/debiasing")
    batch_size: int = 16
    draws: int = 6
    ekfac_draws: int = 3
    folds: tuple[int, ...] = (2, 4, 8, 16, 32)
    further_batches: int = 2
    full_examples: int = 600
    test_examples: int = 100
    prior_precisions: tuple[float, ...] = (0.1, 0.316, 1.0, 3.16, 10.0)
    fisher: Literal["exact", "mc", "empirical"] = "exact"
    chunk_size: int = 50


def run(settings: Settings) -> list[Row]:
    """Fit, predict, and compare with full-batch; return a row for each method."""
    trained = load(settings)
    b = settings.batch_size
    a_draw = (2 + settings.further_batches) * b
    number = settings.full_examples + settings.draws * a_draw
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(trained.train), generator=generator)
    if number > len(order):
        raise ValueError(
            f"the study takes {number} training images; {settings.problem} has {len(order)}. Lower "
            "full_examples, draws or batch_size."
        )
    chosen = torch.randperm(len(trained.test), generator=generator)[: settings.test_examples]
    test = trained.test.subset(chosen)
    parts = order[: settings.full_examples].split(settings.chunk_size)
    full = [trained.batch(trained.train, part) for part in parts]
    rows: list[Row] = []

    def measure(curvature: str, name: str, draw: int | None, *batches: Any, **how: Any) -> None:
        la = Laplace(trained.model, curvature=curvature, params="weights", fisher=settings.fisher)
        la.fit_batches(*batches, num_data=len(trained.train), generator=generator, **how)
        for delta in settings.prior_precisions:
            la.prior_precision = delta
            probs = predicted(trained, la, "", test, settings.chunk_size)
            nll = measured(probs, test.labels)["nll"]
            method = name if curvature == "kfac" else f"EKFAC, {name}"
            rows.append({"method": method, "draw": draw, "prior_precision": delta, "nll": nll})

    measure("kfac", FULL, None, full)
    if settings.ekfac_draws:
        measure("ekfac", FULL, None, full)
    for draw in tqdm(range(settings.draws), "draws", disable=not settings.progress):
        start = settings.full_examples + draw * a_draw
        x, y = trained.batch(trained.train, order[start : start + a_draw])

        def some(first: int, last: int, x: torch.Tensor = x, y: torch.Tensor = y) -> list[Batch]:
            return [(x[first:last], y[first:last])]

        hand = some(0, 2 * b)
        for curvature in ("kfac", "ekfac")[: 1 + (draw < settings.ekfac_draws)]:
            measure(curvature, MINI, draw, hand)
            measure(curvature, f"debiased, {b} + {b}", draw, some(0, b), some(b, 2 * b))
            for folds in settings.folds:
                measure(curvature, f"crossfit, {folds} folds", draw, hand, folds=folds)
        for size in (b // 2, 3 * b // 2):
            name = f"debiased, {size} + {2 * b - size}"
            measure("kfac", name, draw, some(0, size), some(size, 2 * b))
        for m in range(2, settings.further_batches + 2):
            measure("kfac", f"debiased, {b} + {m * b}", draw, some(0, b), some(b, (m + 1) * b))
        measure("kfac", f"debiased, {b} + all", draw, some(0, b), full)
        measure("kfac", "oracle magnitudes", draw, hand, full)
    summary = distances(rows)
    figure = bars_figure(summary, "ratio", "|NLL − full-batch NLL| over the mini-batch's ↓")
    title = "Distance of the NLL to full-batch at equal data, ± half a 95 % interval over draws"
    write(settings, {"results": rows, "summary": summary}, {"distances": figure}, title)
    return summary
