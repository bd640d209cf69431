"""Operators of networks: parameters, data, linearised batches that are kept; and the Jacobian."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.losses import OutputLoss, OutputMap
from laplace_debias.curvature.network.batches import Batches, BatchHook
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.network import Network
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.repeatable_data import Batch, Data
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators.linearisation import Linearisation, Lineariser
from laplace_debias.operators import LinearOperator, ParameterLayout, Transpose
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import current, refuse_ranks, together
from laplace_debias.system.threads import Lock

Result = TypeVar("Result")

MEMORY_BOUND = 2**31
# Above this many bytes of activations, columns side by side gain nothing on a CPU: the arithmetic
# fills it already, and the caches are left behind.
CPU_CHUNK_BYTES = 2**22
# Below this many columns, what torch.vmap spends on every operation outweighs what it saves.
FEW_COLUMNS = 8


def loss_scale(loss: OutputLoss, data: Data, outputs: Tensor) -> float:
    """The factor of a loss's sum over all data, whose targets are checked."""
    total = 0.0
    like_first: torch.Size | None = None
    for batch in data:
        like_first = batch.targets.shape[1:] if like_first is None else like_first
        # Sequences of another length are checked when their outputs are there.
        if batch.targets.shape[1:] == like_first:
            loss.check(outputs[:1].expand(batch.size, *outputs.shape[1:]), batch.targets)
        total += loss.count(batch.targets)
    total = sum(current().exchange(float(total)))
    if total <= 0:
        raise ValueError(
            "The loss counts no target: all are ignored (ignore_index) or have weight 0."
        )
    return 1 / total if loss.reduction == "mean" else 1.0


def check_product(operator: LinearOperator, vectors: Tensor, products: Tensor) -> None:
    """Require products with finite vectors not to hold NaN."""
    if not products.isnan().any() or not vectors.isfinite().all():
        return
    raise ValueError(
        f"A product of {type(operator).__name__} with a finite vector holds NaN. The outputs are "
        "finite, so the network or the loss has no derivative at these parameters (a root, a power "
        "or a logarithm of 0), or a derivative overflows. Add a small number under the root, or "
        "compute in float64."
    )


@dataclass(frozen=True)
class Item:
    """One batch, linearised; `rows` are its outputs' places among those of all data, flattened."""

    rows: slice
    linearisation: Linearisation
    at_outputs: OutputMap | None
    num_bytes: int


class NetworkOperator(LinearOperator):
    """A linear operator made of a network's derivatives on a data set.

    The first batches' linearisations are kept within the memory bound, the others made anew in
    every product. Several threads may multiply: one at a time linearises, all use what is kept.

    Attributes:
        layout: The selected parameters, in the model's order, as they lie in a vector.
        num_data: N, the number of examples, of all processes that share the data.
        num_bytes_kept: What the linearised batches kept between products take, in bytes.
    """

    # What the data draws from: of an operator with labels of its own what these are drawn from.
    _generator: torch.Generator | None = None

    # Under inference mode nothing could be differentiated.
    @together("a curvature operator's construction")
    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        params: ParameterSelection | None,
        num_data: int | None,
        memory_bound: int,
        chunk_size: int | None,
        batch: BatchHook | None,
    ) -> None:
        whole(memory_bound, "memory_bound", 0)
        if chunk_size is not None:
            whole(chunk_size, "chunk_size")
        self._network = Network(model, "all" if params is None else params, data, batch)
        network = self._network
        self._ranks = current()
        self._ranks.require_same(model=lambda: checksum(network.model))
        stream = network.stream(data, self._generator)
        self._data = Data(stream, network.device, num_data, self._ranks)
        self._chunk_size = chunk_size
        self._memory_bound = memory_bound
        self._lock, self._items, self._is_full = Lock(), list[Item](), False
        self._checked: set[int] = set()
        first = self._data.batch(0)
        self._first_outputs = self._network.first_outputs(first.inputs, first.size)
        self._output_shape = self._first_outputs.shape[1:]  # of one example of the first batch
        self._lineariser = Lineariser(self._network)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self._network.dtype

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self._network.device

    @property
    def layout(self) -> ParameterLayout:
        """The selected parameters, in the model's order."""
        return self._network.layout

    @property
    def num_data(self) -> int:
        """N, the number of examples."""
        return self._data.num_examples

    @property
    def num_bytes_kept(self) -> int:
        """The bytes of linearised batches kept between products, at most `memory_bound`."""
        return sum(item.num_bytes for item in self._items)

    def _make(self, batch: Batch) -> Item:
        """Linearise a batch; checks its outputs the first time."""
        linearisation = self._linearise(batch)
        outputs = linearisation.outputs
        if batch.index not in self._checked:
            check_outputs(outputs, least=0)
            self._check_batch(outputs, batch.targets)
            self._checked.add(batch.index)
        at_outputs, num_tensors = self._at_outputs(outputs, batch)
        num_bytes = linearisation.num_bytes + num_tensors * outputs.nbytes
        first = batch.first * self._output_shape.numel()
        return Item(slice(first, first + outputs.numel()), linearisation, at_outputs, num_bytes)

    def _linearise(self, batch: Batch) -> Linearisation:
        return self._lineariser.first_order(batch.inputs)

    @abstractmethod
    def _check_batch(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that do not fit outputs of this shape."""

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> tuple[OutputMap | None, int]:
        """The linear map at the outputs, and how many tensors of their size it holds."""
        return None, 0

    def _of_items(self, function: Callable[[Item], Result]) -> Iterator[Result]:
        """`function` of every linearised batch, in order, at the model's present parameters.

        No iterator over the items themselves: while the next one is made, whoever went through
        them would still hold the last, beyond the memory bound.
        """
        if not self._network.is_current():
            with self._lock:
                # Unless another thread has done so.
                if not self._network.is_current():
                    self._network.refresh()
                    # A new list: other threads may be going through the old one.
                    self._items, self._is_full = [], False
                    self._lineariser.programs.clear()
                    self._checked.clear()
        items = self._items
        if len(items) == len(self._data.sizes):
            return map(function, items)
        return (function(self._item(batch)) for batch in self._data)

    def _item(self, batch: Batch) -> Item:
        with self._lock:
            if batch.index < len(self._items):
                return self._items[batch.index]
            item = self._make(batch)
            # What another thread has dropped on the way is not begun in the middle.
            if not self._is_full and batch.index == len(self._items):
                self._is_full = self.num_bytes_kept + item.num_bytes > self._memory_bound
                if not self._is_full:
                    self._items.append(item)
            return item

    def _chunks(self, item: Item, num_columns: int) -> list[slice]:
        """The columns to multiply side by side."""
        size = self._chunk_size
        if size is None:
            each = item.num_bytes + self._network.num_parameters * self.dtype.itemsize
            on_cpu = self.device.type == "cpu"
            size = (CPU_CHUNK_BYTES if on_cpu else self._memory_bound // 8) // each
            if min(size, num_columns) < FEW_COLUMNS:
                size = 1
        return [slice(i, i + size) for i in range(0, num_columns, size)]


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
        check_product(self, vectors, products)
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
        check_product(self, vectors, products)
        return products.T
