r"""Beyond the paper: how far mini-batch K-FAC and EKFAC are from the full-batch GGN.

An approximation $C' = U\,\mathrm{diag}(\Lambda)\,U^\top$ of a block $C$ has the error
$\|C' - C\|_F^2 = \sum(\Lambda - M)^2 + \|C - U\,\mathrm{diag}(M)\,U^\top\|_F^2$ with the curvature
$M_i = u_i^\top C u_i$ of the full batch along the directions of the approximation, which an EKFAC
fit measures. The first term is a sum over all directions, including directions that share a
magnitude. The second term is estimated from products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from examples.paper.common import (
    Batch,
    ExperimentSettings,
    Row,
    Trained,
    distinct,
    half_width,
    load,
    select,
    write,
)
from examples.paper.plots import bars_figure
from laplace_debias import Laplace
from laplace_debias.curvature import GGN
from laplace_debias.linalg import frobenius_norm
from laplace_debias.operators import EigenKronecker

ALL = "all blocks"


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The mini-batches and fits to measure.

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
    batches = trained.random_batches(settings.batch_size, number, settings.seed)
    full = batches[settings.draws :]
    rows: list[Row] = []
    for draw, batch in enumerate(batches[: settings.draws]):
        rows += [{"draw": draw, **row} for row in errors(trained, batch, full, settings)]
    summary: list[Row] = []
    for fit, block in distinct(rows, "fit", "block"):
        error_of_draws = [row["error"] for row in select(rows, fit=fit, block=block)]
        summary.append(
            {
                "method": fit,
                "block": block,
                "error": fmean(error_of_draws),
                "error ±": half_width(error_of_draws, fmean),
            }
        )
    overall = select(summary, block=ALL)
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
    """Return the blocks of the full batch in the eigenbases of one batch's factors, by name."""
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


def errors(trained: Trained, batch: Batch, full: list[Batch], settings: Settings) -> list[Row]:
    """Return the errors of all fits of one mini-batch.

    Returns:
        A row with the relative error for each fit and block, and one for all blocks of a fit.
    """
    x, y = batch
    half = settings.batch_size // 2
    first = (x[:half], y[:half])
    second = (x[half:], y[half:])
    on_batch = references(trained, batch, full)
    on_first = references(trained, first, full)
    rows: list[Row] = []
    for name, curvature in (("K-FAC", "kfac"), ("EKFAC", "ekfac")):
        fit = partial(fit_blocks, trained, curvature)
        rows += error_rows(name, fit([batch]), on_batch)
        rows += error_rows(f"debiased {name}", fit([first], [second]), on_first)
        crossfit_blocks = fit([batch], folds=settings.folds)
        rows += error_rows(f"cross-fitted {name}", crossfit_blocks, on_batch)
    return rows


def fit_blocks(
    trained: Trained,
    curvature: str,
    directions: list[Batch],
    magnitudes: list[Batch] | None = None,
    folds: int | None = None,
) -> Mapping[str, Any]:
    """Return the blocks of a fitted curvature, by name."""
    la = Laplace(trained.model, curvature=curvature, params="weights")
    la.fit_batches(directions, magnitudes, folds=folds)
    return la.posterior.curvature.blocks


def error_rows(fit: str, blocks: Mapping[str, Any], exact: Mapping[str, Reference]) -> list[Row]:
    """Return the relative errors of a fit's blocks, and of all blocks together.

    Args:
        fit: The name of the fit.
        blocks: The blocks of its curvature.
        exact: The blocks of the full batch in the same eigenbases.
    """
    rows: list[Row] = []
    squared_errors = []
    squared_norms = []
    for name, block in blocks.items():
        squared_error = exact[name].squared_error(_magnitudes(block))
        squared_norm = exact[name].squared_norm
        rows.append({"fit": fit, "block": name, "error": math.sqrt(squared_error / squared_norm)})
        squared_errors.append(squared_error)
        squared_norms.append(squared_norm)
    squared_ratio = math.fsum(squared_errors) / math.fsum(squared_norms)
    rows.append({"fit": fit, "block": ALL, "error": math.sqrt(squared_ratio)})
    return rows


def _magnitudes(block: Any) -> Tensor:
    """Return the curvatures of a block along its eigenvectors, in float64."""
    assert isinstance(block, EigenKronecker)
    return block.magnitudes.double()
