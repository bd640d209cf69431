"""The reader of batches: inputs and targets from whatever a loader yields."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.inputs import (
    Inputs,
    OneArgument,
    dtype_error,
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
    one position, as causal language models do, or PEFT adds positions for a prompt, the targets are
    moved too (see `LabelPositions`). A hook makes `(inputs, targets)` of what the data yields; they
    are taken as they are.

    If it does not need targets, a batch may also consist of inputs only: a tensor, as the only
    entry of a tuple or list, or a mapping or dataclass without targets; or the targets may be None.
    A pair is always inputs and targets.
    """

    model: nn.Module
    hook: BatchHook | None = None
    needs_targets: bool = True
    # Found out with the first batch that leaves it open.
    _positions: "LabelPositions | None" = dataclasses.field(default=None, init=False)
    _is_independent_of_targets: bool = dataclasses.field(default=False, init=False)

    def __call__(self, batch: Any, name: str = "A batch", takes_weights: bool = False) -> Batch:
        """Read a batch as inputs and targets, with as many targets as inputs.

        Targets that a batch lacks are zeros. With `takes_weights`, the third entry of a batch may
        be the weights of its examples.
        """
        weights = None
        if self.hook is not None:
            batch = self.hook(batch)
        elif isinstance(batch, (tuple, list)) and len(batch) == 3:
            if not takes_weights:
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
            if self._positions is None:
                self._positions = label_positions(unwrapped(self.model), named, targets)
            targets = self._positions.targets(targets)
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
            decoder_inputs = _decoder_inputs(module, labels)
            if decoder_inputs is not None:
                named["decoder_input_ids"] = decoder_inputs
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
            remedy = f"Remove these entries from the batch, or {USE_A_HOOK}."
            if len(parameters) == 1 and len(unknown) == len(named):
                remedy = (
                    "If this parameter takes the whole batch, pass pairs `(OneArgument(batch), "
                    'batch["labels"])` to a fit, and `OneArgument(batch)` to a prediction.'
                )
            raise ValueError(
                f"The batch has the entries {unknown}, which are not parameters of the model's "
                f"forward pass. Its parameters are {list(parameters)}. {remedy}"
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


def _decoder_inputs(module: nn.Module, labels: Tensor) -> Tensor | None:
    """Return the inputs that a model of Hugging Face gives its decoder; None for other modules.

    Some models (Whisper, M2M100, Blenderbot) have no method for that, but call a function of the
    file that defines them.
    """
    if hasattr(type(module), "prepare_decoder_input_ids_from_labels"):
        prepare: Any = module.prepare_decoder_input_ids_from_labels
        return prepare(labels=labels)
    config = getattr(module, "config", None)
    start = getattr(config, "decoder_start_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    if start is None or padding is None:
        return None
    if "labels" not in inspect.signature(module.forward).parameters:
        return None
    for kind in type(module).__mro__:
        shift = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
        if shift is not None and len(inspect.signature(shift).parameters) == 3:
            return shift(labels, padding, start)
    return None


def _checked(inputs: Inputs, targets: Any, weights: Any, name: str) -> Batch:
    """Require entries of one size, and weights that are finite and not negative."""
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
        return Batch(inputs, targets)
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
    return Batch(inputs, targets, weights)


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


@dataclasses.dataclass(frozen=True)
class LabelPositions:
    """The positions of the outputs that labels `[B, T]` belong to.

    Attributes:
        num_virtual: The number of positions that come before those of the tokens, for a prompt that
            PEFT adds.
        is_shifted: Whether a label belongs to the output at the position before it.
    """

    num_virtual: int = 0
    is_shifted: bool = False

    def targets(self, labels: Tensor) -> Tensor:
        """Move labels to the outputs that predict them."""
        if self.is_shifted and self.num_virtual == 0:
            return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # The first label belongs to the output of the last virtual token.
        num_after = int(self.is_shifted)
        return F.pad(labels, (self.num_virtual - num_after, num_after), value=IGNORED)


@torch.inference_mode(False)
def label_positions(model: nn.Module, named: dict[str, Any], labels: Tensor) -> LabelPositions:
    """Find the outputs that the labels of tokens belong to in a Hugging Face model's own loss.

    Most causal language models shift labels by one position, some of that name do not (those of
    BART's family), nor do token classifiers and masked language models. PEFT's prompts add
    positions. So it is tried out: a single position of one example is labelled, and the gradient of
    the model's own loss in its logits shows which of them the label belongs to. Labels are
    `[B, T]`.
    """
    # The outermost model of Hugging Face's that computes a loss.
    for candidate in model.modules():
        names = [f"{kind.__module__}.{kind.__name__}" for kind in type(candidate).__mro__]
        is_pretrained = any(re.fullmatch(_HUGGING_FACE, name) for name in names)
        if is_pretrained and "labels" in inspect.signature(candidate.forward).parameters:
            break
    else:
        return LabelPositions()
    twin = shared_copy(candidate)
    last = labels.shape[1] - 1
    weights = [
        parameter.requires_grad_() for parameter in twin.parameters() if can_require_grad(parameter)
    ]
    parameters = inspect.signature(candidate.forward).parameters
    # PEFT's models pass on what they are given. The models of transformers also have such
    # arguments, but a wrapper of the user may take other entries of the batch itself.
    takes_any = any(name.startswith("peft.") for name in names)
    inputs = {name: value for name, value in named.items() if takes_any or name in parameters}
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
    num_virtual = max(0, logits.shape[1] - labels.shape[1])
    if read not in ([last + num_virtual], [last + num_virtual - 1]):
        raise ValueError(
            f"The labels of {type(candidate).__name__} cannot be matched with its outputs, because "
            f"its loss compares the label at position {last} with the logits of {read}. Pass "
            "`batch=`, a function that converts a batch to (inputs, targets), and shift the "
            "targets in it, so that each target has the position of the output that predicts it."
        )
    return LabelPositions(num_virtual, is_shifted=read != [last + num_virtual])


_HUGGING_FACE = r"transformers\..*\.PreTrainedModel|peft\.peft_model\.PeftModel"


def _has_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a parameter has a dtype; `model.parameters()` would take longer for the first one."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == dtype:
                return True
    return False
