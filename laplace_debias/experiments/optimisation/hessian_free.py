"""Training by `DebiasedHessianFree`, and by its single-batch form on the same examples.

Every step sees new examples. Single-batch takes them as one batch; debiased computes directions on
one half of them, and step sizes, damping and line search on the other (Eq. 8). Both train once as
intended, and once bare: without damping and line search, only the step sizes keep them from
diverging.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.curvature.network.weight_decay import decay_groups
from laplace_debias.experiments.optimisation.hessian_free_report import ends, findings
from laplace_debias.experiments.shared.checks import check_at_least, check_even_batch
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.judge import METRICS, Judge
from laplace_debias.experiments.shared.recipe import RecipeChanges
from laplace_debias.experiments.shared.settings import ExperimentSettings
from laplace_debias.experiments.shared.setup import check_data, plain_console
from laplace_debias.experiments.shared.store import Row, open_store
from laplace_debias.optim import DebiasedHessianFree, StepReport
from laplace_debias.problems import (
    ProblemData,
    TestProblem,
    get_problem,
    load_checkpoint,
    load_problem,
)
from laplace_debias.report.tables import print_table
from laplace_debias.report.trajectories import trajectory_figure
from laplace_debias.system.device import device_from

NAME = "hessian_free"
SINGLE, DEBIASED = "single-batch", "debiased"
DAMPED, BARE = "damped", "bare"


@dataclass(frozen=True, kw_only=True)
class HessianFreeSettings(ExperimentSettings):
    """How the network is trained, and on what.

    Attributes:
        checkpoint: The network that training starts from; one with random weights if None.
        recipe: What differs from the problem's recipe: here the weight decay alone.
        batch_size: Examples per step; debiased computes its directions on half of them.
        steps: Steps of each run.
        draws: Runs of each kind, each from its own initialisation and order of examples.
        damping: λ at the start of the damped runs.
        max_iter: Most iterations of conjugate gradients per step.
        bare: Whether to train without damping and line search too.
        evaluate_every: Steps from one measurement of the network to the next.
        chunk_size: Images measured at a time.

    Raises:
        ValueError: If a number is out of range, or the recipe changes more than the weight decay.
    """

    output: Path = Path("results/hessian_free")
    problem: str = "allcnn-digits"
    batch_size: int = 100
    steps: int = 60
    draws: int = 3
    damping: float = 1.0
    max_iter: int = 20
    bare: bool = True
    evaluate_every: int = 1
    chunk_size: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "steps", "draws", "max_iter", "evaluate_every", "chunk_size")
        check_even_batch(self.batch_size)
        if not 0 < self.damping < math.inf:
            raise ValueError(f"damping is {self.damping}; expected a positive number")
        if self.recipe != RecipeChanges(weight_decay=self.recipe.weight_decay):
            raise ValueError(
                f"recipe is {self.recipe}; expected a weight_decay alone, because this experiment "
                "has its own optimizer"
            )


def run_hessian_free(settings: HessianFreeSettings, console: Console | None = None) -> list[Row]:
    """Train; write `results.csv`, `ends.csv` and the pictures.

    Returns:
        A row per measured step of a run; see `train_run`.

    Raises:
        As `Experiment`.

    Reference:
        Martens (2010), Deep learning via Hessian-free optimization.
    """
    console = console or plain_console()
    device_from(settings.device)
    store = open_store(NAME, settings)
    problem = get_problem(settings.problem)
    if settings.checkpoint is None:
        data = problem.data(settings.source, seed=settings.seed)
    else:
        # The checkpoint's split: its validation images must not be trained on.
        _, data = load_problem(problem, settings.source, settings.checkpoint, seed=settings.seed)
    check_data(data, settings, store)
    variants = (DAMPED, BARE) if settings.bare else (DAMPED,)
    kinds = [
        (variant, method, draw)
        for draw in range(settings.draws)
        for variant in variants
        for method in (SINGLE, DEBIASED)
    ]
    rows: list[Row] = []
    for kind in tqdm(kinds, desc="runs", disable=not settings.progress):

        def compute(kind: tuple[str, str, int] = kind) -> list[Row]:
            return train_run(problem, data, settings, *kind)

        rows += store.rows("-".join(map(str, kind)), compute)
    store.table(rows)
    table = ends(rows)
    store.table(table, "ends")
    print_table(table, "The last step, mean over runs", console=console)
    pictures = []
    for variant in variants:
        of_variant = [row for row in rows if row["variant"] == variant]
        figure = trajectory_figure(of_variant, METRICS, x_key="step", x_label="Step")
        pictures += store.picture(figure, f"{NAME}_{variant}")
    for sentence in findings(table):
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return rows


def train_run(
    problem: TestProblem,
    data: ProblemData,
    settings: HessianFreeSettings,
    variant: str,
    method: str,
    draw: int,
) -> list[Row]:
    """Train one network and measure it on all training and test images.

    The single-batch and the debiased run of a draw start from the same weights and see the same
    examples at every step. A run ends early when its loss is no longer finite, on all images or
    on the batch of a step; then its last row has infinite losses.

    Args:
        problem: The problem.
        data: Its data.
        settings: Steps, batch size and so on.
        variant: `"damped"` or `"bare"`.
        method: `"single-batch"` or `"debiased"`.
        draw: Which run.

    Returns:
        A row per measured step, the start included: regularised losses (nats) and accuracies; of
        the step damping, line search factor, reduction ratio on the batch of the step sizes, number
        of curvature products, and `examples` per product. What belongs to a step is None at the
        start and where no step was possible.
    """
    device = device_from(settings.device)
    model = _start(problem, settings, draw).to(device)
    given = settings.recipe.weight_decay
    decay = problem.recipe.penalty if given is None else given
    optimizer = _optimizer(model, decay, variant == DAMPED, settings)
    generator = torch.Generator().manual_seed(settings.seed + draw)
    size = settings.batch_size

    def closure(indices: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        x, y = (part.to(device) for part in data.train.batch(indices))

        def evaluate() -> tuple[Tensor, Tensor]:
            outputs = model(x)
            return problem.loss(outputs, y), outputs

        return evaluate

    of_run = {"variant": variant, "method": method, "draw": draw}
    rows: list[Row] = []

    def record(step: int, broken: bool = False) -> bool:
        found = Judge(model, data.train, data.test, decay, settings.chunk_size)()
        if broken:
            found |= {"train_loss": math.inf, "test_loss": math.inf}
        report = _report_of(None if broken else optimizer.last_step)
        examples = {"examples": size if method == SINGLE else size // 2}
        rows.append({**of_run, "step": step, **found, **report, **examples})
        return math.isfinite(found["train_loss"])

    record(0)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, settings.steps + 1):
        if len(order) < size:
            order = torch.randperm(len(data.train), generator=generator)
        chosen, order = order[:size], order[size:]
        batches = (chosen,) if method == SINGLE else chosen.split(size // 2)
        try:
            optimizer.step(*map(closure, batches))
        except ValueError as error:
            # The loss has overflowed, as it may in a bare run.
            if "NaN or Inf" not in str(error):
                raise
            record(step, broken=True)
            break
        due = step % settings.evaluate_every == 0 or step == settings.steps
        if due and not record(step):
            break
    return rows


def _optimizer(
    model: nn.Module, decay: float, damped: bool, settings: HessianFreeSettings
) -> DebiasedHessianFree:
    return DebiasedHessianFree(
        decay_groups(model.parameters(), decay),
        damping=settings.damping if damped else 0.0,
        max_iter=settings.max_iter,
        adapt_damping=damped,
        line_search=damped,
    )


def _report_of(step: StepReport | None) -> Row:
    """What a row holds of a step."""
    return {
        "damping": None if step is None else step.damping,
        "step_size": None if step is None else step.step_size,
        "reduction_ratio": None if step is None else step.reduction_ratio,
        "products": None if step is None else step.num_matvecs,
    }


def _start(problem: TestProblem, settings: HessianFreeSettings, draw: int) -> nn.Module:
    model = problem.initial_model(settings.seed + draw)
    if settings.checkpoint is not None:
        load_checkpoint(model, settings.checkpoint)
    return model.train()


HESSIAN_FREE = Experiment(
    name=NAME,
    figure="Section 4.2.1",
    help="Training by debiased Hessian-free steps, and by single-batch ones.",
    settings=HessianFreeSettings,
    run=run_hessian_free,
)
