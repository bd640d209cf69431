"""Losses of torch: three losses in closed form, and all other losses by differentiation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.losses.base import (
    Labels,
    Loss,
    LossFunction,
    NegativeLogLikelihood,
    OutputLoss,
    OutputMap,
    Uniforms,
    signs_from,
)
from laplace_debias.curvature.losses.likelihoods import Categorical, Likelihood
from laplace_debias.curvature.losses.likelihoods.base import RESHAPE_TARGETS, columns_of
from laplace_debias.curvature.losses.likelihoods.gaussian import check_finite_floats
from laplace_debias.curvature.network.calling import quiet

REDUCTIONS = ("mean", "sum")


def output_loss(loss: Loss, reduction: str | None, takes_vectors: bool = False) -> OutputLoss:
    """Return the loss in the form that the operators use.

    The loss of a `Likelihood` is the mean of −log p(y | f) over examples, for outputs
    `[B, ..., C]`. `reduction` applies to a callable that has no attribute `reduction`. If
    `takes_vectors` is true, the model returns outputs `[B]`, which the package handles as `[B, 1]`.
    A user's callable then receives them with their original shape, `[B]`.
    """
    if isinstance(loss, Likelihood):
        if reduction not in (None, "mean"):
            raise ValueError(
                "The loss of a likelihood is the mean over examples, got "
                f"`reduction={reduction!r}`. Remove `reduction=`. For the sum, multiply the "
                "operator by the number of examples."
            )
        return NegativeLogLikelihood(loss)
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"`loss` is {loss!r}. Pass an instance, such as nn.CrossEntropyLoss(), or a function "
            "from (outputs, targets) to a scalar."
        )
    stated_reduction = _stated_reduction(loss, reduction)
    for kind, in_closed_form in (
        (nn.CrossEntropyLoss, CrossEntropy),
        (nn.MSELoss, SquaredError),
        (nn.BCEWithLogitsLoss, BinaryCrossEntropy),
    ):
        # Only the exact classes have a closed form, because a subclass may compute a different
        # loss.
        if isinstance(loss, kind) and type(loss).forward is kind.forward:
            return in_closed_form(loss)  # type: ignore[arg-type]
    for argument, neutral in (("weight", None), ("pos_weight", None), ("ignore_index", -100)):
        if stated_reduction == "mean" and getattr(loss, argument, neutral) not in (None, neutral):
            raise ValueError(
                f"{type(loss).__name__} computes a weighted mean ({argument}=...). It divides the "
                "sum over a batch by a number that cannot be determined here. Pass the loss "
                'with `reduction="sum"`.'
            )
    # Functional losses ignore the same targets as the classes, but have no `ignore_index`.
    default_ignored = -100 if loss in (F.cross_entropy, F.nll_loss) else None
    ignored = getattr(loss, "ignore_index", default_ignored)
    return AnyLoss(loss, stated_reduction, ignored, takes_vectors)


def _stated_reduction(loss: Loss, reduction: str | None) -> str:
    """Return the reduction, `"mean"` or `"sum"`, that the loss or else the user specifies."""
    loss_reduction = getattr(loss, "reduction", None)
    if None not in (loss_reduction, reduction) and loss_reduction != reduction:
        raise ValueError(
            f"The loss has `reduction={loss_reduction!r}`, but the operator has "
            f"`reduction={reduction!r}`. Remove the operator's `reduction=`."
        )
    stated = loss_reduction if loss_reduction is not None else reduction
    name = type(loss).__name__
    if stated is None:
        raise ValueError(
            f"{name} does not state how it reduces over the examples of a batch. Pass "
            '`reduction="mean"` or `reduction="sum"`.'
        )
    if stated == "batchmean":
        # `batchmean` is the name that KLDivLoss uses for a mean over examples.
        stated = "mean"
    if stated not in REDUCTIONS:
        raise ValueError(
            f"{name} has `reduction={stated!r}`, but an operator needs a scalar loss. Use "
            '`reduction="mean"` or `reduction="sum"`.'
        )
    return stated


class CrossEntropy(NegativeLogLikelihood):
    r"""`nn.CrossEntropyLoss` of logits `[B, C]` or `[B, C, d1, ...]`.

    It is −log p of `Categorical`, which has the same class weights, smoothing and ignored targets
    as torch. In contrast to `Categorical`, the classes are the second dimension, the divisor is
    torch's, and class probabilities need not sum to 1.
    """

    is_recordable = True
    class_dim = 1

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        self._weight = _non_negative(loss.weight, "weight")
        super().__init__(Categorical(loss.ignore_index, self._weight, loss.label_smoothing))
        self.reduction = loss.reduction
        self._ignore_index = loss.ignore_index

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require class indices `[B, d1, ...]`, or probabilities of the outputs' shape."""
        shape = outputs.shape
        if shape[1] < 2:
            raise ValueError(
                "CrossEntropyLoss needs outputs [B, C] or [B, C, d1, ...] with at least two "
                f"classes, got shape {tuple(shape)}. For one logit per example, use "
                "nn.BCEWithLogitsLoss."
            )
        if self._weight is not None and self._weight.shape != shape[1:2]:
            raise ValueError(
                f"CrossEntropyLoss has a `weight` of shape {tuple(self._weight.shape)} for "
                f"{shape[1]} classes (dimension 1 of the outputs). Pass one weight per class."
            )
        is_soft = targets.is_floating_point()
        index_shape = shape[:1] + shape[2:]
        expected_shape = shape if is_soft else index_shape
        if targets.shape != expected_shape:
            raise ValueError(
                f"Targets have shape {tuple(targets.shape)}. Pass class indices of shape "
                f"{tuple(index_shape)}, or class probabilities of shape {tuple(shape)}."
            )
        if not is_soft:
            self.likelihood.check(outputs.movedim(1, -1).flatten(0, -2), targets.flatten())
        elif self._ignore_index >= 0:
            raise ValueError(
                f"`ignore_index={self._ignore_index}` is not supported for targets that are "
                "class probabilities. Remove `ignore_index`, or pass class indices."
            )
        elif not (targets.isfinite() & (targets >= 0)).all():
            raise ValueError(
                "Class probabilities must be finite and at least 0. Check the targets."
            )

    def count(self, targets: Tensor) -> float:
        """Compute the sum of the weights of the targets that are not ignored."""
        if targets.is_floating_point():
            return targets.numel() / targets.shape[1]
        valid = targets[targets != self._ignore_index].long()
        if self._weight is None:
            return float(len(valid))
        return float(self._weight.to(targets.device, torch.float64)[valid].sum())

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Return the map from v to T (p ∘ v − p pᵀv)."""
        p = outputs.softmax(1)
        axis = 1 - outputs.ndim
        weighted = p
        for factor in (labels.counted, labels.curvature_weights):
            if factor is not None:
                weighted = weighted * factor.movedim(-1, 1).to(p.dtype)
        return lambda v: weighted * (v - (p * v).sum(axis, keepdim=True))

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Return √T times the columns of `Categorical.hessian_root`, each at one position."""
        return super().root(outputs.movedim(1, -1), labels).movedim(-1, 2)


