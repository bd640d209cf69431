"""The loss as a function of a batch's outputs, in the form that curvature operators use."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.curvature.data.batch import append_dims
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.likelihoods.base import example_losses, root_columns

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


class Uniforms:
    """Uniform random numbers that depend on the seed, the sample and the example's index.

    The generator is counter-based, so that the numbers do not depend on the batch size or the
    device. It applies the finaliser of SplitMix64 (Steele, Lea & Flood, 2014) once per key.
    """

    def __init__(self, seed: int, sample: int, first_index: int) -> None:
        self._key = (seed, sample, first_index)

    def __call__(self, like: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return numbers in (0, 1), float64, with the shape and device of `like` `[B, ...]`.

        The entries that count get the same numbers as if the example had no other entries.
        """
        seed, sample, first_index = self._key
        rows = np.arange(first_index, first_index + len(like), dtype=np.uint64)[:, None]
        columns = np.arange(like[:1].numel(), dtype=np.uint64)
        state = np.array([seed % 2**64], dtype=np.uint64)
        # The numbers are computed on the host: copying them to an accelerator takes less time than
        # fifty operations there. The sample's number is also an array, because numpy warns if
        # products of scalars overflow.
        for key in (np.array([sample], dtype=np.uint64), rows, columns):
            state = state + (key + np.uint64(1)) * _INCREMENT
            state = (state ^ (state >> np.uint64(30))) * _FIRST_MULTIPLIER
            state = (state ^ (state >> np.uint64(27))) * _SECOND_MULTIPLIER
            state = state ^ (state >> np.uint64(31))
        uniforms = ((state >> np.uint64(11)) + 0.5) / 2**53
        numbers = torch.from_numpy(uniforms).to(like.device, non_blocking=True)
        if counted is not None and len(columns) > 1:
            # The index of an entry among the counted entries of its row; arbitrary for the other
            # entries.
            places = counted.expand_as(like).flatten(1).cumsum(1) - 1
            numbers = numbers.gather(1, places.clamp_min(0))
        return numbers.reshape(like.shape)


LossFunction = Callable[[Any, Tensor], Tensor]
# The types of losses that can be passed to an operator.
Loss = LossFunction | Likelihood
# A linear map of tangents at the outputs, from [..., *outputs] to the same shape.
OutputMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Labels:
    """The arguments of a loss for one batch, except the outputs.

    Attributes:
        targets: The targets, in the form in which the loss uses them.
        counted: The mask of the terms that count, that is, contribute to the loss, `[B, ..., 1]`,
            or `[B, ...]` for a loss without classes. It is None if all terms count.
        curvature_weights: The weights ω of the Hessians of the terms, `[B, ..., 1]` or
            `[B, ..., C]`; None if all are 1.
        example_weights: The weights of the examples, `[B]`, which only `weighted_value` and
            `weighted_hessian` use; None if all are 1.
    """

    targets: Tensor
    counted: Tensor | None = None
    curvature_weights: Tensor | None = None
    example_weights: Tensor | None = None


