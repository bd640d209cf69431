"""Tuning the prior precision over a grid of 21 on held-out images."""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import ours, peers
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure

TITLE = "Tuning over 21 prior precisions (laplace-torch: one image, one round)"
UNIT = "s per image"
REFERENCES = ("ours, one predict",)
GOALS = (
    Goal("ours, tune", "ours, one predict", at_most=1.3),
    Goal(FASTEST_PEER, "ours, tune", at_least=100.0),
)
_GRID_SIZE = 21


def compare(settings: Settings) -> list[Row]:
    """Our tuning takes one pass over the validation data.

    Its time is compared with that of one prediction, and with that of laplace-torch's grid search.
    """
    contenders = [
        Contender("ours, one predict", _predict(settings)),
        Contender("ours, tune", _tune(settings)),
        # laplace-torch repeats the prediction at every point, which takes minutes instead of
        # seconds.
        Contender("laplace-torch", _laplace_torch(settings), is_peer=True, size=1, most_rounds=1),
    ]
    return measure(contenders, settings, settings.images, warm_up=1, per_example=True)


def _predict(settings: Settings) -> Callable[[], Run]:
    def build() -> Run:
        la = ours.fitted(settings)
        return lambda size: la.predict(settings.data(size)[0])

    return build


def _tune(settings: Settings) -> Callable[[], Run]:
    def build() -> Run:
        la = ours.fitted(settings)
        grid = torch.logspace(-4, 4, _GRID_SIZE)
        return lambda size: la.tune([settings.data(size)], grid=grid)

    return build


def _laplace_torch(settings: Settings) -> Callable[[], Run]:
    def build() -> Run:
        la = peers.laplace_torch_fitted(settings)
        is_warm_up = True

        def run(size: int) -> object:
            nonlocal is_warm_up
            grid_size = 1 if is_warm_up else _GRID_SIZE
            is_warm_up = False
            loader = DataLoader(TensorDataset(*settings.data(size)), batch_size=size)
            return la.optimize_prior_precision(
                pred_type="glm",
                method="gridsearch",
                val_loader=loader,
                grid_size=grid_size,
                link_approx="probit",
            )

        return run

    return build
