"""Inputs of a model: one tensor, several, or named ones; and its outputs."""

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from laplace_debias.curvature.layer_rules import layer_rule
from laplace_debias.curvature.network.checkpoints import PlainCheckpoints
from laplace_debias.curvature.network.fingerprints import digest_of
from laplace_debias.curvature.network.precision import wide

# One tensor [B, ...]; several as a tuple or list, passed on by position; or a mapping, passed on
# by name, or whole (`OneArgument`). An entry that is no tensor (None, a flag) belongs to every
# example.
Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@runtime_checkable
class Record(Protocol):
    """A dataclass, whose fields are inputs by name, and targets perhaps."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class OneArgument(dict[str, Any]):
    """A mapping that is passed as one argument: `model(batch)`, not `model(**batch)`.

    Use it wherever inputs are expected: `[(OneArgument(x), y) for x, y in loader]`, and
    `la.predict(OneArgument(x))`. The model gets a plain `dict`. All tensors of examples in it must
    have the same leading dimension.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias import Laplace, OneArgument
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = nn.Linear(2, 3)
        ...     def forward(self, batch):
        ...         return self.head(batch["image"])
        >>> batch = OneArgument(image=torch.randn(6, 2))
        >>> la = Laplace(Model()).fit_batches([(batch, torch.randint(3, (6,)))])
        >>> la.predict(batch).probs.shape
        torch.Size([6, 3])
    """


def like(inputs: Mapping[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Wrap other named values in the type of the inputs."""
    return OneArgument(named) if isinstance(inputs, OneArgument) else named


