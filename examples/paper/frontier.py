"""Beyond the paper: the distance of each fit from exact full-batch K-FAC, against its time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Literal

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from tqdm import tqdm

from examples.paper.common import (
    FULL,
    Batch,
    ExperimentSettings,
    Row,
    Trained,
    distances,
    load,
    random_indices,
    select,
    write,
)
from examples.paper.plots import add_legend, method_colours, new_panels
from laplace_debias import Auto, Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.report.style import OKABE_ITO, style_axes
from laplace_debias.report.tables import write_csv

AUTO = "auto"
AUTO_WITH_BUDGET = "auto, told a number"
Mode = Literal["mini", "debiased", "crossfit"]


@dataclass(frozen=True)
class Way:
    """A way to fit a given number of examples: its mode, and its type of Fisher matrix."""

    mode: Mode
    fisher: Literal["exact", "mc", "empirical"]


WAYS = {
    "mini-batch": Way("mini", "exact"),
    "mini-batch, Monte-Carlo": Way("mini", "mc"),
    "mini-batch, empirical": Way("mini", "empirical"),
    "debiased": Way("debiased", "exact"),
    "cross-fitted": Way("crossfit", "exact"),
    "cross-fitted, Monte-Carlo": Way("crossfit", "mc"),
}


@dataclass(kw_only=True)
class Settings(ExperimentSettings):
    """The fits of the study, and the amounts of data.

    Attributes:
        ways: The entries of `WAYS` to fit.
        sizes: Numbers of examples, for all fits except `mode="auto"`.
        monte_carlo_sizes: Further numbers of examples, for fits with Monte-Carlo labels and no
            folds.
        tolerances: Tolerances of `mode="auto"`.
        budgets: Numbers of examples that `mode="auto"` may draw.
        looks: The number of examples that `mode="auto"` then reads per example drawn.
        draws: How many times each fit is repeated, with different examples.
        population: The number of random training examples from which all fits draw. The full-batch
            fit uses these examples, scaled to the number of all examples. None for all.
        reference: The posterior file of the full-batch fit, from the output of an earlier run.
        test_examples: The number of test images to predict.
        prior_precisions: The grid of δ.
        chunk_size: Images per batch.
    """

    output: Path = Path("results/frontier")
    ways: tuple[str, ...] = tuple(WAYS)
    sizes: tuple[int, ...] = (64, 256, 1024)
    monte_carlo_sizes: tuple[int, ...] = ()
    tolerances: tuple[float, ...] = (0.2, 0.1, 0.05)
    budgets: tuple[int, ...] = ()
    looks: int = 8
    draws: int = 5
    population: int | None = None
    reference: Path | None = None
    test_examples: int = 100
    prior_precisions: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 1000.0)
    chunk_size: int = 50


def run(settings: Settings) -> list[Row]:
    """Fit and predict in every way; return a row for each way and size."""
    trained = load(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    test_indices = random_indices(trained.test, settings.test_examples, generator)
    test = trained.batches(trained.test, test_indices, settings.chunk_size)
    generator = torch.Generator().manual_seed(settings.seed)
    population = random_indices(trained.train, settings.population, generator)

    rows = full_batch_rows(trained, population, test, settings)
    for draw in tqdm(range(settings.draws), "draws", disable=not settings.progress):
        generator = torch.Generator().manual_seed(1000 + draw)
        order = population[torch.randperm(len(population), generator=generator)]
        rows += way_rows(trained, order, draw, test, settings)
        rows += auto_rows(trained, order, draw, test, settings)
        # A run takes hours; if it is interrupted, the finished draws are already in the file.
        write_csv(rows, settings.output / "results.csv")

    summary = summarise(rows)
    num_data = len(trained.train)
    full_batch_seconds = {}
    if "mini-batch" in settings.ways:
        full_batch_seconds[f"{FULL}, exact"] = seconds_of_size(summary, "mini-batch", num_data)
    if "mini-batch, Monte-Carlo" in settings.ways:
        seconds = seconds_of_size(summary, "mini-batch, Monte-Carlo", num_data)
        full_batch_seconds[f"{FULL}, Monte-Carlo"] = seconds
    figure = frontier_figure(summary, full_batch_seconds)
    title = "Mean distance of the NLL to exact full-batch, ± half a 95 % interval over draws"
    write(settings, {"results": rows, "summary": summary}, {"frontier": figure}, title)
    for name, seconds in full_batch_seconds.items():
        print(f"{name} would take {seconds:.3g} CPU seconds.")
    return summary


def full_batch_rows(
    trained: Trained, population: Tensor, test: list[Batch], settings: Settings
) -> list[Row]:
    """Fit to the whole population, or load such a fit, and save it; return its NLLs."""
    la = Laplace(trained.model, params="weights")
    start = process_time()
    if settings.reference is None:
        batches = ImageBatches(trained, population, settings.chunk_size)
        la.fit_batches(batches, num_data=len(trained.train))
    else:
        la = Laplace.load(settings.reference, trained.model)
    seconds = process_time() - start
    labels = {"method": FULL, "draw": None, "size": len(trained.train), "seconds": seconds}
    rows = nll_rows(la, labels, test, settings)
    settings.output.mkdir(parents=True, exist_ok=True)
    la.save(settings.output / "full-batch.safetensors")
    return rows


def way_rows(
    trained: Trained, order: Tensor, draw: int, test: list[Batch], settings: Settings
) -> list[Row]:
    """Fit in every way to the first examples of a random order, for each size; return the NLLs."""
    rows: list[Row] = []
    for name in settings.ways:
        way = WAYS[name]
        sizes = list(settings.sizes)
        if way == Way("mini", "mc"):
            sizes += settings.monte_carlo_sizes
        for size in sizes:
            if size > len(order):
                continue
            la = Laplace(trained.model, params="weights", fisher=way.fisher)
            generator = torch.Generator().manual_seed(draw)
            start = process_time()
            fit(la, trained, order[:size], way.mode, settings.chunk_size, generator)
            seconds = process_time() - start
            labels = {"method": name, "draw": draw, "size": size, "seconds": seconds}
            rows += nll_rows(la, labels, test, settings)
    return rows


def fit(
    la: Laplace,
    trained: Trained,
    indices: Tensor,
    mode: Mode,
    chunk_size: int,
    generator: torch.Generator,
) -> None:
    """Fit a posterior to training images, in batches that fit into memory.

    The generator draws the labels of Monte-Carlo fits.
    """
    num_data = len(trained.train)
    half = len(indices) // 2
    batches = ImageBatches(trained, indices, chunk_size)
    if mode == "mini":
        la.fit_batches(batches, num_data=num_data, generator=generator)
    elif mode == "crossfit":
        la.fit_batches(batches, num_data=num_data, folds=2, generator=generator)
    else:
        first_half = ImageBatches(trained, indices[:half], chunk_size)
        second_half = ImageBatches(trained, indices[half:], chunk_size)
        la.fit_batches(first_half, second_half, num_data=num_data, generator=generator)


def auto_rows(
    trained: Trained, order: Tensor, draw: int, test: list[Batch], settings: Settings
) -> list[Row]:
    """Fit with `mode="auto"`, for each tolerance and each budget of examples; return the NLLs."""
    batches = ImageBatches(trained, order, settings.chunk_size)
    rows: list[Row] = []
    for tolerance in settings.tolerances:
        scheme = Auto(batches, tolerance)
        labels = {"method": AUTO, "draw": draw, "size": tolerance}
        rows += auto_fit_rows(trained, scheme, labels, test, settings)
    for budget in settings.budgets:
        # No fit reaches this tolerance, so that the fit ends with the budget.
        scheme = Auto(batches, 1e-9, examples=budget, forward_ratio=settings.looks)
        labels = {"method": AUTO_WITH_BUDGET, "draw": draw, "size": budget}
        rows += auto_fit_rows(trained, scheme, labels, test, settings)
    return rows


def auto_fit_rows(
    trained: Trained, scheme: Auto, labels: Row, test: list[Batch], settings: Settings
) -> list[Row]:
    """Fit with one scheme of `mode="auto"`; return its NLLs, with the report of the fit."""
    la = Laplace(trained.model, params="weights")
    generator = torch.Generator().manual_seed(labels["draw"])
    start = process_time()
    la.fit(scheme, num_data=len(trained.train), generator=generator)
    seconds = process_time() - start
    report = la.fit_report
    labels = {
        **labels,
        "seconds": seconds,
        "error": report.error,
        "read": report.num_read,
        "drawn": report.num_examples,
    }
    return nll_rows(la, labels, test, settings)


def nll_rows(la: Laplace, labels: Row, test: list[Batch], settings: Settings) -> list[Row]:
    """Return the NLL on test images for each prior precision, with the labels of the fit."""
    grid = list(settings.prior_precisions)
    table = la.tune(test, grid=grid, link=Link("pairwise")).table
    return [
        {**labels, "prior_precision": row["prior_precision"], "nll": row["nll"]} for row in table
    ]


@dataclass(frozen=True, eq=False)
class ImageBatches:
    """Batches of training images in a fixed order, which can be read repeatedly.

    Attributes:
        trained: The network and its data.
        order: The indices of the images.
        size: Images per batch.
    """

    trained: Trained
    order: Tensor
    size: int

    def __iter__(self) -> Iterator[Batch]:
        """Load one batch after the other."""
        for indices in self.order.split(self.size):
            yield self.trained.batch(self.trained.train, indices)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Return the distances, with the mean examples passed backward and CPU seconds per draw."""
    table = []
    for row in distances(rows):
        fit_rows = select(rows, method=row["method"], size=row["size"])
        examples = fmean(fit_row.get("drawn", fit_row["size"]) for fit_row in fit_rows)
        seconds = fmean(fit_row["seconds"] for fit_row in fit_rows)
        table.append({**row, "examples": examples, "CPU seconds": seconds})
    return table


