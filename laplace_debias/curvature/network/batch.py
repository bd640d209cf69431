"""A batch of examples: inputs, targets, and possibly weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.inputs import (
    Inputs,
    join,
    mark_of,
    take,
    tensors_of,
    with_tensors,
)

AnyBatch = TypeVar("AnyBatch", bound="Batch")


@dataclass(frozen=True, eq=False)
class Batch:
    """Some examples of the data.

    Attributes:
        inputs: The inputs of the model, with the examples along the first dimension.
        targets: The targets, `[B, ...]`.
        weights: The weights of the examples, which are finite and at least 0. None if each example
            counts once.
    """

    inputs: Inputs
    targets: Tensor
    weights: Float[Tensor, " batch"] | None = None

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate several batches. Examples without weights count once."""
        weights = None
        weighted = [batch.weights for batch in batches if batch.weights is not None]
        if weighted:
            weights = torch.cat([batch.weights_or_ones.to(weighted[0].device) for batch in batches])
        return Batch(
            join([batch.inputs for batch in batches]),
            torch.cat([batch.targets for batch in batches]),
            weights,
        )

    @property
    def num_examples(self) -> int:
        """The number of examples B."""
        return len(self.targets)

    @property
    def weights_or_ones(self) -> Float[Tensor, " batch"]:
        """The weights; ones if there are none."""
        if self.weights is None:
            return torch.ones(self.num_examples, device=self.targets.device)
        return self.weights

    @property
    def total_weight(self) -> float:
        """The sum of the weights; the number of examples if there are none."""
        if self.weights is None:
            return self.num_examples
        return float(self.weights.double().sum())

    @property
    def mark(self) -> str:
        """A text that depends on the order and on every entry of the examples."""
        return mark_of(self.inputs, self.targets, self.weights)

    def take(self, examples: slice | Tensor) -> "Batch":
        """Select examples by a slice, by their indices, or by a mask."""
        weights = self.weights
        if weights is not None:
            # The weights may be on the CPU while the inputs and targets are on a device.
            on_device = examples.to(weights.device) if isinstance(examples, Tensor) else examples
            weights = weights[on_device]
        return Batch(take(self.inputs, examples), self.targets[examples], weights)

    def copied(self: AnyBatch) -> AnyBatch:
        """Copy the tensors, since a loader may write the next batch into the same memory."""
        return replace(
            self,
            inputs=with_tensors(self.inputs, map(torch.clone, tensors_of(self.inputs))),
            targets=self.targets.clone(),
            weights=None if self.weights is None else self.weights.clone(),
        )
