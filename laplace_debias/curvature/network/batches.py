"""Data as batches of inputs and targets, from anything that can be iterated over."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain, count, islice
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    dtype_error,
    mark_of,
    move,
    num_examples,
    take,
    tensors_of,
    without_subclass,
)
from laplace_debias.curvature.network.label_dependence import check_outputs_without_targets
from laplace_debias.curvature.network.outputs import check_outputs
from laplace_debias.curvature.network.quantised import can_require_grad
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.system.checks import check_generator
from laplace_debias.system.ranks import process_group
from laplace_debias.system.threads import Randomness

# From what the data yields to (inputs, targets).
BatchHook = Callable[[Any], tuple[Any, Any]]

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")
"""Names by which an entry of a batch is recognised as its targets."""

USE_A_HOOK = (
    "pass `batch=`, a function that converts a batch to (inputs, targets), such as `batch=lambda "
    "batch: (batch[0], batch[1])`"
)


@dataclasses.dataclass(eq=False)
class BatchReader:
    """A reader that splits batches into inputs and targets.

    A batch is a pair `(inputs, targets)`, or a mapping or dataclass with an entry that is called as
    `TARGETS` has it. The rest of such a batch are the inputs: passed by name where the model's
    forward pass takes them by name, and a single one of another name by position. A model is never
    given the targets, so it computes no loss. If a Hugging Face model moves the labels of tokens by
    one position, as causal language models do, so are the targets (see `shifts_labels`). A hook
    makes `(inputs, targets)` of what the data yields; they are taken as they are.

    If it does not need targets, a batch may also consist of inputs only: a tensor, as the only
    entry of a tuple or list, or a mapping or dataclass without targets; or the targets may be None.
    A pair is always inputs and targets.
    """

    model: nn.Module
    hook: BatchHook | None = None
    needs_targets: bool = True
    # Found out with the first batch that leaves it open.
    _shifts: bool | None = dataclasses.field(default=None, init=False)
    _is_independent_of_targets: bool = dataclasses.field(default=False, init=False)

    def __call__(self, batch: Any, name: str = "A batch", weighs: bool = False) -> tuple[Any, ...]:
        """A batch as inputs and targets, with as many targets as inputs.

        Targets that a batch lacks are zeros. If it `weighs`, a batch may be a triple, whose third
        entry are the examples' weights.
        """
        weights = None
        if self.hook is not None:
            batch = self.hook(batch)
        elif isinstance(batch, (tuple, list)) and len(batch) == 3:
            if not weighs:
                raise TypeError(
                    f"{name} has three entries. Weights of examples as the third entry are not "
                    "supported here. Pass pairs (inputs, targets). If the third entry is something "
                    f"else, {USE_A_HOOK}. Combine several inputs in a tuple or a dict."
                )
            *batch, weights = batch
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        named = None if is_pair or self.hook is not None else _named(batch)
        if is_pair:
            inputs, targets = batch
            inputs = _named(inputs) or inputs
        elif named is not None:
            inputs, targets = self._from_names(named)
        elif not self.needs_targets and self.hook is None and _is_inputs_only(batch):
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            inputs = _named(inputs) or inputs
            targets = None
        else:
            came = type(batch).__name__
            came += f" of length {len(batch)}" if isinstance(batch, Sized) else ""
            if self.hook is not None:
                raise TypeError(
                    f"The function `batch=` returned {came}. Return a pair (inputs, targets)."
                )
            single = ""
            if isinstance(batch, Tensor):
                single = " If the data are a single batch, pass it in a list, `[(x, y)]`."
            raise TypeError(
                "Batches must be pairs (inputs, targets), or mappings or dataclasses in "
                "which the targets have one of the names "
                f"{', '.join(map(repr, TARGETS))}, got {came}. For other batches, "
                f"{USE_A_HOOK}. Combine several inputs in a tuple or a dict.{single}"
            )
        if targets is None and not self.needs_targets:
            targets = torch.zeros(num_examples(inputs), dtype=torch.long)
        return _checked(inputs, targets, weights, name)

    def inputs(self, x: Any, device: torch.device, *, keeps_graph: bool = False) -> Inputs:
        """Return the inputs of a prediction, from inputs or from a mapping with targets.

        An entry that the forward pass takes under that name is an input, except for `labels`. With
        a hook, which returns the inputs of a batch, `labels` are an input too. They come on a
        device; gradients flow back to them only if `keeps_graph`. Raises as `move`.
        """
        named = _named(x)
        if named is not None:
            parameters = self._parameters()
            batch = dict(named)
            self._add_decoder_inputs(named)
            inputs = {
                key: value
                for key, value in named.items()
                if key not in TARGETS
                or (key in parameters and (key != "labels" or self.hook is not None))
            }
            x = self._placed(inputs)
            if "labels" in batch and "labels" not in inputs:
                self._check_targets(batch, x, "labels")
        moved = move(x, device, None, keeps_graph=keeps_graph)
        self._check_dtypes(moved)
        return moved

    def _check_dtypes(self, inputs: Inputs) -> None:
        """Require that floats have the dtype of a parameter, usually that of the first."""
        for x in tensors_of(inputs):
            if not x.is_floating_point():
                continue
            if not _has_dtype(self.model, x.dtype):
                dtypes = {parameter.dtype for parameter in self.model.parameters()}
                raise dtype_error(x.dtype, dtypes)

    def _from_names(self, named: dict[str, Any]) -> tuple[Inputs, Any]:
        if not self.needs_targets:
            named = {
                key: value
                for key, value in named.items()
                if value is not None or key not in TARGETS
            }
            if named.keys().isdisjoint(TARGETS):
                return self._placed(named), None
        target_keys = [key for key in TARGETS if key in named]
        if len(target_keys) != 1:
            problem = "none of them has a name of targets"
            if target_keys:
                problem = f"several of them have names of targets, {target_keys}"
            raise ValueError(
                f"The batch has the entries {list(named)}, and {problem}. Rename the "
                f"entries so that exactly one of them has a name from "
                f"{', '.join(map(repr, TARGETS))}, or {USE_A_HOOK}."
            )
        batch = dict(named)
        self._add_decoder_inputs(named)
        targets = named.pop(target_keys[0])
        is_matrix = isinstance(targets, Tensor) and targets.ndim == 2
        is_of_labels = is_matrix and not targets.is_floating_point() and targets.dtype != torch.bool
        # Labels of tokens, [B, T], as some input has them.
        if is_of_labels and any(x.shape[:2] == targets.shape for x in tensors_of(named)):
            if self._shifts is None:
                self._shifts = shifts_labels(unwrapped(self.model), named, targets)
            if self._shifts:
                # To the outputs that predict them, each one position earlier.
                targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
        inputs = self._placed(named)
        self._check_targets(batch, inputs, target_keys[0])
        return inputs, targets

    def _check_targets(self, batch: Mapping[str, Any], inputs: Inputs, name: str) -> None:
        """Require once that the outputs are the same without the targets, which are left out."""
        if not self._is_independent_of_targets and self._takes(name):
            check_outputs_without_targets(unwrapped(self.model), batch, inputs, name)
            self._is_independent_of_targets = True

    def _add_decoder_inputs(self, named: dict[str, Any]) -> None:
        """Add the decoder's inputs that an encoder-decoder model makes from the labels.

        The model itself makes them, or one within a wrapper that passes them on.
        """
        labels = named.get("labels")
        has_decoder_inputs = not named.keys().isdisjoint(
            ("decoder_input_ids", "decoder_inputs_embeds")
        )
        if not isinstance(labels, Tensor) or has_decoder_inputs:
            return
        if not self._takes("decoder_input_ids"):
            return
        for module in unwrapped(self.model).modules():
            if hasattr(type(module), "prepare_decoder_input_ids_from_labels"):
                prepare: Any = module.prepare_decoder_input_ids_from_labels
                named["decoder_input_ids"] = prepare(labels=labels)
                return

    def _takes(self, name: str) -> bool:
        """Whether the forward pass takes an argument of a name."""
        parameters = self._parameters()
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return name in parameters or takes_any

    def _placed(self, named: dict[str, Any]) -> Inputs:
        """Inputs by name; a single one that the forward pass does not know by its name as it is."""
        parameters = self._parameters()
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        unknown = [key for key in named if key not in parameters]
        if len(named) == 1 and unknown:
            (value,) = named.values()
            return value
        if unknown and not takes_any:
            raise ValueError(
                f"The batch has the entries {unknown}, which are not parameters of the model's "
                f"forward pass. Its parameters are {list(parameters)}. Remove these entries from "
                f"the batch, or {USE_A_HOOK}."
            )
        return named

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the forward pass; of the model inside, where PEFT passes all on."""
        model = unwrapped(self.model)
        parameters = inspect.signature(model.forward).parameters
        base = getattr(model, "get_base_model", None)
        if base is not None and all(p.kind in _ANY for p in parameters.values()):
            return inspect.signature(base().forward).parameters
        return parameters


