"""The base class for covariances of a network's outputs, summed over blocks of parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.jacobians import Jacobians, rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.laplace.functional.last_layer import LastLayer
from laplace_debias.laplace.state.posterior import GaussianPosterior


class CovarianceAccumulator(ABC):
    r"""The covariance of the outputs, $J P^{-1} J^\top$, summed over blocks of parameters.

    Args:
        blocks: The blocks, in the posterior's order.
        posterior: A posterior over the parameters of the blocks.
        prior_precisions: δ of every block at every grid point, `[P, blocks]`.
        diagonal: Whether to compute only variances.
        jacobians: A function that computes Jacobians.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        posterior: GaussianPosterior,
        prior_precisions: Float[Tensor, "grid blocks"],
        diagonal: bool,
        jacobians: Jacobians = rotated_jacobians,
    ) -> None:
        self.blocks = blocks
        self.posterior = posterior
        self.prior_precisions = prior_precisions
        self._diagonal = diagonal
        self._jacobians = jacobians
        self._read_directions()

    @abstractmethod
    def _read_directions(self) -> None:
        """Read the directions of each block from the posterior, at the end of the constructor."""

    @property
    def kept_row_bytes(self) -> int:
        """The number of bytes per Jacobian row that are kept until all blocks have been added."""
        return 0

    def last_layer(
        self, forward_pass: ForwardPass
    ) -> tuple[LastLayer, Float[Tensor, "batch d"]] | None:
        """Return the last layer and its inputs if they determine its part of the covariance.

        The result is None unless a tapped linear layer returns the outputs `[B, C]` of the network.
        """
        return None

    @abstractmethod
    def add(
        self,
        into: Float[Tensor, "grid batch columns *again"],
        records: Iterable[BlockRecord],
        outputs: Int[Tensor, "#batch columns"] | None,
    ) -> None:
        """Add the covariances, or variances, of some outputs of each example.

        Args:
            into: The sums `[P, B, C, C]`, or `[P, B, C]` for variances; changed in place.
            records: Each block's gradients of the outputs, from one backward pass.
            outputs: Indices of the outputs among all outputs of the model. None if the records are
                gradients of values within the network, in which case all outputs must share one
                posterior.
        """
