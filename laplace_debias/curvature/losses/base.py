"""The loss as a curvature operator asks for it: a function of the outputs of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.uniforms import Uniforms

LossFunction = Callable[[Any, Tensor], Tensor]
# What operators take for a loss.
Loss = LossFunction | Likelihood
# What the loss needs to know of a batch besides the outputs: targets, and weights of its rows.
Labels = tuple[Tensor, ...]
# A linear map of tangents at the outputs, [..., *outputs] to the same.
OutputMap = Callable[[Tensor], Tensor]


class OutputLoss(ABC):
    """A loss as a function of the outputs `[B, ...]` of a batch, *summed*, with its count.

    The loss of a data set is the sum of the batches' values, with `reduction="mean"` divided by the
    sum of their counts. Working with sums makes everything built on them independent of how the
    data is cut into batches.

    Attributes:
        reduction: `"mean"` or `"sum"`.
        is_recordable: Whether `value` consists of operations known to be recorded safely.
        is_convex: Whether it is convex in the outputs for certain, so that a generalised
            Gauss-Newton matrix is positive semi-definite.
    """

    reduction: str
    is_recordable: bool = True
    is_convex: bool = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:  # noqa: B027 (any target fits)
        """Raise a `ValueError` or `TypeError` if targets do not fit outputs of this shape."""

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """Prepares targets for the other methods, for outputs of `ndim` dimensions."""
        return (targets,)

    @abstractmethod
    def count(self, targets: Tensor) -> float:
        """The number that `reduction="mean"` divides by, for one batch."""

    def counted(self, labels: Labels) -> Tensor | None:
        """The mask of outputs that count, broadcasting to the outputs; None for all."""
        return None

    @abstractmethod
    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The sum over the batch, a scalar; differentiable in the outputs."""

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The gradient of `value` in the outputs."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.value(f, labels), f)[0]

    @abstractmethod
    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """The Hessian of `value` in the outputs."""

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Columns `[K, B, ...]` whose outer products, example by example, add up to the `hessian`.

        Raises:
            TypeError: If it has no such root in closed form.
        """
        raise TypeError(
            "The root of the loss Hessian is known for nn.CrossEntropyLoss, nn.MSELoss and "
            'nn.BCEWithLogitsLoss only: use fisher="empirical" for other losses, or GGN.'
        )

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """The gradient at labels drawn from the model's own distribution.

        Its outer product is, in expectation and example by example, the `hessian`.

        Raises:
            NotImplementedError: If the loss is not a log-likelihood; see `has_distribution`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no distribution of the labels.")

    @property
    def has_distribution(self) -> bool:
        """Whether labels can be drawn from the model."""
        return type(self).drawn_gradient is not OutputLoss.drawn_gradient
