r"""Checks that a posterior can be computed with: finite, and within the range of its dtype.

All of a posterior's numbers are functions of the precisions along its directions,
$N\Lambda + \delta$. They are checked once, where a posterior is made.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators import (
    BlockDiagonal,
    EigenKronecker,
    LinearOperator,
    LowRankPlusDiagonal,
)
from laplace_debias.system.checks import real


def check_temperature(temperature: Any) -> float:
    """T as a `float`.

    Raises:
        TypeError: If it is not one number.
        ValueError: If it is not positive and finite.
    """
    value = real(temperature, "temperature")
    if value.ndim:
        raise TypeError(f"temperature must be one number, got {temperature!r}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(
            f"temperature must be positive and finite, got {float(value)}: 1 for the posterior "
            "itself, less for one that is more certain."
        )
    return float(value)


def checked_at_once(num_parameters: int) -> int:
    """How many of the mean's entries `squared_norm` looks at together."""
    return max(2**10, num_parameters // 256)


def squared_norm(mean: Float[Tensor, " parameters"]) -> float:
    """The squared norm of parameters (less the prior's mean), which must be finite.

    Raises:
        ValueError: If a parameter or the norm is not.
    """
    # Not all at once: in double precision that would be several times the mean.
    parts = [part.double().square().sum() for part in mean.split(checked_at_once(len(mean)))]
    square = torch.stack(parts).sum().item()
    if not math.isfinite(square):
        raise ValueError(
            "The posterior's mean holds NaN or Inf, or its square overflows: the model has "
            "diverged, its checkpoint is damaged, or the prior's mean is too far from it."
        )
    return square


def largest_curvatures(curvature: BlockDiagonal) -> list[float]:
    """The largest curvature of every block, whose parts must all be finite.

    Every number is read once, and the host waits for the device once.

    Args:
        curvature: Blocks of directions and magnitudes.

    Raises:
        ValueError: Naming the block, if directions or magnitudes hold NaN or Inf, or a magnitude is
            negative.
    """
    parts = {name: _parts(block) for name, block in curvature.blocks.items()}
    extremes = iter(_extremes([part for of_block in parts.values() for part in of_block.values()]))
    largest = []
    for name, of_block in parts.items():
        highest = 0.0
        for part, (low, high) in zip(of_block, extremes, strict=False):
            is_magnitude = part in ("magnitudes", "diagonal")
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ValueError(_not_finite(name, is_magnitude, curvature.blocks[name].dtype))
            if is_magnitude and low < 0:
                raise ValueError(
                    f"The curvature of {name} has negative magnitudes, down to {low:.3g}: expected "
                    "those of a positive semi-definite matrix, such as the GGN or a Fisher."
                )
            highest = max(highest, high) if is_magnitude else highest
        largest.append(highest)
    return largest


def _parts(block: LinearOperator) -> dict[str, Tensor]:
    """A block's tensors that hold a number, by their fields."""
    assert isinstance(block, (EigenKronecker, LowRankPlusDiagonal))
    fields = ("U_G", "U_A", "U", "diagonal", "magnitudes")
    found = {field: getattr(block, field, None) for field in fields}
    return {field: part for field, part in found.items() if part is not None and part.numel()}


def _extremes(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The least and the greatest entry of each tensor; NaN for both where it holds NaN."""
    if not tensors:
        return []
    found = [torch.stack(torch.aminmax(tensor)).double() for tensor in tensors]
    return torch.stack(found).tolist()


def _not_finite(name: str, is_magnitude: bool, dtype: torch.dtype) -> str:
    if is_magnitude:
        return (
            f"The curvature of {name} holds NaN or Inf in {dtype}: look for Inf among the inputs "
            "and for targets or a sigma that are far from 1 in size, rescale them, or convert the "
            "model to a wider dtype."
        )
    return (
        f"The directions of {name} hold NaN or Inf: its eigendecomposition failed. Rescale the "
        "inputs, or fit with factor_dtype=torch.float64 or a model in a wider dtype."
    )


def check_prior_precision(
    prior_precision: Tensor, num_blocks: int, dtype: torch.dtype | None = None
) -> None:
    """Require one positive finite number, or one per block.

    Args:
        prior_precision: δ.
        num_blocks: How many curvature blocks there are.
        dtype: What δ and 1/δ must be normal numbers of; None for any.

    Raises:
        ValueError: Otherwise.
    """
    if prior_precision.ndim > 1 or (
        prior_precision.ndim == 1 and len(prior_precision) != num_blocks
    ):
        raise ValueError(
            f"The prior precision must be one number or one for each of the {num_blocks} blocks, "
            f"got shape {tuple(prior_precision.shape)}."
        )
    values = _values(prior_precision)
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError(
            f"The prior precision must be positive and finite, got {prior_precision.tolist()}: a "
            "flat prior is approached by a small one, such as 1e-6."
        )
    if dtype is None:
        return
    tiny = torch.finfo(dtype).tiny
    if min(values) < tiny or max(values) > 1 / tiny:
        raise ValueError(
            f"The prior precision {prior_precision.tolist()} or its reciprocal is out of the range "
            f"of {dtype}: expected {tiny:.3g} to {1 / tiny:.3g}. Use one closer to 1, or convert "
            "the model to a wider dtype."
        )


def check_precisions(
    largest: Mapping[str, float],
    num_data: float,
    prior_precision: Tensor,
    square: float,
    dtype: torch.dtype,
) -> None:
    r"""Require precisions $N\Lambda + \delta$ and variances that are normal numbers of a dtype.

    Magnitudes below the dtype's least normal number lose digits, which N multiplies. That must not
    show beside δ: so δ/N, too, must be a normal number.

    Args:
        largest: The largest curvature of every block.
        num_data: N, over the temperature.
        prior_precision: δ, one number or one per block.
        square: The squared norm of the mean less the prior's: δ times it is part of the marginal
            likelihood.
        dtype: What the posterior is computed in.

    Raises:
        ValueError: Naming the block, otherwise.
    """
    check_prior_precision(prior_precision, len(largest))
    tiny = torch.finfo(dtype).tiny
    deltas = _values(prior_precision)
    deltas = deltas * len(largest) if len(deltas) == 1 else deltas
    for (name, curvature), delta in zip(largest.items(), deltas, strict=True):
        if delta < num_data * tiny:
            raise ValueError(
                f"The prior precision of {name}, {delta:.3g}, is too small for {dtype} and N = "
                f"{num_data}: expected at least {num_data * tiny:.3g}. Use a larger one, or "
                "convert the model to a wider dtype."
            )
        if num_data * curvature + delta > 1 / tiny:
            raise ValueError(
                f"The precision of {name} is up to {num_data * curvature + delta:.3g} (N = "
                f"{num_data} times a curvature of {curvature:.3g}, and a prior precision of "
                f"{delta:.3g}), whose reciprocal is out of the range of {dtype}: expected at most "
                f"{1 / tiny:.3g}. Rescale the inputs, the targets and their sigma, use a smaller "
                "prior precision, or convert the model to a wider dtype."
            )
    if not math.isfinite(max(deltas) * square):
        raise ValueError(
            f"The prior's log-density overflows: a prior precision of {max(deltas):.3g} times a "
            f"squared norm of the parameters of {square:.3g}. Use a smaller prior precision."
        )


def _values(prior_precision: Tensor) -> list[float]:
    return prior_precision.detach().double().reshape(-1).tolist()