class OutputLoss(ABC):
    """A loss as a function of the outputs `[B, ...]`, summed over the batch, with its divisor.

    The loss of a data set is the sum of the batches' values. With `reduction="mean"`, this sum is
    divided by the sum of the batches' counts. Therefore, results do not depend on how the data are
    split into batches. `is_recordable` says whether `value` consists of operations that are known
    to be safe to record. `is_convex` says whether `value` is known to be convex in the outputs, so
    that a generalised Gauss-Newton matrix is positive semi-definite. `has_distribution` says
    whether labels can be drawn from the model.
    """

    reduction: str
    is_recordable: bool = True
    is_convex: bool = True
    has_distribution: bool = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:  # noqa: B027 (any target fits)
        """Raise a `ValueError` or `TypeError` if targets do not fit outputs of this shape."""

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """Prepare targets for the other methods; the outputs have `ndim` dimensions."""
        return Labels(targets)

    @abstractmethod
    def count(self, targets: Tensor) -> float:
        """Compute the divisor of `reduction="mean"` for one batch."""

    def counted(self, labels: Labels) -> Tensor | None:
        """Return a mask of the outputs that count, broadcastable to them, or None if all count."""
        return labels.counted

    @abstractmethod
    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute the sum of the loss over the batch, a scalar differentiable in the outputs."""

    @abstractmethod
    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute each example's part of `value`, differentiable in the outputs."""

    def weighted_value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute Σ w ℓ, the sum over the batch with the weights of the examples."""
        if labels.example_weights is None:
            return self.value(outputs, labels)
        losses = self.values(outputs, labels)
        return (losses * labels.example_weights.to(losses)).sum()

    def counts(self, targets: Tensor) -> Float[Tensor, " batch"]:
        """Compute each example's part of `count`, float64."""
        counts = [self.count(example) for example in targets.split(1)]
        return torch.tensor(counts, dtype=torch.float64, device=targets.device)

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute the gradient of `value` with respect to the outputs."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.value(f, labels), f)[0]

    @abstractmethod
    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Compute the Hessian of `value` with respect to the outputs."""

    def weighted_hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Compute the Hessian of `weighted_value` with respect to the outputs."""
        product = self.hessian(outputs, labels)
        if labels.example_weights is None:
            return product
        weights = append_dims(labels.example_weights.to(outputs), outputs.ndim)
        return lambda v: weights * product(v)

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute columns `[K, B, ...]` whose outer products add up to each example's `hessian`.

        A loss that has no such root in closed form raises a `TypeError`.
        """
        raise TypeError(
            "The root of the loss Hessian is only available for nn.CrossEntropyLoss, nn.MSELoss "
            'and nn.BCEWithLogitsLoss. For other losses, use `fisher="empirical"` or `GGN`.'
        )

    def signed_root(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Add up the columns of `root` with random signs.

        In expectation, the outer product of the sum equals the `hessian` of each example.
        """
        columns = self.root(outputs, labels)
        numbers = uniforms(columns.new_empty(columns.shape[1], len(columns)))
        signs = signs_from(numbers).to(columns.dtype)
        return torch.einsum("kb...,bk->b...", columns, signs)

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Compute the gradient at labels drawn from the model's own distribution.

        In expectation, its outer product equals the `hessian` of each example. The loss must be a
        log-likelihood; see `has_distribution`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is not a log-likelihood, so labels cannot be sampled from it."
        )