def seconds_of_size(summary: Sequence[Row], method: str, size: int) -> float:
    """Extrapolate a way's CPU seconds to a size, on the line of its smallest and largest size."""
    by_size = sorted(select(summary, method=method), key=lambda row: row["size"])
    smallest = by_size[0]
    largest = by_size[-1]
    if smallest is largest:
        return largest["CPU seconds"] * size / largest["size"]
    additional_seconds = largest["CPU seconds"] - smallest["CPU seconds"]
    slope = additional_seconds / (largest["size"] - smallest["size"])
    return largest["CPU seconds"] + slope * (size - largest["size"])


def frontier_figure(summary: Sequence[Row], full_batch_seconds: Mapping[str, float]) -> Figure:
    """Draw distance against seconds, with a line per way.

    Args:
        summary: The rows of `summarise`.
        full_batch_seconds: CPU seconds of full-batch fits, by the names of vertical lines.
    """
    lines: dict[str, list[Row]] = {}
    for row in sorted(summary, key=lambda row: row["CPU seconds"]):
        name = row["method"]
        if name == AUTO_WITH_BUDGET:
            name = AUTO
        lines.setdefault(name, []).append(row)
    colours = method_colours(name for name in lines if name != AUTO)
    colours[AUTO] = OKABE_ITO["black"]
    figure, ((ax,),) = new_panels(1, 1, (7.2, 4.2))
    for name, rows in lines.items():
        x = [row["CPU seconds"] for row in rows]
        y = [row["NLL distance"] for row in rows]
        width = 2.4 if name == AUTO else 1.1
        ax.plot(x, y, "o-", color=colours[name], markersize=4, linewidth=width)
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    for (name, seconds), style in zip(full_batch_seconds.items(), ("--", ":"), strict=False):
        ax.axvline(seconds, color="black", linewidth=0.9, linestyle=style)
        handles.append(Line2D([], [], color="black", linestyle=style, label=name))
    ax.set(xscale="log", yscale="log", xlabel="CPU seconds of the fit")
    ax.set_ylabel("|NLL − exact full-batch NLL| (nats) ↓")
    style_axes(ax)
    add_legend(figure, handles, columns=3)
    return figure
