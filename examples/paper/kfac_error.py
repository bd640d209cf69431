r"""Beyond the paper: how far mini-batch K-FAC and EKFAC are from the full-batch GGN.

Of an approximation $C' = U\,\mathrm{diag}(\Lambda)\,U^\top$ of a block $C$,
$\|C' - C\|_F^2 = \sum\Lambda^2 - 2\sum\Lambda M + \|C\|_F^2$ with the curvature
$M_i = u_i^\top C u_i$ of the full batch along its directions, which an EKFAC fit measures.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from examples.paper.common import (
    Batch,
    Row,
    Trained,
    half_width,
    load,
    write,
)
from examples.paper.common import (
    Settings as Shared,
)
from examples.paper.plots import bars_figure
from laplace_debias import Laplace
from laplace_debias.curvature import GGN
from laplace_debias.linalg import frobenius_norm
from laplace_debias.operators import EigenKronecker

ALL = "all blocks"


@dataclass(kw_only=True)
class Settings(Shared):
    """What is measured.

    Attributes:
        batch_size: Examples of a mini-batch, even: all of them for mini-batch and cross-fitted
            fits, halves for debiased ones.
        draws: How many mini-batches are fitted, each in every way.
        num_batches: How many further ones stand for the full batch.
        folds: Folds of the cross-fitted fits.
    """

    output: Path = Path("results/kfac_error")
    batch_size: int = 128
    draws: int = 3
    num_batches: int = 6
    folds: int = 8


def run(settings: Settings) -> list[Row]:
    """Fit each mini-batch in every way; errors ‖C' − C‖ / ‖C‖ of every block and of all."""
    trained = load(settings)
    number = settings.draws + settings.num_batches
    batches = trained.batches(settings.batch_size, number, settings.seed)
    drawn, full = batches[: settings.draws], batches[settings.draws :]
    norms = squared_norms(trained, full)
    rows = [
        {"draw": draw, **row}
        for draw, batch in enumerate(drawn)
        for row in errors(trained, batch, full, norms, settings)
    ]
    summary = []
    for fit, block in dict.fromkeys((row["fit"], row["block"]) for row in rows):
        found = [r["error"] for r in rows if (r["fit"], r["block"]) == (fit, block)]
        mean, width = fmean(found), half_width(found, fmean)
        summary.append({"method": fit, "block": block, "error": mean, "error ±": width})
    overall = [row for row in summary if row["block"] == ALL]
    figure = bars_figure(overall, "error", "Relative error ↓")
    tables = {"results": rows, "blocks": summary, "summary": overall}
    title = f"Relative error of {settings.batch_size} examples' curvature, ± half a 95 % interval"
    write(settings, tables, {"kfac_error": figure}, title)
    return summary


def squared_norms(trained: Trained, full: list[Batch]) -> dict[str, float]:
    """‖C‖_F² of every block of the full batch's GGN, estimated by products."""
    found = {}
    for name, _ in trained.model.named_parameters():
        if name.endswith("weight"):
            block = GGN(trained.model, nn.CrossEntropyLoss(), full, [name])
            found[name] = float(frobenius_norm(block, num_matvecs=30).value) ** 2
    return {**found, ALL: sum(found.values())}


def errors(
    trained: Trained, batch: Batch, full: list[Batch], norms: dict[str, float], settings: Settings
) -> list[Row]:
    """The errors of all fits of one mini-batch."""
    (x, y), half = batch, settings.batch_size // 2
    first, second = (x[:half], y[:half]), (x[half:], y[half:])

    def blocks(curvature: str, directions: Batch, *measured: list[Batch], **how: int) -> Any:
        la = Laplace(trained.model, curvature=curvature, params="weights")
        la.fit_batches([directions], *measured, **how)
        return la.posterior.curvature.blocks

    on_full = {part[1].shape: blocks("ekfac", part, full) for part in (batch, first)}
    rows = []
    for name, curvature in (("K-FAC", "kfac"), ("EKFAC", "ekfac")):
        for fit, directions, found in (
            (name, batch, blocks(curvature, batch)),
            (f"debiased {name}", first, blocks(curvature, first, [second])),
            (f"cross-fitted {name}", batch, blocks(curvature, batch, folds=settings.folds)),
        ):
            of_fit = {}
            for block, C in found.items():
                assert isinstance(C, EigenKronecker)
                L = C.magnitudes.double()
                M = on_full[directions[1].shape][block].magnitudes.double()
                of_fit[block] = float((L.square() - 2 * L * M).sum()) + norms[block]
            of_fit[ALL] = sum(of_fit.values())
            rows += [
                {"fit": fit, "block": key, "error": math.sqrt(error / norms[key])}
                for key, error in of_fit.items()
            ]
    return rows
