"""From what a user calls a loss to what the operators know of it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_debias.curvature.losses.base import Labels, Loss, LossFunction, OutputLoss, OutputMap
from laplace_debias.curvature.losses.known import BinaryCrossEntropy, CrossEntropy, SquaredError
from laplace_debias.curvature.losses.likelihoods import Likelihood
from laplace_debias.curvature.losses.negative_log_likelihood import NegativeLogLikelihood

REDUCTIONS = ("mean", "sum")


class AnyLoss(OutputLoss):
    """A callable `loss(outputs, targets) -> scalar`, differentiated by torch.

    Args:
        loss: Takes a batch's outputs `[B, ...]` and targets.
        reduction: What the callable does over the examples of its batch; a mean is one over
            examples, so that the data set's loss weighs every batch by its size.
        ignore_index: The target that the loss leaves out, if there is one: its mean is then not
            one over examples.
    """

    # Nobody knows what is in it: see `SquaredError.value`.
    is_recordable = False
    is_convex = False

    def __init__(self, loss: LossFunction, reduction: str, ignore_index: int | None = None) -> None:
        self.reduction = reduction
        self._loss = loss
        self._ignore_index = ignore_index

    def count(self, targets: Tensor) -> float:
        """The number of examples.

        Raises:
            ValueError: If the mean leaves some out.
        """
        is_mean_of_fewer = (
            self.reduction == "mean"
            and self._ignore_index is not None
            and not targets.is_floating_point()
            and bool((targets == self._ignore_index).any())
        )
        if is_mean_of_fewer:
            raise ValueError(
                f"Targets are ignored (ignore_index={self._ignore_index}), so that the mean of "
                f"{type(self._loss).__name__} over a batch divides by a number that only it knows: "
                'give it reduction="sum".'
            )
        return float(targets.shape[0])

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """The callable's value, times the number of examples if it is a mean."""
        value = self._loss(outputs, labels[0])
        if not isinstance(value, Tensor) or value.ndim != 0:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"The loss must return a scalar tensor for a batch, got {found}: reduce it with "
                "`.mean()` or `.sum()` and say which with `reduction=`."
            )
        return value * outputs.shape[0] if self.reduction == "mean" else value

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """By differentiating the gradient once more."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.value(f, labels), f, create_graph=True)

        def product(v: Tensor) -> Tensor:
            if not g.requires_grad:  # a loss that is linear in the outputs
                return torch.zeros_like(v)
            return torch.autograd.grad(
                g, f, v, retain_graph=True, is_grads_batched=v.ndim > f.ndim
            )[0]

        return product


def output_loss(loss: Loss, reduction: str | None, num_data: int) -> OutputLoss:
    """What the operators know of a loss.

    Args:
        loss: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss` with any arguments, or
            any callable `loss(outputs, targets) -> scalar`; or a `Likelihood`, whose loss is the
            mean of −log p(y | f) over examples, of outputs `[B, ..., C]`.
        reduction: Of a callable that has no attribute `reduction`: `"mean"` or `"sum"`.
        num_data: N, the number of examples in the data.

    Raises:
        TypeError: If the loss cannot be called.
        ValueError: For a reduction that is missing, unknown, in contradiction with the loss's own,
            or that this loss's arguments make depend on the batch.
    """
    if isinstance(loss, Likelihood):
        if reduction not in (None, "mean"):
            raise ValueError(
                f"A likelihood's loss is the mean over examples, got reduction={reduction!r}: "
                "multiply the operator by N for the sum."
            )
        return NegativeLogLikelihood(loss)
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"loss must be an instance such as nn.CrossEntropyLoss() or a callable "
            f"(outputs, targets) -> scalar, got {loss!r}."
        )
    own = getattr(loss, "reduction", None)
    if own is not None and reduction is not None and own != reduction:
        raise ValueError(
            f"The loss has reduction={own!r}, the operator was given reduction={reduction!r}: "
            "leave it out."
        )
    stated = own if own is not None else reduction
    name = type(loss).__name__
    if stated is None:
        raise ValueError(
            f"{name} does not say how it reduces over the examples of a batch: pass "
            'reduction="mean" or reduction="sum".'
        )
    if stated == "batchmean":
        # KLDivLoss's name for a mean over examples.
        stated = "mean"
    if stated not in REDUCTIONS:
        raise ValueError(
            f'{name} has reduction={stated!r}: an operator needs a scalar loss, "mean" or "sum".'
        )
    if _is(loss, nn.CrossEntropyLoss):
        return CrossEntropy(loss)  # type: ignore[arg-type]
    if _is(loss, nn.MSELoss):
        return SquaredError(loss)  # type: ignore[arg-type]
    if _is(loss, nn.BCEWithLogitsLoss):
        return BinaryCrossEntropy(loss, num_data)  # type: ignore[arg-type]
    for argument, neutral in (("weight", None), ("pos_weight", None), ("ignore_index", -100)):
        if stated == "mean" and getattr(loss, argument, neutral) not in (None, neutral):
            raise ValueError(
                f"{name} has {argument}=..., so that its mean over a batch divides by a number "
                'that only it knows: give it reduction="sum".'
            )
    # The functions ignore what the classes ignore, without saying so.
    silent = -100 if loss in (F.cross_entropy, F.nll_loss) else None
    return AnyLoss(loss, stated, getattr(loss, "ignore_index", silent))


def _is(loss: LossFunction, kind: type[nn.Module]) -> bool:
    """Whether a loss computes what torch's class does; a subclass may not."""
    return isinstance(loss, kind) and type(loss).forward is kind.forward