class NegativeLogLikelihood(OutputLoss):
    """The loss −log p(y | f), in nats, summed over the positions of an example.

    The mean is over examples. A target that the likelihood ignores (`ignore_index`) adds nothing to
    the sum.
    """

    reduction = "mean"
    # A user's likelihood may contain operations that cannot be recorded.
    is_recordable = False
    # The dimension of the classes in outputs, and in targets of the same shape as the outputs.
    class_dim = -1

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require targets that the likelihood accepts for the outputs' positions."""
        self.likelihood.check(*flat_terms(outputs, targets))

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """Return one row of targets per term, the mask of counted terms, and curvature weights."""
        targets = targets.movedim(self.class_dim, -1) if targets.ndim == ndim else targets
        positions = targets.shape[: ndim - 1]
        rows = targets.flatten(0, ndim - 2)
        counted = self.likelihood.counted(rows)
        weights = self.likelihood.curvature_weights(rows)
        return Labels(
            rows,
            None if counted is None else counted.reshape(*positions, -1),
            None if weights is None else weights.reshape(*positions, -1),
        )

    def count(self, targets: Tensor) -> float:
        """Count the examples."""
        return float(len(targets))

    def counted(self, labels: Labels) -> Tensor | None:
        """Return the mask of the positions that count."""
        counted = labels.counted
        return None if counted is None else counted.movedim(-1, self.class_dim)

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute Σ ℓ in double precision."""
        terms = outputs.movedim(self.class_dim, -1).flatten(0, -2)
        return example_losses(self.likelihood, terms, labels.targets).double().sum()

    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute ℓ of each example, float64."""
        terms = outputs.movedim(self.class_dim, -1).flatten(0, -2)
        losses = example_losses(self.likelihood, terms, labels.targets).double()
        return losses.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute ∇ ℓ at every position that counts."""
        outputs = outputs.movedim(self.class_dim, -1)
        gradient = self.likelihood.gradient(outputs.flatten(0, -2), labels.targets)
        placed = _place_columns(gradient.unsqueeze(0), outputs, labels)[0]
        return placed.movedim(-1, self.class_dim)

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Return the likelihood's columns, each of which is zero at all positions but one."""
        columns = self._root(outputs, labels)
        positions = columns.shape[2:-1]
        if not positions:
            return columns
        columns = columns.flatten(2, -2)  # [K, B, T, C]
        is_position = torch.eye(columns.shape[2], dtype=columns.dtype, device=columns.device)
        separate_columns = columns.unsqueeze(1) * is_position[:, None, :, None]  # [K, T, B, T, C]
        return separate_columns.flatten(0, 1).unflatten(2, positions)

    def signed_root(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Add up the columns of all positions at once, each multiplied by a random sign."""
        outputs = outputs.movedim(self.class_dim, -1)

        def draw_signs(num_columns: int) -> Tensor:
            """Draw the signs of all positions, `[terms, columns]`."""
            entries = outputs.new_empty(*outputs.shape[:-1], num_columns)
            return signs_from(uniforms(entries, labels.counted)).flatten(0, -2)

        total = self.likelihood.signed_root(outputs.flatten(0, -2), draw_signs)
        weighted = _weight_columns(total.unsqueeze(0), outputs, labels)[0]
        return weighted.movedim(-1, self.class_dim)

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Compute the Hessian from its root, position by position."""
        columns = self._root(outputs, labels)

        def product(v: Tensor) -> Tensor:
            along = torch.einsum("k...c,...c->k...", columns, v)
            return torch.einsum("k...c,k...->...c", columns, along)

        return product

    def hessian_traces(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute the trace of each example's loss Hessian, float64; 1 − Σ p² for a softmax."""
        batch = len(outputs)
        weights = labels.curvature_weights
        if weights is not None and weights.shape[-1] > 1:
            # Each column has its own weight, so the trace without weights cannot be rescaled.
            root = self._root(outputs.double(), labels)
            return root.square().sum(0).reshape(batch, -1).sum(1)
        traces = self.likelihood.hessian_trace(outputs.flatten(0, -2))
        if labels.counted is not None:
            traces = traces * labels.counted.flatten()
        if weights is not None:
            traces = traces * weights.flatten()
        return traces.reshape(batch, -1).sum(1).double()

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Compute the weighted gradient of −log p at labels that are drawn from p(y | f)."""
        outputs = outputs.movedim(self.class_dim, -1)
        terms = outputs.flatten(0, -2)
        numbers = uniforms(outputs, labels.counted).reshape(terms.shape)
        gradient = self.likelihood.drawn_gradient(terms, numbers)
        weighted = _weight_columns(gradient.unsqueeze(0), outputs, labels)[0]
        return weighted.movedim(-1, self.class_dim)

    def _root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute the likelihood's columns of all terms, `[K, B, ..., C]`."""
        columns = root_columns(self.likelihood, outputs.flatten(0, -2))
        return _weight_columns(columns, outputs, labels)


def signs_from(uniforms: Tensor) -> Tensor:
    """Turn uniform random numbers into signs."""
    return torch.where(uniforms < 0.5, -1.0, 1.0)


def _place_columns(columns: Tensor, outputs: Tensor, labels: Labels) -> Tensor:
    """Reshape columns `[K, terms, C]` like the outputs, with zeros for terms that do not count."""
    columns = columns.unflatten(1, outputs.shape[:-1])
    return columns if labels.counted is None else columns * labels.counted


def _weight_columns(columns: Tensor, outputs: Tensor, labels: Labels) -> Tensor:
    """Place columns whose outer products are Hessians, and multiply them by √ω."""
    columns = _place_columns(columns, outputs, labels)
    weights = labels.curvature_weights
    return columns if weights is None else columns * weights.to(columns.dtype).sqrt()


def flat_terms(
    outputs: Float[Tensor, "batch *positions outputs"], targets: Tensor
) -> tuple[Float[Tensor, "terms outputs"], Tensor]:
    """Reshape outputs and targets to one row for each term of the loss."""
    positions = outputs.shape[:-1]
    if targets.shape[: len(positions)] != positions:
        raise ValueError(
            f"Targets of shape {tuple(targets.shape)} do not match outputs of shape "
            f"{tuple(outputs.shape)}. Pass one target per position, {tuple(positions)}. The "
            "classes must be the last dimension of the outputs. For outputs [B, C, ...], use "
            "class_dim=1, or `outputs.movedim(1, -1)` in the model."
        )
    return outputs.flatten(0, -2), targets.flatten(0, len(positions) - 1)
