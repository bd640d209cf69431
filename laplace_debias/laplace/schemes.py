"""Ways to fit, as values: which examples give the directions, and which the magnitudes.

A scheme holds its data, and knows which function of a `CurvatureKind` serves it. A new way to fit
is one more class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex

from laplace_debias.curvature.fits.kinds import CurvatureKind
from laplace_debias.curvature.fits.sweep import CurvatureFit, Problem
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.shards import check_shared
from laplace_debias.laplace.data_size import Expected, told_by
from laplace_debias.laplace.fitted import Fitted
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import current

FOLDS = 2
"""How many folds cross-fitting takes by default: more did no better in the study of debiasing."""
# Makes the state of a fit.
Finish = Callable[[CurvatureFit], Fitted]


@dataclass(frozen=True)
class Scheme(ABC):
    """A way to fit, with the data that it reads.

    The `fields` that hold the data are in the order in which a fit reads them, with what errors
    call them; magnitudes are measured on the last.
    """

    mode: ClassVar[str]
    saves: ClassVar[bool] = True
    fields: ClassVar[dict[str, str]] = {"data": "data"}

    @property
    def read(self) -> list[Batches]:
        """The data that a fit reads, in its order."""
        return [getattr(self, field) for field in self.fields]

    def expected(self, num_data: SupportsIndex | None) -> Expected:
        """N: what the user says, or the number of examples that the fit reads."""
        shared = [check_shared(current(), data) for data in self.read]
        if num_data is not None:
            return Expected(whole(num_data, "num_data"), is_shared=shared[0])
        for data in self.read:
            told_by(data)
        return Expected(None, is_shared=shared[0])

    def check(self, kind: CurvatureKind) -> None:  # noqa: B027 (most schemes read everything once)
        """Refuse data that can be read only once where it is read twice."""

    @abstractmethod
    def fit(self, kind: CurvatureKind, problem: Problem, fitted: Finish) -> Fitted:
        """Fit data that `check` let pass and that is read as pairs by now."""


@dataclass(frozen=True)
class Full(Scheme):
    """Directions and magnitudes from the same examples: all of the data, or a mini-batch.

    Of a mini-batch the magnitudes are biased: they are the extremes of that batch.

    Attributes:
        data: Batches `(x, y)`.
    """

    mode = "given batches"
    data: Batches

    def check(self, kind: CurvatureKind) -> None:
        """As `Scheme.check`."""
        if kind.name == "ekfac" and isinstance(self.data, Iterator):
            raise TypeError(
                f"curvature={kind.name!r} reads the data twice, but this iterator can be read only "
                "once: pass a DataLoader or a list of batches."
            )

    def fit(self, kind: CurvatureKind, problem: Problem, fitted: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return fitted(kind.fit(problem, self.data, None))


@dataclass(frozen=True)
class Split(Scheme):
    """Directions from some examples, magnitudes from others, which removes the bias (Eq. 9).

    Attributes:
        directions: Batches `(x, y)` that give the eigenbases.
        magnitudes: Batches that the curvature along them is measured on.
    """

    mode = "debiased"
    fields: ClassVar = {
        "directions": "batches of the directions",
        "magnitudes": "batches of the magnitudes",
    }
    directions: Batches
    magnitudes: Batches

    def fit(self, kind: CurvatureKind, problem: Problem, fitted: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return fitted(kind.fit(problem, self.directions, self.magnitudes))


@dataclass(frozen=True)
class CrossFit(Scheme):
    """Directions from all the examples at hand, magnitudes out of fold.

    See `curvature.fits.crossfit`.

    Attributes:
        data: Batches `(x, y)`, which are held in memory.
        folds: K, at least 2.

    Raises:
        TypeError: As `whole`.
        ValueError: Likewise.
    """

    mode = "crossfit"
    data: Batches
    folds: int = FOLDS

    def __post_init__(self) -> None:
        whole(self.folds, "folds", 2)

    def fit(self, kind: CurvatureKind, problem: Problem, fitted: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return fitted(kind.crossfit(problem, self.data, self.folds))


OF_FIRST_BATCHES: dict[str, tuple[int, Callable[[Sequence[Any]], Scheme]]] = {
    "mini": (1, Full),
    "debiased": (2, lambda batches: Split(batches[:1], batches[1:])),
    "crossfit": (1, CrossFit),
}
"""Modes that read a loader's first batches: how many, and the scheme of them."""
# The first one reads all batches, the last one as many as it takes.
MODES = ("full", *OF_FIRST_BATCHES, "auto")


def check_mode(mode: str, folds: int | None) -> None:
    """Require a mode, and folds where there are some."""
    if mode not in MODES:
        raise ValueError(f"Unknown mode={mode!r}: use one of {', '.join(MODES)}.")
    if folds is not None and mode != "crossfit":
        raise ValueError(f'folds={folds} belongs to mode="crossfit", not to mode="{mode}".')
