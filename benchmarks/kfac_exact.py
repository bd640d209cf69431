"""K-FAC factors from the exact loss Hessian."""

from benchmarks.kfac_factors import compare_factors
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Row

TITLE = "K-FAC factors, exact Fisher (ten classes)"
UNIT = "s per batch"
REFERENCES = ("gradient",)
GOALS = (
    Goal("ours, hooks", "gradient", at_most=4.5),
    Goal("ours, BackPACK", "gradient", at_most=4.5),
    Goal(FASTEST_PEER, "ours, hooks", at_least=1.7),
)


def compare(settings: Settings) -> list[Row]:
    """The factors of weights and biases are computed on one batch, in float32.

    Eigendecompositions are not included.
    """
    return compare_factors(settings, "exact")
