"""Beyond the paper: the distance of each fit from exact full-batch K-FAC, against its time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from time import process_time

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from tqdm import tqdm

from examples.paper.common import FULL, Batch, Row, Trained, distances, load, write
from examples.paper.common import Settings as Shared
from examples.paper.plots import add_legend, method_colours, new_panels
from laplace_debias import Auto, Laplace
from laplace_debias.laplace.links import Link
from laplace_debias.report.style import OKABE_ITO, style_axes
from laplace_debias.report.tables import write_csv

AUTO = "auto"
# The mode and the Fisher matrix of each way.
WAYS = {
    "mini-batch": ("mini", "exact"),
    "mini-batch, Monte-Carlo": ("mini", "mc"),
    "mini-batch, empirical": ("mini", "empirical"),
    "debiased": ("debiased", "exact"),
    "cross-fitted": ("crossfit", "exact"),
    "cross-fitted, Monte-Carlo": ("crossfit", "mc"),
}


@dataclass(kw_only=True)
class Settings(Shared):
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
    chosen = torch.randperm(len(trained.test), generator=generator)[: settings.test_examples]
    test = [trained.batch(trained.test, part) for part in chosen.split(settings.chunk_size)]
    grid, num_data = list(settings.prior_precisions), len(trained.train)
    generator = torch.Generator().manual_seed(settings.seed)
    everything = torch.randperm(num_data, generator=generator)[: settings.population]
    rows: list[Row] = []

    def measure(name: str, fit: Callable[[], Laplace], draw: int | None, size: float) -> Laplace:
        start = process_time()
        la = fit()
        seconds = process_time() - start
        report = la.fit_report if name.startswith(AUTO) else None
        table = la.tune(test, grid=grid, link=Link("pairwise")).table
        told = {} if report is None else {"error": report.error, "read": report.num_read}
        drawn = {} if report is None else {"drawn": report.num_examples}
        shared = {"method": name, "draw": draw, "size": size, "seconds": seconds, **told, **drawn}
        rows.extend(
            {**shared, "prior_precision": row["prior_precision"], "nll": row["nll"]}
            for row in table
        )
        return la

    def new(fisher: str = "exact") -> Laplace:
        return Laplace(trained.model, params="weights", fisher=fisher)

    if settings.reference is None:
        fit_full = partial(_fit, settings, trained, new(), everything, "full")
    else:
        fit_full = partial(Laplace.load, settings.reference, trained.model)
    full = measure(FULL, fit_full, None, num_data)
    settings.output.mkdir(parents=True, exist_ok=True)
    full.save(settings.output / "full-batch.safetensors")
    del full
    for draw in tqdm(range(settings.draws), "draws", disable=not settings.progress):
        generator = torch.Generator().manual_seed(1000 + draw)
        order = everything[torch.randperm(len(everything), generator=generator)]
        for name in settings.ways:
            mode, fisher = WAYS[name]
            more = settings.monte_carlo_sizes if (mode, fisher) == ("mini", "mc") else ()
            for size in (*settings.sizes, *more):
                if size <= len(order):
                    fit = partial(_fit, settings, trained, new(fisher), order[:size], mode)
                    measure(name, fit, draw, size)
        data = _Shuffled(trained, order, settings.chunk_size)
        autos = [(AUTO, tolerance, Auto(data, tolerance)) for tolerance in settings.tolerances]
        autos += [
            (f"{AUTO}, told a number", number, Auto(data, 1e-9, None, number, settings.looks))
            for number in settings.budgets
        ]
        for name, size, scheme in autos:
            measure(name, partial(new().fit, scheme, num_data=num_data), draw, size)
        # A run takes hours; if it is interrupted, the finished draws are already in the file.
        write_csv(rows, settings.output / "results.csv")
    summary = summarise(rows)
    title = "Mean distance of the NLL to exact full-batch, ± half a 95 % interval over draws"
    whole = {
        f"{FULL}, {fisher}": seconds_of(summary, way, num_data)
        for way, fisher in (("mini-batch", "exact"), ("mini-batch, Monte-Carlo", "Monte-Carlo"))
        if way in settings.ways
    }
    figure = _figure(summary, whole)
    write(settings, {"results": rows, "summary": summary}, {"frontier": figure}, title)
    for name, seconds in whole.items():
        print(f"{name} would take {seconds:.3g} CPU seconds.")
    return summary


def _fit(settings: Settings, trained: Trained, la: Laplace, indices: Tensor, mode: str) -> Laplace:
    """Fit a posterior to given images, in batches that fit into memory."""
    batches = partial(_Shuffled, trained, chunk_size=settings.chunk_size)
    num_data, half = len(trained.train), len(indices) // 2
    if mode == "debiased":
        first, second = batches(indices[:half]), batches(indices[half:])
        return la.fit_batches(first, second, num_data=num_data)
    folds = 2 if mode == "crossfit" else None
    return la.fit_batches(batches(indices), num_data=num_data, folds=folds)


@dataclass
class _Shuffled:
    """Batches of training images in a fixed order, which can be read repeatedly."""

    trained: Trained
    order: Tensor
    chunk_size: int

    def __iter__(self) -> Iterator[Batch]:
        for part in self.order.split(self.chunk_size):
            yield self.trained.batch(self.trained.train, part)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Return the distances, with the mean examples passed backward and CPU seconds per draw."""
    table = []
    for row in distances(rows):
        key = row["method"], row["size"]
        fits = [r for r in rows if (r["method"], r["size"]) == key]
        examples = fmean(fit.get("drawn", fit["size"]) for fit in fits)
        table.append(
            {**row, "examples": examples, "CPU seconds": fmean(fit["seconds"] for fit in fits)}
        )
    return table


def seconds_of(summary: Sequence[Row], method: str, size: int) -> float:
    """Interpolate a way's CPU seconds for a size, between its smallest and largest size."""
    of_way = sorted((r for r in summary if r["method"] == method), key=lambda row: row["size"])
    first, last = of_way[0], of_way[-1]
    if first is last:
        return _seconds(last) * size / last["size"]
    slope = (_seconds(last) - _seconds(first)) / (last["size"] - first["size"])
    return _seconds(last) + slope * (size - last["size"])


def _figure(summary: Sequence[Row], whole: Mapping[str, float]) -> Figure:
    """Draw distance against seconds, with a line per way; `whole` contains full-batch fits."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(summary, key=_seconds):
        name = AUTO if row["method"].startswith(AUTO) else row["method"]
        lines.setdefault(name, []).append((_seconds(row), row["NLL distance"]))
    colours = method_colours(name for name in lines if name != AUTO) | {AUTO: OKABE_ITO["black"]}
    figure, ((ax,),) = new_panels(1, 1, (7.2, 4.2))
    for name, points in lines.items():
        x, y = zip(*points, strict=True)
        width = 2.4 if name == AUTO else 1.1
        ax.plot(x, y, "o-", color=colours[name], markersize=4, linewidth=width)
    styles = dict(zip(whole, ("--", ":"), strict=False))
    for name, seconds in whole.items():
        ax.axvline(seconds, color="black", linewidth=0.9, linestyle=styles[name])
    ax.set(xscale="log", yscale="log", xlabel="CPU seconds of the fit")
    ax.set_ylabel("|NLL − exact full-batch NLL| (nats) ↓")
    style_axes(ax)
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    handles += [Line2D([], [], color="black", linestyle=styles[n], label=n) for n in whole]
    add_legend(figure, handles, columns=3)
    return figure


def _seconds(row: Row) -> float:
    return row["CPU seconds"]
