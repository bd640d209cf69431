"""`laplace-debias spectrum`: the spectrum of a trained network's curvature."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from laplace_debias.commands.network import not_for, plain, print_notes
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
from laplace_debias.problems import get_problem, train
from laplace_debias.report.style import save
from laplace_debias.report.tables import write_csv
from laplace_debias.sources import SourceSettings, Task, load
from laplace_debias.sources.shares import share
from laplace_debias.system.atomic import check_target
from laplace_debias.system.device import device_from
from laplace_debias.system.ranks import current

_OF_LANCZOS = ("tolerance", "max_matvecs", "trace_matvecs", "density_probes", "density_steps")
_LOSSES: dict[Task, tuple[str, nn.Module]] = {
    "classification": ("mean cross-entropy", nn.CrossEntropyLoss()),
    "binary": ("mean binary cross-entropy", nn.BCEWithLogitsLoss()),
    "multilabel": ("mean binary cross-entropy", nn.BCEWithLogitsLoss()),
    "regression": ("mean squared error", nn.MSELoss()),
}


@dataclass(frozen=True, kw_only=True)
class Settings(SpectrumBudget, SourceSettings):
    """Which spectrum is measured, and how.

    Attributes:
        matrix: `ggn` or `hessian`, of the mean loss: cross-entropy, binary cross-entropy or squared
            error, by the task.
        method: `lanczos`: iterations, estimates of trace and density. `rows`, for the GGN of some
            hundred examples: all eigenvalues through the products of its rows, without estimates.
        examples: How many of the training examples the loss is taken over, chosen by the seed.
        batch_size: Examples per batch. Results do not depend on it.
        output: Folder of the tables and the picture.

    Raises:
        ValueError: As `SourceSettings`; if a number is out of range.
    """

    matrix: Literal["ggn", "hessian"] = "ggn"
    method: Literal["lanczos", "rows"] = "lanczos"
    examples: int = 500
    batch_size: int | None = 50
    output: Path = Path("results/spectrum")

    def __post_init__(self) -> None:
        SpectrumBudget.__post_init__(self)
        SourceSettings.__post_init__(self)
        check_at_least(self, 1, "examples")
        if self.method == "rows" and self.matrix != "ggn":
            raise ValueError(f"method rows is for the GGN, not for {self.matrix}: use lanczos")

    def without_effect(self) -> dict[str, str]:
        """As `SourceSettings.without_effect`."""
        of_other = _OF_LANCZOS if self.method == "rows" else ("left_out",)
        return {
            **not_for("spectrum", "validation_examples", "test_examples"),
            **dict.fromkeys(of_other, f"not for method={self.method}"),
        }


def run(settings: Settings, console: Console | None = None) -> SpectrumResult:
    """Load, multiply, print what was found and write tables and the picture.

    Returns:
        What was measured.

    Raises:
        ValueError: As `load`; if there are fewer examples than asked for.
        OSError: If the results cannot be written.
    """
    console = console or plain_console()
    began = time.perf_counter()
    ranks = current()
    if settings.method == "rows" and ranks.size > 1:
        raise ValueError(
            f"method=rows is for one process, and WORLD_SIZE says {ranks.size}: give "
            "--method=lanczos, or start the command without torchrun"
        )
    check_target(settings.output / "eigenvalues.csv", make_folders=True)
    model, batches, task = _trained(settings, console)
    device = next(model.parameters()).device
    name, loss = _LOSSES[task]
    if task == "binary":
        batches = [(x, y.reshape(-1, 1)) for x, y in batches]
    if task in ("binary", "multilabel"):
        batches = [(x, y.float()) for x, y in batches]
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    if settings.problem is not None:
        # Convolutions are a fifth faster with the channels of a pixel side by side; not every
        # network's products can be batched then.
        last = torch.channels_last
        model.to(memory_format=last)
        batches = [(x.to(memory_format=last), y) for x, y in batches]
    kind = GGN if settings.matrix == "ggn" else Hessian
    network = settings.problem or settings.model or settings.timm or settings.torchvision
    examples = "images" if batches[0][0].ndim == 4 else "examples"
    console.print(
        f"{kind.__name__} of the {name} of {settings.examples:,} training {examples}, {network}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    loading = {"loading": time.perf_counter() - began}
    if settings.method == "rows":
        result = decompose(model, batches, settings, loading, loss)
    else:
        batches = list(share(batches, model))
        A = kind(model, loss, batches, memory_bound=settings.memory_bound)
        result = measure(A, settings, loading)
    _print(result, console)
    if ranks.rank > 0:
        return result
    _write(result, settings)
    picture = settings.output / "spectrum.png"
    save(draw(result, kind.__name__), picture)
    console.print(f"Picture: {picture}", soft_wrap=True)
    return result


def as_json(settings: Settings, result: SpectrumResult) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "output": str(settings.output),
        "matrix": settings.matrix,
        "num_parameters": result.num_parameters,
        "eigenvalues": plain(result.eigenpairs.values),
        "trace": plain(float(result.trace.value)),
        "trace_standard_error": plain(float(result.trace.standard_error)),
        "seconds": plain(result.seconds),
    }


def _trained(
    settings: Settings, console: Console
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Task]:
    """The trained network on its device, some of what it was trained on, and the task."""
    problem = None if settings.problem is None else get_problem(settings.problem)
    if problem is not None and settings.checkpoint is None and "digits" in problem.name:
        data = problem.data(seed=settings.seed).train
        _check_number(settings, len(data))
        model = problem.initial_model(settings.seed)
        ranks = current()
        if ranks.rank == 0:
            generator = torch.Generator().manual_seed(settings.seed)
            train(model, data, problem.recipe, generator=generator, progress=settings.progress)
        model.load_state_dict(ranks.from_rank(model.state_dict(), 0))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(settings.seed))
        chosen = order[: settings.examples].split(settings.batch_size or settings.examples)
        model = model.eval().to(device_from(settings.device))
        return model, [data.batch(some) for some in chosen], "classification"
    loaded = load(settings.without_comparison())
    print_notes(loaded, console)
    batches: list[tuple[Tensor, Tensor]] = []
    left = settings.examples
    for x, y in loaded.train:
        batches.append((x[:left], y[:left]))
        left -= len(batches[-1][1])
        if not left:
            break
    _check_number(settings, settings.examples - left)
    return loaded.model, batches, loaded.task


def _check_number(settings: Settings, there: int) -> None:
    if settings.examples > there:
        raise ValueError(
            f"examples is {settings.examples}; expected at most {there}, the training examples"
        )


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
