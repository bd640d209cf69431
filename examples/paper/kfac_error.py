r"""Beyond the paper: how far mini-batch K-FAC and EKFAC are from the full-batch GGN.

An approximation $C' = U\,\mathrm{diag}(\Lambda)\,U^\top$ of a block $C$ has the error
$\|C' - C\|_F^2 = \sum(\Lambda - M)^2 + \|C - U\,\mathrm{diag}(M)\,U^\top\|_F^2$ with the curvature
$M_i = u_i^\top C u_i$ of the full batch along the directions of the approximation, which an EKFAC
fit measures. The first term is a sum over all directions, including directions that share a
magnitude. The second term is estimated from products.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

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
    """What to measure.

    Attributes:
        batch_size: Examples of a mini-batch, an even number. Mini-batch and cross-fitted fits use
            all of them, debiased fits use two halves.
        draws: The number of mini-batches; each is fitted in every way.
        num_batches: The number of further mini-batches that represent the full batch.
        folds: Folds of the cross-fitted fits.
    """

    output: Path = Path("results/kfac_error")
    batch_size: int = 64
    draws: int = 3
    num_batches: int = 6
    folds: int = 8


def run(settings: Settings) -> list[Row]:
    """Fit each mini-batch in every way; return ‖C' − C‖ / ‖C‖ of each block and of all blocks."""
    trained = load(settings)
    number = settings.draws + settings.num_batches
    batches = trained.batches(settings.batch_size, number, settings.seed)
    drawn, full = batches[: settings.draws], batches[settings.draws :]
    rows = [
        {"draw": draw, **row}
        for draw, batch in enumerate(drawn)
        for row in errors(trained, batch, full, settings)
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


@dataclass(frozen=True)
class Reference:
    """A GGN block C of the full batch in an eigenbasis U: its diagonal M, and the remainder.

    Attributes:
        magnitudes: M, the diagonal of UᵀCU.
        multiplicities: The number of directions that share each magnitude.
        remainder: ‖C − U diag(M) Uᵀ‖_F², estimated from products.
    """

    magnitudes: Tensor
    multiplicities: Tensor
    remainder: float

    @property
    def squared_norm(self) -> float:
        """‖C‖_F²."""
        return self.squared_error(torch.zeros_like(self.magnitudes))

    def squared_error(self, magnitudes: Tensor) -> float:
        """Compute ‖U diag(magnitudes) Uᵀ − C‖_F², as a sum of squares for accuracy."""
        squares = (magnitudes - self.magnitudes).square()
        return float((self.multiplicities * squares).sum()) + self.remainder


def references(trained: Trained, directions: Batch, full: list[Batch]) -> dict[str, Reference]:
    """Return the blocks of the full batch in the eigenbases of one batch's factors."""
    la = Laplace(trained.model, curvature="ekfac", params="weights")
    la.fit_batches([directions], full)
    by_block = {}
    for name, diagonal in la.posterior.curvature.blocks.items():
        exact = GGN(trained.model, nn.CrossEntropyLoss(), full, [name])
        generator = torch.Generator(exact.device).manual_seed(0)
        remainder = frobenius_norm(exact - diagonal, num_matvecs=30, generator=generator)
        by_block[name] = Reference(
            _magnitudes(diagonal), diagonal.multiplicities, float(remainder.value) ** 2
        )
    return by_block


def _magnitudes(block: Any) -> Tensor:
    assert isinstance(block, EigenKronecker)
    return block.magnitudes.double()


def errors(trained: Trained, batch: Batch, full: list[Batch], settings: Settings) -> list[Row]:
    """Return the errors of all fits of one mini-batch."""
    x, y = batch
    half = settings.batch_size // 2
    first = (x[:half], y[:half])
    second = (x[half:], y[half:])
    on_batch = references(trained, batch, full)
    on_first = references(trained, first, full)
    rows = []
    for name, curvature in (("K-FAC", "kfac"), ("EKFAC", "ekfac")):

        def fitted(*batches: list[Batch], folds: int | None = None, kind: str = curvature) -> Any:
            la = Laplace(trained.model, curvature=kind, params="weights")
            la.fit_batches(*batches, folds=folds)
            return la.posterior.curvature.blocks

        fits = {
            name: (on_batch, fitted([batch])),
            f"debiased {name}": (on_first, fitted([first], [second])),
            f"cross-fitted {name}": (on_batch, fitted([batch], folds=settings.folds)),
        }
        for fit, (exact, blocks) in fits.items():
            squares = {
                block: (exact[block].squared_error(_magnitudes(C)), exact[block].squared_norm)
                for block, C in blocks.items()
            }
            totals = [math.fsum(column) for column in zip(*squares.values(), strict=True)]
            rows += [
                {"fit": fit, "block": block, "error": math.sqrt(error / norm)}
                for block, (error, norm) in {**squares, ALL: tuple(totals)}.items()
            ]
    return rows
