"""`laplace-debias spectrum`: the spectrum of a trained network's curvature."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from laplace_debias.curvature import GGN, Hessian
from laplace_debias.experiments.bias.curvature_spectrum import (
    SpectrumBudget,
    SpectrumResult,
    decompose,
    draw,
    measure,
)
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.setup import plain_console
from laplace_debias.problems import DataSource, Images, get_problem, load_problem, train
from laplace_debias.report.style import save
from laplace_debias.report.tables import write_csv
from laplace_debias.system.device import device_from


@dataclass(frozen=True, kw_only=True)
class Settings(SpectrumBudget):
    """Which spectrum is measured, and how.

    Attributes:
        problem: Name of the test problem, or its letter in the paper.
        data: Its data, as `laplace-debias train` takes it; nothing for the digits.
        checkpoint: A file of `laplace-debias train`. If None, a problem of the digits is trained
            first, and other problems use published weights.
        cache: Folder for decoded images; see `problems.cifar10`.
        matrix: `ggn` or `hessian`, of the mean cross-entropy.
        method: `lanczos`: iterations, estimates of trace and density. `rows`, for the GGN of some
            hundred examples: all eigenvalues through the products of its rows, without estimates.
        examples: How many of the training images the loss is taken over: the first ones.
        batch_size: Images per batch. Results do not depend on it.
        device: Where to run, for example `cpu` or `cuda`; `auto` takes a GPU where there is one.
        output: Folder of the tables and the picture.

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
    device: str = "auto"
    output: Path = Path("results/spectrum")

    def __post_init__(self) -> None:
        super().__post_init__()
        get_problem(self.problem)
        check_at_least(self, 1, "examples", "batch_size")
        if self.method == "rows" and self.matrix != "ggn":
            raise ValueError(f"method rows is for the GGN, not for {self.matrix}: use lanczos")


def run(settings: Settings, console: Console | None = None) -> SpectrumResult:
    """Load, multiply, print what was found and write tables and the picture.

    Returns:
        What was measured.

    Raises:
        ValueError: If the data or the checkpoint is missing, damaged or of another problem, or
            there are fewer images than asked for.
        OSError: If the results cannot be written.
    """
    console = console or plain_console()
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


def _trained(settings: Settings) -> tuple[nn.Module, Images]:
    """The trained network in evaluation mode, and what it was trained on."""
    problem = get_problem(settings.problem)
    source = DataSource(root=settings.data, cache=settings.cache, progress=settings.progress)
    if settings.checkpoint is None and problem.published is None and "digits" in problem.name:
        data = problem.data(seed=settings.seed)
        model = problem.initial_model(settings.seed)
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
        f"{pairs.message}"
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


def _write(result: SpectrumResult, settings: Settings) -> None:
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
