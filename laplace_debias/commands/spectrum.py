"""`laplace-debias spectrum`: measure the spectrum of a network's curvature."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from laplace_debias.commands.network import not_for, print_notes
from laplace_debias.sources.settings import SourceSettings
from laplace_debias.system.settings import check_at_least, option

if TYPE_CHECKING:
    from laplace_debias.assessment.spectrum import Spectrum

_DEFAULT_EXAMPLES = 500
_DEFAULT_EIGENPAIRS = 50
_MOST_SHOWN = 13
"""The largest number of eigenvalues that are printed."""


@dataclass(frozen=True, kw_only=True)
class Settings(SourceSettings):
    """Options of `laplace-debias spectrum`.

    Attributes:
        matrix: The GGN or the Hessian of the mean loss, which is the cross-entropy, the binary
            cross-entropy or the squared error, depending on the task.
        examples: The number of training examples in the loss. The seed determines which ones. By
            default, there are 500, or as many as the data contains.
        eigenpairs: The number of leading eigenpairs. By default, there are 50, or as many as the
            network has parameters.
        tolerance: The largest residual norm of an eigenpair, relative to the largest eigenvalue.
        max_matvecs: The maximum number of matrix products for the eigenpairs.
        trace_matvecs: The number of matrix products for the trace, in addition to those for the
            eigenpairs.
        density_probes: The number of random probes for the spectral density of the other
            eigenvalues.
        density_steps: The number of Lanczos steps per probe. Each step is one matrix product.
        density_width: The width of the smoothing of the density, in decades.
        density_floor: Eigenvalues up to this multiple of the largest one count as zero, because a
            few Lanczos steps do not separate smaller ones.
        memory_bound: The memory for linearised batches, in bytes. Batches that do not fit are
            linearised again in each product.
        output: The folder of the tables and the figure.
    """

    heading: ClassVar = "Spectrum"
    unused: ClassVar = not_for("spectrum", "validation_examples", "test_examples")
    usage: ClassVar = (
        "laplace-debias spectrum --model my_pkg.models:build --checkpoint net.pt --data images "
        "--examples 200",
    )

    matrix: Literal["ggn", "hessian"] = "ggn"
    examples: int | None = None
    eigenpairs: int | None = None
    tolerance: float = 1e-3
    max_matvecs: int = 150
    trace_matvecs: int = 10
    density_probes: int = 2
    density_steps: int = 10
    density_width: float = 0.1
    density_floor: float = 1e-5
    memory_bound: int = 4 * 2**30
    output: Path = field(default=Path("results/spectrum"), metadata=option(heading="Output"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "examples", "eigenpairs", "density_probes", "density_steps")
        check_at_least(self, self.eigenpairs or 1, "max_matvecs")
        check_at_least(self, 2, "trace_matvecs")
        check_at_least(self, 0, "memory_bound")
        for name in ("tolerance", "density_width", "density_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}. Pass a positive number.")


def run(settings: Settings) -> "Spectrum":
    """Measure the spectrum, print the results, and write the tables and the figure."""
    from laplace_debias.assessment.spectrum import curvature_of, first_batches, measure_spectrum
    from laplace_debias.sources import load
    from laplace_debias.system.files import check_target
    from laplace_debias.system.ranks import process_group
    from laplace_debias.system.shown import counted

    check_target(settings.output / "eigenvalues.csv", make_folders=True)
    loaded = load(settings.without_comparison())
    print_notes(loaded)
    name, _ = loaded.likelihood.training_loss()
    matrix = "GGN" if settings.matrix == "ggn" else "Hessian"
    batches = first_batches(loaded, settings.examples or _DEFAULT_EXAMPLES)
    num_examples = sum(len(targets) for _, targets in batches)
    if settings.examples is not None and num_examples < settings.examples:
        raise ValueError(
            f"examples={settings.examples} is more than the number of training examples. Pass "
            f"at most {num_examples}."
        )
    A = curvature_of(loaded, settings.matrix, batches, settings.memory_bound)
    num_parameters = A.shape[0]
    if settings.eigenpairs is not None and num_parameters < settings.eigenpairs:
        raise ValueError(
            f"eigenpairs={settings.eigenpairs} is more than the number of parameters. Pass at "
            f"most {num_parameters}."
        )
    default_eigenpairs = min(_DEFAULT_EIGENPAIRS, num_parameters, settings.max_matvecs)
    print(
        f"{matrix} of the {name} of {counted(num_examples, f'training {loaded.input_name}')}, "
        f"{counted(num_parameters, 'parameter')}"
    )
    spectrum = measure_spectrum(
        A,
        eigenpairs=settings.eigenpairs or default_eigenpairs,
        tolerance=settings.tolerance,
        max_matvecs=settings.max_matvecs,
        trace_matvecs=settings.trace_matvecs,
        density_probes=settings.density_probes,
        density_steps=settings.density_steps,
        density_width=settings.density_width,
        density_floor=settings.density_floor,
        seed=settings.seed,
        progress=settings.progress,
    )
    _print(spectrum)
    if process_group().rank == 0:
        _write(settings.output, spectrum, matrix)
    return spectrum


def _write(folder: Path, spectrum: "Spectrum", matrix: str) -> None:
    """Write the tables and the figure."""
    from laplace_debias.report.spectrum_plot import spectrum_figure
    from laplace_debias.report.style import save
    from laplace_debias.report.tables import write_csv

    pairs = spectrum.eigenpairs
    density = spectrum.density
    tables = {"eigenvalues": {"eigenvalue": pairs.values, "residual": pairs.residuals}}
    if density is not None:
        tables["density"] = {
            "eigenvalue": density.grid,
            "density": density.density,
            "standard_error": density.standard_error,
        }
    for name, columns in tables.items():
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_csv([dict(zip(columns, row, strict=True)) for row in rows], folder / f"{name}.csv")
    if density is None:
        # Remove the table of an earlier run, which would not match the new figure.
        (folder / "density.csv").unlink(missing_ok=True)
    path = folder / "spectrum.png"
    save(spectrum_figure(pairs, spectrum.trace, density, matrix), path)
    print(f"Figure: {path}")


def as_json(settings: Settings, spectrum: "Spectrum") -> dict[str, Any]:
    """Return the object that `--json` prints."""
    from laplace_debias.system.shown import plain

    return {
        "output": str(settings.output),
        "matrix": settings.matrix,
        "num_parameters": len(spectrum.eigenpairs.vectors),
        "eigenvalues": plain(spectrum.eigenpairs.values),
        "trace": plain(float(spectrum.trace.value)),
        "trace_standard_error": plain(float(spectrum.trace.standard_error)),
        "seconds": plain(spectrum.seconds),
    }


def _print(spectrum: "Spectrum") -> None:
    """Print the eigenvalues, the trace and the time."""
    from laplace_debias.system.shown import counted

    pairs = spectrum.eigenpairs
    trace = spectrum.trace
    density = spectrum.density
    texts = [f"{value:.4g}" for value in pairs.values.tolist()]
    shown = texts
    if len(texts) > _MOST_SHOWN:
        shown = [*texts[: _MOST_SHOWN - 1], "…", texts[-1]]
    print(f"Leading {counted(len(texts), 'eigenvalue')}: {', '.join(shown)}")
    print(
        f"  largest residual {float(pairs.residuals.max()):.2g}, "
        f"{counted(pairs.num_matvecs, 'product')}: {pairs.message}"
    )
    fraction = float(pairs.values.sum() / trace.value)
    if density is None:
        small = "all other eigenvalues are below the floor of the density"
    else:
        small = (
            f"of the other eigenvalues {density.null_fraction:.2%} are within ±{density.floor:.1g}"
        )
    print(
        f"Trace: {float(trace.value):.5g} ± {float(trace.standard_error):.2g} (standard error); "
        f"the sum of the leading eigenvalues is {fraction:.1%} of it; {small}"
    )
    print(f"Time: {spectrum.seconds:.0f} s")
