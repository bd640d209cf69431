"""The interface of a curvature structure: its fits, its memory use and its saved tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import CurvatureFit, FitContext
from laplace_debias.curvature.fits.information import Information
from laplace_debias.curvature.fits.magnitudes import drop_squares
from laplace_debias.curvature.layer_rules import Block
from laplace_debias.operators import EigenKronecker, LowRankPlusDiagonal

# A block of all parameters is low-rank, or has the eigenvectors of the whole matrix.
CurvatureBlock = EigenKronecker | LowRankPlusDiagonal
# The numbers of rows of each block's factors G and A; None for a factor that is stored as a matrix.
NumRows = Mapping[Block, Sequence[int | None]]
NO_ROWS: NumRows = {}
EIGH_MATRICES = 5
"""Number of matrices of a factor's size in memory while it is decomposed, including the factor."""


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block during a fit and after it.

    Attributes:
        name: The block.
        factors: G and A, and then their eigenbases, in `factor_dtype`.
        magnitudes: The curvature along every direction, in `factor_dtype`.
        posterior: Directions and magnitudes that are kept after the fit, in the model's dtype.
    """

    name: str
    factors: int
    magnitudes: int
    posterior: int


@dataclass(frozen=True)
class TrialPass:
    """The sizes of the results of a trial pass over one batch.

    Attributes:
        sum_bytes: Bytes of the sums.
        row_bytes: Bytes of all Jacobian rows of the batch.
        num_rows: The numbers of rows of the factors with thin directions.
    """

    sum_bytes: int = 0
    row_bytes: int = 0
    num_rows: NumRows = field(default_factory=dict)


def squares_trial(context: FitContext, data: Iterable[Batch]) -> TrialPass:
    """Measure exact curvature along directions on the data of a trial."""
    drop_squares(context, data)
    return TrialPass()


@dataclass(frozen=True)
class Workload:
    """The size of a planned fit, estimated from a trial on one batch.

    Attributes:
        is_debiased: Whether magnitudes are measured on data that did not determine the directions.
        num_folds: The number of folds; 1 without cross-fitting.
        num_passes: The number of times that one batch, or one fold of a batch, is read; None if the
            number of batches is unknown.
        working_bytes: The largest number of bytes during a pass, not counting its sums.
        row_bytes: Bytes of all Jacobian rows of one batch.
        num_rows: The numbers of rows of the factors with thin directions, for all batches.
    """

    is_debiased: bool
    num_folds: int
    num_passes: int | None
    working_bytes: int
    row_bytes: int
    num_rows: NumRows

    @property
    def is_crossfit(self) -> bool:
        """Whether magnitudes are measured on held-out folds."""
        return self.num_folds > 1


@dataclass(frozen=True)
class CurvatureStructure(ABC):
    """A structure of the curvature, which defines how a posterior is fitted, stored and planned.

    To add a structure, write a subclass in a new file and add a line to `STRUCTURES`.

    Attributes:
        rank: The number of directions that are kept, or None for a structure without a rank.
        name: The structure's name, which a user passes as `curvature`.
        is_dense: Whether all parameters form a single block.
        has_factors: Whether a layer's block is a Kronecker product of factors.
        takes_rank: Whether the structure has the option `rank`.
        takes_inducing: Whether the structure has the options `inducing` and `independent_outputs`.
        reads_data_twice: Whether a fit reads its data twice if directions and magnitudes share the
            data.
        reads_directions_twice: Whether a fit reads the data of the directions twice, even if the
            magnitudes have data of their own.
        reads_folds_together: Whether cross-fitting reads all folds in one pass.
        less_memory: The options that reduce memory use, for advice in messages.
    """

    rank: float | None = None

    name: ClassVar[str]
    is_dense: ClassVar[bool] = False
    has_factors: ClassVar[bool] = False
    takes_rank: ClassVar[bool] = False
    takes_inducing: ClassVar[bool] = False
    reads_data_twice: ClassVar[bool] = False
    reads_directions_twice: ClassVar[bool] = False
    reads_folds_together: ClassVar[bool] = False
    less_memory: ClassVar[str] = (
        'curvature="diag" or "lowrank", params="weights" or "last_layer", or fewer parameters by '
        "name"
    )

    @property
    def draws_examples(self) -> bool:
        """Whether a fit draws random examples according to their indices in the data."""
        return False

    @property
    def inducing_mark(self) -> int | str | None:
        """The number of inducing inputs, or a digest of the inputs that the user passed."""
        return None

    @property
    def has_independent_outputs(self) -> bool:
        """Whether each output has a separate posterior over all parameters."""
        return False

    @property
    def directions_per_factor(self) -> int | None:
        """The largest number of directions of each Kronecker factor, or None if unlimited."""
        return None

    def check(self, context: FitContext) -> None:  # noqa: B027 (most have nothing to check)
        """Check the structure's options against the data and the network, before a fit's passes."""

    def block_names(self, blocks: Sequence[Block]) -> list[str]:
        """Return the names of the posterior's blocks."""
        return [block.name for block in blocks]

    @abstractmethod
    def fit(
        self,
        context: FitContext,
        directions: Iterable[Batch],
        magnitudes: Iterable[Batch] | None = None,
    ) -> CurvatureFit:
        """Fit directions to one data set; measure magnitudes on another (Eq. 9) or the same one.

        Args:
            context: The network, its loss and its blocks.
            directions: The batches that determine the directions. If `reads_directions_twice`, or
                `reads_data_twice` without `magnitudes`, they are read twice, so they must not be an
                iterator.
            magnitudes: The batches on which the curvature is measured. None measures it on the
                batches of the directions.
        """

    @abstractmethod
    def crossfit(self, context: FitContext, data: Iterable[Batch], num_folds: int) -> CurvatureFit:
        """Fit directions to all data, and measure magnitudes on held-out folds."""

    def update(
        self,
        context: FitContext,
        information: Information,
        data: Iterable[Batch],
        num_data: int | None = None,
    ) -> CurvatureFit:
        """Add the information of new data to the information of earlier data.

        Args:
            context: The network and its blocks.
            information: The information of the earlier data.
            data: The new data.
            num_data: The number of examples that the new data represent; None counts the examples.

        Returns:
            The curvature of the mean loss of all examples, and the totals of the new data.
        """
        raise NotImplementedError(
            f"curvature={self.name!r} cannot be updated. Fit to the earlier and the new data "
            f"together, or define `update` in {type(self).__name__}."
        )

    @abstractmethod
    def trial_passes(
        self, context: FitContext, data: Iterable[Batch]
    ) -> Sequence[Callable[[], TrialPass]]:
        """Return the passes of a fit, each to be run over one batch to measure its cost."""

    def num_trials(self, is_debiased: bool) -> int:
        """Return the number of batches that a fit reads for each batch of a trial.

        A debiased fit reads two data sets and, by default, runs every pass over both.
        """
        return 2 if is_debiased else 1

    def decomposed_sizes(
        self, context: FitContext, num_rows: NumRows = NO_ROWS
    ) -> Sequence[int] | None:
        """Return the sizes d of the `[d, d]` matrices that a fit decomposes, or None if unknown."""
        return None

    @abstractmethod
    def block_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> list[BlockBytes]:
        """Count the bytes of each block; the list is empty if there is only a single block."""

    def posterior_bytes(self, context: FitContext, num_rows: NumRows = NO_ROWS) -> int:
        """Count the bytes of the fitted curvature."""
        return sum(block.posterior for block in self.block_bytes(context, num_rows))

    def least_bytes(self, context: FitContext) -> int:
        """Return a lower bound on the bytes of a fit: the bytes of the fitted curvature."""
        return self.posterior_bytes(context)

    @abstractmethod
    def stage_bytes(self, context: FitContext, workload: Workload) -> dict[str, int]:
        """Estimate the largest number of bytes in each stage of a fit."""

    def tensors(self, block: CurvatureBlock) -> dict[str, Tensor]:
        """Return the tensors that a file stores for a block; coordinate axes are left out."""
        assert isinstance(block, EigenKronecker)
        tensors = {"U_G": block.U_G, "U_A": block.U_A, "magnitudes": block.magnitudes}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> CurvatureBlock:
        """Rebuild a block from its `tensors`."""
        return EigenKronecker(tensors.get("U_G"), tensors.get("U_A"), tensors["magnitudes"])

    def restore_all(
        self,
        tensors: Sequence[Mapping[str, Tensor]],
        names: Sequence[str],
        network: nn.Module,
        blocks: Sequence[Block],
        memory_bound: int | None,
    ) -> dict[str, CurvatureBlock]:
        """Rebuild all blocks that a file contains for a network, by name.

        Args:
            tensors: The `tensors` of each block.
            names: The names of the blocks in the file.
            network: A copy of the network, for directions that the network computes.
            blocks: The blocks of the network's Bayesian parameters.
            memory_bound: The limit on working memory, in bytes; None for the default.
        """
        return {
            name: self.from_tensors(block_tensors)
            for name, block_tensors in zip(names, tensors, strict=True)
        }
