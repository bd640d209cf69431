"""Predictions with the exact functional covariance of a K-FAC posterior."""

from collections.abc import Callable
from typing import Any

from benchmarks import ours, peers
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure

TITLE = "Predictive with exact functional variance, K-FAC of all parameters"
UNIT = "s per image"
REFERENCES = ("gradient",)
GOALS = (
    Goal(FASTEST_PEER, "ours, predict", at_least=10.0),
    Goal(FASTEST_PEER, "ours, functional", at_least=10.0),
    Goal("ours, predict", at_most=100.0, quantity="megabytes"),
    Goal("ours, functional", at_most=100.0, quantity="megabytes"),
)


def compare(settings: Settings) -> list[Row]:
    """The closed forms are the pairwise link (ours) and the probit link (laplace-torch).

    `functional` returns full covariances.
    """
    contenders = [
        Contender("gradient", ours.gradient(settings)),
        Contender("ours, predict", _ours(settings, lambda la, x: la.predict(x))),
        Contender("ours, functional", _ours(settings, lambda la, x: la.functional(x))),
        Contender("laplace-torch", laplace_torch(settings), is_peer=True),
    ]
    return measure(contenders, settings, settings.images, warm_up=1, per_example=True)


def _ours(settings: Settings, predict: Callable[[Any, Any], object]) -> Callable[[], Run]:
    def build() -> Run:
        la = ours.fitted(settings)
        return lambda size: predict(la, settings.data(size)[0])

    return build


def laplace_torch(settings: Settings) -> Callable[[], Run]:
    """Return laplace-torch's closed-form predictive."""

    def build() -> Run:
        la = peers.laplace_torch_fitted(settings)
        return lambda size: la(settings.data(size)[0], pred_type="glm", link_approx="probit")

    return build
