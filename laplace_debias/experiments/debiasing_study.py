"""A study: how directions and magnitudes from few examples are best had, at equal data.

Every method sees the same 2b training examples of a draw (some, told by their names, further ones).
One pass over them in small groups serves all K-FAC methods, whose factors are sums of the groups'.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from rich.console import Console
from torch import nn

from laplace_debias.curvature.blocks import curvature_blocks
from laplace_debias.curvature.columns import Fisher, LikelihoodCotangents
from laplace_debias.curvature.kfac.backends import choose_backend
from laplace_debias.curvature.kfac.fit import Problem
from laplace_debias.curvature.likelihood import likelihood_from
from laplace_debias.curvature.selection import select_parameters
from laplace_debias.experiments.debiasing_fits import MEMORY_BOUND, Row, StudyFits
from laplace_debias.experiments.debiasing_report import StudyResult, report
from laplace_debias.experiments.debiasing_settings import DebiasingStudySettings
from laplace_debias.experiments.evaluation import device_from
from laplace_debias.problems import DataSource, Images, get_problem, load_problem
from laplace_debias.report.tables import read_csv, write_csv

_PLACES = ("data", "checkpoint", "cache", "output", "device", "progress", "draws", "ekfac_draws")
"""Settings that do not change what is found in a draw."""


def run(settings: DebiasingStudySettings, console: Console | None = None) -> StudyResult:
    """Fit, predict, print a table, write results and a picture.

    Args:
        settings: What to study.
        console: Where to print; the standard output if None.

    Returns:
        What was measured.

    Raises:
        ValueError: If data or checkpoint are missing or damaged, there is too little data, or the
            folder holds results of other settings.
        OSError: If the results cannot be written.
    """
    console = console or Console(highlight=False, markup=False)
    source = DataSource(root=settings.data, cache=settings.cache, progress=settings.progress)
    _claim(settings)
    model, data = load_problem(
        get_problem(settings.problem), source, settings.checkpoint, seed=settings.seed
    )
    rows = study(model.to(device_from(settings.device)), data.train, data.test, settings)
    return report(rows, settings.output, console)


def study(
    model: nn.Module, train: Images, test: Images, settings: DebiasingStudySettings
) -> list[Row]:
    """Measure every method in every draw; draws in the output folder are not made again.

    Args:
        model: The trained network, in evaluation mode.
        train: What it was trained on.
        test: Images to predict.
        settings: What to study.

    Returns:
        Rows with `method`, `draw` (None for full-batch), `prior_precision`, `nll` (nats, mean over
        test images) and `log_variance` (mean over test images and logits).

    Raises:
        ValueError: If there are too few images.
    """
    a_draw = (2 + settings.further_batches) * settings.batch_size
    needed = settings.full_examples + settings.draws * a_draw
    if needed > len(train) or settings.test_examples > len(test):
        raise ValueError(
            f"the study takes {needed} training and {settings.test_examples} test images; there "
            f"are {len(train)} and {len(test)}: lower draws, full_examples or test_examples"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(train), generator=generator)
    chosen = torch.randperm(len(test), generator=generator)[: settings.test_examples]
    names = select_parameters(model, settings.params)
    fisher = Fisher(settings.fisher, 1, settings.seed)
    problem = Problem(
        model,
        LikelihoodCotangents(likelihood_from("classification", None), fisher),
        curvature_blocks(model, names),
        choose_backend(model, "auto"),
        model.get_parameter(names[0]).dtype,
        MEMORY_BOUND,
    )
    fits = StudyFits(problem, settings, train, order, test.batch(chosen))

    def stored(name: str, compute: Callable[[], list[Row]]) -> list[Row]:
        path = settings.output / "parts" / f"{name}.csv"
        if not path.exists():
            write_csv(compute(), path)
        return read_csv(path)

    rows = stored("full", fits.full_rows)
    for draw in range(settings.draws):
        rows += stored(f"draw_{draw}", partial(fits.draw_rows, draw))
    if settings.ekfac_draws:
        rows += stored("ekfac_full", fits.ekfac_full_rows)
    for draw in range(settings.ekfac_draws):
        rows += stored(f"ekfac_draw_{draw}", partial(fits.ekfac_draw_rows, draw))
    return rows


def _claim(settings: DebiasingStudySettings) -> None:
    """Make the folder that of these settings.

    Raises:
        ValueError: If it holds results of others.
    """
    described = {k: v for k, v in asdict(settings).items() if k not in _PLACES}
    plain = json.loads(json.dumps(described, default=str))
    path = settings.output / "settings.json"
    if not path.exists():
        settings.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    differing = sorted(k for k in {**found, **plain} if found.get(k) != plain.get(k))
    if differing:
        raise ValueError(
            f"{settings.output} holds results of other settings ({', '.join(differing)} differ): "
            "choose another output, or go back to those to go on"
        )