_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _checked(inputs: Inputs, targets: Any, weights: Any, name: str) -> tuple[Any, ...]:
    """A pair, or a triple whose weights are finite and not negative, of one size."""
    if not isinstance(targets, Tensor):
        advice = ' Or use `return_tensors="pt"` in the tokenizer or collator.'
        raise TypeError(
            f"Targets must be a tensor, got {type(targets).__name__}. Convert an array or a "
            f"list with `torch.as_tensor`.{advice if isinstance(targets, list) else ''}"
        )
    targets = without_subclass(targets)
    if targets.is_nested:
        raise TypeError(
            "Targets are a nested tensor. Pad them with `torch.nested.to_padded_tensor(y, "
            "-100)`. Classification ignores targets of -100."
        )
    size = num_examples(inputs)
    if targets.ndim == 0 or size != len(targets):
        raise ValueError(
            f"{name} contains {size} inputs, but its targets have the shape "
            f"{tuple(targets.shape)}. Pass one target per input."
        )
    if weights is None:
        return inputs, targets
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise TypeError(
            "The third entry of a batch must be the weights of its examples, a tensor of "
            f"floating-point numbers, got {getattr(weights, 'dtype', type(weights).__name__)}. "
            f"Convert the weights. If the third entry is something else, {USE_A_HOOK}."
        )
    if weights.shape != (size,):
        raise ValueError(
            f"{name} contains {size} examples, but weights of shape {tuple(weights.shape)}. Pass "
            "one weight per example."
        )
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError(
            f"The weights of examples must be finite and at least 0, but {name} "
            "contains other values. Check the third entry of the batches."
        )
    return inputs, targets, weights


