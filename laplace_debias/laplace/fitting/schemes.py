"""Fitting schemes: which examples determine directions, and which determine magnitudes.

A scheme contains its data. To add a new way to fit, add a class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex

from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.losses.likelihoods import Gaussian
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.batches import Batches, Stream
from laplace_debias.curvature.network.dataset_size import TrainingSize, check_sampler
from laplace_debias.curvature.network.shards import check_shared
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.laplace.fitting.noise import estimate_noise
from laplace_debias.laplace.fitting.prepared import PreparedFit
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import process_group

FOLDS = 2
"""Default number of folds of cross-fitting. More were no better in the study of debiasing."""


@dataclass(frozen=True)
class Scheme(ABC):
    """A fitting scheme, with the data that it reads.

    Attributes:
        mode: The scheme's name, which the posterior shows.
        is_resumable: Whether the passes of a fit can be saved and resumed.
        reads_all: Whether a fit reads all batches of its data.
        num_first_batches: The number of a loader's first batches that a mode passes to
            `from_batches`; None for the whole loader.
        takes_folds: Whether a fit splits its data into folds.
        is_split: Whether directions and magnitudes come from different data.
        keeps_noise: Whether the curvature is measured at the noise of an earlier fit.
    """

    mode: ClassVar[str]
    is_resumable: ClassVar[bool] = True
    reads_all: ClassVar[bool] = True
    num_first_batches: ClassVar[int | None] = None
    takes_folds: ClassVar[bool] = False
    is_split: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = False

    @classmethod
    def from_batches(cls, batches: Any, folds: int | None) -> "Scheme":
        """Make the scheme of a mode, `Laplace.fit(loader, mode)`.

        Args:
            batches: The loader, or a list of its first batches.
            folds: The number of folds that was passed, only if the scheme takes it.
        """
        raise NotImplementedError(
            f"{cls.__name__} cannot be selected with `mode=`. Pass an instance of the class, "
            f"`fit({cls.__name__}(...))`."
        )

    @property
    def num_folds(self) -> int | None:
        """The number of folds, or None if the fit has none."""
        return None

    @property
    @abstractmethod
    def sources(self) -> Mapping[str, Batches]:
        """The data that a fit reads, in the order in which it is read, by what errors call it."""

    def adding(self, information: Information) -> "Scheme":
        """Return the scheme of a fit that adds its data to the information of earlier data.

        Raises:
            ValueError: If the fit does not measure the curvature of all of its data.
        """
        raise ValueError(
            "`prior=` adds the curvature of all data to the prior's precision, so it "
            f'requires `mode="full"`, but got `mode="{self.mode}"`. Use `mode="full"`, or '
            "`prior_precision=` instead of `prior=`."
        )

    def estimate_noise(self, context: FitContext, streams: Sequence[Stream]) -> Gaussian:
        """Estimate a regression's noise from the streams of the sources."""
        sources: list[Iterable[Batch]] = []
        for stream in streams:
            # The first batch of an iterator is not lost; the others would be.
            is_read_once = isinstance(stream.source, Iterator)
            sources.append(stream.first if is_read_once else stream)
        return estimate_noise(context, sources)

    @abstractmethod
    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit the curvature to the streams of the sources, `prepared.streams`."""

    def check(self, structure: CurvatureStructure) -> None:  # noqa: B027 (most read data once)
        """Check before any work that the data can be read as often as the fit needs."""

    def training_size(self, num_data: SupportsIndex | None) -> TrainingSize:
        """Determine N: as passed, or the number of examples that the fit reads."""
        sources = self.sources.values()
        is_shared = [check_shared(process_group(), data) for data in sources]
        if num_data is not None:
            return TrainingSize(whole(num_data, "num_data"), is_shared=is_shared[0])
        for data in sources:
            check_sampler(data)
        return TrainingSize(None, is_shared=is_shared[0])


@dataclass(frozen=True)
class Full(Scheme):
    """The plain fit: eigenvectors and eigenvalues come from the same examples.

    The magnitudes of a mini-batch are biased, because they are the extremes of this batch.

    Attributes:
        data: Batches `(x, y)`.
    """

    mode = "given batches"
    data: Batches

    @classmethod
    def from_batches(cls, batches: Batches, folds: int | None) -> "Full":
        """Make a `Full` that reads all batches."""
        return cls(batches)

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that the fit reads."""
        return {"data": self.data}

    def adding(self, information: Information) -> Scheme:
        """Return the scheme that adds the data to the information of earlier data."""
        if self.num_first_batches is not None:
            return super().adding(information)
        return Added(self.data, information)

    def check(self, structure: CurvatureStructure) -> None:
        """Require data that can be iterated twice, if the fit needs two passes."""
        if structure.reads_data_twice:
            _refuse_iterator(structure, self.data)

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit the curvature to the data."""
        (data,) = prepared.streams
        return prepared.config.structure.fit(prepared.context, data)


@dataclass(frozen=True)
class WholeLoader(Full):
    """The scheme `Full` on all batches of a loader."""

    mode = "full"


@dataclass(frozen=True)
class Mini(Full):
    """The scheme `Full` on the first batch of a loader, only for comparisons."""

    mode = "mini"
    num_first_batches = 1


@dataclass(frozen=True)
class Added(Full):
    """The information of all data, added to that of earlier data.

    Attributes:
        data: New batches `(x, y)`.
        information: The information of earlier data, for the same parameters.
    """

    mode = "full"
    information: Information

    def adding(self, information: Information) -> Scheme:
        """Return the scheme itself, which has the information already."""
        return self

    def check(self, structure: CurvatureStructure) -> None:
        """Require factors that can be added."""
        if isinstance(structure, KfacCurvature):
            _check_has_factors(self.information)

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Add the information of the data."""
        names = prepared.parameters.block_names
        earlier_names = list(self.information.curvature.blocks)
        structure = prepared.config.structure
        if names != earlier_names and not structure.has_independent_outputs:
            differing = sorted(set(names) ^ set(earlier_names)) or names
            raise ValueError(
                "The new data has different curvature blocks from the earlier data: "
                f"{differing[:4]} differ. Fit to the earlier and the new data together."
            )
        (data,) = prepared.streams
        num_data = prepared.size.num_data
        return structure.update(prepared.context, self.information, data, num_data)


