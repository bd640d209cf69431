"""Cotangents at the outputs, whose outer products add up to the loss Hessian."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import scale_examples
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.losses.base import Labels, OutputLoss, Uniforms
from laplace_debias.curvature.network.outputs import targets_classes_last


@dataclass(frozen=True)
class BatchCotangents:
    """The cotangents of a batch, and its loss.

    Attributes:
        columns: The cotangents, `[K, B, ...]`. Their outer products add up to the weighted Hessians
            of the examples' losses.
        loss: The weighted sum of the examples' losses, 0-d.
        input_weights: The weight of each example in the Kronecker factor A, `[B]`: the weight of
            the example times the mean weight of its terms in the Hessian. None if all weights are
            1.
    """

    columns: Float[Tensor, "columns batch *outputs"]
    loss: Tensor
    input_weights: Float[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class Cotangents:
    """The cotangents at the outputs of a batch that represent the loss Hessian.

    The loss of an example is the sum of the losses at its positions. With T positions, `"exact"`
    has T times as many columns, each at one position. `"mc"` and `"empirical"` use the labels of
    all positions at once, and `"signs"` adds up the columns of all positions. For targets with an
    entry for every output, `class_dim` is the dimension of the classes in the targets, which is
    their dimension in the network's own outputs. It is None if the targets already have the layout
    of the loss.
    """

    loss: OutputLoss
    fisher: FisherType
    class_dim: int | None = None

    def for_output(self, output: int, num_outputs: int) -> "OutputCotangents":
        """Return the cotangents that represent one output's entry of the loss Hessian's diagonal.

        Args:
            output: The index of the output among an example's flattened outputs.
            num_outputs: The number of outputs that every example must have.
        """
        return OutputCotangents(self.loss, self.fisher, self.class_dim, output, num_outputs)

    def num_columns(self, num_outputs: int) -> int:
        """Return the number of columns for an example with `num_outputs` outputs."""
        return num_outputs if self.fisher.kind == "exact" else self.fisher.mc_samples

    def counted(self, targets: Tensor, ndim: int) -> Tensor | None:
        """Return a mask of the outputs that count, broadcastable to them, or None if all count."""
        targets = targets_classes_last(targets, ndim, self.class_dim)
        if targets.ndim < ndim - 1:
            return None
        return self.loss.counted(self.loss.labels(targets, ndim))

    def input_weights(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, " batch"] | None:
        """Compute the `input_weights` of a batch whose examples have no weights."""
        targets = targets_classes_last(targets, outputs.ndim, self.class_dim)
        targets = targets.to(outputs.device, non_blocking=True)
        return self._mean_weights(self.loss.labels(targets, outputs.ndim))

    def _mean_weights(self, labels: Labels) -> Float[Tensor, " batch"] | None:
        """Average the weights of each example's terms in the outer products of the cotangents."""
        weights = labels.curvature_weights
        if weights is None:
            return None
        if self.fisher.kind == "empirical":
            weights = weights.square()  # A gradient contains the weight, not its root.
        weights = weights.double()
        if labels.counted is None:
            return weights.flatten(1).mean(1)
        counted = labels.counted.expand_as(weights).flatten(1)
        return (weights.flatten(1) * counted).sum(1) / counted.sum(1).clamp_min(1)

    def __call__(
        self,
        outputs: Float[Tensor, "batch *outputs"],
        targets: Tensor,
        first_index: int,
        weights: Float[Tensor, " batch"] | None = None,
    ) -> BatchCotangents:
        """Compute a batch's cotangents.

        `first_index` is the index of the batch's first example in the data, and `weights` are the
        weights of the examples. Targets may be on the CPU if the likelihood `checks_shapes_only`.
        """
        targets = targets_classes_last(targets, outputs.ndim, self.class_dim)
        # Targets that are still on the CPU are checked there, without waiting for the device.
        self.loss.check(outputs, targets)
        targets = targets.to(outputs.device, non_blocking=True)
        labels = self.loss.labels(targets, outputs.ndim)
        columns = self._columns(outputs, labels, first_index)
        input_weights = self._mean_weights(labels)
        if weights is None:
            # A loss with parameters of its own would otherwise keep its graph in the totals.
            value = self.loss.value(outputs, labels).detach().double()
            return BatchCotangents(columns, value, input_weights)
        weights = weights.to(outputs.device)
        losses = self.loss.values(outputs, labels).detach().double()
        # Compute the roots in the precision of the cotangents, not in the precision of the weights.
        columns = scale_examples(columns, weights.to(columns.dtype).sqrt(), 1)
        input_weights = weights if input_weights is None else weights * input_weights
        return BatchCotangents(columns, losses @ weights.double(), input_weights)

    def _columns(
        self, outputs: Tensor, labels: Labels, first_index: int
    ) -> Float[Tensor, "columns batch *outputs"]:
        """Compute the cotangents without the examples' weights."""
        if self.fisher.kind == "exact":
            return self.loss.root(outputs, labels)
        if self.fisher.kind == "empirical":
            return self.loss.gradient(outputs, labels).unsqueeze(0)
        draw = self.loss.drawn_gradient
        if self.fisher.kind == "signs":
            draw = self.loss.signed_root
        drawn = [
            draw(outputs, labels, Uniforms(self.fisher.seed, sample, first_index))
            for sample in range(self.fisher.mc_samples)
        ]
        if len(drawn) == 1:
            return drawn[0].unsqueeze(0)
        return torch.stack(drawn) / len(drawn) ** 0.5


@dataclass(frozen=True)
class OutputCotangents(Cotangents):
    r"""A cotangent at a single output: the root of its entry on the loss Hessian's diagonal.

    For columns s of any cotangents, it is $\big(\sum_k s_{kc}^2\big)^{1/2} e_c$.

    Attributes:
        output: c, the index of the output among an example's flattened outputs.
        num_outputs: The number of outputs that every example must have.
    """

    output: int = 0
    num_outputs: int = 1

    def num_columns(self, num_outputs: int) -> int:
        """Return 1."""
        return 1

    def __call__(
        self,
        outputs: Float[Tensor, "batch *outputs"],
        targets: Tensor,
        first_index: int,
        weights: Float[Tensor, " batch"] | None = None,
    ) -> BatchCotangents:
        """Compute a batch's cotangent, `[1, B, ...]`.

        Raises:
            ValueError: If the examples do not have `num_outputs` outputs.
        """
        num_outputs = outputs.shape[1:].numel()
        if num_outputs != self.num_outputs:
            raise ValueError(
                f"Each inducing input has {self.num_outputs} outputs, but the examples of a batch "
                f"have {num_outputs}. With `independent_outputs=True`, each output has a separate "
                "process. Pad all inputs to the same shape, or use `independent_outputs=False`."
            )
        root = super().__call__(outputs, targets, first_index, weights)
        entries = root.columns.flatten(2)[:, :, self.output]
        cotangent = torch.zeros_like(root.columns[0].flatten(1))
        cotangent[:, self.output] = torch.linalg.vector_norm(entries, dim=0)
        return replace(root, columns=cotangent.view_as(root.columns[:1]))
