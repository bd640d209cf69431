"""Losses as functions of the outputs: value, gradient, Hessian, gradients at drawn labels."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_debias.curvature.columns import keyed_uniforms
from laplace_debias.curvature.likelihood import Categorical

LossFunction = Callable[[Any, Tensor], Tensor]
# What the loss needs to know of a batch besides the outputs: targets, and weights of its rows.
Labels = tuple[Tensor, ...]
# A linear map of tangents at the outputs, [..., *outputs] to the same.
OutputMap = Callable[[Tensor], Tensor]

REDUCTIONS = ("mean", "sum")


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

    def check(self, shape: torch.Size, targets: Tensor) -> None:  # noqa: B027 (any target fits)
        """Raise a `ValueError` or `TypeError` if targets do not fit outputs of a shape."""

    def labels(self, targets: Tensor, first: int) -> Labels:
        """What the other methods need of a batch whose first example is the `first` of the data."""
        return (targets,)

    @abstractmethod
    def count(self, targets: Tensor) -> float:
        """What `reduction="mean"` divides by, for one batch."""

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

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: "Uniforms") -> Tensor:
        """The gradient at labels drawn from the model's own distribution.

        Its outer product is, in expectation and example by example, the `hessian`.

        Raises:
            TypeError: If the loss is no log-likelihood that labels could be drawn from.
        """
        raise TypeError(
            "The Fisher needs a distribution of the labels, which only nn.CrossEntropyLoss, "
            "nn.MSELoss and nn.BCEWithLogitsLoss give: use GGN or EmpiricalFisher for other losses."
        )

    @property
    def has_distribution(self) -> bool:
        """Whether labels can be drawn from the model."""
        return type(self).drawn_gradient is not OutputLoss.drawn_gradient


class Uniforms:
    """Uniform numbers keyed by seed, sample and the example's place in the data.

    Args:
        seed: Any integer.
        sample: Which of several independent tables.
        first: Place of the batch's first example in the data.
    """

    def __init__(self, seed: int, sample: int, first: int) -> None:
        self._key = (seed, sample, first)

    def __call__(self, like: Tensor) -> Tensor:
        """Numbers in (0, 1) of the shape, dtype and device of `like` `[B, ...]`."""
        rows = like.reshape(like.shape[0], -1)
        return keyed_uniforms(*self._key, rows).reshape(like.shape).to(like.dtype)


class CrossEntropy(OutputLoss):
    r"""`nn.CrossEntropyLoss` of logits `[B, C]` or `[B, C, d1, ...]`.

    With $w$ the class weights, $q$ the smoothed target distribution, $t_c = w_c q_c$ (zero where
    the target is ignored) and $T = \sum_c t_c$, a term is $T\,\mathrm{logsumexp}(f) - t^\top f$,
    its gradient $T p - t$ and its Hessian $T(\mathrm{diag}(p) - pp^\top)$ with $p$ the softmax.
    """

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        self.reduction = loss.reduction
        self._weight = _non_negative(loss.weight, "weight")
        self._ignore_index = loss.ignore_index
        self._smoothing = loss.label_smoothing

    def check(self, shape: torch.Size, targets: Tensor) -> None:
        """Class indices `[B, d1, ...]` in range or `ignore_index`, or probabilities of `shape`."""
        if len(shape) < 2:
            raise ValueError(
                f"CrossEntropyLoss needs outputs [B, C] or [B, C, d1, ...], got {tuple(shape)}: "
                "for one logit an example use nn.BCEWithLogitsLoss."
            )
        if self._weight is not None and self._weight.shape != shape[1:2]:
            raise ValueError(
                f"CrossEntropyLoss has weight of shape {tuple(self._weight.shape)} for {shape[1]} "
                "classes (dimension 1 of the outputs): give one weight a class."
            )
        if targets.is_floating_point():
            self._check_probabilities(shape, targets)
            return
        expected = shape[:1] + shape[2:]
        if targets.dtype not in (torch.int64, torch.uint8):
            raise TypeError(
                f"Class indices must be int64, got {targets.dtype}: use `targets.long()`."
            )
        if targets.shape != expected:
            raise ValueError(
                f"Expected class indices of shape {tuple(expected)}, or class probabilities of "
                f"shape {tuple(shape)}, got {tuple(targets.shape)}."
            )
        valid = targets[targets != self._ignore_index]
        if len(valid) and not (int(valid.min()) >= 0 and int(valid.max()) < shape[1]):
            raise ValueError(
                f"Class indices must lie in 0 … {shape[1] - 1} or be ignore_index="
                f"{self._ignore_index}, got {int(valid.min())} … {int(valid.max())}."
            )

    def _check_probabilities(self, shape: torch.Size, targets: Tensor) -> None:
        if self._ignore_index >= 0:
            raise ValueError(
                f"ignore_index={self._ignore_index} means nothing for class probabilities, and "
                "torch refuses it: leave it out, or pass class indices."
            )
        if targets.shape != shape:
            raise ValueError(
                f"Class probabilities must have the outputs' shape {tuple(shape)}, got "
                f"{tuple(targets.shape)}."
            )
        if not (targets.isfinite() & (targets >= 0)).all():
            raise ValueError("Class probabilities must be finite and not negative.")

    def count(self, targets: Tensor) -> float:
        """The sum of the weights of the targets that are not ignored."""
        if targets.is_floating_point():
            return targets.numel() / targets.shape[1]
        valid = targets[targets != self._ignore_index].long()
        if self._weight is None:
            return float(len(valid))
        return float(self._weight.to(targets.device, torch.float64)[valid].sum())

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """What torch computes, summed."""
        return F.cross_entropy(
            outputs,
            labels[0].to(outputs.dtype) if labels[0].is_floating_point() else labels[0],
            weight=None if self._weight is None else self._weight.to(outputs),
            ignore_index=self._ignore_index,
            label_smoothing=self._smoothing,
            reduction="sum",
        )

    def _weighted_targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """t, `[B, C, d1, ...]`."""
        keep = None
        if targets.is_floating_point():
            q = targets.to(outputs.dtype)
        else:
            keep = (targets != self._ignore_index).unsqueeze(1)
            classes = targets.long().unsqueeze(1).where(keep, 0)
            q = torch.zeros_like(outputs).scatter_(1, classes, 1.0)
        num_classes = outputs.shape[1]
        t = (1 - self._smoothing) * q + self._smoothing / num_classes
        if self._weight is not None:
            t = t * self._weight.to(outputs).reshape(-1, *[1] * (outputs.ndim - 2))
        return t if keep is None else t * keep

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """T p − t."""
        t = self._weighted_targets(outputs, labels[0])
        return t.sum(1, keepdim=True) * outputs.softmax(1) - t

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """The map of v to T (p ∘ v − p pᵀv)."""
        p = outputs.softmax(1)
        weighted = self._weighted_targets(outputs, labels[0]).sum(1, keepdim=True) * p
        axis = 1 - outputs.ndim

        def product(v: Tensor) -> Tensor:
            return weighted * (v - (p * v).sum(axis, keepdim=True))

        return product

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """√T times the columns of `Categorical.hessian_root`, each at one position."""
        total = self._weighted_targets(outputs, labels[0]).sum(1).sqrt()  # [B, d1, ...]
        logits = outputs.movedim(1, -1)
        columns = Categorical().hessian_root(logits.flatten(0, -2)).unflatten(1, total.shape)
        columns = columns * total.unsqueeze(-1)  # [C - 1, B, d1, ..., C]
        if outputs.ndim > 2:
            at = torch.eye(total[0].numel(), dtype=outputs.dtype, device=outputs.device)
            columns = columns.flatten(2, -2).unsqueeze(1) * at[:, None, :, None]
            columns = columns.flatten(0, 1).unflatten(2, total.shape[1:])
        return columns.movedim(-1, 2)

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """√T (p − e_y), y drawn from the softmax at every position."""
        p = outputs.softmax(1)
        cumulative = p.cumsum(1)
        above = uniforms(p[:, :1]) * cumulative[:, -1:]
        drawn = (cumulative[:, :-1] <= above).sum(1, keepdim=True)
        root = self._weighted_targets(outputs, labels[0]).sum(1, keepdim=True).sqrt()
        return root * p.scatter_add(1, drawn, torch.full_like(p[:, :1], -1.0))


class SquaredError(OutputLoss):
    r"""`nn.MSELoss`: terms $(f - y)^2$, the negative log-likelihood of a Gaussian of variance ½."""

    def __init__(self, loss: nn.MSELoss) -> None:
        self.reduction = loss.reduction

    def check(self, shape: torch.Size, targets: Tensor) -> None:
        """Finite floating-point targets of the outputs' shape."""
        _check_like_outputs("MSELoss", shape, targets)

    def count(self, targets: Tensor) -> float:
        """The number of entries."""
        return float(targets.numel())

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Σ (f − y)²."""
        # Not `F.mse_loss`: recording a derivative of its derivative crashes torch (2.15).
        return (outputs - labels[0].to(outputs.dtype)).square().sum()

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """2 (f − y)."""
        return 2 * (outputs - labels[0].to(outputs.dtype))

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """The map of v to 2 v."""
        return lambda v: 2 * v

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """√2 times the unit vectors."""
        return _each_alone(torch.full_like(outputs, 2**0.5))

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """√2 ε with standard normal ε."""
        return 2**0.5 * torch.special.ndtri(uniforms(outputs))


class BinaryCrossEntropy(OutputLoss):
    r"""`nn.BCEWithLogitsLoss` of logits and targets in [0, 1] of one shape.

    With $w$ the weight, $\pi$ the `pos_weight` and $T = w(1 + (\pi - 1)y)$, a term is
    $T\,\mathrm{softplus}(f) - w\pi y f$, its gradient $T p - w\pi y$ and its Hessian $T p(1-p)$
    with $p$ the sigmoid. A weight with a row an example has them in the order of the whole data.
    """

    def __init__(self, loss: nn.BCEWithLogitsLoss, num_data: int) -> None:
        self.reduction = loss.reduction
        self._num_data = num_data
        self._weight = _non_negative(loss.weight, "weight")
        self._pos_weight = _non_negative(loss.pos_weight, "pos_weight")

    def check(self, shape: torch.Size, targets: Tensor) -> None:
        """Targets in [0, 1] of the outputs' shape; weights that broadcast to them."""
        _check_like_outputs("BCEWithLogitsLoss", shape, targets)
        if not ((targets >= 0) & (targets <= 1)).all():
            raise ValueError(
                f"BCEWithLogitsLoss needs targets in [0, 1], got {float(targets.min())} … "
                f"{float(targets.max())}."
            )
        whole = (self._num_data, *shape[1:])
        for name, weight in (("weight", self._weight), ("pos_weight", self._pos_weight)):
            if weight is not None and not _broadcasts(weight.shape, whole):
                raise ValueError(
                    f"BCEWithLogitsLoss has {name} of shape {tuple(weight.shape)}, which does not "
                    f"broadcast to the outputs of the whole data, {whole}: a weight an example "
                    f"needs {self._num_data} rows, in the order of the data."
                )

    def labels(self, targets: Tensor, first: int) -> Labels:
        """Targets, T and w π of the batch's entries."""
        weight = self._rows(self._weight, targets, first)
        positive = weight * self._rows(self._pos_weight, targets, first)
        return targets, weight + (positive - weight) * targets, positive

    def has_rows(self, ndim: int) -> bool:
        """Whether a weight has a row for every example, with outputs of so many dimensions."""
        weights = [w for w in (self._weight, self._pos_weight) if w is not None]
        return any(weight.ndim == ndim and weight.shape[0] > 1 for weight in weights)

    def _rows(self, weight: Tensor | None, targets: Tensor, first: int) -> Tensor:
        if weight is None:
            return torch.ones_like(targets)
        weight = weight.to(targets)
        if weight.ndim == targets.ndim and weight.shape[0] > 1:
            weight = weight[first : first + targets.shape[0]]
        return weight.expand(targets.shape)

    def count(self, targets: Tensor) -> float:
        """The number of entries, whatever their weights, as torch has it."""
        return float(targets.numel())

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """T softplus(f) − w π y f, with logits of either sign kept from overflowing."""
        targets, total, positive = (x.to(outputs.dtype) for x in labels)
        return (total * F.softplus(outputs) - positive * targets * outputs).sum()

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """T p − w π y."""
        targets, total, positive = (x.to(outputs.dtype) for x in labels)
        return total * outputs.sigmoid() - positive * targets

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """The map of v to T p (1 − p) ∘ v."""
        curvature = labels[1].to(outputs.dtype) * outputs.sigmoid() * (-outputs).sigmoid()
        return lambda v: curvature * v

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """√(T p (1 − p)) times the unit vectors, with log-sigmoids that do not lose digits."""
        deviation = (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp()
        return _each_alone(labels[1].to(outputs.dtype).sqrt() * deviation)

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """√T (p − y), y drawn from the sigmoid."""
        p = outputs.sigmoid()
        return labels[1].to(outputs.dtype).sqrt() * (p - (uniforms(p) < p).to(p.dtype))


class AnyLoss(OutputLoss):
    """A callable `loss(outputs, targets) -> scalar`, differentiated by torch.

    Args:
        loss: Takes a batch's outputs `[B, ...]` and targets.
        reduction: What the callable does over the examples of its batch; a mean is one over
            examples, so that the data set's loss weighs every batch by its size.
    """

    # Nobody knows what is in it: see `SquaredError.value`.
    is_recordable = False
    is_convex = False

    def __init__(self, loss: LossFunction, reduction: str) -> None:
        self.reduction = reduction
        self._loss = loss

    def count(self, targets: Tensor) -> float:
        """The number of examples."""
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
                g, f, v, retain_graph=True, is_grads_batched=v.ndim > f.ndim, materialize_grads=True
            )[0]

        return product


