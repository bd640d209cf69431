"""`laplace-debias spectrum`: the spectrum of a trained network's curvature."""

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor, nn

from laplace_debias.commands.network import not_for, print_notes
from laplace_debias.curvature import GGN, Hessian
from laplace_debias.curvature.losses.likelihoods import HeteroscedasticGaussian
from laplace_debias.linalg import (
    EigenPairs,
    Estimate,
    SpectralDensity,
    eigsh,
    spectral_density,
    trace,
)
from laplace_debias.operators import LinearOperator, LowRankPlusDiagonal
from laplace_debias.report.spectrum_plot import plot_spectral_density
from laplace_debias.report.style import OKABE_ITO, save, style_axes
from laplace_debias.report.tables import write_csv
from laplace_debias.sources import Loaded, SourceSettings, Task, load
from laplace_debias.sources.shares import share
from laplace_debias.system.checks import check_at_least
from laplace_debias.system.files import check_target
from laplace_debias.system.ranks import current
from laplace_debias.system.shown import plain

_LOSSES: dict[Task, tuple[str, nn.Module | HeteroscedasticGaussian]] = {
    "classification": ("mean cross-entropy", nn.CrossEntropyLoss()),
    "binary": ("mean binary cross-entropy", nn.BCEWithLogitsLoss()),
    "multilabel": ("mean binary cross-entropy", nn.BCEWithLogitsLoss()),
    "regression": ("mean squared error", nn.MSELoss()),
    "heteroscedastic": ("mean negative log-likelihood", HeteroscedasticGaussian()),
}


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias spectrum`.

    Attributes:
        matrix: `ggn` or `hessian`, of the mean loss: cross-entropy, binary cross-entropy or squared
            error, by the task.
        examples: Number of training examples that the loss is taken over, chosen by the seed.
        batch_size: Examples per batch. Results do not depend on it.
        eigenpairs: Number of leading eigenpairs.
        tolerance: Largest residual norm of a pair, relative to the largest eigenvalue.
        max_matvecs: Largest number of products for the eigenpairs.
        trace_matvecs: Number of products for the rest of the trace, which the eigenpairs do not
            explain.
        density_probes: Number of probes of the spectral density of that rest.
        density_steps: Number of Lanczos steps, and products, per probe.
        density_width: Width of the density's smoothing, in decades.
        density_floor: Eigenvalues up to this multiple of the largest one count as zero: a few
            Lanczos steps do not separate smaller ones.
        memory_bound: Bytes for linearised batches. Batches beyond it are linearised again in each
            product.
        output: Folder of the tables and the picture.
    """

    matrix: Literal["ggn", "hessian"] = "ggn"
    examples: int = 500
    batch_size: int | None = 50
    eigenpairs: int = 50
    tolerance: float = 1e-3
    max_matvecs: int = 150
    trace_matvecs: int = 10
    density_probes: int = 2
    density_steps: int = 10
    density_width: float = 0.1
    density_floor: float = 1e-5
    memory_bound: int = 4 * 2**30
    output: Path = Path("results/spectrum")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "examples", "eigenpairs", "density_probes", "density_steps")
        check_at_least(self, self.eigenpairs, "max_matvecs")
        check_at_least(self, 2, "trace_matvecs")
        check_at_least(self, 0, "memory_bound")
        for name in ("tolerance", "density_width", "density_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        return not_for("spectrum", "validation_examples", "test_examples")


@dataclass(frozen=True, eq=False)
class SpectrumResult:
    """Eigenpairs, the whole trace and the density of the rest."""

    eigenpairs: EigenPairs
    trace: Estimate
    density: SpectralDensity
    seconds: float


def run(settings: Settings) -> SpectrumResult:
    """Load, multiply, print what was found and write tables and the picture."""
    ranks = current()
    check_target(settings.output / "eigenvalues.csv", make_folders=True)
    loaded = load(settings.without_comparison())
    print_notes(loaded)
    batches = _batches(loaded, settings)
    name, loss = _LOSSES[loaded.task]
    model, kind = loaded.model, GGN if settings.matrix == "ggn" else Hessian
    print(
        f"{kind.__name__} of the {name} of {settings.examples:,} training {loaded.input_name}s, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    batches = list(share(batches, model))
    result = measure(kind(model, loss, batches, memory_bound=settings.memory_bound), settings)
    _print(result)
    if ranks.rank > 0:
        return result
    pairs, density = result.eigenpairs, result.density
    columns = {
        "eigenvalues": {"eigenvalue": pairs.values, "residual": pairs.residuals},
        "density": {
            "eigenvalue": density.grid,
            "density": density.density,
            "standard_error": density.standard_error,
        },
    }
    for name, parts in columns.items():
        rows = zip(*(part.tolist() for part in parts.values()), strict=True)
        path = settings.output / f"{name}.csv"
        write_csv([dict(zip(parts, row, strict=True)) for row in rows], path)
    picture = settings.output / "spectrum.png"
    save(draw(result, kind.__name__), picture)
    print(f"Picture: {picture}")
    return result


def as_json(settings: Settings, result: SpectrumResult) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "output": str(settings.output),
        "matrix": settings.matrix,
        "num_parameters": len(result.eigenpairs.vectors),
        "eigenvalues": plain(result.eigenpairs.values),
        "trace": plain(float(result.trace.value)),
        "trace_standard_error": plain(float(result.trace.standard_error)),
        "seconds": plain(result.seconds),
    }


def _batches(loaded: Loaded, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """The first training examples, on the network's device, as the loss takes them."""
    device = next(loaded.model.parameters()).device
    batches: list[tuple[Tensor, Tensor]] = []
    left = settings.examples
    for x, y in loaded.train:
        if loaded.task in ("binary", "multilabel"):
            y = y.reshape(len(y), -1).float()
        batches.append((x[:left].to(device), y[:left].to(device)))
        left -= len(batches[-1][1])
        if not left:
            return batches
    raise ValueError(
        f"examples is {settings.examples}; expected at most {settings.examples - left}, the "
        "training examples"
    )


def measure(A: LinearOperator, settings: Settings) -> SpectrumResult:
    r"""Leading eigenpairs of a symmetric operator, its trace, and the density of the rest.

    With the eigenpairs $V\Lambda V^\top$ taken out, $A - V\Lambda V^\top$ has a trace and a density
    without outliers, which few products estimate well. This is the deflation of Hutch++, with the
    eigenvectors in place of a sketch.

    Reference:
        Gambhir, Stathopoulos, Orginos. Deflation as a method of variance reduction for estimating
        the trace of a matrix inverse. SISC, 2017.
    """
    began = time.perf_counter()
    generator = torch.Generator(A.device).manual_seed(settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the status is printed
        pairs = eigsh(
            A,
            k=settings.eigenpairs,
            tol=settings.tolerance,
            max_matvecs=settings.max_matvecs,
            generator=generator,
            progress=settings.progress,
        )
    rest = A - LowRankPlusDiagonal(pairs.vectors, pairs.values, 0.0)
    of_rest = trace(
        rest,
        num_matvecs=settings.trace_matvecs,
        generator=generator,
        progress=settings.progress,
    )
    density = spectral_density(
        rest,
        scale="log",
        num_probes=settings.density_probes,
        num_steps=settings.density_steps,
        width=settings.density_width,
        floor=settings.density_floor * float(pairs.values.abs().max()),
        generator=generator,
        progress=settings.progress,
    )
    whole = replace(
        of_rest,
        value=pairs.values.sum() + of_rest.value,
        num_matvecs=pairs.num_matvecs + of_rest.num_matvecs,
    )
    return SpectrumResult(pairs, whole, density, time.perf_counter() - began)


def draw(result: SpectrumResult, matrix: str) -> Figure:
    """The eigenvalues one by one, and the density of all."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained", facecolor="white")
    by_rank, by_value = figure.subplots(1, 2)
    values = result.eigenpairs.values.cpu()
    by_rank.plot(range(1, len(values) + 1), values, "o", markersize=3.5, color=OKABE_ITO["blue"])
    if bool((values > 0).all()):
        by_rank.set_yscale("log")
        by_rank.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_rank.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        by_rank.yaxis.set_minor_formatter(NullFormatter())
    by_rank.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_rank.set_xlabel("Rank")
    by_rank.set_ylabel("Eigenvalue")
    total, error = float(result.trace.value), float(result.trace.standard_error)
    told = f"{total:.4g} ± {error:.2g}" if error else f"{total:.4g}"
    by_rank.set_title(
        f"trace of the {matrix}: {told}, of which the leading {len(values)} "
        f"are {float(values.sum()) / total:.0%}",
        fontsize=9,
        loc="left",
    )
    style_axes(by_rank)
    plot_spectral_density(result.density, by_value)
    # The eigenvalues that were taken out before the density was estimated.
    marks = values[values > 0]
    by_value.plot(
        marks,
        torch.full_like(marks, by_value.get_ylim()[0] * 1.5),
        "|",
        color=OKABE_ITO["vermillion"],
        markersize=9,
        label=f"leading {len(values)}, one by one",
    )
    by_value.plot([], [], color=OKABE_ITO["blue"], label="density of the others")
    by_value.legend(frameon=False, fontsize=8)
    return figure


def _print(result: SpectrumResult) -> None:
    pairs, total = result.eigenpairs, result.trace
    values = pairs.values.tolist()
    shown = ", ".join(f"{value:.4g}" for value in values[:12])
    print(f"Leading {len(values)} eigenvalues: {shown}, … {values[-1]:.4g}")
    print(
        f"  greatest residual {float(pairs.residuals.max()):.2g}, {pairs.num_matvecs} products: "
        f"{pairs.message}"
    )
    part = float(pairs.values.sum() / total.value)
    print(
        f"Trace: {float(total.value):.5g} ± {float(total.standard_error):.2g} (standard error); "
        f"the leading {len(values)} are {part:.1%} of it; of the other eigenvalues "
        f"{result.density.null_fraction:.2%} are within ±{result.density.floor:.1g}"
    )
    print(f"Time: {result.seconds:.0f} s")
