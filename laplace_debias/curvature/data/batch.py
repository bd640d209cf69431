"""A batch of examples: inputs, targets, and possibly weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.network.inputs import (
    Inputs,
    digest_of_examples,
    join,
    take,
    tensors_of,
    with_tensors,
)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples with their targets, and weights if there are any.

    Attributes:
        inputs: The inputs of the model, with the examples along the first dimension.
        targets: The targets, `[B, ...]`.
        weights: The weights of the examples, finite and nonnegative; None if each example counts
            once.
        number: The batch's number in the user's data, counted from 1, for error messages; None if
            the batch joins several of the user's batches or is part of one.
        first_index: The index of the first example within the data of all processes; the others
            follow consecutively. Random draws for an example, such as its Monte Carlo label, depend
            on its index.
    """

    inputs: Inputs
    targets: Tensor
    weights: Float[Tensor, " batch"] | None = None
    number: int | None = None
    first_index: int = 0

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate several batches, and give the examples consecutive indices.

        Examples without weights count once.
        """
        weights = None
        weighted = [batch.weights for batch in batches if batch.weights is not None]
        if weighted:
            weights = torch.cat([batch.weights_or_ones.to(weighted[0].device) for batch in batches])
        return Batch(
            join([batch.inputs for batch in batches]),
            torch.cat([batch.targets for batch in batches]),
            weights,
            first_index=batches[0].first_index,
        )

    @property
    def num_examples(self) -> int:
        """The number of examples B."""
        return len(self.targets)

    @property
    def weights_or_ones(self) -> Float[Tensor, " batch"]:
        """The weights, or ones if the batch has no weights."""
        if self.weights is None:
            return torch.ones(self.num_examples, device=self.targets.device)
        return self.weights

    @property
    def total_weight(self) -> float:
        """The sum of the weights, or the number of examples if the batch has no weights."""
        if self.weights is None:
            return self.num_examples
        return float(self.weights.double().sum())

    @property
    def mark(self) -> str:
        """A digest of every entry of the examples, in their order."""
        return digest_of_examples(self.inputs, self.targets, self.weights)

    def take(self, examples: slice | Tensor) -> "Batch":
        """Select examples by a slice, by their positions in the batch, or by a mask.

        The new batch has no number, and its indices start at 0.
        """
        weights = self.weights
        if weights is not None:
            # The weights may be on the CPU while the inputs and targets are on a device.
            on_device = examples.to(weights.device) if isinstance(examples, Tensor) else examples
            weights = weights[on_device]
        return Batch(take(self.inputs, examples), self.targets[examples], weights)

    def copied(self) -> "Batch":
        """Copy the tensors, because a loader may write the next batch into the same memory."""
        return replace(
            self,
            inputs=with_tensors(self.inputs, map(torch.clone, tensors_of(self.inputs))),
            targets=self.targets.clone(),
            weights=None if self.weights is None else self.weights.clone(),
        )


def append_dims(tensor: Tensor, ndim: int) -> Tensor:
    """Append dimensions of size 1 until there are `ndim` dimensions, to broadcast the entries."""
    return tensor.view(*tensor.shape, *[1] * (ndim - tensor.ndim))


def scale_examples(values: Tensor, scales: Float[Tensor, " batch"], dim: int) -> Tensor:
    """Multiply every example by its scale; the examples lie along dimension `dim`."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return values * scales.to(values).view(shape)
