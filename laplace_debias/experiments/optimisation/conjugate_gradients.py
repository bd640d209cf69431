"""Figures 5 and 13: conjugate gradients from a trained network, single-batch against debiased.

Both minimise a quadratic of the regularised loss without damping. Single-batch CG sees one batch,
debiased CG two of half the size: directions from the first, step sizes from the second (Eq. 8). The
network's real loss and accuracy, on training and test images, show the quality of the steps.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from laplace_debias.experiments.optimisation.conjugate_gradients_report import (
    findings,
    stability,
)
from laplace_debias.experiments.shared.checks import check_at_least, check_even_batch
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.judge import METRICS, Judge
from laplace_debias.experiments.shared.settings import QuadraticSettings
from laplace_debias.experiments.shared.setup import Trained, begin
from laplace_debias.experiments.shared.store import Row
from laplace_debias.linalg import Iterate, cg, debiased_cg
from laplace_debias.problems import ImageBatches
from laplace_debias.quadratic import Quadratic
from laplace_debias.report.tables import print_table
from laplace_debias.report.trajectories import trajectory_figure

SINGLE, DEBIASED = "single-batch", "debiased"
FULL, FULL_DEBIASED = "full-batch", "full-batch, debiased"

NAME = "conjugate_gradients"


@dataclass(frozen=True, kw_only=True)
class ConjugateGradientsSettings(QuadraticSettings):
    """Which trajectories there are, and what they are measured on.

    Attributes:
        batch_size: Examples of single-batch CG; debiased CG has two batches of half as many.
        draws: How many times the batches are drawn; both methods share the examples of a draw.
            A resumed run takes more.
        iterations: Steps of each run.
        evaluate_every: Steps from one measurement of the network to the next. Start and end are
            always measured, also the end of a run that stops early.
        full_examples: Training examples of the full-batch runs: 0 for no such runs, None for all
            examples.
        train_examples: Training images that loss and accuracy are measured on; all if None.
        test_examples: Test images, likewise.
        chunk_size: Images per forward pass.
    """

    output: Path = Path("results/conjugate_gradients")
    batch_size: int = 512
    iterations: int = 30
    evaluate_every: int = 1
    full_examples: int | None = 0
    train_examples: int | None = None
    test_examples: int | None = None
    chunk_size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "iterations", "evaluate_every")
        check_at_least(self, 1, "train_examples", "test_examples", "chunk_size")
        check_even_batch(self.batch_size)
        if self.full_examples is not None and (self.full_examples % 2 or self.full_examples < 0):
            raise ValueError(
                f"full_examples is {self.full_examples}; expected an even number, because debiased "
                "CG splits the examples into two halves"
            )


@dataclass(frozen=True)
class Run:
    """One trajectory to be computed.

    Attributes:
        method: Its name.
        draw: Which draw of batches.
        first: Training examples of the directions.
        second: Those of the step sizes; None for the same.
    """

    method: str
    draw: int
    first: Int64[Tensor, " n"]
    second: Int64[Tensor, " m"] | None

    @property
    def name(self) -> str:
        """A name for a file."""
        return f"{self.method}-{self.draw}".replace(", ", "-")


@dataclass(frozen=True)
class Plan:
    """All choices of examples that an experiment makes.

    Attributes:
        runs: The trajectories, draw by draw, then those of the full batch.
        train: Training images that loss and accuracy are measured on.
        test: Test images, likewise.
    """

    runs: list[Run]
    train: Int64[Tensor, " n"]
    test: Int64[Tensor, " m"]


def plan(settings: ConjugateGradientsSettings, num_train: int, num_test: int) -> Plan:
    """The choices that the settings make.

    Args:
        settings: The settings.
        num_train: How many training examples there are.
        num_test: How many test examples.

    Raises:
        ValueError: If there are too few of them.
    """
    size, full = settings.batch_size, settings.full_examples
    if full is None:
        full = num_train - num_train % 2
    settings.check_counts(num_train, num_test)
    generator = torch.Generator().manual_seed(settings.seed)
    train = torch.randperm(num_train, generator=generator)[: settings.train_examples]
    test = torch.randperm(num_test, generator=generator)[: settings.test_examples]
    of_full = []
    # This comes first, so that further draws do not change it.
    if full:
        chosen = torch.randperm(num_train, generator=generator)[:full]
        of_full = _pair(chosen, 0, FULL, FULL_DEBIASED)
    found = []
    for draw in range(settings.draws):
        chosen = torch.randperm(num_train, generator=generator)[:size]
        found += _pair(chosen, draw, SINGLE, DEBIASED)
    return Plan(found + of_full, train, test)


def _pair(chosen: Tensor, draw: int, single: str, debiased: str) -> list[Run]:
    half = len(chosen) // 2
    return [
        Run(single, draw, chosen, None),
        Run(debiased, draw, chosen[:half], chosen[half:]),
    ]


def trajectory(
    trained: Trained,
    run: Run,
    judge: Judge,
    weight_decay: float,
    settings: ConjugateGradientsSettings,
) -> list[Row]:
    """Run CG (Eq. 3) or debiased CG (Eq. 8) and measure the network at its iterates.

    Args:
        trained: The trained network and its data.
        run: Which trajectory.
        judge: Measures the network.
        weight_decay: β.
        settings: Iterations, curvature, chunk size.

    Returns:
        A row per measured iterate, the start included: the metrics, the change of the quadratic of
        the batch that sets step sizes (nats), the step size and the steps' length so far.
    """
    dtype = next(trained.model.parameters()).dtype

    def quadratic(indices: Tensor) -> Quadratic:
        return Quadratic.from_data(
            trained.model,
            trained.problem.loss,
            ImageBatches(trained.data.train, indices, settings.chunk_size, dtype),
            curvature=settings.curvature,
            weight_decay=weight_decay,
            num_data=len(indices),
        )

    rows: list[Row] = []
    last: Iterate | None = None

    def record(iterate: Iterate) -> None:
        nonlocal last
        last = iterate
        if iterate.iteration % settings.evaluate_every == 0:
            measure(iterate)

    def measure(iterate: Iterate) -> None:
        step = iterate.iteration
        rows.append(
            {
                "method": run.method,
                "draw": run.draw,
                "iteration": step,
                **judge(iterate.x),
                "quadratic": float(iterate.values[-1]),
                "step_size": float(iterate.step_sizes[-1]) if step else None,
                "distance": float(iterate.x.norm()),
            }
        )

    first = quadratic(run.first)
    limits = {"tol": 0.0, "max_iter": settings.iterations, "progress": settings.progress}
    if run.second is None:
        cg(first.matrix, -first.gradient, callback=record, **limits)  # type: ignore[arg-type]
    else:
        second = quadratic(run.second)
        debiased_cg(
            first.matrix,
            second.matrix,
            -first.gradient,
            -second.gradient,
            callback=lambda _, debiased: record(debiased),
            **limits,  # type: ignore[arg-type]
        )
    # CG stops early where the curvature is not positive.
    if last is not None and last.iteration != rows[-1]["iteration"]:
        measure(last)
    return rows


def run_conjugate_gradients(
    settings: ConjugateGradientsSettings, console: Console | None = None
) -> list[Row]:
    """Compute all trajectories; write `results.csv`, `stability.csv` and the picture.

    Returns:
        The rows of all trajectories; see `trajectory`.

    Raises:
        As `Experiment`.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning,
        Sections 6.1 and B.5.
    """
    console, store, trained = begin(NAME, settings, console, growing=("draws",))
    data = trained.data
    chosen = plan(settings, len(data.train), len(data.test))
    decay = settings.decay(trained.weight_decay)
    judge = Judge(
        trained.model,
        data.train.subset(chosen.train),
        data.test.subset(chosen.test),
        decay,
        settings.chunk_size,
    )
    rows: list[Row] = []
    for run in tqdm(chosen.runs, desc="trajectories", disable=not settings.progress):

        def compute(run: Run = run) -> list[Row]:
            return trajectory(trained, run, judge, decay, settings)

        rows += store.rows(run.name, compute)
    store.table(rows)
    table = stability(rows)
    store.table(table, "stability")
    columns = ["method", "draw", "train best", "train end", "test best", "test end"]
    print_table(table, "Regularised loss (nats) of the trajectories", columns, console=console)
    pictures = store.picture(trajectory_figure(rows, METRICS), NAME)
    for sentence in findings(rows):
        console.print(sentence)
    console.print(f"Pictures: {', '.join(map(str, pictures))}", soft_wrap=True)
    return rows


CONJUGATE_GRADIENTS = Experiment(
    name=NAME,
    figure="Figures 5, 13",
    help="Loss and accuracy along single-batch and debiased conjugate gradients.",
    settings=ConjugateGradientsSettings,
    run=run_conjugate_gradients,
)
