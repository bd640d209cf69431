"""The cost of debiasing: whole fits to two batches of b examples, or to one batch of 2b."""

from collections.abc import Callable

from benchmarks.report import Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias import Laplace

TITLE = "Whole fit, exact Fisher, float64 factors: two batches of b against one of 2b"
UNIT = "s per fit"
MINI = "ours, mini-batch, 2b"
DEBIASED = "ours, debiased, b + b"
REFERENCES = (MINI,)
GOALS = (Goal(DEBIASED, MINI, at_most=1.1),)


def compare(settings: Settings) -> list[Row]:
    """The time includes factors, eigenvectors and the curvature along them."""
    contenders = [
        Contender(MINI, _fit(settings, num_batches=1)),
        Contender(DEBIASED, _fit(settings, num_batches=2)),
    ]
    return measure(contenders, settings, settings.batch, warm_up=4)


def _fit(settings: Settings, num_batches: int) -> Callable[[], Run]:
    def build() -> Run:
        la = Laplace(settings.model())

        def run(size: int) -> object:
            x, y = settings.data(size)
            batches = list(zip(x.chunk(num_batches), y.chunk(num_batches), strict=True))
            return la.fit_batches(batches[:1], batches[1:] or None)

        return run

    return build
