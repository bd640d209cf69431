"""Figure 21: the bias of mini-batch quadratics over the course of training."""

import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from laplace_debias.experiments.bias.bias_figures import trend_figure
from laplace_debias.experiments.bias.bias_rows import QUANTITIES, measure_bias, summary_of
from laplace_debias.experiments.bias.cuts import BiasSettings
from laplace_debias.experiments.shared.checks import check_at_least
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import (
    Trained,
    check_data,
    plain_console,
    trained_model,
)
from laplace_debias.experiments.shared.store import Rows, Store, file_digest, open_store
from laplace_debias.problems import ProblemData, get_problem, load_checkpoint, log_epochs
from laplace_debias.report.tables import print_table
from laplace_debias.system.device import device_from

_EPOCH = re.compile(r"epoch-(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class OverTrainingSettings(BiasSettings):
    """What is measured.

    Attributes:
        checkpoint: None; see `checkpoints`.
        checkpoints: Folder of `epoch-<number>.safetensors`, as `laplace-debias train` writes it;
            the network is trained first where none is given.
        num_checkpoints: At how many log-equidistant epochs the bias is measured, where the network
            is trained here.
        batch_size: Examples of a mini-batch.
    """

    output: Path = Path("results/over_training")
    checkpoints: Path | None = None
    num_checkpoints: int = 6
    batch_size: int = 128
    draws: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_batches(self.batch_size)
        check_at_least(self, 1, "num_checkpoints")
        if self.checkpoint is not None:
            raise ValueError(
                "checkpoint is given, which is one point of a training; give --checkpoints, the "
                "folder of all of them"
            )


def run_over_training(settings: OverTrainingSettings, console: Console | None = None) -> Rows:
    """Measure the bias at several epochs of one training.

    Returns:
        The summary: a row for each epoch, draw and quantity.

    Raises:
        As `Experiment`.
    """
    console = console or plain_console()
    given = None if settings.checkpoints is None else checkpoints_in(settings.checkpoints)
    device = device_from(settings.device)
    store = open_store("over_training", settings)
    problem = get_problem(settings.problem)
    data = problem.data(settings.source, seed=settings.seed)
    if given is None:
        check_data(data, settings, store)
        networks = _trained_here(settings, store, data, console)
    else:
        # The checkpoints hold the split, so the data is checked when they are read.
        networks = given
    digests = [{"epoch": epoch, "file": file_digest(networks[epoch])} for epoch in networks]
    if not store.matches("checkpoints", digests):
        raise ValueError(
            f"{store.folder} holds results of other checkpoints; choose another --output"
        )
    decay = settings.recipe.applied_to(problem.recipe).penalty
    table: Rows = []
    summary: Rows = []
    for epoch, path in networks.items():
        model = problem.model()
        extra = load_checkpoint(model, path)
        if "split.train" in extra and "split.val" in extra:
            split = extra["split.train"], extra["split.val"]
            data = problem.data(settings.source, split=split)
        check_data(data, settings, store)
        trained = Trained(problem, model.eval().to(device), data, decay)
        rows = measure_bias(
            store, f"epoch-{epoch}", trained, settings.batch_size, "eigenvectors", settings
        )
        table += [{"epoch": epoch} | row for row in rows]
        summary += [{"epoch": epoch} | row for row in summary_of(rows)]
    figure = trend_figure(summary, "epoch", "Epoch", QUANTITIES)
    paths = [store.table(table), store.table(summary, "summary")]
    paths += store.picture(figure, "over_training")
    columns = ("epoch", "draw", "same_mean_error", "same_p10", "same_p90", "same_over_full")
    curvature = [row for row in summary if row["quantity"] == "curvature"]
    print_table(curvature, "Relative error of the curvature", columns, console=console)
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return summary


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints of a training by epoch.

    Raises:
        ValueError: If there are none.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): entry for entry in entries if (match := _EPOCH.fullmatch(entry.name))}
    if not found:
        raise ValueError(
            f"no epoch-<number>.safetensors in {folder}; expected the folder of checkpoints that "
            "`laplace-debias train` writes"
        )
    return dict(sorted(found.items()))


def _trained_here(
    settings: OverTrainingSettings, store: Store, data: ProblemData, console: Console
) -> dict[int, Path]:
    problem = get_problem(settings.problem)
    recipe = settings.recipe.applied_to(problem.recipe)
    epochs = log_epochs(recipe.num_epochs, settings.num_checkpoints)
    trained_model(problem, data, settings, store, console, epochs=epochs)
    return {epoch: store.part(f"network.epoch-{epoch:04d}.safetensors") for epoch in epochs}


OVER_TRAINING = Experiment(
    name="over_training",
    figure="Figure 21",
    help="the bias of slopes and curvatures over the course of training.",
    settings=OverTrainingSettings,
    run=run_over_training,
)
