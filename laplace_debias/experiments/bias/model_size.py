"""Figure 22: the bias of mini-batch curvature against the number of parameters."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from laplace_debias.experiments.bias.bias_figures import trend_figure
from laplace_debias.experiments.bias.bias_rows import measure_bias, summary_of
from laplace_debias.experiments.bias.cuts import BiasSettings
from laplace_debias.experiments.shared.checks import check_different
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import (
    Trained,
    check_data,
    plain_console,
    trained_model,
)
from laplace_debias.experiments.shared.store import Rows, open_store
from laplace_debias.problems import (
    CONVNET_DEPTHS,
    CONVNET_WIDTHS,
    ImageDataset,
    ProblemData,
    TestProblem,
    conv_net,
    get_problem,
)
from laplace_debias.report.tables import print_table
from laplace_debias.system.device import device_from


@dataclass(frozen=True, kw_only=True)
class ModelSizeSettings(BiasSettings):
    """What is measured.

    Attributes:
        problem: A test problem, whose data and recipe serve ConvNets of all sizes.
        checkpoint: None: every network is trained first.
        models: (depth, width) of each ConvNet.
        batch_size: Examples of a mini-batch.
    """

    output: Path = Path("results/model_size")
    problem: str = "convnet-digits"
    models: tuple[tuple[int, int], ...] = tuple(
        (depth, width) for depth in CONVNET_DEPTHS for width in CONVNET_WIDTHS
    )
    batch_size: int = 128
    draws: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_batches(self.batch_size)
        check_different(self, "models")
        if min(min(depth + 1, width) for depth, width in self.models) < 1:
            raise ValueError(f"models is {self.models}; expected depths ≥ 0 and widths ≥ 1")
        if self.checkpoint is not None:
            raise ValueError("checkpoint is given; leave it out: networks of all sizes are trained")


def run_model_size(settings: ModelSizeSettings, console: Console | None = None) -> Rows:
    """Train ConvNets of several sizes and measure the bias on each.

    Returns:
        The summary: a row for each network, draw and quantity.

    Raises:
        As `Experiment`.
    """
    console = console or plain_console()
    device = device_from(settings.device)
    store = open_store("model_size", settings)
    base = get_problem(settings.problem)
    data = base.data(settings.source, seed=settings.seed)
    check_data(data, settings, store)
    decay = settings.recipe.applied_to(base.recipe).penalty
    table: Rows = []
    summary: Rows = []
    for depth, width in settings.models:
        problem = sized(base, data, depth, width)
        name = f"{depth}-{width}"
        model = trained_model(problem, data, settings, store, console, name=f"network-{name}")
        trained = Trained(problem, model.to(device), data, decay)
        size = {
            "depth": depth,
            "width": width,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        rows = measure_bias(store, name, trained, settings.batch_size, "eigenvectors", settings)
        table += [size | row for row in rows]
        summary += [size | row for row in summary_of(rows)]
    figure = trend_figure(summary, "parameters", "Number of parameters", ("curvature",))
    paths = [store.table(table), store.table(summary, "summary")]
    paths += store.picture(figure, "model_size")
    columns = ("depth", "width", "parameters", "draw", "same_mean_error", "same_p10", "same_p90")
    curvature = [row for row in summary if row["quantity"] == "curvature"]
    print_table(curvature, "Relative error of the curvature", columns, console=console)
    console.print(f"Files: {', '.join(map(str, paths))}", soft_wrap=True)
    return summary


def sized(base: TestProblem, data: ProblemData, depth: int, width: int) -> TestProblem:
    """A test problem with a ConvNet of some depth and width.

    Raises:
        ValueError: If its images are not held in memory, or have sizes that a ConvNet cannot halve
            twice.
    """
    if not isinstance(data.train, ImageDataset) or data.train.images[0, 0].shape[0] % 4:
        raise ValueError(
            f"the images of {base.name} do not fit a ConvNet; choose a problem of the digits or "
            "CIFAR, for example convnet-digits"
        )
    channels, size = data.train.images.shape[1:3]
    network = partial(conv_net, depth, width, len(data.train.classes), channels, size)
    return replace(base, name=f"ConvNet {depth}-{width}", model=network)


MODEL_SIZE = Experiment(
    name="model_size",
    figure="Figure 22",
    help="the bias of the curvature against the number of parameters of a ConvNet.",
    settings=ModelSizeSettings,
    run=run_model_size,
)