class SquaredError(OutputLoss):
    r"""`nn.MSELoss`: terms $(f - y)^2$, the negative log-likelihood of a Gaussian of variance ½."""

    def __init__(self, loss: nn.MSELoss) -> None:
        self.reduction = loss.reduction

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require finite targets of the outputs' shape, or `[B]` for a single output."""
        _check_like_outputs("MSELoss", outputs, targets)

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """Return the targets, reshaped to the number of dimensions of the outputs."""
        return Labels(columns_of(targets, ndim))

    def count(self, targets: Tensor) -> float:
        """Count the entries."""
        return float(targets.numel())

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute Σ (f − y)²."""
        # `F.mse_loss` is not used: recording its second derivative crashes torch (2.15).
        return (outputs - labels.targets.to(outputs.dtype)).square().sum()

    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute Σ (f − y)² per example."""
        return (outputs - labels.targets.to(outputs.dtype)).square().flatten(1).sum(1)

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute 2 (f − y)."""
        return 2 * (outputs - labels.targets.to(outputs.dtype))

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Return the map from v to 2 v."""
        return lambda v: 2 * v

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Return √2 times the unit vectors."""
        return _each_alone(torch.full_like(outputs, 2**0.5))

    def signed_root(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Return √2 times random signs."""
        return 2**0.5 * signs_from(uniforms(outputs)).to(outputs.dtype)

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Draw √2 ε with standard normal ε."""
        # Quantiles are computed in float64, because a uniform number that is rounded to float32 can
        # be 1.
        return (2**0.5 * torch.special.ndtri(uniforms(outputs))).to(outputs.dtype)


class _EntryWeights(NamedTuple):
    """The weights in the terms of `BinaryCrossEntropy`, one of each per entry.

    Attributes:
        total: T = w (1 + (π − 1) y), the weight of the softplus and of the Hessian.
        positive: w π, the weight of y f.
    """

    total: Tensor
    positive: Tensor


class BinaryCrossEntropy(OutputLoss):
    r"""`nn.BCEWithLogitsLoss` of logits and targets in [0, 1] with the same shape.

    With $w$ the weight, $\pi$ the `pos_weight` and $T = w(1 + (\pi - 1)y)$, a term is
    $T\,\mathrm{softplus}(f) - w\pi y f$. Its gradient is $T p - w\pi y$ and its Hessian $T p(1-p)$,
    where $p$ is the sigmoid.
    """

    def __init__(self, loss: nn.BCEWithLogitsLoss) -> None:
        self.reduction = loss.reduction
        self._weight = _non_negative(loss.weight, "weight")
        self._pos_weight = _non_negative(loss.pos_weight, "pos_weight")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Require targets of the outputs' shape in [0, 1]."""
        shape = outputs.shape
        _check_like_outputs("BCEWithLogitsLoss", outputs, targets)
        if not ((targets >= 0) & (targets <= 1)).all():
            raise ValueError(
                "Targets of BCEWithLogitsLoss must be between 0 and 1, got "
                f"{float(targets.min())} to {float(targets.max())}. Pass labels or "
                "probabilities."
            )
        example_shape = torch.Size((1, *shape[1:]))
        for name, weight in (("weight", self._weight), ("pos_weight", self._pos_weight)):
            if weight is not None and not _broadcasts(weight, example_shape):
                raise ValueError(
                    f"BCEWithLogitsLoss has a `{name}` of shape {tuple(weight.shape)}, which "
                    "does not broadcast to the outputs of one example, of shape "
                    f"{tuple(shape[1:])}. Pass one weight per output. To weight examples, use "
                    "batches (x, y, weights)."
                )

    def labels(self, targets: Tensor, ndim: int) -> Labels:
        """Return the targets, the weights T, and the mask of the entries whose w is not zero."""
        targets = columns_of(targets, ndim)
        if self._weight is None and self._pos_weight is None:
            return Labels(targets)
        counted = None
        if self._weight is not None:
            counted = (self._weight != 0).to(targets.device).expand(targets.shape)
        return Labels(targets, counted, self._weights(targets, torch.float64).total)

    def _weights(self, targets: Tensor, dtype: torch.dtype) -> _EntryWeights:
        """Compute the weights of every entry in float64, and convert them."""
        # Compute in float64 even if targets are in half precision, because torch does not round the
        # weights to half precision either.
        targets = targets.double()
        weight = _expand_weight(self._weight, targets)
        positive = weight * _expand_weight(self._pos_weight, targets)
        total = weight + (positive - weight) * targets
        return _EntryWeights(total.to(dtype), positive.to(dtype))

    def count(self, targets: Tensor) -> float:
        """Count the entries, whatever their weights, as torch does."""
        return float(targets.numel())

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute T softplus(f) − w π y f without overflow."""
        return self._terms(outputs, labels).sum()

    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute the sum of the terms per example."""
        return self._terms(outputs, labels).flatten(1).sum(1)

    def _terms(self, outputs: Tensor, labels: Labels) -> Tensor:
        weights = self._weights(labels.targets, outputs.dtype)
        targets = labels.targets.to(outputs.dtype)
        # Each formula is used where its second derivative is accurate; torch's softplus is a
        # straight line above 20.
        softplus = torch.where(outputs > 0, -F.logsigmoid(-outputs), F.softplus(outputs))
        return weights.total * softplus - weights.positive * targets * outputs

    def gradient(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute T p − w π y."""
        weights = self._weights(labels.targets, outputs.dtype)
        targets = labels.targets.to(outputs.dtype)
        return weights.total * outputs.sigmoid() - weights.positive * targets

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Return the map from v to T p (1 − p) ∘ v."""
        total = self._weights(labels.targets, outputs.dtype).total
        curvature = total * outputs.sigmoid() * (-outputs).sigmoid()
        return lambda v: curvature * v

    def root(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Return √(T p (1 − p)) times the unit vectors."""
        return _each_alone(self._deviations(outputs, labels))

    def signed_root(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Return √(T p (1 − p)) times random signs."""
        signs = signs_from(uniforms(outputs)).to(outputs.dtype)
        return signs * self._deviations(outputs, labels)

    def _deviations(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute √(T p (1 − p))."""
        total = self._weights(labels.targets, outputs.dtype).total
        deviation = (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp()
        return total.sqrt() * deviation

    def drawn_gradient(self, outputs: Tensor, labels: Labels, uniforms: Uniforms) -> Tensor:
        """Compute √T (p − y) for labels y that are drawn from the sigmoid."""
        total = self._weights(labels.targets, outputs.dtype).total
        p = outputs.sigmoid()
        return total.sqrt() * (p - (uniforms(p, labels.counted) < p).to(p.dtype))


class AnyLoss(OutputLoss):
    """A callable `loss(outputs, targets) -> scalar` that torch differentiates.

    A mean is assumed to be over examples, so the data set's loss weights every batch by its size. A
    loss that ignores targets (`ignore_index`) is not a mean over examples, and raises an error.
    """

    # The callable may contain operations whose recording crashes torch; see `SquaredError.value`.
    is_recordable = False
    is_convex = False
    has_distribution = False

    def __init__(
        self,
        loss: LossFunction,
        reduction: str,
        ignore_index: int | None = None,
        takes_vectors: bool = False,
    ) -> None:
        self.reduction = reduction
        self._loss = loss
        self._ignore_index = ignore_index
        self._takes_vectors = takes_vectors

    def count(self, targets: Tensor) -> float:
        """Count the examples."""
        is_mean_of_fewer = (
            self.reduction == "mean"
            and self._ignore_index is not None
            and not targets.is_floating_point()
            and bool((targets == self._ignore_index).any())
        )
        if is_mean_of_fewer:
            raise ValueError(
                f"Some targets are ignored (`ignore_index={self._ignore_index}`), so it is "
                f"not known by which number {type(self._loss).__name__} divides the sum over "
                'a batch to get the mean. Pass the loss with `reduction="sum"`.'
            )
        return float(targets.shape[0])

    def value(self, outputs: Tensor, labels: Labels) -> Tensor:
        """Compute the callable's value, times the number of examples if it is a mean."""
        num_examples = outputs.shape[0]
        if self._takes_vectors:
            outputs = outputs.squeeze(1)
        value = self._loss(outputs, labels.targets)
        if not isinstance(value, Tensor) or value.ndim != 0:
            description = type(value).__name__
            if isinstance(value, Tensor):
                description = str(tuple(value.shape))
            raise TypeError(
                f"The loss must return a scalar tensor for a batch, got {description}. "
                "Reduce it with `.mean()` or `.sum()`, and pass the matching "
                '`reduction="mean"` or `reduction="sum"`.'
            )
        return value * num_examples if self.reduction == "mean" else value

    def values(self, outputs: Tensor, labels: Labels) -> Float[Tensor, " batch"]:
        """Compute the callable's value for each example separately."""
        examples = zip(outputs.split(1), labels.targets.split(1), strict=True)
        return torch.stack([self.value(output, Labels(target)) for output, target in examples])

    def hessian(self, outputs: Tensor, labels: Labels) -> OutputMap:
        """Compute the Hessian by differentiating the gradient once more."""
        with torch.enable_grad():
            f = outputs.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.value(f, labels), f, create_graph=True)

        def product(v: Tensor) -> Tensor:
            if not g.requires_grad:  # The loss is linear in the outputs.
                return torch.zeros_like(v)
            with quiet():
                return torch.autograd.grad(
                    g, f, v, retain_graph=True, is_grads_batched=v.ndim > f.ndim
                )[0]

        return product


def check_depends_on_outputs_only(
    loss: OutputLoss, parameters: Sequence[Tensor], outputs: Tensor, labels: Labels
) -> None:
    """Raise an error for a callable that uses the given parameters, as a weight decay does.

    The part of the loss that does not depend on the outputs would be missing in its derivatives.
    Parameters that are fixed may be used, because no derivative with respect to them is computed.
    """
    if not isinstance(loss, AnyLoss):
        return
    with torch.enable_grad():
        value = loss.value(outputs.detach(), labels)
        if not value.requires_grad:
            return
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    if any(gradient is not None for gradient in gradients):
        raise ValueError(
            "The loss depends on the model's parameters directly, as a weight decay does, and not "
            "only through the outputs. Leave this part out of the loss, and add its Hessian to the "
            "operator: for c · ‖θ‖², add 2 * c * Identity(D). For a Quadratic, pass weight_decay=."
        )


def _each_alone(values: Tensor) -> Tensor:
    """Return columns `[K, B, ...]`, each with one entry of the outputs and zero elsewhere."""
    columns = torch.diag_embed(values.flatten(1)).movedim(1, 0)
    return columns.unflatten(2, values.shape[1:])


def _expand_weight(weight: Tensor | None, targets: Tensor) -> Tensor:
    """Return the weight of every entry of the targets, 1 by default."""
    if weight is None:
        return torch.ones_like(targets)
    return weight.to(targets).expand(targets.shape)


def _non_negative(weight: Tensor | None, name: str) -> Tensor | None:
    if weight is not None and not (weight.isfinite() & (weight >= 0)).all():
        raise ValueError(f"`{name}` of the loss must be finite and at least 0. Check its entries.")
    return None if weight is None else weight.detach().clone()


def _broadcasts(weight: Tensor, shape: torch.Size) -> bool:
    """Whether a weight can be broadcast to a shape without enlarging that shape."""
    # Broadcasting aligns the last dimensions.
    sizes = zip(weight.shape[::-1], shape[::-1], strict=False)
    return weight.ndim <= len(shape) and all(size in (1, target) for size, target in sizes)


def _check_like_outputs(name: str, outputs: Tensor, targets: Tensor) -> None:
    check_finite_floats(targets, name)
    if columns_of(targets, outputs.ndim).shape != outputs.shape:
        raise ValueError(
            f"Targets of {name} must have the shape of the outputs, {tuple(outputs.shape)}, got "
            f"{tuple(targets.shape)}. {RESHAPE_TARGETS}"
        )