def _check_has_factors(information: Information) -> None:
    """Require Kronecker factors that can be recovered from the curvature."""
    for name, block in information.curvature.blocks.items():
        if getattr(block, "trace_A", None) is None:
            raise ValueError(
                f"The Kronecker factors of {name} cannot be recovered. Either the "
                "posterior was loaded from a file written by an earlier version of the "
                "library, or it was created by OnlineCurvature. Fit to the earlier and "
                "the new data together."
            )


@dataclass(frozen=True)
class Split(Scheme):
    """A fit with eigenvectors from one batch and the curvature from a different batch (Eq. 9).

    Attributes:
        directions: Batches `(x, y)` from which the eigenvectors are computed.
        magnitudes: Batches on which the curvature along these eigenvectors is measured.
    """

    mode = "debiased"
    num_first_batches = 2
    is_split = True
    directions: Batches
    magnitudes: Batches

    @classmethod
    def from_batches(cls, batches: Sequence[Any], folds: int | None) -> "Split":
        """Make a `Split` that takes its eigenvectors from the first batch only."""
        return cls(batches[:1], batches[1:])

    @property
    def sources(self) -> Mapping[str, Batches]:
        """The data that gives the eigenvectors, and the data that gives the curvature."""
        return {
            "batches of the directions": self.directions,
            "batches of the magnitudes": self.magnitudes,
        }

    def check(self, structure: CurvatureStructure) -> None:
        """Require data that can be read twice, if the fit needs two passes."""
        if structure.reads_directions_twice:
            _refuse_iterator(structure, self.directions)

    def fit(self, prepared: PreparedFit) -> CurvatureFit:
        """Fit eigenvectors to one stream, then measure the curvature along them on the other."""
        directions, magnitudes = prepared.streams
        return prepared.config.structure.fit(prepared.context, directions, magnitudes)


@dataclass(frozen=True)
class CrossFit(Scheme):
    """A fit that measures the curvature of each fold along eigenvectors of the other folds.

    See `curvature.fits.crossfit`.

    Attributes:
        data: Batches `(x, y)`, which are kept in memory.
        folds: K, at least 2.

    Raises:
        TypeError: If `folds` is not an integer.
        ValueError: If `folds` is less than 2.
    """

    mode = "crossfit"
    num_first_batches = 1
    takes_folds = True
    data: Batches
    folds: int = FOLDS

    @classmethod
    def from_batches(cls, batches: Batches, folds: int | None) -> "CrossFit":
        """Make a `CrossFit` that divides all batches into folds."""
        return cls(batches, FOLDS if folds is None else folds)

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
