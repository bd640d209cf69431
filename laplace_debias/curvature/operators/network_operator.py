"""The base class of operators of networks, and the Jacobian."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_forms import BatchHook
from laplace_debias.curvature.data.batches import Batches
from laplace_debias.curvature.data.repeatable_data import RepeatableBatches
from laplace_debias.curvature.losses import OutputLoss, OutputMap
from laplace_debias.curvature.network.fingerprints import checksum
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.operators.linearisation import Linearisation, Lineariser
from laplace_debias.curvature.operators.network import Network
from laplace_debias.operators import LinearOperator, ParameterLayout, Transpose
from laplace_debias.operators.differentiable_product import DifferentiableProduct
from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import collective, process_group, refuse_ranks
from laplace_debias.system.threads import Lock

Result = TypeVar("Result")

LINEARISATION_BYTES = 2**31
# If activations have more bytes than this, multiplying several columns at once saves no time on a
# CPU: one column already uses the whole CPU, and several columns do not fit into its caches.
CPU_CHUNK_BYTES = 2**22
# With fewer columns than this, the overhead of torch.vmap per operation exceeds its savings.
FEW_COLUMNS = 8


def loss_scale(loss: OutputLoss, data: RepeatableBatches, outputs: Tensor) -> float:
    """Check all targets, and return the factor that scales the summed loss."""
    total = 0.0
    first_shape: torch.Size | None = None
    for batch in data:
        if first_shape is None:
            first_shape = batch.targets.shape[1:]
        # Targets for sequences of other lengths are checked later, when their outputs are known.
        if batch.targets.shape[1:] == first_shape:
            loss.check(outputs[:1].expand(batch.num_examples, *outputs.shape[1:]), batch.targets)
        if batch.weights is None:
            total += loss.count(batch.targets)
        else:
            counts = loss.counts(batch.targets)
            total += float(counts @ batch.weights.to(counts))
    total = sum(process_group().exchange(float(total)))
    if total <= 0:
        raise ValueError(
            "No target contributes to the loss, because all targets are ignored (ignore_index) "
            "or have weight 0. Pass at least one target that is not ignored."
        )
    return 1 / total if loss.reduction == "mean" else 1.0


def check_product(operator: LinearOperator, vectors: Tensor, products: Tensor) -> None:
    """Require that products with finite vectors contain no NaN."""
    if not products.isnan().any() or not vectors.isfinite().all():
        return
    raise ValueError(
        f"The product of {type(operator).__name__} with a finite vector contains NaN. The "
        "outputs are finite, so the network or the loss has no derivative at these parameters "
        "(for example a root, a power or a logarithm of 0), or a derivative overflows. Add a "
        "small number under the root, or compute in float64."
    )


class MapAtOutputs(NamedTuple):
    """The linear map at the outputs of a batch.

    Attributes:
        apply: The map, or None if the operator has no such map.
        num_tensors: The number of tensors of the outputs' size that the map keeps.
    """

    apply: OutputMap | None
    num_tensors: int


@dataclass(frozen=True)
class Item:
    """A linearised batch.

    Attributes:
        rows: Indices of the batch's outputs among the flattened outputs of all data.
        linearisation: The outputs, and their linear maps with respect to the parameters.
        at_outputs: The linear map at the outputs, or None if the operator has no such map.
        num_bytes: Bytes that the item needs while it is kept.
    """

    rows: slice
    linearisation: Linearisation
    at_outputs: OutputMap | None
    num_bytes: int


class NetworkOperator(LinearOperator):
    """A linear operator built from the derivatives of a network on a data set.

    The linearisations of the first batches are kept, as many as the memory bound allows; the others
    are computed again in every product. Several threads may compute products at the same time: they
    linearise one at a time, and share the linearisations that are kept.

    Attributes:
        layout: The selected parameters, in the model's order, as they are laid out in a vector.
        num_data: N, the number of examples of all processes that share the data.
        num_bytes_kept: Bytes of the linearised batches that are kept between products.
    """

    # Whether batches may contain weights of their examples.
    _takes_weights = True
    # The generator seeds the order of the data, and also the labels or signs if these are drawn.
    _generator: torch.Generator | None = None

    # Leave inference mode, in which nothing could be differentiated.
    @collective("a curvature operator's construction")
    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        params: ParameterSelection | None,
        num_data: int | None,
        *,
        memory_bound: int,
        chunk_size: int | None,
        batch: BatchHook | None,
    ) -> None:
        whole(memory_bound, "memory_bound", 0)
        if chunk_size is not None:
            whole(chunk_size, "chunk_size")
        self._network = Network(model, "all" if params is None else params, data, batch)
        network = self._network
        self._ranks = process_group()
        self._ranks.require_same(model=lambda: checksum(network.working_copy()))
        stream = network.stream(data, self._generator, takes_weights=self._takes_weights)
        self._data = RepeatableBatches(stream, network.device, num_data, self._ranks)
        self._chunk_size = chunk_size
        self._memory_bound = memory_bound
        self._lock = Lock()
        self._items: list[Item] = []
        self._is_full = False
        # The indices of the batches whose targets have been checked.
        self._checked: set[int | None] = set()
        first = self._data.first()
        self._first_outputs = self._network.first_outputs(first.inputs, first.num_examples)
        # The shape of the outputs of one example; sequences of other batches may differ in length.
        self._output_shape = self._first_outputs.shape[1:]
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
        """The selected parameters in the model's order."""
        return self._network.layout

    @property
    def num_data(self) -> int:
        """N, the number of examples."""
        return self._data.num_examples

    @property
    def num_bytes_kept(self) -> int:
        """The bytes of the linearised batches that are kept between products."""
        return sum(item.num_bytes for item in self._items)

    def _make(self, batch: Batch) -> Item:
        """Linearise a batch, and check its outputs the first time."""
        linearisation = self._linearise(batch)
        outputs = linearisation.outputs
        if batch.number not in self._checked:
            check_outputs(outputs, least=0)
            self._check_batch(outputs, batch.targets)
            self._checked.add(batch.number)
        at_outputs = self._at_outputs(outputs, batch)
        num_bytes = linearisation.num_bytes + at_outputs.num_tensors * outputs.nbytes
        first = batch.first_index * self._output_shape.numel()
        rows = slice(first, first + outputs.numel())
        return Item(rows, linearisation, at_outputs.apply, num_bytes)

    def _matmat(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        return DifferentiableProduct.apply(matrix, self._product, self.T)

    @abstractmethod
    def _product(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        """Multiply with a matrix, without a graph of automatic differentiation."""

    def _linearise(self, batch: Batch) -> Linearisation:
        return self._lineariser.first_order(batch.inputs)

    @abstractmethod
    def _check_batch(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error for targets that do not fit outputs of this shape."""

    def _at_outputs(self, outputs: Tensor, batch: Batch) -> MapAtOutputs:
        """Return the linear map at the outputs."""
        return MapAtOutputs(None, num_tensors=0)

    def _map_items(self, function: Callable[[Item], Result]) -> Iterator[Result]:
        """Apply a function to every linearised batch, in order, at the model's current parameters.

        The items themselves are not yielded: a loop over them would keep the last item alive while
        the next one is computed, beyond the memory bound.
        """
        if not self._network.is_current():
            with self._lock:
                # Another thread may have refreshed the network in the meantime.
                if not self._network.is_current():
                    self._network.refresh()
                    # The list is replaced, not changed, because other threads may be iterating over
                    # it.
                    self._items = []
                    self._is_full = False
                    self._lineariser.programs.clear()
                    self._checked.clear()
        items = self._items
        if len(items) == len(self._data.sizes):
            return map(function, items)
        return (function(self._item(index, batch)) for index, batch in enumerate(self._data))

    def _item(self, index: int, batch: Batch) -> Item:
        """Return the linearised batch with an index; keep it if the memory bound allows."""
        with self._lock:
            if index < len(self._items):
                return self._items[index]
            item = self._make(batch)
            # The list must begin with the first batch, even if another thread has just emptied the
            # list.
            if not self._is_full and index == len(self._items):
                self._is_full = self.num_bytes_kept + item.num_bytes > self._memory_bound
                if not self._is_full:
                    self._items.append(item)
            return item

    def _chunks(self, item: Item, num_columns: int) -> list[slice]:
        """Split columns into chunks that are multiplied at once."""
        size = self._chunk_size
        if size is None:
            bytes_per_column = item.num_bytes + self._network.num_parameters * self.dtype.itemsize
            # The linearisations that are kept may fill the memory bound, so a chunk adds only a
            # small part of it.
            chunk_bytes = self._memory_bound // 8
            if self.device.type == "cpu":
                chunk_bytes = CPU_CHUNK_BYTES
            size = chunk_bytes // bytes_per_column
            if min(size, num_columns) < FEW_COLUMNS:
                size = 1
        return [slice(i, i + size) for i in range(0, num_columns, size)]


class Jacobian(NetworkOperator):
    r"""The Jacobian $\partial f / \partial\theta$ of all outputs, `[N·C, D]`.

    Rows are the outputs of the first example, flattened row-major, then the outputs of the second
    example, and so on. C is the number of output entries of an example.

    Args:
        model: The network; see `CurvatureOperator`.
        data: Batches `(inputs, targets)`; the targets are not used. See `CurvatureOperator`.
        params: The parameters; see `CurvatureOperator`.
        num_data: The number of examples, or None if it is not known. An error is raised if the data
            contain a different number of examples.
        memory_bound: The largest number of bytes of the linearised batches that are kept between
            products.
        chunk_size: The number of columns of a matrix that are multiplied at once; see
            `CurvatureOperator`.
        batch: A function from an item of the data to `(inputs, targets)`.

    Raises:
        ValueError: If the model's outputs are random, the model contains or returns NaN, the data
            are empty or differ between passes, or the outputs of examples differ in shape. Errors
            that the first pass can detect are raised before any product.
        TypeError: If the data are an iterator that can be read only once, or inputs are not
            tensors.
    """

    # Batches may not contain weights, because the rows of a Jacobian are outputs, which have no
    # weights.
    _takes_weights = False

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        params: ParameterSelection | None = None,
        num_data: int | None = None,
        *,
        memory_bound: int = LINEARISATION_BYTES,
        chunk_size: int | None = None,
        batch: BatchHook | None = None,
    ) -> None:
        refuse_ranks("Jacobian", "J.T @ J is GGN(model, nn.MSELoss(), data), scaled")
        super().__init__(
            model,
            data,
            params,
            num_data,
            memory_bound=memory_bound,
            chunk_size=chunk_size,
            batch=batch,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """`(N·C, D)`."""
        return self.num_data * self._output_shape.numel(), self._network.num_parameters

    @property
    def T(self) -> Transpose:  # noqa: N802
        """The adjoint, `[D, N·C]`."""
        return Transpose(self, self._adjoint_matmat)

    def _check_batch(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape[1:] != self._output_shape:
            raise ValueError(
                "The rows of the Jacobian need outputs of the same shape, but examples have "
                f"outputs of shapes {tuple(self._output_shape)} and {tuple(outputs.shape[1:])}. "
                "Pad the inputs to the same length."
            )

    @torch.inference_mode(False)
    def _product(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        vectors = matrix.T.contiguous()
        products = vectors.new_empty(len(vectors), self.shape[0])

        def push(item: Item) -> None:
            for chunk in self._chunks(item, len(vectors)):
                tangents = vectors[chunk]
                batched = len(tangents) > 1
                tensors = self._network.split(tangents if batched else tangents[0])
                (product,) = item.linearisation.jacobian(tensors, batched=batched)
                products[chunk, item.rows] = product.reshape(len(tangents), -1)

        for _ in self._map_items(push):
            pass
        check_product(self, vectors, products)
        return products.T

    def _adjoint_matmat(self, matrix: Float[Tensor, "rows k"]) -> Float[Tensor, "columns k"]:
        return DifferentiableProduct.apply(matrix, self._adjoint_product, self)

    @torch.inference_mode(False)
    def _adjoint_product(self, matrix: Float[Tensor, "rows k"]) -> Float[Tensor, "columns k"]:
        vectors = matrix.T.contiguous()
        products = vectors.new_zeros(len(vectors), self.shape[1])

        def pull(item: Item) -> None:
            outputs = item.linearisation.outputs
            for chunk in self._chunks(item, len(vectors)):
                cotangents = vectors[chunk, item.rows]
                batched = len(cotangents) > 1
                shape: tuple[int, ...] = outputs.shape
                if batched:
                    shape = (len(cotangents), *outputs.shape)
                reshaped = cotangents.reshape(shape)
                gradients = item.linearisation.adjoint((reshaped,), batched=batched)
                products[chunk] += self._network.join(gradients, batched)

        for _ in self._map_items(pull):
            pass
        check_product(self, vectors, products)
        return products.T
