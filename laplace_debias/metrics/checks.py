"""Checks of the arguments of metrics, before anything is computed."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from laplace_debias.system.checks import real

_ROW_SUM_TOLERANCE = 1e-4
"""How far from 1 a row of float32 or float64 probabilities may sum."""


def check_probs(
    probs: Float[Tensor, "n *classes"], name: str = "probs"
) -> Float[Tensor, "n classes"]:
    """Check probabilities and bring them into the form `[n, classes]`, float32 at least.

    Rows that miss a sum of 1 only by rounding pass as they are; entries above 1 only by rounding
    are set to 1.
    """
    _check_numbers(probs, name)
    if probs.ndim not in (1, 2):
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}; expected [n, classes], or [n] probabilities "
            "of class 1. Flatten the other dimensions into n."
        )
    if probs.ndim == 2 and probs.shape[1] < 2:
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}; expected at least two classes. Pass a binary "
            "problem's probabilities of class 1 as [n]. Squeeze the last dimension."
        )
    tolerance = max(_ROW_SUM_TOLERANCE, 4 * torch.finfo(probs.dtype).eps)
    if probs.dtype in (torch.float16, torch.bfloat16):
        probs = probs.float()
    lowest, highest = (bound.item() for bound in probs.aminmax())
    if lowest != lowest:
        raise ValueError(
            f"`{name}` holds NaN; expected probabilities. Look at the outputs of the network."
        )
    if lowest < 0 or highest > 1 + tolerance:
        raise ValueError(
            f"`{name}` lies in [{lowest:.4g}, {highest:.4g}]; expected probabilities in [0, 1]. "
            "Apply softmax (or sigmoid) to logits first."
        )
    if probs.ndim == 2:
        error = (probs.sum(dim=1) - 1).abs().max().item()
        if error > tolerance:
            raise ValueError(
                f"the rows of `{name}` must sum to 1, but they are off by up to "
                f"{error:.4g}, and at most {tolerance:.1g} is allowed. Apply softmax to "
                "logits, or divide each row by its sum."
            )
    probs = probs.clamp(max=1)
    return torch.stack([1 - probs, probs], dim=1) if probs.ndim == 1 else probs


def check_classification(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]
) -> tuple[Float[Tensor, "n classes"], Integer[Tensor, " n"]]:
    """Check probabilities with their labels, and give them as `[n, classes]` and int64 `[n]`."""
    check_tensor(labels, "labels")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"`labels` has dtype {labels.dtype}; expected integer class indices. "
            "Convert them with `labels.long()`."
        )
    if labels.ndim != 1:
        raise ValueError(
            f"`labels` has shape {list(labels.shape)}; expected [n]. Take the argmax of one-hot "
            "labels, squeeze a trailing dimension of one."
        )
    probs = check_probs(probs)
    if len(probs) != len(labels):
        raise ValueError(
            f"`probs` has {len(probs)} examples, but `labels` has {len(labels)}; expected "
            "the same number. Pass both for the same examples, in the same order."
        )
    check_same_device(probs, labels, "probs", "labels")
    lowest, highest = (bound.item() for bound in labels.aminmax())
    if lowest < 0 or highest >= probs.shape[1]:
        raise ValueError(
            f"`labels` lie in {lowest} ... {highest}; expected 0 ... {probs.shape[1] - 1}, as "
            f"`probs` has {probs.shape[1]} classes. Renumber them or drop the examples without one."
        )
    return probs, labels.long()


def check_scores(scores: Float[Tensor, " n"], name: str) -> None:
    """Checks scores of examples, of which only the order counts, so that Inf is allowed."""
    _check_numbers(scores, name)
    if scores.ndim != 1:
        raise ValueError(
            f"`{name}` has shape {list(scores.shape)}; expected one score per example, [n]. "
            "Reduce probabilities first, with `entropy` for example."
        )
    if scores.isnan().any():
        raise ValueError(f"`{name}` holds NaN; expected scores with an order. Drop those examples.")


def check_same_device(
    first: Shaped[Tensor, "..."], second: Shaped[Tensor, "..."], first_name: str, second_name: str
) -> None:
    """Checks that two tensors are on one device."""
    if first.device != second.device:
        raise ValueError(
            f"`{first_name}` is on {first.device} and `{second_name}` on {second.device}; expected "
            "one device. Move one of them with `.to(...)`."
        )


def check_tensor(values: object, name: str) -> None:
    """Checks that an argument is a tensor."""
    if not isinstance(values, Tensor):
        raise TypeError(
            f"`{name}` is a {type(values).__name__}; expected a tensor. "
            "Convert it with `torch.as_tensor`."
        )


def _check_numbers(values: Shaped[Tensor, "..."], name: str) -> None:
    check_tensor(values, name)
    if not values.is_floating_point():
        raise ValueError(
            f"`{name}` has dtype {values.dtype}; expected floating point. "
            "Convert it with `.float()`."
        )
    if values.numel() == 0:
        raise ValueError(
            f"`{name}` is empty, of shape {list(values.shape)}; expected at least one example. "
            "Is the loader empty?"
        )


def check_real(tensors: Mapping[str, Float[Tensor, "..."]]) -> None:
    """Check numbers of a regression, by name: finite, of one shape, on one device."""
    (first_name, first), *_ = tensors.items()
    for name, values in tensors.items():
        _check_numbers(values, name)
        if values.shape != first.shape:
            raise ValueError(
                f"`{name}` has shape {list(values.shape)} and `{first_name}` {list(first.shape)}; "
                "expected the same. Squeeze or expand one of them."
            )
        check_same_device(first, values, first_name, name)
        if not values.isfinite().all():
            raise ValueError(
                f"`{name}` holds NaN or Inf; expected finite numbers. Drop those examples, or "
                "look at the outputs of the network."
            )


def check_level(level: float) -> None:
    """Checks the level of an interval."""
    if not 0 < real(level, "level") < 1:
        raise ValueError(
            f"`level` is {level}; expected a fraction between 0 and 1, for example 0.95."
        )
