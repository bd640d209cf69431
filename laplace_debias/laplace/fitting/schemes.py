"""Fitting schemes, which decide which examples determine directions and which magnitudes.

A scheme also contains its data. To add a new way to fit, add a class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, SupportsIndex

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import Batches, Stream
from laplace_debias.curvature.data.dataset_size import TrainingSize, check_sampler
from laplace_debias.curvature.data.shards import check_shared
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.laplace.fitting.noise import estimate_noise
from laplace_debias.laplace.fitting.prepared import PreparedFit
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import process_group

FOLDS = 2
"""Default number of folds in cross-fitting. More folds were no better in our study of debiasing."""


class Scheme(ABC):
    """A fitting scheme and the data that it reads.

    Attributes:
        is_resumable: Whether the passes of a fit can be saved and resumed.
        reads_all: Whether a fit reads all batches of its data.
    """

    is_resumable: ClassVar[bool] = True
    reads_all: ClassVar[bool] = True

    @property
    @abstractmethod
    def label(self) -> str:
        """The scheme's name, which the posterior shows as its mode."""

    @property
    def num_folds(self) -> int | None:
        """The number of folds, or None if the fit has no folds."""
        return None

    @property
    @abstractmethod
    def sources(self) -> Mapping[str, Batches]:
        """The data that a fit reads, in reading order, keyed by names for error messages."""

    def estimate_noise(self, context: FitContext, streams: Sequence[Stream]) -> Gaussian:
        """Estimate the noise of a regression from the streams of the sources."""
        sources: list[Iterable[Batch]] = []
        for stream in streams:
            if isinstance(stream.source, Iterator):
                # Only the first batch of an iterator is kept for the fit, so reading more would
                # lose data.
                sources.append(filter(None, [stream.first]))
            else:
                sources.append(stream)
        return estimate_noise(context, streams[0].first, chain.from_iterable(sources))

    @abstractmethod
    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit the curvature to `prepared.streams`, the streams of the sources.

        Some structures read batches twice. If the fit selects batches of a stream, pass a list of
        them, or an object that can be read again, rather than an iterator.
        """

    def check(self, structure: CurvatureStructure) -> None:  # noqa: B027 (most read data once)
        """Check before any work that the data can be read as often as the fit requires."""

    def training_size(self, num_data: SupportsIndex | None) -> TrainingSize:
        """Determine N: `num_data`, or by default the number of examples that the fit reads."""
        sources = self.sources.values()
        is_shared = [check_shared(process_group(), data) for data in sources]
        if num_data is not None:
            return TrainingSize(whole(num_data, "num_data"), is_shared=is_shared[0])
        for data in sources:
            check_sampler(data)
        return TrainingSize(None, is_shared=is_shared[0])


def prior_needs_all_data(label: str) -> ValueError:
    """Return the error for a fit that combines `prior=` with only part of the data."""
    return ValueError(
        "`prior=` adds the curvature of all data to the prior's precision, so it "
        f'requires `mode="full"`, but got `mode="{label}"`. Use `mode="full"`, or '
        "`prior_precision=` instead of `prior=`."
    )


@dataclass(frozen=True)
class Full(Scheme):
    """A plain fit, which computes directions and magnitudes from the same examples.

    On a mini-batch, the magnitudes are biased, because the directions were chosen to make them
    extreme.

    Attributes:
        data: Batches `(x, y)`.
        label: The scheme's name, which the posterior shows as its mode.
    """

    data: Batches
    label: str = field(default="given batches", kw_only=True)

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that the fit reads."""
        return {"data": self.data}

    def check(self, structure: CurvatureStructure) -> None:
        """If the fit needs two passes, require data that can be iterated twice."""
        if structure.reads_data_twice:
            _refuse_iterator(structure, self.data)

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit the curvature to the data."""
        (data,) = prepared.streams
        return prepared.config.structure.fit(prepared.context, data)


@dataclass(frozen=True)
class Split(Scheme):
    """A fit with eigenvectors from some batches and curvature from different batches (Eq. 9).

    Attributes:
        directions: Batches `(x, y)` from which the eigenvectors are computed.
        magnitudes: Batches on which the curvature along these eigenvectors is measured.
    """

    label = "debiased"
    directions: Batches
    magnitudes: Batches

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that gives the eigenvectors, and the data that gives the curvature."""
        return {
            "batches of the directions": self.directions,
            "batches of the magnitudes": self.magnitudes,
        }

    def check(self, structure: CurvatureStructure) -> None:
        """If the fit needs two passes, require data that can be read twice."""
        if structure.reads_directions_twice:
            _refuse_iterator(structure, self.directions)

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Compute eigenvectors from one stream, and the curvature along them on the other."""
        directions, magnitudes = prepared.streams
        return prepared.config.structure.fit(prepared.context, directions, magnitudes)


@dataclass(frozen=True)
class CrossFit(Scheme):
    """A fit that measures the curvature of each fold along eigenvectors of the other folds.

    See `curvature.fits.crossfit`.

    Attributes:
        data: Batches `(x, y)`, all of which are kept in memory.
        folds: The number of folds K, at least 2.

    Raises:
        TypeError: If `folds` is not an integer.
        ValueError: If `folds` is less than 2.
    """

    label = "crossfit"
    data: Batches
    folds: int = FOLDS

    def __post_init__(self) -> None:
        whole(self.folds, "folds", 2)

    @property
    def num_folds(self) -> int:
        """The number of folds."""
        return self.folds

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that the fit reads."""
        return {"data": self.data}

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Estimate the curvature from the data by cross-fitting."""
        (data,) = prepared.streams
        return prepared.config.structure.crossfit(prepared.context, data, self.folds)


def _refuse_iterator(structure: CurvatureStructure, data: Batches) -> None:
    """Require data that can be read twice."""
    if isinstance(data, Iterator):
        raise TypeError(
            f"`curvature={structure.name!r}` needs two passes over the data, but this iterator "
            "can be read only once. Pass a DataLoader or a list of batches."
        )
