"""Drawing parameters from a K-FAC posterior."""

from collections.abc import Callable
from typing import Any

from benchmarks import ours, peers
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure

TITLE = "Samples from the posterior, K-FAC of all parameters"
UNIT = "s per sample"
REFERENCES = ("ours",)
GOALS = (Goal(FASTEST_PEER, "ours", at_least=1.0),)
_SAMPLES = 10


def compare(settings: Settings) -> list[Row]:
    """Ten samples are drawn at once."""
    contenders = [
        Contender("ours", _sample(lambda: ours.fitted(settings))),
        Contender(
            "laplace-torch", _sample(lambda: peers.laplace_torch_fitted(settings)), is_peer=True
        ),
    ]
    return measure(contenders, settings, _SAMPLES, warm_up=2, per_example=True)


def _sample(fit: Callable[[], Any]) -> Callable[[], Run]:
    def build() -> Run:
        return fit().sample

    return build
