"""Checks of the arguments of metrics, which run before anything is computed."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from laplace_debias.system.checks import real
from laplace_debias.system.shown import counted

_ROW_SUM_TOLERANCE = 1e-4
"""How far the sum of a row of float32 or float64 probabilities may differ from 1."""


def check_probs(
    probs: Float[Tensor, "n *classes"], name: str = "probs"
) -> Float[Tensor, "n classes"]:
    """Check probabilities, and convert them to the shape `[n, classes]` and at least float32.

    Rows whose sum differs from 1 only by rounding are left as they are. In half precision, however,
    rounding errors are large, so the rows are divided by their sums. Entries that exceed 1 only by
    rounding are set to 1.
    """
    _check_numbers(probs, name)
    if probs.ndim not in (1, 2):
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}. Pass [n, classes], or [n] for "
            "probabilities of class 1, and flatten other dimensions into n."
        )
    if probs.ndim == 2 and probs.shape[1] < 2:
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}, but there must be at least two classes. "
            "For a binary problem, pass the probabilities of class 1 as [n], without the last "
            "dimension."
        )
    tolerance = max(_ROW_SUM_TOLERANCE, 4 * torch.finfo(probs.dtype).eps)
    is_half = probs.dtype in (torch.float16, torch.bfloat16)
    if is_half:
        probs = probs.float()
    lowest, highest = (bound.item() for bound in probs.aminmax())
    if math.isnan(lowest):
        raise ValueError(f"`{name}` contains NaN. Check the outputs of the network.")
    if lowest < 0 or highest > 1 + tolerance:
        raise ValueError(
            f"`{name}` has values from {lowest:.4g} to {highest:.4g}, which are not "
            "probabilities. Apply softmax (or sigmoid) to logits first."
        )
    if probs.ndim == 2:
        error = (probs.sum(dim=1) - 1).abs().max().item()
        if error > tolerance:
            raise ValueError(
                f"The rows of `{name}` must sum to 1, but their sums differ from 1 by up to "
                f"{error:.4g}, more than {tolerance:.1g}. Apply softmax to logits, or divide "
                "each row by its sum."
            )
        if is_half:
            probs = probs / probs.sum(dim=1, keepdim=True)
    probs = probs.clamp(max=1)
    if probs.ndim == 1:
        return torch.stack([1 - probs, probs], dim=1)
    return probs


def check_classification(
    probs: Float[Tensor, "n *classes"], labels: Integer[Tensor, " n"]
) -> tuple[Float[Tensor, "n classes"], Integer[Tensor, " n"]]:
    """Check probabilities and labels, and return them as `[n, classes]` and int64 `[n]`."""
    check_tensor(labels, "labels")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"`labels` has dtype {labels.dtype}, but must contain integer class indices. Convert "
            "them with `labels.long()`."
        )
    if labels.ndim != 1:
        raise ValueError(
            f"`labels` has shape {list(labels.shape)}, but must have shape [n]. If the labels are "
            "one-hot, pass their argmax. If examples have several positions, flatten examples and "
            "positions of `labels` and `probs` into one dimension. If the last dimension has size "
            "1, remove it."
        )
    probs = check_probs(probs)
    if len(probs) != len(labels):
        raise ValueError(
            f"`probs` has {counted(len(probs), 'example')}, but `labels` has {len(labels)}. Pass "
            "both for the same examples, in the same order."
        )
    check_same_device(probs, labels, "probs", "labels")
    lowest, highest = (bound.item() for bound in labels.aminmax())
    if lowest < 0 or highest >= probs.shape[1]:
        raise ValueError(
            f"`labels` are between {lowest} and {highest}, but must be between 0 and "
            f"{probs.shape[1] - 1}, because `probs` has {probs.shape[1]} classes. Renumber the "
            "classes, or remove the examples of other classes."
        )
    return probs, labels.long()


def check_scores(scores: Float[Tensor, " n"], name: str) -> None:
    """Check the scores of examples. They may be infinite, because only their order matters."""
    _check_numbers(scores, name)
    if scores.ndim != 1:
        raise ValueError(
            f"`{name}` has shape {list(scores.shape)}, but must have one score per example, [n]. "
            "Compute scores from probabilities first, for example with `entropy`."
        )
    if scores.isnan().any():
        raise ValueError(
            f"`{name}` contains NaN, which cannot be ordered. Remove the examples whose score is "
            "NaN."
        )


def check_score_pair(scores_id: Float[Tensor, " n"], scores_ood: Float[Tensor, " m"]) -> None:
    """Check the scores of ID and OOD examples, whose numbers may differ."""
    check_scores(scores_id, "scores_id")
    check_scores(scores_ood, "scores_ood")
    check_same_device(scores_id, scores_ood, "scores_id", "scores_ood")


def check_same_device(
    first: Shaped[Tensor, "..."], second: Shaped[Tensor, "..."], first_name: str, second_name: str
) -> None:
    """Check that two tensors are on the same device."""
    if first.device != second.device:
        raise ValueError(
            f"`{first_name}` is on {first.device}, but `{second_name}` is on {second.device}. "
            "Move one of them with `.to(...)`."
        )


def check_tensor(values: object, name: str) -> None:
    """Check that an argument is a tensor."""
    if not isinstance(values, Tensor):
        raise TypeError(
            f"`{name}` is a {type(values).__name__}, but must be a tensor. Convert it with "
            "`torch.as_tensor`."
        )


def _check_numbers(values: Shaped[Tensor, "..."], name: str) -> None:
    """Raise an error unless an argument is a floating-point tensor with at least one entry."""
    check_tensor(values, name)
    if not values.is_floating_point():
        raise ValueError(
            f"`{name}` has dtype {values.dtype}, but must be floating point. Convert it with "
            "`.float()`."
        )
    if values.numel() == 0:
        raise ValueError(
            f"`{name}` is empty, of shape {list(values.shape)}. Pass at least one example."
        )


def check_real(tensors: Mapping[str, Float[Tensor, "..."]]) -> None:
    """Check that the named tensors of a regression are finite, of one shape and on one device."""
    (first_name, first), *_ = tensors.items()
    for name, values in tensors.items():
        _check_numbers(values, name)
        if values.shape != first.shape:
            raise ValueError(
                f"`{name}` has shape {list(values.shape)}, but `{first_name}` has shape "
                f"{list(first.shape)}. Squeeze or expand one of them."
            )
        check_same_device(first, values, first_name, name)
        if not values.isfinite().all():
            raise ValueError(
                f"`{name}` contains NaN or Inf. Remove these examples, or check the outputs of "
                "the network."
            )


def check_examples(
    examples: Integer[Tensor, " n"] | None, rows: Shaped[Tensor, "n ..."], name: str
) -> None:
    """Check that `examples`, unless it is None, has one integer for each row."""
    if examples is None:
        return
    check_tensor(examples, name)
    if examples.dtype != torch.int64 or examples.shape != rows.shape[:1]:
        raise ValueError(
            f"`{name}` has shape {list(examples.shape)} and dtype {examples.dtype}. Pass the "
            f"number of the example of each row, as an int64 tensor of shape [{len(rows)}]."
        )
    check_same_device(rows, examples, "the predictions", name)


def check_level(level: float) -> None:
    """Check that the level of an interval is between 0 and 1."""
    if not 0 < real(level, "level") < 1:
        raise ValueError(f"`level` is {level}. Pass a fraction between 0 and 1, for example 0.95.")