def _is_inputs_only(batch: Any) -> bool:
    """Whether a batch that is no pair has the form of inputs without targets."""
    if isinstance(batch, (tuple, list)):
        return len(batch) == 1
    return isinstance(batch, (Tensor, OneArgument))


def _named(batch: Any) -> dict[str, Any] | None:
    """The entries of a mapping or a dataclass, by name; None for anything else."""
    if isinstance(batch, OneArgument):
        return None  # The model takes it as it is.
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


IGNORED = -100
"""The label of ignored positions, the same as in Hugging Face and in `F.cross_entropy`."""


@torch.inference_mode(False)
def shifts_labels(model: nn.Module, named: dict[str, Any], labels: Tensor) -> bool:
    """Return whether a Hugging Face model shifts its labels by one position.

    Most causal language models do, some of that name do not (those of BART's family), nor do token
    classifiers and masked language models. So it is tried out: a single position of one example is
    labelled, and the gradient of the model's own loss in its logits shows which of them the label
    belongs to. Labels are `[B, T]`.
    """
    # The outermost model of Hugging Face's that computes a loss.
    for candidate in model.modules():
        names = [f"{kind.__module__}.{kind.__name__}" for kind in type(candidate).__mro__]
        is_pretrained = any(
            re.fullmatch(r"transformers\..*\.PreTrainedModel", name) for name in names
        )
        if is_pretrained and "labels" in inspect.signature(candidate.forward).parameters:
            break
    else:
        return False
    twin = shared_copy(candidate)
    last = labels.shape[1] - 1
    weights = [
        parameter.requires_grad_() for parameter in twin.parameters() if can_require_grad(parameter)
    ]
    parameters = inspect.signature(candidate.forward).parameters
    inputs = {name: value for name, value in named.items() if name in parameters}
    example: Any = take(move(inputs, weights[0].device, None), slice(0, 1))
    marked = torch.full_like(labels[:1], IGNORED, device=weights[0].device)
    marked[0, last] = 0
    with torch.enable_grad():
        outputs = twin(**example, labels=marked)
    is_tuple = isinstance(outputs, tuple)
    loss, logits = outputs[:2] if is_tuple else (outputs.loss, outputs.logits)
    # The gradient of NaN is NaN, also where the loss ignores it.
    check_outputs(logits)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    read = gradient[0].flatten(1).abs().amax(1).nonzero().flatten().tolist()
    if read not in ([last], [last - 1]):
        raise ValueError(
            f"The labels of {type(candidate).__name__} cannot be matched with its outputs, because "
            f"its loss compares the label at position {last} with the logits of {read}. Pass "
            "`batch=`, a function that converts a batch to (inputs, targets), and shift the "
            "targets in it, so that each target has the position of the output that predicts it."
        )
    return read == [last - 1]


