"""The requested part of the outputs' covariance, and the size of the chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.network.outputs import (
    LARGEST_DEFAULT_BYTES,
    PASS_BYTES,
    are_finite,
    checked_memory_bound,
)
from laplace_debias.laplace.functional.linear_head import HeadMomentKind
from laplace_debias.system.memory import ROOM

# The output gradients of a chunk may use the whole memory bound; the forward pass and slices of
# Jacobians need additional memory. With more bytes per block than this, calls become no cheaper.
_CHUNK_BYTES_PER_BLOCK = 2**21


@dataclass(frozen=True)
class ChunkSize:
    """The number of examples and outputs that are differentiated together.

    Attributes:
        examples: The number of examples.
        columns: The number of outputs of each example.
    """

    examples: int
    columns: int


@dataclass(frozen=True)
class CovarianceRequest:
    """The requested part of the outputs' covariance.

    Attributes:
        kind: The requested part of the covariance. For `"differences"`, one output fewer is
            differentiated, and the matrix is symmetric only up to rounding. `"difference
            variances"` are supported only for a last layer.
        outputs: Indices of the requested outputs of each example, `[B, k]`; None for all.
        memory_bound: The largest number of bytes for output gradients, or for the Jacobian of one
            block; None for the default of `checked_memory_bound`.
    """

    kind: HeadMomentKind
    outputs: Int[Tensor, "batch k"] | None
    memory_bound: int | None

    @property
    def diagonal(self) -> bool:
        """Whether only variances are requested."""
        return self.kind == "variances"

    def num_columns(self, num_outputs: int) -> int:
        """Return the number of outputs per example that are differentiated."""
        if self.kind == "differences" and num_outputs > 1:
            return num_outputs - 1
        return num_outputs

    def zeros(
        self, outputs: Float[Tensor, "batch *outputs"], num_columns: int, num_points: int
    ) -> Float[Tensor, "grid batch *covariance"]:
        """Return zeros with the shape of the covariances, or variances, at each grid point."""
        columns = [num_columns] if self.diagonal else [num_columns, num_columns]
        return outputs.new_zeros(num_points, len(outputs), *columns)

    def granted_bytes(
        self,
        num_columns: int,
        bytes_per_column: int,
        device: torch.device,
        *,
        subject: str = "an example's output gradients and Jacobians",
        remedy: str | None = None,
    ) -> int:
        """Return the number of bytes that may be used to differentiate some outputs.

        Raises:
            ValueError: If the memory bound is too small for one variance, or for all covariances.
        """
        if remedy is None:
            remedy = ", request only variances (`diagonal=True`), or request fewer outputs"
            if self.diagonal:
                remedy = ""
        needed = bytes_per_column if self.diagonal else num_columns * bytes_per_column
        return checked_memory_bound(self.memory_bound, needed, subject, device, remedy)

    def chunk_size(
        self,
        num_columns: int,
        gradient_bytes: int,
        num_blocks: int,
        bytes_per_column: int | None,
        device: torch.device,
        remedy: str | None = None,
    ) -> ChunkSize:
        """Choose how many examples, and how many outputs of each, are differentiated together.

        Args:
            num_columns: Number of outputs per example to differentiate.
            gradient_bytes: Bytes of the layers' output gradients, per output of an example.
            num_blocks: The number of parameter blocks.
            bytes_per_column: Bytes that differentiation needs per output of an example; None if
                nothing is differentiated.
            device: The device of the outputs.
            remedy: A further remedy that the error suggests if the memory bound is too small.

        Raises:
            ValueError: As in `granted_bytes`.
        """
        columns = num_columns
        bound = self.memory_bound or PASS_BYTES * ROOM[device.type]
        if bytes_per_column is not None:
            bound = self.granted_bytes(num_columns, bytes_per_column, device, remedy=remedy)
            columns = min(num_columns, bound // bytes_per_column)
        bound = min(bound, _CHUNK_BYTES_PER_BLOCK * ROOM[device.type] * num_blocks)
        return ChunkSize(max(1, bound // (gradient_bytes * columns)), columns)

    def kept_rows(self, num_columns: int, row_bytes: int, device: torch.device) -> ChunkSize:
        """Choose for how many examples the Jacobian rows are kept in memory together.

        Args:
            num_columns: Outputs of an example to differentiate.
            row_bytes: Bytes of a Jacobian row and its output gradients.
            device: The device of the outputs.

        Raises:
            ValueError: As in `granted_bytes`.
        """
        bound = self.granted_bytes(num_columns, row_bytes, device)
        columns = min(num_columns, bound // row_bytes)
        return ChunkSize(max(1, bound // (row_bytes * columns)), columns)

    def check_size(
        self, num_outputs: int, outputs: Float[Tensor, "batch *outputs"], free_positions: int
    ) -> None:
        """Require that the covariance of the outputs can be computed.

        Args:
            num_outputs: The number of requested outputs of an example.
            outputs: The network's outputs.
            free_positions: The largest number of positions of outputs `[B, T, C]` at which all
                outputs may be differentiated. At more positions, outputs must be selected.

        Raises:
            ValueError: If an example's covariance does not fit into memory, or if it would take
                hours to differentiate all outputs at all positions.
        """
        num_bytes = num_outputs**2 * outputs.element_size()
        if num_bytes <= LARGEST_DEFAULT_BYTES:
            return
        if outputs.ndim > 2 and outputs.shape[1] > free_positions and self.outputs is None:
            raise ValueError(
                f"The model has {num_outputs} outputs per example, of shape "
                f"{tuple(outputs.shape[1:])}, and all of them would be differentiated. "
                "Select fewer outputs: `positions=-1` selects the last token, and "
                "functional(x, positions=-1, outputs=k) selects the k largest outputs of "
                "the last token. If an embedding shares the weight of the output layer, "
                "also exclude this weight with `params=`."
            )
        if not self.diagonal:
            raise ValueError(
                f"The covariance of {num_outputs} outputs needs {num_bytes} bytes per example. "
                "Request only variances (`diagonal=True`) or some outputs (`outputs=k` for the k "
                "largest)."
            )


def bytes_per_column(gradient_bytes: int, blocks: Sequence[Block], element_size: int) -> int:
    """Return the bytes per output of an example: for its gradients, or for one block's Jacobian."""
    # The Jacobian of an embedding covers only the rows that are looked up, so its block is left
    # out.
    sizes = [block.size * element_size for block in blocks if not block.is_one_hot]
    return max(gradient_bytes, *sizes) if sizes else gradient_bytes


