"""The spectrum of a network's curvature: leading eigenpairs, trace, spectral density."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from laplace_debias.curvature import ggn_spectrum
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.linalg import (
    EigenPairs,
    Estimate,
    SpectralDensity,
    Status,
    eigsh,
    spectral_density,
    trace,
)
from laplace_debias.operators import Diagonal, LinearOperator, LowRankPlusDiagonal
from laplace_debias.report.spectrum_plot import plot_spectral_density
from laplace_debias.report.style import OKABE_ITO, log_ticks, new_panels, style_axes


@dataclass(frozen=True, kw_only=True)
class SpectrumBudget:
    """How much of a spectrum is measured, and how many products each part of it may cost.

    Attributes:
        eigenpairs: How many eigenpairs, the largest.
        left_out: For `rows`: share of the trace that may be left out with the smallest rows. No
            eigenvalue is too small by more.
        tolerance: For `lanczos`, as the next four: greatest residual norm of a pair, relative to
            the largest eigenvalue.
        max_matvecs: Greatest number of products for the eigenpairs.
        trace_matvecs: Products for the rest of the trace, which the eigenpairs do not explain.
        density_probes: Probes of the spectral density of that rest.
        density_steps: Lanczos steps, and products, per probe.
        density_width: Width of the density's smoothing, in decades.
        density_floor: Eigenvalues count as zero up to this multiple of the largest one. A few
            Lanczos steps do not tell smaller ones apart.
        memory_bound: Bytes that linearised batches or rows may take. What does not fit is computed
            again.
        seed: Seed of all random vectors, and of the training.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a number is out of range.
    """

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
    progress: bool = True

    def __post_init__(self) -> None:
        check_at_least(self, 1, "eigenpairs", "density_probes", "density_steps")
        check_at_least(self, self.eigenpairs, "max_matvecs")
        check_at_least(self, 2, "trace_matvecs")
        check_at_least(self, 0, "memory_bound")
        if not 0 <= self.left_out < 1:
            raise ValueError(f"left_out is {self.left_out}; expected at least 0 and less than 1")
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


def measure(
    A: LinearOperator, settings: SpectrumBudget, seconds: dict[str, float] | None = None
) -> SpectrumResult:
    r"""Leading eigenpairs of a symmetric operator, its trace, and the density of the rest.

    With the eigenpairs $V\Lambda V^\top$ taken out, $A - V\Lambda V^\top$ has a trace and a density
    without outliers, which few products estimate well. This is the deflation of Hutch++, with the
    eigenvectors in place of a sketch.

    Args:
        A: Symmetric operator, `[D, D]`.
        settings: Numbers of eigenpairs, products, probes and steps.
        seconds: Seconds spent before, by name.

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
    settings: SpectrumBudget,
    seconds: dict[str, float] | None = None,
    loss: nn.Module | None = None,
) -> SpectrumResult:
    """The spectrum of the GGN of few examples, exactly, from the products of its rows.

    Args:
        model: The network, in evaluation mode.
        batches: Images and labels.
        settings: Number of eigenpairs, share left out, and the density's width and floor.
        seconds: Seconds spent before, by name.
        loss: Whose GGN, as `ggn_spectrum` takes it; the mean cross-entropy if None.

    Returns:
        What was measured. Residuals are their bound by what was left out.
    """
    clock = _Clock(seconds or {})
    spectrum = ggn_spectrum(
        model,
        nn.CrossEntropyLoss() if loss is None else loss,
        batches,
        settings.eigenpairs,
        tol=settings.left_out,
        memory_bound=settings.memory_bound,
    )
    clock.stop("all eigenvalues")
    k = spectrum.vectors.shape[1]
    size = len(spectrum.vectors)
    # Where there are more rows than parameters, the values behind the last one are rounding.
    leading, others = spectrum.values[:k], spectrum.values[k:size]
    pairs = EigenPairs(
        leading,
        spectrum.vectors,
        torch.full_like(leading, spectrum.left_out),
        num_matvecs=0,
        status=Status.CONVERGED,
        message=f"from {len(spectrum.values):,} rows of the Jacobian, exact but for the trace of "
        f"{spectrum.left_out:.2g} of those left out",
    )
    trace = torch.tensor(spectrum.trace, dtype=leading.dtype, device=leading.device)
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
        matrix: Name of the matrix.
    """
    figure, ((by_rank, by_value),) = new_panels(1, 2, (9.6, 3.8))
    values = result.eigenpairs.values.cpu()
    by_rank.plot(range(1, len(values) + 1), values, "o", markersize=3.5, color=OKABE_ITO["blue"])
    if bool((values > 0).all()):
        by_rank.set_yscale("log")
        log_ticks(by_rank.yaxis)
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
