"""The reader of batches: inputs and targets from whatever a loader yields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batch_forms import (
    TARGETS,
    BatchHook,
    NamedBatch,
    PlainBatch,
    batch_form,
    checked_batch,
    hook_form,
    named_entries,
)
from laplace_debias.curvature.data.forward_arguments import ForwardArguments
from laplace_debias.curvature.data.hugging_face import (
    LabelPositions,
    are_token_labels,
    label_positions,
    with_decoder_inputs,
)
from laplace_debias.curvature.data.label_dependence import check_outputs_without_targets
from laplace_debias.curvature.network.inputs import (
    Inputs,
    dtype_error,
    move,
    num_examples,
    tensors_of,
)
from laplace_debias.curvature.network.unwrapping import unwrapped


@dataclasses.dataclass(eq=False)
class Learned:
    """Properties of a model that its readers learn from the first batch that needs them.

    Attributes:
        label_positions: The positions of the outputs that predict the labels of tokens; None until
            they have been found.
        is_independent_of_targets: Whether the outputs are the same without the targets; False until
            this has been checked.
    """

    label_positions: LabelPositions | None = None
    is_independent_of_targets: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class BatchReader:
    """A reader that splits batches into inputs and targets.

    A batch is a pair `(inputs, targets)`, or a mapping or dataclass with an entry whose name is in
    `TARGETS`. The other entries of a mapping or dataclass are the inputs. They are passed by name
    if the model's forward pass has parameters of these names; a single input with a different name
    is passed by position. A model never receives the targets, so it computes no loss. If a Hugging
    Face model shifts the labels of tokens by one position, as causal language models do, or PEFT
    adds positions for a prompt, the targets are shifted accordingly (see `LabelPositions`). A hook
    converts an item of the data to `(inputs, targets)`, which are used unchanged.

    If the reader does not need targets, a batch may also consist only of inputs: a tensor, a tuple
    or list with a single entry, or a mapping or dataclass without targets. The targets may also be
    None. A pair always consists of inputs and targets.

    Attributes:
        model: The model, with its wrappers.
        hook: A function that converts an item of the data to (inputs, targets); None if no
            conversion is needed.
        needs_targets: Whether batches must have targets. If not, missing targets are read as zeros.
        takes_weights: Whether a batch may have a third entry, one weight per example.
        learned: Properties of the model, which readers made by `dataclasses.replace` share.
    """

    model: nn.Module
    hook: BatchHook | None = None
    needs_targets: bool = True
    takes_weights: bool = False
    learned: Learned = dataclasses.field(default_factory=Learned)

    def __call__(self, batch: Any, name: str = "A batch") -> Batch:
        """Read a batch. Errors refer to the batch by `name`."""
        form: PlainBatch | NamedBatch
        if self.hook is not None:
            form = hook_form(self.hook(batch))
        else:
            form = batch_form(
                batch, name, needs_targets=self.needs_targets, takes_weights=self.takes_weights
            )
        weights = None
        if isinstance(form, NamedBatch):
            inputs, targets = self._from_names(form)
        else:
            inputs = form.inputs
            if type(inputs) is dict:
                ForwardArguments.of(unwrapped(self.model)).check_names(inputs)
            targets = form.targets
            weights = form.weights
        if targets is None and not self.needs_targets:
            targets = torch.zeros(num_examples(inputs), dtype=torch.long)
        return checked_batch(inputs, targets, weights, name)

    def inputs(self, x: Any, device: torch.device, *, keeps_graph: bool = False) -> Inputs:
        """Return the inputs of a prediction, which may be passed in a mapping with targets.

        An entry with a name from `TARGETS` is an input only if the forward pass has a parameter of
        this name. In addition, `labels` are an input only with a hook, because the inputs of a
        prediction then contain no targets. The inputs are moved to a device, and gradients flow
        back to them only if `keeps_graph`. See `move` for the errors.
        """
        named = named_entries(x)
        if named is not None:
            forward = ForwardArguments.of(unwrapped(self.model))
            inputs = {
                key: value
                for key, value in with_decoder_inputs(unwrapped(self.model), named).items()
                if self._is_input(key, forward)
            }
            x = forward.inputs(inputs)
            if "labels" in named and "labels" not in inputs:
                self._check_outputs(named, x, "labels", forward)
        moved = move(x, device, None, keeps_graph=keeps_graph)
        _check_dtypes(moved, self.model)
        return moved

    def _is_input(self, key: str, forward: ForwardArguments) -> bool:
        """Whether a named entry is an input of a prediction; see `inputs`."""
        if key not in TARGETS:
            return True
        if key == "labels" and self.hook is None:
            return False
        return key in forward.parameters

    def _from_names(self, batch: NamedBatch) -> tuple[Inputs, Tensor | None]:
        """Split a batch with named entries into the inputs and the targets."""
        model = unwrapped(self.model)
        forward = ForwardArguments.of(model)
        named = with_decoder_inputs(model, batch.entries)
        target_name = batch.target_name
        if target_name is None:
            return forward.inputs(named), None
        named = {key: value for key, value in named.items() if key != target_name}
        targets = batch.entries[target_name]
        if are_token_labels(targets, named):
            if self.learned.label_positions is None:
                self.learned.label_positions = label_positions(model, named, targets)
            targets = self.learned.label_positions.targets(targets)
        inputs = forward.inputs(named)
        self._check_outputs(batch.entries, inputs, target_name, forward)
        return inputs, targets

    def _check_outputs(
        self, batch: Mapping[str, Any], inputs: Inputs, target_name: str, forward: ForwardArguments
    ) -> None:
        """Check, for one batch only, that the outputs are the same without the targets."""
        if not self.learned.is_independent_of_targets and forward.takes(target_name):
            check_outputs_without_targets(unwrapped(self.model), batch, inputs, target_name)
            self.learned.is_independent_of_targets = True


def _check_dtypes(inputs: Inputs, model: nn.Module) -> None:
    """Require that floating-point inputs have the dtype of some parameter."""
    for x in tensors_of(inputs):
        # Usually the first parameter has the dtype, so the others are not read.
        if x.is_floating_point() and all(p.dtype != x.dtype for p in model.parameters()):
            dtypes = {parameter.dtype for parameter in model.parameters()}
            raise dtype_error(x.dtype, dtypes)