def call(
    model: nn.Module, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Call the model; outputs `[B]` become `[B, 1]`.

    Else this is `returned_outputs`.
    """
    outputs = returned_outputs(model, inputs, parameters)
    return as_columns(outputs, tensors_of(inputs)[0].shape[:1])


def as_columns(outputs: Tensor, batch_shape: torch.Size) -> Tensor:
    """Add the dimension of outputs `[B, 1]` to a single output for each example, `[B]`."""
    return outputs.unsqueeze(1) if outputs.shape == batch_shape else outputs


def returned_outputs(
    model: nn.Module, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Call the model, and return its outputs in their own shape.

    With other values for some `parameters` it is differentiable in them by `torch.func`. The model
    gets copies: what works in place on its inputs must not change a batch that is used again.

    Raises:
        TypeError: If the model returns no tensor of real numbers.
    """
    inputs = with_tensors(inputs, map(torch.clone, tensors_of(inputs)))
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        arguments = (inputs,)
    elif isinstance(inputs, OneArgument):
        arguments = (dict(inputs),)
    elif isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        arguments = tuple(inputs)
    try:
        if parameters is None:
            with layer_by_layer():
                return without_subclass(logits_of(model(*arguments, **named)))
        with differentiable(model):
            outputs = functional_call(model, dict(parameters), arguments, named)
            return without_subclass(logits_of(outputs))
    except ValueError as error:
        # Statistics over the batch, of a single example.
        if "more than 1 value per channel" in str(error):
            raise mixing_error() from error
        raise


def mixing_error() -> ValueError:
    """Make the error for a model in which an example's outputs depend on other examples."""
    return ValueError(
        "The outputs of an example change with the other examples of the batch, so the curvature "
        "per example is not defined. Look for statistics over the batch, or attention along the "
        "wrong dimension, and change the model so that the outputs of each example depend only "
        "on this example."
    )


# For all shared settings: it is locked only for the moment of a change.
_SETTINGS = threading.RLock()


class SharedSetting:
    """A setting of the process that several threads may change at once.

    A context manager that saves a value, sets another and restores the first is wrong here: when
    two threads overlap, the second one saves what the first one has set, and restores that for
    good. So the first thread to come sets, and the last one to leave restores.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make = make
        # By the thread, how many contexts it has entered that have not been left.
        self._holders = Counter[int]()
        self._entered: tuple[AbstractContextManager, Context] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Make the setting for the duration of a context."""
        # A context that was abandoned is left by whichever thread frees it.
        thread = threading.get_ident()
        self._enter(thread)
        try:
            yield
        finally:
            self._leave(thread)

    def is_made_by_this_thread(self) -> bool:
        """Whether the thread that calls it is within the setting, and not only another one."""
        return threading.get_ident() in self._holders

    def _enter(self, thread: int) -> None:
        with _SETTINGS:
            if self._entered is None:
                # Another thread may be the one to leave: context variables must not mind.
                manager = self._make()
                context = copy_context()
                context.run(manager.__enter__)
                self._entered = manager, context
            self._holders[thread] += 1

    def _leave(self, thread: int) -> None:
        with _SETTINGS:
            self._holders[thread] -= 1
            if not self._holders[thread]:
                del self._holders[thread]
            if not self._holders and self._entered is not None:
                (manager, context), self._entered = self._entered, None
                context.run(manager.__exit__, None, None, None)


@SharedSetting
@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Switch off torch's fused transformer layers, which hooks cannot see into, and checkpoints."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _PLAIN_CHECKPOINTS:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


_PLAIN_CHECKPOINTS = PlainCheckpoints(layer_by_layer.is_made_by_this_thread)

# Keeps attention from its fused kernels, which have no forward derivative.
_plain_attention = SharedSetting(partial(sdpa_kernel, SDPBackend.MATH))


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Keeps the row of `padding_idx` fixed in every derivative, as it is in training.

    torch's forward derivatives have that row, and so have those of a table for each example.
    """
    rows = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look rows up, then reduce them bag by bag: torch's own has one derivative only."""
    if max_norm is not None:  # Which changes the table in place.
        return F.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    entries = torch.arange(input.numel(), device=input.device)
    if offsets is None:
        num_bags = input.shape[0]
        bags = entries.div(max(input.shape[1], 1), rounding_mode="floor")
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        num_bags = len(starts)
        bags = torch.searchsorted(starts, entries.to(starts.dtype), right=True) - 1
    rows = F.embedding(input.flatten(), weight)
    counts = torch.ones_like(bags)
    if padding_idx is not None:
        counts = (input.flatten() != padding_idx % len(weight)).to(bags.dtype)
    sums = rows.new_zeros(num_bags, weight.shape[1])
    if mode == "max":
        # Entries of padding go into a bag of their own.
        bags = torch.where(counts > 0, bags, num_bags)
        sums = rows.new_zeros(num_bags + 1, weight.shape[1])
        index = bags.unsqueeze(1).expand_as(rows)
        return sums.scatter_reduce(0, index, rows, "amax", include_self=False)[:-1]
    factors = counts.to(rows.dtype)
    if per_sample_weights is not None:
        factors = factors * per_sample_weights.flatten()
    sums = sums.index_add(0, bags, rows * factors.unsqueeze(1))
    if mode == "sum":
        return sums
    sizes = torch.zeros(num_bags, dtype=counts.dtype, device=counts.device)
    sizes = sizes.index_add(0, bags, counts).clamp_min(1)
    return sums / sizes.unsqueeze(1)


def _pairwise_distances(input: Tensor, p: float = 2.0) -> Tensor:
    """Distances between every two rows, in the order of `F.pdist`."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


# Instead of torch's own, of which not all derivatives are there or right. Arguments have torch's
# names, as they may be passed by name; `compute_mode` of distances changes their speed alone.
_IN_PLACE_OF: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.embedding: _embedding,
    # No forward derivative, and no second one.
    F.embedding_bag: _embedding_bag,
    F.pdist: _pairwise_distances,
    # No second derivative.
    F.hardsigmoid: lambda input, inplace=False: (
        input.add_(3).clamp_(0, 6).div_(6) if inplace else F.relu6(input + 3) / 6
    ),
    # Wrong gradients of several examples, and along several columns, at once.
    torch.cdist: lambda x1, x2, p=2.0, compute_mode=None: torch.linalg.vector_norm(
        x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1
    ),
    # A second derivative that is not symmetric.
    torch._weight_norm: lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)),
}


class _Agreeing(TorchFunctionMode):
    """Runs the functions of `_IN_PLACE_OF`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _IN_PLACE_OF.get(func, func)(*args, **(kwargs or {}))


def _ignoring(category: type[Warning], message: str = "") -> tuple[Any, ...]:
    """A filter of warnings, as `warnings.filters` has it."""
    pattern = re.compile(message, re.IGNORECASE) if message else None
    return ("ignore", pattern, category, None, 0)


@SharedSetting
@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about its own parts.

    The filters are added and removed one by one, so that those that other threads set in the
    meantime stay.
    """
    added = [
        _ignoring(FutureWarning),
        _ignoring(Warning, "TF32 acceleration"),
        # An operation that torch does not vectorise runs in a loop: slower, and the same numbers.
        _ignoring(Warning, "There is a performance drop"),
    ]
    filters: Any = warnings.filters
    filters[:0] = added
    try:
        yield
    finally:
        added_ids = set(map(id, added))
        filters = warnings.filters
        filters[:] = [entry for entry in filters if id(entry) not in added_ids]


@SharedSetting
@contextmanager
def _plain_recurrence() -> Iterator[None]:
    with ExitStack() as stack:
        # The switches set the flag along with the one that is meant.
        with quiet():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        try:
            yield
        finally:
            with quiet():
                stack.close()


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Make a model differentiable forward and back, to any order."""
    is_recurrent = any(layer_rule(module).is_recurrent for module in model.modules())
    recurrence = _plain_recurrence() if is_recurrent else nullcontext()
    with layer_by_layer(), _plain_attention(), _Agreeing(), recurrence:
        yield


def num_examples(inputs: Inputs) -> int:
    """Return B, the leading dimension of every tensor among the inputs."""
    shapes = []
    sizes = set()
    for x in tensors_of(inputs):
        if x.is_nested:
            raise TypeError(
                "Inputs contain a nested tensor, whose examples have different shapes. Pad it "
                "with `torch.nested.to_padded_tensor(x, 0.0)`, and pass a mask that marks the "
                "padding."
            )
        shapes.append(tuple(x.shape))
        sizes.add(x.shape[:1])
    if not shapes:
        raise TypeError(
            "Inputs must be a tensor, or a tuple or mapping of tensors, got "
            f"{type(inputs).__name__}. Convert them."
        )
    size = max(shapes[0][:1], default=0)
    if size == 0 or sizes != {(size,)}:
        raise ValueError(
            "Inputs must contain at least one example, and the same number in every tensor, got "
            f"{shapes}. Check the batches."
        )
    return size


def take(inputs: Inputs, examples: slice | Tensor) -> Inputs:
    """Select examples by a slice or by their indices."""
    return with_tensors(inputs, map(itemgetter(examples), tensors_of(inputs)))


def join(batches: Sequence[Inputs]) -> Inputs:
    """Concatenate the examples of several inputs."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))  # type: ignore[arg-type]
    if any(type(batch) is not type(first) or len(batch) != len(first) for batch in batches):
        raise TypeError(
            "The inputs of the batches have different types. Pass all of them in the same form."
        )
    keys: Any = first if isinstance(first, Mapping) else range(len(first))
    joined = {
        key: torch.cat([batch[key] for batch in batches])
        if isinstance(first[key], Tensor)
        else first[key]
        for key in keys
    }
    return like(first, joined) if isinstance(first, Mapping) else tuple(joined.values())


def move(
    inputs: Any,
    device: torch.device | None,
    dtypes: Collection[torch.dtype] | None,
    *,
    keeps_graph: bool = False,
) -> Inputs:
    """Move inputs to a device, and require that their floats have one of the dtypes.

    Gradients flow back to the inputs only if `keeps_graph`.
    """
    num_examples(inputs)
    moved = []
    for x in tensors_of(inputs):
        if dtypes is not None and x.is_floating_point() and x.dtype not in dtypes:
            raise dtype_error(x.dtype, dtypes)
        # Tensors made under inference_mode cannot take part in differentiation.
        if x.is_inference():
            x = x.clone()
        elif not keeps_graph:
            x = x.detach()
        moved.append(x.to(device or x.device, non_blocking=True))
    return with_tensors(inputs, moved)


def dtype_error(dtype: torch.dtype, dtypes: Collection[torch.dtype]) -> TypeError:
    """Make the error for inputs of a dtype that no parameter has."""
    return TypeError(
        f"Inputs have dtype {dtype}, but the model's parameters have "
        f"{', '.join(map(str, dtypes))}. Convert one of them."
    )


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors among the inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    elif not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    return list(filter(torch.is_tensor, inputs))


def without_subclass(tensor: Tensor) -> Tensor:
    """Return a tensor without its class, such as an image of a data library.

    Classes that define what an operation computes, such as distributed tensors, are kept.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def mark_of(inputs: Inputs, targets: Tensor, weights: Tensor | None = None) -> str:
    """Return a text that depends on the order and on every entry of the examples."""
    tensors = [*tensors_of(inputs), targets]
    if weights is not None:
        tensors.append(weights)
    return digest_of(tensors)


def with_tensors(inputs: Any, tensors: Iterable[Tensor]) -> Any:
    """Replace the tensors among the inputs, in their order."""
    replacements = iter(tensors)
    if isinstance(inputs, Tensor):
        return next(replacements)
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    placed = [next(replacements) if isinstance(x, Tensor) else x for x in values]
    if isinstance(inputs, Mapping):
        return like(inputs, dict(zip(inputs, placed, strict=True)))
    return tuple(placed)


def logits_of(outputs: Any) -> Tensor:
    """Find the outputs in what a model returns, and convert half precision to single.

    That is the tensor itself; `.logits` of an object; the entry `"logits"` of a mapping, or its
    only tensor; the first entry of a tuple or list, or the second where the first is a loss, a
    single number (Hugging Face with `return_dict=False`).
    """
    logits = outputs
    if type(outputs) is Tensor:
        pass  # It is looked at first, because a plain tensor is by far the most common.
    elif hasattr(outputs, "logits"):
        logits = outputs.logits
    elif isinstance(outputs, Mapping):
        tensors = tensors_of(outputs)
        logits = outputs.get("logits", tensors[0] if len(tensors) == 1 else None)
    elif isinstance(outputs, (tuple, list)) and outputs:
        is_loss = isinstance(outputs[0], Tensor) and outputs[0].ndim == 0 and len(outputs) > 1
        logits = outputs[1] if is_loss else outputs[0]
    if isinstance(logits, Tensor) and (logits.is_nested or logits.is_complex()):
        kind = f"complex ({logits.dtype})"
        remedy = "converts them with torch.view_as_real"
        if logits.is_nested:
            kind = "a nested tensor"
            remedy = "pads them"
        raise TypeError(
            f"The model's outputs are {kind}, but a real tensor of shape [batch, ..., outputs] is "
            f"needed. Wrap the model in a module that {remedy}."
        )
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"The model returned {_description(outputs)}. Wrap it in a module that returns a "
            "tensor, an object with the attribute `logits`, a dict with the entry 'logits', or a "
            "tuple that begins with the logits."
        )
    return logits.to(wide(logits.dtype))


def _description(outputs: Any) -> str:
    """Names what came by its kind and its entries' kinds: they may hold millions of numbers."""
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        return f"a {kind} with the entries {[str(key) for key in outputs]}"
    if hasattr(outputs, "logits"):
        return f"a {kind} whose `.logits` is of type {type(outputs.logits).__name__}"
    if isinstance(outputs, (tuple, list)):
        return f"a {kind} of [{', '.join(type(entry).__name__ for entry in outputs)}]"
    return kind
