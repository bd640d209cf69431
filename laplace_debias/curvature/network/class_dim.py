"""The dimension of the outputs that has the classes: the last, or one that is moved there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.curvature.network.inputs import logits_of
from laplace_debias.curvature.network.shadow import shadow
from laplace_debias.system.checks import whole
from laplace_debias.system.warn import warn

# How far from 1 the sum of probabilities may be: softmaxes are also computed in half precision.
_ROUNDING = 1e-3


def check_class_dim(class_dim: int | None) -> None:
    """Require None or a dimension other than that of the examples.

    Raises:
        ValueError: For dimension 0.
        TypeError: As `whole`.
    """
    if class_dim is None:
        return
    if whole(class_dim, "class_dim", -(2**53)) == 0:
        raise ValueError(
            "class_dim=0 is the dimension of the examples: use class_dim=1 for outputs "
            "[B, C, ...], class_dim=-1 for outputs [B, ..., C]."
        )


def classes_last(model: nn.Module, class_dim: int | None) -> nn.Module:
    """The model with its outputs `[B, ..., C]`: itself, or a `shadow` that moves the classes there.

    Args:
        model: The model; it is left untouched.
        class_dim: Which dimension of its outputs has the classes; the last if None.
    """
    if class_dim in (None, -1):
        return model
    assert class_dim is not None
    twin = shadow(model)
    twin.register_forward_hook(_ClassesLast(class_dim))
    return twin


@dataclass(frozen=True)
class _ClassesLast:
    """A forward hook that moves the dimension of the classes to the end."""

    class_dim: int

    def __call__(self, _: nn.Module, __: Any, outputs: Any) -> Any:
        outputs = logits_of(outputs)
        if self.class_dim % max(outputs.ndim, 1) == 0 or not (
            -outputs.ndim <= self.class_dim < outputs.ndim
        ):
            # How many examples a probe had is none of the user's business.
            shape = ", ".join(["batch", *map(str, outputs.shape[1:])] if outputs.ndim else [])
            raise ValueError(
                f"class_dim={self.class_dim}, but the model's outputs have shape [{shape}]: give a "
                "dimension of theirs that is not the first."
            )
        return outputs.movedim(self.class_dim, -1)


def targets_classes_last(targets: Tensor, ndim: int, class_dim: int | None) -> Tensor:
    """Targets that go with outputs `[B, ..., C]`.

    Targets with an entry for every output (regression, several labels) have the classes where the
    model's outputs have them, and so they are moved too; class indices stay as they are.

    Args:
        targets: As the user has them.
        ndim: How many dimensions the outputs have.
        class_dim: As `classes_last`.
    """
    if class_dim is None or targets.ndim != ndim:
        return targets
    return targets.movedim(class_dim, -1)


def check_layout(shape: torch.Size, targets: Tensor, class_dim: int | None) -> None:
    """Ask where the classes are if the shapes fit both `[B, ..., C]` and `[B, C, ...]`.

    One batch whose shapes fit one of the two tells for all: the others have the same model.

    Args:
        shape: That of a batch's outputs.
        targets: The batch's targets.
        class_dim: As the user gave it.

    Raises:
        ValueError: If they do, and `class_dim` does not say it.
    """
    if class_dim is not None or len(shape) < 3:
        return
    if targets.shape == shape[:-1] == shape[:1] + shape[2:] and shape[1] > 1:
        raise ValueError(
            f"Outputs of shape {tuple(shape)} with targets of shape {tuple(targets.shape)} may "
            "have the classes in the last dimension or in dimension 1. Say which: "
            "Laplace(..., class_dim=-1) for [B, ..., C], class_dim=1 for [B, C, ...]."
        )


def warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if every row of the outputs `[B, ..., C]` is a distribution over C ≥ 2 classes.

    Logits may be one row of non-negative numbers that sum to 1, but hardly several.
    """
    if outputs.ndim < 2 or outputs.shape[-1] < 2 or outputs[..., 0].numel() < 2:
        return
    sums = outputs.double().sum(-1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= _ROUNDING).all()):
        warn(
            "The model's outputs are probabilities: none is negative and each row sums to 1. "
            'likelihood="classification" takes logits and applies a softmax to them. Remove the '
            "softmax from the model, or return log-probabilities."
        )


def warn_of_sigmoid(network: nn.Module, outputs: Tensor) -> None:
    """Warn if the network's last layer is a sigmoid, and the outputs are between 0 and 1."""
    is_sigmoid = isinstance(list(network.modules())[-1], nn.Sigmoid)
    if is_sigmoid and bool(((outputs >= 0) & (outputs <= 1)).all()):
        warn(
            "The model's outputs are probabilities: its last layer is a sigmoid. "
            'likelihood="binary" and "multilabel" take logits and apply a sigmoid to them. Remove '
            "the sigmoid from the model."
        )
