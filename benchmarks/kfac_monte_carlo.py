"""K-FAC factors from one Monte-Carlo label per example."""

from benchmarks.kfac_factors import compare_factors
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Row

TITLE = "K-FAC factors, Monte-Carlo Fisher (one label per example)"
UNIT = "s per batch"
REFERENCES = ("gradient",)
GOALS = (
    Goal("ours, hooks", "gradient", at_most=1.5),
    Goal("ours, BackPACK", "gradient", at_most=2.0),
    Goal(FASTEST_PEER, "ours, hooks", at_least=2.0),
)


def compare(settings: Settings) -> list[Row]:
    """The factors of weights and biases are computed on one batch, in float32.

    Eigendecompositions are not included.
    """
    return compare_factors(settings, "mc")
