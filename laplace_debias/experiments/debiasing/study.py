"""A study of ways to get directions and magnitudes from few examples, at equal data.

Every method sees the same 2b training examples of a draw. Methods with larger numbers in their
names see further examples too. One pass over them in small groups serves all K-FAC methods, whose
factors are sums of the groups'.
"""

from functools import partial

import torch
from rich.console import Console
from torch import nn

from laplace_debias.curvature.fits.problem import Problem
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood
from laplace_debias.curvature.network.selection import select_parameters
from laplace_debias.experiments.debiasing.study_fits import MEMORY_BOUND, StudyFits
from laplace_debias.experiments.debiasing.study_report import StudyResult, report
from laplace_debias.experiments.debiasing.study_settings import DebiasingSettings
from laplace_debias.experiments.shared.experiment import Experiment
from laplace_debias.experiments.shared.setup import load_trained, plain_console
from laplace_debias.experiments.shared.store import Row, Store, open_store
from laplace_debias.problems import Images


def run_debiasing(settings: DebiasingSettings, console: Console | None = None) -> StudyResult:
    """Fit, predict, print a table, write results and a picture.

    Returns:
        What was measured.

    Raises:
        As `Experiment`.
    """
    console = console or plain_console()
    store = open_store("debiasing", settings, growing=("draws", "ekfac_draws"))
    trained = load_trained(settings, store, console)
    rows = study(trained.model, trained.data.train, trained.data.test, settings, store)
    return report(rows, settings.output, console)


def study(
    model: nn.Module, train: Images, test: Images, settings: DebiasingSettings, store: Store
) -> list[Row]:
    """Measure every method in every draw; draws in the store are not computed again.

    Args:
        model: The trained network, in evaluation mode.
        train: What it was trained on.
        test: Images to predict.
        settings: What to study.
        store: Where draws are stored.

    Returns:
        Rows with `method`, `draw` (None for full-batch), `prior_precision`, `nll` (nats, mean over
        test images) and `log_variance` (mean over test images and logits).

    Raises:
        ValueError: If there are too few images.
    """
    settings.check_counts(len(train), len(test))
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(train), generator=generator)
    chosen = torch.randperm(len(test), generator=generator)[: settings.test_examples]
    example = train.batch(order[:1])[0].to(next(model.parameters()).device)
    names = select_parameters(model, settings.params, example)
    fisher = FisherType(settings.fisher, 1, settings.seed)
    loss = NegativeLogLikelihood(Categorical())
    dtype = model.get_parameter(names[0]).dtype
    problem = Problem.of(model, loss, names, fisher, dtype, memory_bound=MEMORY_BOUND)
    fits = StudyFits(problem, settings, train, order, test.batch(chosen), store)
    rows = store.rows("full", fits.full_rows)
    for draw in range(settings.draws):
        rows += store.rows(f"draw_{draw}", partial(fits.draw_rows, draw))
    if settings.ekfac_draws:
        rows += store.rows("ekfac_full", fits.ekfac_full_rows)
    for draw in range(settings.ekfac_draws):
        rows += store.rows(f"ekfac_draw_{draw}", partial(fits.ekfac_draw_rows, draw))
    return rows


DEBIASING = Experiment(
    name="debiasing",
    figure="beyond the paper",
    help="Distance to full-batch of debiased, cross-fitted and averaged K-FAC, equal data.",
    settings=DebiasingSettings,
    run=run_debiasing,
)
