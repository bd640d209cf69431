"""The spectrum of a trained network's curvature: leading eigenpairs, trace, spectral density."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from rich.console import Console
from torch import Tensor, nn

from laplace_debias.curvature import GGN, Hessian, ggn_spectrum
from laplace_debias.experiments.posteriors.evaluation import device_from
from laplace_debias.linalg import (
    EigenPairs,
    Estimate,
    SpectralDensity,
    eigsh,
    spectral_density,
    trace,
)
from laplace_debias.operators import Diagonal, LinearOperator, LowRankPlusDiagonal
from laplace_debias.problems import DataSource, Images, get_problem, load_problem, train
from laplace_debias.report.spectrum import plot_spectral_density
from laplace_debias.report.style import OKABE_ITO, save, style_axes
from laplace_debias.report.tables import write_csv


@dataclass(frozen=True, kw_only=True)
class SpectrumSettings:
    """What spectrum is measured, and how many products each part of it may cost.

    Attributes:
        problem: Name of the test problem, or its letter in the paper.
        data: Its data, as `TrainingSettings` takes it; nothing for the digits.
        checkpoint: A file of `laplace-debias train`. Without one a problem of the digits is trained
            first, another takes its published weights.
        cache: Folder for decoded images; see `problems.cifar10`.
        matrix: `ggn` or `hessian`, of the mean cross-entropy.
        method: `lanczos`: iterations, estimates of trace and density. `rows`, for the GGN of some
            hundred examples: all eigenvalues through the products of its rows, without estimates.
        examples: How many of the training images the loss is taken over: the first ones.
        batch_size: Images a batch. Results do not depend on it.
        eigenpairs: How many eigenpairs, the largest.
        left_out: For `rows`: share of the trace that the least rows may have to be left out, and
            what eigenvalues may be too small by at most.
        tolerance: For `lanczos`, as the next four: greatest residual norm of a pair, relative to
            the largest eigenvalue.
        max_matvecs: Greatest number of products for the eigenpairs.
        trace_matvecs: Products for the rest of the trace, which the eigenpairs do not explain.
        density_probes: Probes of the spectral density of that rest.
        density_steps: Lanczos steps, and products, a probe.
        density_width: Width of the density's smoothing, in decades.
        density_floor: Eigenvalues count as zero up to so much of the largest one. A few Lanczos
            steps do not tell smaller ones apart.
        memory_bound: Bytes that linearised batches or rows may take. What does not fit is computed
            again.
        seed: Seed of all random vectors, and of the training.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        output: Folder of the tables and the picture.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a number is out of range or the problem is unknown.
    """

    problem: str = "allcnnc-cifar10-one-cycle"
    data: Path | None = None
    checkpoint: Path | None = None
    cache: Path | None = None
    matrix: Literal["ggn", "hessian"] = "ggn"
    method: Literal["lanczos", "rows"] = "lanczos"
    examples: int = 500
    batch_size: int = 50
    eigenpairs: int = 50
    left_out: float = 1e-4
    tolerance: float = 1e-3
    max_matvecs: int = 150
    trace_matvecs: int = 10
    density_probes: int = 2
    density_steps: int = 10
    density_width: float = 0.1
    density_floor: float = 1e-5
    memory_bound: int = 4 * 2**30
    seed: int = 0
    device: str = "auto"
    output: Path = Path("results/spectrum")
    progress: bool = True

    def __post_init__(self) -> None:
        get_problem(self.problem)
        for name, least in (
            ("examples", 1),
            ("batch_size", 1),
            ("eigenpairs", 1),
            ("max_matvecs", self.eigenpairs),
            ("trace_matvecs", 2),
            ("density_probes", 1),
            ("density_steps", 1),
            ("memory_bound", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.method == "rows" and self.matrix != "ggn":
            raise ValueError(f"method rows is for the GGN, not for {self.matrix}: use lanczos")
        if not 0 <= self.left_out < 1:
            raise ValueError(f"left_out is {self.left_out}; expected a share, from 0 to below 1")
        for name in ("tolerance", "density_width", "density_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")


@dataclass(frozen=True, eq=False)
class SpectrumResult:
    """What was measured.

    Attributes:
        eigenpairs: The leading eigenpairs.
        trace: The trace: the eigenvalues, exactly, and an estimate of what they leave.
        rest: The part of the trace that the eigenpairs leave.
        density: Density of the spectrum that is left without the eigenpairs.
        num_parameters: D.
        seconds: What each part took.
    """

    eigenpairs: EigenPairs
    trace: Estimate
    rest: Estimate
    density: SpectralDensity
    num_parameters: int
    seconds: dict[str, float]


def run_spectrum(settings: SpectrumSettings, console: Console | None = None) -> SpectrumResult:
    """Load, multiply, print what was found and write tables and the picture.

    Args:
        settings: What to measure.
        console: Where to print; the standard output if None.

    Returns:
        What was measured.

    Raises:
        ValueError: If the data or the checkpoint is missing, damaged or of another problem, or
            there are fewer images than asked for.
        OSError: If the results cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    settings.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    model, data = _trained(settings)
    if settings.examples > len(data):
        raise ValueError(
            f"examples is {settings.examples}; expected at most {len(data)}, the training images"
        )
    device = device_from(settings.device)
    # Convolutions are a fifth faster with the channels of a pixel side by side.
    last = torch.channels_last
    model.to(device).to(memory_format=last)
    batches = [
        data.batch(some) for some in torch.arange(settings.examples).split(settings.batch_size)
    ]
    batches = [(x.to(device, memory_format=last), y.to(device)) for x, y in batches]
    kind = GGN if settings.matrix == "ggn" else Hessian
    console.print(
        f"{kind.__name__} of the mean cross-entropy of {settings.examples:,} training images, "
        f"{settings.problem}, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    loading = {"loading": time.perf_counter() - began}
    if settings.method == "rows":
        result = decompose(model, batches, settings, loading)
    else:
        A = kind(model, nn.CrossEntropyLoss(), batches, memory_bound=settings.memory_bound)
        result = measure(A, settings, loading)
    _print(result, console)
    _write(result, settings)
    picture = settings.output / "spectrum.png"
    save(draw(result, kind.__name__), picture)
    console.print(f"Picture: {picture}", soft_wrap=True)
    return result


def measure(
    A: LinearOperator, settings: SpectrumSettings, seconds: dict[str, float] | None = None
) -> SpectrumResult:
    r"""Eigenpairs, trace and density of a symmetric operator, each from what is left by the others.

    With the eigenpairs $V\Lambda V^\top$ taken out, $A - V\Lambda V^\top$ has a trace and a density
    without outliers, which few products tell well: the deflation of Hutch++, with the eigenvectors
    that are wanted anyway in the place of a sketch.

    Args:
        A: Symmetric operator, `[D, D]`.
        settings: Numbers of eigenpairs, products, probes and steps.
        seconds: What was spent before, by name.

    Returns:
        What was measured.

    Reference:
        Gambhir, Stathopoulos, Orginos. Deflation as a method of variance reduction for estimating
        the trace of a matrix inverse. SISC, 2017.
    """
    generator = torch.Generator(A.device).manual_seed(settings.seed)
    clock = _Clock(seconds or {})
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
    clock.stop("eigenpairs")
    rest = A - LowRankPlusDiagonal(pairs.vectors, pairs.values, 0.0)
    rest_trace = trace(
        rest,
        num_matvecs=settings.trace_matvecs,
        generator=generator,
        progress=settings.progress,
    )
    clock.stop("trace")
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
    clock.stop("density")
    whole = Estimate(
        pairs.values.sum() + rest_trace.value,
        rest_trace.standard_error,
        pairs.num_matvecs + rest_trace.num_matvecs,
        degrees_of_freedom=rest_trace.degrees_of_freedom,
    )
    return SpectrumResult(pairs, whole, rest_trace, density, A.shape[0], clock.seconds)


def decompose(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    settings: SpectrumSettings,
    seconds: dict[str, float] | None = None,
) -> SpectrumResult:
    """The same of the GGN of few examples, through the products of its rows: no estimates.

    Args:
        model: The network, in evaluation mode.
        batches: Images and labels.
        settings: How many eigenpairs, what may be left out, and the density's width and floor.
        seconds: What was spent before, by name.

    Returns:
        What was measured. Residuals are their bound by what was left out.
    """
    clock = _Clock(seconds or {})
    spectrum = ggn_spectrum(
        model,
        nn.CrossEntropyLoss(),
        batches,
        settings.eigenpairs,
        tol=settings.left_out,
        memory_bound=settings.memory_bound,
    )
    clock.stop("all eigenvalues")
    k = spectrum.vectors.shape[1]
    leading, others = spectrum.values[:k], spectrum.values[k:]
    pairs = EigenPairs(
        leading,
        spectrum.vectors,
        torch.full_like(leading, spectrum.left_out),
        num_matvecs=0,
        converged=True,
        status=f"from {len(spectrum.values):,} rows of the Jacobian, exact but for the trace of "
        f"{spectrum.left_out:.2g} of those left out",
    )
    trace = torch.tensor(spectrum.trace, dtype=leading.dtype, device=leading.device)
    size = len(spectrum.vectors)
    rest = torch.cat([others, others.new_zeros(size - len(others))])
    density = spectral_density(
        Diagonal(rest),
        scale="log",
        width=settings.density_width,
        floor=settings.density_floor * float(leading.max()),
    )
    clock.stop("density")
    return SpectrumResult(
        pairs,
        Estimate.exact(trace),
        Estimate.exact(trace - leading.sum()),
        density,
        size,
        clock.seconds,
    )


def draw(result: SpectrumResult, matrix: str) -> Figure:
    """The eigenvalues one by one, and the density of all.

    Args:
        result: What was measured.
        matrix: What it is called.
    """
    figure = Figure(figsize=(9.6, 3.8), layout="constrained", facecolor="white")
    by_rank, by_value = figure.subplots(1, 2)
    values = result.eigenpairs.values.cpu()
    by_rank.plot(range(1, len(values) + 1), values, "o", markersize=3.5, color=OKABE_ITO["blue"])
    if bool((values > 0).all()):
        by_rank.set_yscale("log")
        by_rank.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_rank.yaxis.set_major_formatter("{x:g}")
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


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = dict(seconds)
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def _trained(settings: SpectrumSettings) -> tuple[nn.Module, Images]:
    """The trained network in evaluation mode, and what it was trained on."""
    problem = get_problem(settings.problem)
    source = DataSource(root=settings.data, cache=settings.cache, progress=settings.progress)
    if settings.checkpoint is None and problem.published is None and "digits" in problem.name:
        data = problem.data(seed=settings.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = problem.model()
        generator = torch.Generator().manual_seed(settings.seed)
        train(model, data.train, problem.recipe, generator=generator, progress=settings.progress)
        return model.eval(), data.train
    model, data = load_problem(problem, source, settings.checkpoint, seed=settings.seed)
    return model, data.train


def _print(result: SpectrumResult, console: Console) -> None:
    pairs, total = result.eigenpairs, result.trace
    values = pairs.values.tolist()
    shown = ", ".join(f"{value:.4g}" for value in values[:12])
    console.print(f"Leading {len(values)} eigenvalues: {shown}, … {values[-1]:.4g}")
    console.print(
        f"  greatest residual {float(pairs.residuals.max()):.2g}, {pairs.num_matvecs} products: "
        f"{pairs.status}"
    )
    share = float(pairs.values.sum() / total.value)
    console.print(
        f"Trace: {float(total.value):.5g} ± {float(total.standard_error):.2g} (standard error); "
        f"the leading {len(values)} are {share:.1%} of it; {result.rest.num_matvecs} products for "
        "the rest"
    )
    console.print(
        f"Density of the rest: {result.density.num_matvecs} products; "
        f"{result.density.null_fraction:.2%} of its eigenvalues are within "
        f"±{result.density.floor:.1g}"
    )
    parts = ", ".join(f"{name} {value:.0f} s" for name, value in result.seconds.items())
    console.print(f"Time: {sum(result.seconds.values()):.0f} s ({parts})")


def _write(result: SpectrumResult, settings: SpectrumSettings) -> None:
    pairs, total, density = result.eigenpairs, result.trace, result.density
    rows = zip(pairs.values.tolist(), pairs.residuals.tolist(), strict=True)
    write_csv(
        [
            {"rank": rank, "eigenvalue": value, "residual": residual}
            for rank, (value, residual) in enumerate(rows, 1)
        ],
        settings.output / "eigenvalues.csv",
    )
    write_csv(
        [
            {
                "trace": float(total.value),
                "standard_error": float(total.standard_error),
                "num_matvecs": total.num_matvecs,
                "num_parameters": result.num_parameters,
            }
        ],
        settings.output / "trace.csv",
    )
    columns: dict[str, Tensor] = {
        "eigenvalue": density.grid,
        "density": density.density,
        "standard_error": density.standard_error,
    }
    listed = zip(*(column.tolist() for column in columns.values()), strict=True)
    write_csv(
        [dict(zip(columns, row, strict=True)) for row in listed], settings.output / "density.csv"
    )