# Batches as `BatchReader` reads them: pairs (inputs, targets), or mappings and dataclasses.
Batches = Iterable[Any]
# The same, checked, and on the model's device or on their way there; in a fit a third entry may be
# the weights of the examples, `[B]`.
Pairs = Iterable[tuple[Any, ...]]
# From a batch's number in this process, and how many examples the process has read before, to the
# index of the batch's first example among those of all processes.
FirstIndex = Callable[[int, int], int]


_END = object()


@runtime_checkable
class FitData(Protocol):
    """The pairs that a fit reads, with the indices of their examples."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...

    def first_index(self, batch: int, num_read: int) -> int:
        """Return the index of a batch's first example among those of all processes.

        Batches are counted from 0; `num_read` is the number of examples in those before.
        """

    def batch_number(self, batch: int) -> int | None:
        """Return the number of a batch in the user's data, from 1, or None."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """Pairs that were made from the user's batches.

    Attributes:
        pairs: The pairs of this process.
        first_indices: For each pair the index of its first example in all data of the fit, fold
            after fold.
        size: The number of examples of all processes, or the sum of their weights.
    """

    pairs: list[Any]
    first_indices: list[int]
    size: float

    @classmethod
    def consecutive(cls, pairs: Sequence[tuple[Any, ...]]) -> "Fold":
        """Make a fold of all examples of this process."""
        sizes = [len(pair[1]) for pair in pairs]
        first_indices = list(accumulate(sizes[:-1], initial=0)) if sizes else []
        return cls(list(pairs), first_indices, sum(map(weight_of, pairs)))

    @classmethod
    def joined(cls, folds: "Sequence[Fold]") -> "Fold":
        """Join folds to one, with their pairs fold after fold."""
        pairs = [pair for fold in folds for pair in fold.pairs]
        first_indices = [index for fold in folds for index in fold.first_indices]
        return cls(pairs, first_indices, sum(fold.size for fold in folds))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)

    def first_index(self, batch: int, _: int) -> int:
        """Return the index of a pair's first example."""
        return self.first_indices[batch]

    def batch_number(self, _: int) -> None:
        """Return None: a pair is not a batch of the user's data."""


def check_batches(source: Any) -> None:
    """Require batches, rather than a tensor of examples or a data set.

    Raises:
        TypeError: For a tensor, an array, a table, or a map-style `Dataset`.
    """
    if hasattr(source, "shape"):
        raise TypeError(
            f"Data must be batches (inputs, targets), got a {type(source).__name__} of shape "
            f"{tuple(source.shape)}. Pass a DataLoader, such as `DataLoader(TensorDataset(x, y), "
            "batch_size=128)`, or a list of batches, `[(x, y)]`."
        )
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"Data must be batches (inputs, targets), but a {type(source).__name__} yields "
            "single examples. Pass a DataLoader, such as `DataLoader(dataset, batch_size=128)`."
        )


def total_size(batches: Sequence[Any]) -> int | None:
    """Return the number of examples of some batches; None if a batch shows no tensor.

    It is the length of each batch's first tensor, whether of its inputs or of its targets.
    """
    total = 0
    for batch in batches:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].ndim == 0:
            return None
        total += len(tensors[0])
    return total