def output_loss(loss: LossFunction, reduction: str | None, num_data: int) -> OutputLoss:
    """What the operators know of a loss.

    Args:
        loss: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss` with any arguments, or
            any callable `loss(outputs, targets) -> scalar`.
        reduction: Of a callable that has no attribute `reduction`: `"mean"` or `"sum"`.
        num_data: N, the number of examples in the data.

    Raises:
        TypeError: If the loss cannot be called.
        ValueError: For a reduction that is missing, unknown, in contradiction with the loss's own,
            or that this loss's arguments make depend on the batch.
    """
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
    return AnyLoss(loss, stated)


def _each_alone(values: Tensor) -> Tensor:
    """For values `[B, ...]` one column an output entry, zero elsewhere, `[K, B, ...]`."""
    columns = torch.diag_embed(values.flatten(1)).movedim(1, 0)
    return columns.unflatten(2, values.shape[1:])


def _is(loss: LossFunction, kind: type[nn.Module]) -> bool:
    """Whether a loss computes what torch's class does; a subclass may not."""
    return isinstance(loss, kind) and type(loss).forward is kind.forward


def _non_negative(weight: Tensor | None, name: str) -> Tensor | None:
    if weight is not None and not (weight.isfinite() & (weight >= 0)).all():
        raise ValueError(f"The loss's {name} must be finite and not negative.")
    return None if weight is None else weight.detach().clone()


def _check_like_outputs(name: str, shape: torch.Size, targets: Tensor) -> None:
    if not targets.is_floating_point():
        raise TypeError(
            f"{name} needs floating-point targets, got {targets.dtype}: use `targets.float()`."
        )
    if targets.shape != shape:
        raise ValueError(
            f"{name} needs targets of the outputs' shape {tuple(shape)}, got "
            f"{tuple(targets.shape)}: use `targets.reshape(...)`."
        )
    if not targets.isfinite().all():
        raise ValueError(f"{name} targets hold NaN or Inf: remove these examples.")


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == torch.Size(to)
    except RuntimeError:
        return False
