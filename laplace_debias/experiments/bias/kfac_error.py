"""Beyond the paper: how far mini-batch K-FAC and EKFAC are from the full-batch GGN."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.fits.magnitudes import ekfac_magnitudes
from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.fits.sweep import sweep
from laplace_debias.curvature.layers.blocks import Block
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.uses import Uses
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood
from laplace_debias.curvature.network.selection import select_parameters
from laplace_debias.experiments.shared.checks import check_at_least, check_even_batch
from laplace_debias.experiments.shared.confidence import half_width
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.setup import Batch, Trained, begin
from laplace_debias.experiments.shared.store import Rows
from laplace_debias.laplace import Laplace
from laplace_debias.operators import EigenKronecker
from laplace_debias.report.style import OKABE_ITO, add_legend, new_panels, style_axes
from laplace_debias.report.tables import print_table

# A fit of one mini-batch: its curvature, and how it uses the batch.
_FITS: dict[str, tuple[str, str]] = {
    "K-FAC": ("kfac", "mini"),
    "EKFAC": ("ekfac", "mini"),
    "debiased K-FAC": ("kfac", "debiased"),
    "debiased EKFAC": ("ekfac", "debiased"),
    "cross-fitted K-FAC": ("kfac", "crossfit"),
    "cross-fitted EKFAC": ("ekfac", "crossfit"),
}
_OVERALL = "all blocks"


@dataclass(frozen=True, kw_only=True)
class KfacErrorSettings(ExperimentSettings):
    """What is measured.

    Attributes:
        batch_size: Examples of a mini-batch, even: all of them for mini-batch and cross-fitted
            fits, halves for debiased ones.
        draws: How many mini-batches are fitted, each in every way.
        num_batches: How many further ones stand for the full batch: their union. None of them is
            fitted, as a mini-batch's own share in the full set is small.
        folds: Folds of the cross-fitted fits.
        probes: Random vectors for the norm of the full-batch blocks.
    """

    output: Path = Path("results/kfac_error")
    batch_size: int = 128
    draws: int = 3
    num_batches: int = 6
    folds: int = 8
    probes: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_even_batch(self.batch_size)
        check_at_least(self, 1, "draws", "num_batches")
        if not 2 <= self.folds <= self.batch_size:
            raise ValueError(f"folds is {self.folds}; expected 2 to {self.batch_size}")
        check_at_least(self, 2, "probes")

    def check_counts(self, num_train: int, num_test: int) -> None:
        """Refuse to ask for more images than there are; see `ExperimentSettings`."""
        needed = self.batch_size * (self.draws + self.num_batches)
        if needed > num_train:
            raise ValueError(
                f"draws={self.draws} and num_batches={self.num_batches} of {self.batch_size} take "
                f"{needed} training images; there are {num_train}"
            )


def run_kfac_error(settings: KfacErrorSettings, console: Console | None = None) -> Rows:
    r"""Fit each mini-batch in every way, and measure the distance to the full-batch GGN's blocks.

    Of an approximation $C' = U\,\mathrm{diag}(\Lambda)\,U^\top$ of a block $C$,
    $\|C' - C\|_F^2 = \sum\Lambda^2 - 2\sum\Lambda M + \|C\|_F^2$ with the curvature
    $M_i = u_i^\top C u_i$ of the full batch along its directions; only $\|C\|_F^2$ is estimated
    (Hutchinson, from products with Gaussian vectors), and it is common to all.

    Returns:
        For every draw, fit and block the relative error, `‖C' − C‖ / ‖C‖`; NaN where the estimated
        norm is too small to tell.

    Raises:
        As `Experiment`.
    """
    console, store, trained = begin("kfac_error", settings, console)
    number = settings.draws + settings.num_batches
    batches = trained.batches(trained.data.train, settings.batch_size, number, settings.seed)
    fitted, full = batches[: settings.draws], batches[settings.draws :]
    norms = store.rows("norms", lambda: _norms(trained, full, settings))
    rows: Rows = []
    for draw in tqdm(range(settings.draws), "draws", disable=not settings.progress):

        def measured(draw: int = draw) -> Rows:
            found = _errors(trained, fitted[draw], full, norms, settings)
            return [{"draw": draw} | row for row in found]

        rows += store.rows(f"draw-{draw}", measured)
    summary = _summary(rows)
    paths = [
        store.table(rows),
        store.table(summary, "summary"),
        *store.picture(kfac_error_figure(summary), "kfac_error"),
    ]
    print_table(
        [row for row in summary if row["block"] == _OVERALL],
        f"Relative error of {settings.batch_size} examples' curvature, mean over "
        f"{settings.draws} draws ± half a 95 % confidence interval",
        console=console,
    )
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return rows


def _laplace(trained: Trained, curvature: str) -> Laplace:
    return Laplace(trained.model, curvature=curvature, params="weights", backend="hooks")


def _problem(trained: Trained) -> Problem:
    """What the posteriors of `_laplace` take curvature of."""
    names = select_parameters(trained.model, "weights")
    loss = NegativeLogLikelihood(Categorical())
    return Problem.of(trained.model, loss, names, FisherType(), torch.float64, backend="hooks")


def _norms(trained: Trained, batches: Sequence[Batch], settings: KfacErrorSettings) -> Rows:
    """‖C‖_F² of every full-batch block, with its standard error."""
    problem = _problem(trained)
    generator = torch.Generator().manual_seed(settings.seed)
    probes = {
        block: torch.randn(block.size, settings.probes, generator=generator).to(problem.dtype)
        for block in problem.blocks
    }
    probes = {block: Z.to(trained.device) for block, Z in probes.items()}
    products = {block: torch.zeros_like(Z) for block, Z in probes.items()}

    def multiply(layer: nn.Module, block: Block, uses: Uses) -> Float[Tensor, "d probes"]:
        total = torch.zeros_like(probes[block])
        for _, J, _ in rotated_jacobians(layer, block, uses, None, None):
            rows = J.flatten(2).flatten(0, 1)
            total.addmm_(rows.T, rows @ probes[block])
        return total

    def collect(block: Block, product: Tensor) -> None:
        products[block] += product

    seen = sweep(problem, batches, multiply, collect)
    rows = []
    for block, product in products.items():
        squares = (product.double() / seen.num_examples).square().sum(0)
        rows.append(
            {
                "block": block.name,
                "squared_norm": float(squares.mean()),
                "standard_error": float(squares.std() / math.sqrt(settings.probes)),
            }
        )
    return rows


def _errors(
    trained: Trained,
    batch: Batch,
    full: Sequence[Batch],
    norms: Rows,
    settings: KfacErrorSettings,
) -> Rows:
    """The errors of all fits of one mini-batch, against the batches that stand for all data."""
    x, y = batch
    half = settings.batch_size // 2
    fitted: dict[str, dict[str, EigenKronecker]] = {}
    for name, (curvature, mode) in _FITS.items():
        la = _laplace(trained, curvature)
        if mode == "debiased":
            la.fit_batches([(x[:half], y[:half])], [(x[half:], y[half:])])
        else:
            la.fit_batches([(x, y)], folds=settings.folds if mode == "crossfit" else None)
        fitted[name] = dict(la.posterior.curvature.blocks)
    on_full = _full_batch_magnitudes(trained, full, fitted)
    squared_norms = {row["block"]: float(row["squared_norm"]) for row in norms}
    rows = []
    for name, blocks in fitted.items():
        errors = {}
        for key, block in blocks.items():
            magnitudes, M = block.magnitudes.double(), on_full[name][key].double()
            square = (magnitudes.square() - 2 * magnitudes * M).sum().item() + squared_norms[key]
            errors[key] = square
        errors[_OVERALL] = sum(errors.values())
        totals = {**squared_norms, _OVERALL: sum(squared_norms.values())}
        rows += [
            {
                "fit": name,
                "block": key,
                "relative_error": math.sqrt(error / totals[key]) if error >= 0 else math.nan,
            }
            for key, error in errors.items()
        ]
    return rows


def _full_batch_magnitudes(
    trained: Trained, batches: Sequence[Batch], fitted: dict[str, dict[str, EigenKronecker]]
) -> dict[str, dict[str, Tensor]]:
    """The full batch's exact curvature along each fit's directions, by fit and block."""
    # Fits of the same examples share their directions.
    of_directions: dict[str, str] = {}
    for name, blocks in fitted.items():
        of_directions[name] = next(
            (
                other
                for other in of_directions.values()
                if all(_same_directions(blocks[key], fitted[other][key]) for key in blocks)
            ),
            name,
        )
    owners = sorted(set(of_directions.values()))
    sums = {
        name: {key: torch.zeros_like(block.magnitudes) for key, block in fitted[name].items()}
        for name in owners
    }

    def measure(layer: nn.Module, block: Block, uses: Uses) -> dict[str, Tensor]:
        return {
            name: ekfac_magnitudes(
                layer, block, uses, fitted[name][block.name].U_G, fitted[name][block.name].U_A
            )
            for name in owners
        }

    def collect(block: Block, magnitudes: dict[str, Tensor]) -> None:
        for name, values in magnitudes.items():
            sums[name][block.name] += values

    seen = sweep(_problem(trained), batches, measure, collect)
    return {
        name: {key: value / seen.num_examples for key, value in sums[owner].items()}
        for name, owner in of_directions.items()
    }


def _same_directions(one: EigenKronecker, two: EigenKronecker) -> bool:
    pairs = ((one.U_G, two.U_G), (one.U_A, two.U_A))
    return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


def _summary(rows: Rows) -> Rows:
    """Means over the draws by fit and block, with their 95 % confidence intervals."""
    summary: Rows = []
    for fit in dict.fromkeys(row["fit"] for row in rows):
        for block in dict.fromkeys(row["block"] for row in rows):
            errors = [
                float(row["relative_error"])
                for row in rows
                if (row["fit"], row["block"]) == (fit, block)
            ]
            summary.append(
                {
                    "fit": fit,
                    "block": block,
                    "relative_error": statistics.fmean(errors),
                    "half_width": half_width(errors, statistics.fmean),
                }
            )
    return summary


def kfac_error_figure(summary: Rows) -> Figure:
    """The relative error of every block: a colour for the data's use, a line style for EKFAC."""
    blocks = list(dict.fromkeys(row["block"] for row in summary))
    figure, ((axes,),) = new_panels(1, 1, (6.4, 3.6))
    for fit, (curvature, mode) in _FITS.items():
        values = [float(row["relative_error"]) for row in summary if row["fit"] == fit]
        colour = OKABE_ITO[{"mini": "orange", "debiased": "blue", "crossfit": "green"}[mode]]
        style = {"kfac": "--", "ekfac": "-"}[curvature]
        axes.plot(range(len(blocks)), values, style, color=colour, marker="o", ms=3, label=fit)
    axes.set_xticks(range(len(blocks)), blocks, rotation=45, ha="right")
    axes.set_ylabel("Relative error of the block ↓")
    axes.set_ylim(bottom=0)
    add_legend(figure, axes.get_legend_handles_labels()[0], columns=3)
    style_axes(axes)
    return figure


KFAC_ERROR = Experiment(
    name="kfac_error",
    figure="beyond the paper",
    help="Distance of mini-batch, debiased and cross-fitted K-FAC and EKFAC from the full GGN.",
    settings=KfacErrorSettings,
    run=run_kfac_error,
)