def requested_indices(
    outputs: Float[Tensor, "batch *outputs"], indices: Int[Tensor, "batch k"] | None
) -> Int[Tensor, "#batch k"]:
    """Return the indices of the requested outputs among the flattened outputs of an example."""
    if indices is not None:
        return indices
    return torch.arange(outputs[0].numel(), device=outputs.device).unsqueeze(0)


def unit_columns(
    outputs: Float[Tensor, "batch *outputs"],
    indices: Int[Tensor, "batch k"] | None,
    columns: slice = slice(None),
) -> Float[Tensor, "columns batch *outputs"]:
    """Build unit vectors at some of the requested outputs, to pull back through the network."""
    batch = len(outputs)
    size = outputs[0].numel()
    if indices is None:
        positions = torch.arange(size, device=outputs.device)[columns].unsqueeze(1)
        units = outputs.new_zeros(len(positions), size).scatter_(1, positions, 1.0)
        vectors = units.unsqueeze(1).expand(-1, batch, -1)
    else:
        positions = indices.T[columns].unsqueeze(2)
        vectors = outputs.new_zeros(len(positions), batch, size).scatter_(2, positions, 1.0)
    return vectors.unflatten(2, outputs.shape[1:])


def check_covariance(covariance: Tensor, prior_precisions: Tensor) -> None:
    """Require finite covariances.

    Raises:
        ValueError: If a covariance is not finite. Even if the posterior is finite, its products
            with the Jacobian at these inputs may overflow.
    """
    if not are_finite(covariance):
        raise ValueError(
            f"The covariance of the outputs overflows {covariance.dtype}. For these inputs, the "
            "squared Jacobian divided by the prior precision (at least "
            f"{float(prior_precisions.min()):.3g}) is too large. Rescale the inputs, use a "
            "larger prior precision, or convert the model to a wider dtype."
        )
