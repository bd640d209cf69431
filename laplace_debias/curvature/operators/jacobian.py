"""The Jacobian of a network's outputs on a data set, and its adjoint, by their products."""

from collections import deque

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.losses import OutputMap
from laplace_debias.curvature.network.batches import Batches
from laplace_debias.curvature.network.reader import BatchHook
from laplace_debias.curvature.network.repeatable_data import Batch
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators.network_operator import MEMORY_BOUND, Item, NetworkOperator
from laplace_debias.operators import Transpose
from laplace_debias.system.ranks import refuse_ranks


class Jacobian(NetworkOperator):
    r"""The Jacobian $\partial f / \partial\theta$ of all outputs in the parameters, `[N·C, D]`.

    Rows are the outputs of the first example, flattened row-major, then those of the second, and so
    on; C is the number of output entries of an example.

    Args:
        model: As for `CurvatureOperator`.
        data: Batches `(inputs, targets)`; the targets are not looked at. See `CurvatureOperator`.
        params: As for `CurvatureOperator`.
        num_data: As for `CurvatureOperator`.
        memory_bound: As for `CurvatureOperator`.
        chunk_size: As for `CurvatureOperator`.
        batch: As for `CurvatureOperator`.

    Raises:
        ValueError: As `CurvatureOperator`; and in the first product if examples differ in the shape
            of their outputs.
        TypeError: As `CurvatureOperator`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        params: ParameterSelection | None = None,
        num_data: int | None = None,
        *,
        memory_bound: int = MEMORY_BOUND,
        chunk_size: int | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        refuse_ranks("Jacobian", "J.T @ J is GGN(model, nn.MSELoss(), data), scaled")
        super().__init__(model, data, params, num_data, memory_bound, chunk_size, batch)

    @property
    def shape(self) -> tuple[int, int]:
        """N·C and D."""
        return self.num_data * self._output_shape.numel(), self._network.num_parameters

    @property
    def T(self) -> Transpose:  # noqa: N802
        """The adjoint, `[D, N·C]`; it shares what is kept."""
        return Transpose(self, self._adjoint_matmat)

    def _check_batch(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape[1:] != self._output_shape:
            raise ValueError(
                f"The Jacobian's rows need outputs of one shape, got {tuple(self._output_shape)} "
                f"and {tuple(outputs.shape[1:])} an example: pad the inputs to one length."
            )

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> tuple[OutputMap | None, int]:
        return None, 0

    @torch.inference_mode(False)
    def _matmat(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        vectors = matrix.T.contiguous()
        products = vectors.new_empty(len(vectors), self.shape[0])

        def push(item: Item) -> None:
            for chunk in self._chunks(item, len(vectors)):
                part = vectors[chunk]
                batched = len(part) > 1
                tangents = self._network.split(part if batched else part[0])
                (tangent,) = item.linearisation.maps[0](tangents, batched)
                products[chunk, item.rows] = tangent.reshape(len(part), -1)

        deque(self._of_items(push), maxlen=0)
        return products.T

    @torch.inference_mode(False)
    def _adjoint_matmat(self, matrix: Float[Tensor, "rows k"]) -> Float[Tensor, "columns k"]:
        vectors = matrix.T.contiguous()
        products = vectors.new_zeros(len(vectors), self.shape[1])

        def pull(item: Item) -> None:
            outputs = item.linearisation.outputs
            for chunk in self._chunks(item, len(vectors)):
                part = vectors[chunk, item.rows]
                batched = len(part) > 1
                shape = (len(part), *outputs.shape) if batched else outputs.shape
                gradients = item.linearisation.maps[1]((part.reshape(shape),), batched)
                products[chunk] += self._network.join(gradients, batched)

        deque(self._of_items(pull), maxlen=0)
        return products.T