class Stream:
    """The user's batches, read as checked pairs `(x, y)`.

    The first pair can be looked at without being lost: the next pass goes on with the iterator that
    gave it, so that a loader which shuffles is not begun twice. With a generator a pass's order and
    augmentation are a function of it; passes differ from each other, as those of a shuffling loader
    do, and torch's global generator is left as it was.

    Args:
        source: The user's batches.
        read: Reads a batch as inputs and targets.
        generator: Determines the order and the augmentation of passes.
        device: The device that inputs are moved to; None to leave them.
        target_device: The device that targets are moved to; None to leave them.
        progress: The title of a progress bar; None for no bar.
        counts_any: Whether any of a batch's targets contributes to the loss. If it is passed, some
            targets of each pass must.
        description: The data's name in errors.
        weighs: Whether a batch may have weights of its examples as a third entry.
    """

    def __init__(
        self,
        source: Batches,
        read: BatchReader,
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        target_device: torch.device | None = None,
        progress: str | None = None,
        counts_any: Callable[[Tensor], bool] | None = None,
        description: str = "data",
        weighs: bool = False,
    ) -> None:
        check_batches(source)
        check_generator(generator)
        # Set if several processes share the data, and it matters which example is which.
        self.first_index_among_all: FirstIndex | None = None
        self.source = source
        self.read = read
        self.dtypes = {p.dtype for p in read.model.parameters()}
        self.device = device
        self.target_device = target_device
        self.progress = progress
        self.counts_any = counts_any
        self.description = description
        self.weighs = weighs
        self._first: list[tuple[Any, ...]] = []
        self._started_pass: Iterator[tuple[Any, ...]] | None = None
        self.randomness: AbstractContextManager[object] = nullcontext()
        if generator is not None and not isinstance(source, (list, tuple)):
            self.randomness = Randomness(generator)

    def first_index(self, batch: int, num_read: int) -> int:
        """Return the index of a batch's first example among those of all processes."""
        if self.first_index_among_all is None:
            return num_read
        return self.first_index_among_all(batch, num_read)

    def batch_number(self, batch: int) -> int:
        """Return the number of a batch, from 1."""
        return batch + 1

    @property
    def first(self) -> list[tuple[Any, ...]]:
        """Return a list with the first pair, or an empty list if there is none."""
        if self._started_pass is None and not self._first:
            started_pass = self.in_step()
            self._first = list(islice(started_pass, 1))
            self._started_pass = started_pass
        return self._first

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Read the data once; at least one target must contribute to the loss."""
        num_batches = 0
        any_counts = False
        for pair in self.in_step():
            num_batches += 1
            if self.counts_any is not None and not any_counts:
                any_counts = self.counts_any(pair[1])
            yield pair
        if self.counts_any is None:
            return
        by_rank = process_group().exchange((num_batches, any_counts))
        if any(number for number, _ in by_rank) and not any(counts for _, counts in by_rank):
            raise ValueError(
                f"All targets of the {self.description} are ignored, so there is no "
                "curvature to compute. Pass batches in which at least one target "
                "contributes to the loss."
            )

    def in_step(self) -> Iterator[tuple[Any, ...]]:
        """Read the data without a check at its end, where all processes take the same steps.

        It is an error if several workers each read all of a stream.
        """
        started_pass = self._started_pass
        self._started_pass = None
        if started_pass is not None:
            yield from chain(self._first, started_pass)
            return
        source = self.source
        if self.progress is not None:
            source = tqdm(source, desc=self.progress, unit="batch", leave=False)
        yield from self._read_pairs(source)

    @property
    def is_reiterable(self) -> bool:
        """Whether the data can certainly be read more than once."""
        if isinstance(self.source, DataLoader):
            return not isinstance(self.source.dataset, IterableDataset)
        return isinstance(self.source, Sized) and not isinstance(self.source, Iterator)

    def extra_pass(self) -> Iterator[Inputs]:
        """Yield the inputs of all batches, in a pass besides those of the fit."""
        for x, *_ in self._read_pairs(self.source):
            yield x

    def _read_pairs(self, source: Batches) -> Iterator[tuple[Any, ...]]:
        num_workers = 0
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, IterableDataset):
            num_workers = self.source.num_workers
        with self.randomness:
            steps = iter(source)
        marks = set[str]()
        for number in count(1):
            with self.randomness:
                batch = next(steps, _END)
            if batch is _END:
                return
            x, y, *weights = self.read(batch, f"Batch {number}", self.weighs)
            if number <= 2 and num_workers > 1:
                # The first batches of two workers, which come in turn.
                marks.add(mark_of(x, y))
                if len(marks) < number:
                    raise ValueError(
                        f"The {num_workers} workers that read the stream start with the same "
                        "examples, so every example would count several times. Use "
                        "torch.utils.data.get_worker_info() to let each worker yield a different "
                        "part of the examples, or set `num_workers=1`."
                    )
            x = move(x, self.device, self.dtypes)
            if self.target_device is not None:
                y = y.to(self.target_device, non_blocking=True)
            yield x, y, *weights


def weight_of(pair: tuple[Any, ...]) -> float:
    """Return the sum of a pair's weights, or its number of examples if it has none."""
    return float(pair[2].double().sum()) if len(pair) > 2 else len(pair[1])


def _has_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a parameter has a dtype; `model.parameters()` would take longer for the first one."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == dtype:
                return True
    return False
