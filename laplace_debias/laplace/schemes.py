"""Ways to fit, as values: which examples give the directions, which the magnitudes, and how many N.

A scheme holds its data, and knows how `fit_curvature` is called for it. A new way to fit is one
more class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsIndex

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.crossfit import fit_crossfit
from laplace_debias.curvature.fits.dense import fit_crossfit_dense, fit_full, fit_low_rank
from laplace_debias.curvature.fits.kfac import FITS
from laplace_debias.curvature.kinds import CurvatureKind
from laplace_debias.curvature.network.batches import Batches, Pairs
from laplace_debias.curvature.network.shards import ShardedBatches, check_shared
from laplace_debias.laplace.posterior import Fitted
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import current

_TELL_BY_LENGTH = (SequentialSampler, RandomSampler, SubsetRandomSampler)


@dataclass(frozen=True)
class Expected:
    """The N of a fit; None for the number of examples that the fit sees.

    A pass over all data must confirm an N that a loader told.
    """

    num_data: int | None
    is_told: bool = False
    is_shared: bool = False


def expected_of_loader(loader: Any, num_data: SupportsIndex | None, mode: str) -> Expected:
    """The N of a fit that reads a loader: given, told, or counted if it reads all of it."""
    is_shared = check_shared(current(), loader)
    if num_data is not None:
        return Expected(whole(num_data, "num_data"), is_shared=is_shared)
    told = told_by(loader)
    if told is None and mode != "full":
        raise ValueError(
            f'mode="{mode}" sees a part of the data, and the loader does not tell how many '
            "examples there are in all: pass num_data=, the number of training examples."
        )
    size = int(getattr(loader, "batch_size", None) or 1)
    if mode == "full" and told and getattr(loader, "drop_last", False) and told % size:
        raise ValueError(
            f'mode="full" sees all data, but every pass of this loader leaves out {told % size} of '
            f"its {told} examples (drop_last=True): use drop_last=False, or pass "
            f"num_data={told} to let those seen stand for all."
        )
    return Expected(told, True, is_shared)


def told_by(loader: Any) -> int | None:
    """The number of training examples, as the sampler of a plain `DataLoader` tells it.

    None for anything else, such as a list, a stream or a sampler of the user's own: a pass over
    all data counts these.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    sampler, wrong = getattr(batches, "sampler", loader.sampler), ""
    if isinstance(batches, ShardedBatches):
        if batches.num_ranks == current().size:
            return batches.num_examples
        wrong = f"is for {batches.num_ranks} processes, of which {current().size} take part"
    elif isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        wrong = (
            f"splits the data over {sampler.num_replicas} processes, padded or cut to equal parts "
            "(batch_sampler=ShardedBatches(data, batch_size) does neither)"
        )
    elif isinstance(sampler, (RandomSampler, WeightedRandomSampler)):
        of_all: Any = sampler.data_source if isinstance(sampler, RandomSampler) else sampler.weights
        if sampler.replacement or sampler.num_samples != len(of_all):
            how = "with replacement" if sampler.replacement else "anew in every pass"
            wrong = f"draws {sampler.num_samples} out of {len(of_all)} examples {how}"
    if wrong:
        which = batches if isinstance(batches, ShardedBatches) else sampler
        raise ValueError(
            "The loader does not tell the number of training examples: its "
            f"{type(which).__name__} {wrong}. Pass num_data=, the number of training examples; the "
            "curvature is the mean over the examples that the loader gives."
        )
    is_plain = type(batches) is BatchSampler and type(sampler) in _TELL_BY_LENGTH
    return len(sampler) if is_plain else None  # type: ignore[arg-type]


FOLDS = 2
"""How many folds cross-fitting takes by default: more did no better in the study of debiasing."""
# Makes the state of a fit.
Finish = Callable[[CurvatureFit], Fitted]


def fit_curvature(
    kind: CurvatureKind,
    problem: FitContext,
    directions: Pairs,
    magnitudes: Pairs | None = None,
    num_folds: int | None = None,
) -> CurvatureFit:
    """The curvature along directions from some data.

    Magnitudes come from others, from the same or, with a number of folds, out of fold.
    """
    if kind.is_dense and num_folds is not None:
        return fit_crossfit_dense(problem, directions, num_folds, kind.num_directions)
    if kind.name == "full":
        return fit_full(problem, directions, magnitudes)
    if kind.num_directions is not None:
        return fit_low_rank(problem, directions, magnitudes, kind.num_directions)
    if num_folds is None:
        fitted = FITS[kind.name](problem, directions, magnitudes)
    else:
        fitted = fit_crossfit(problem, directions, num_folds, kind.name)
    if (rank := kind.rank) is None:
        return fitted
    return replace(fitted, curvature=fitted.curvature.map(lambda _, of: of.leading(rank)))


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
    def fit(self, kind: CurvatureKind, problem: FitContext, finish: Finish) -> Fitted:
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

    def fit(self, kind: CurvatureKind, problem: FitContext, finish: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return finish(fit_curvature(kind, problem, self.data))


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

    def fit(self, kind: CurvatureKind, problem: FitContext, finish: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return finish(fit_curvature(kind, problem, self.directions, self.magnitudes))


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

    def fit(self, kind: CurvatureKind, problem: FitContext, finish: Finish) -> Fitted:
        """As `Scheme.fit`."""
        return finish(fit_curvature(kind, problem, self.data, num_folds=self.folds))


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
