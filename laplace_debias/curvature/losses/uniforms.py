"""Random numbers that are keyed by an example's place in the data, not by how it is cut."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Uniforms:
    """Uniform numbers keyed by seed, sample and the example's place in the data.

    Args:
        seed: Any integer.
        sample: Which of several independent tables.
        first: Place of the batch's first example in the data.
    """

    def __init__(self, seed: int, sample: int, first: int) -> None:
        self._key = (seed, sample, first)

    def __call__(self, like: Tensor, counted: Tensor | None = None) -> Tensor:
        """Numbers in (0, 1), float64, of the shape and device of `like` `[B, ...]`.

        Args:
            like: Gives shape and device.
            counted: Which entries count, `[B, ...]`: their numbers are those of an example without
                the others. None for all.
        """
        rows = like.reshape(like.shape[0], -1)
        columns = None if counted is None else places(counted.expand_as(like).flatten(1))
        return keyed_uniforms(*self._key, rows, columns).reshape(like.shape)


def places(counted: Bool[Tensor, "batch entries"]) -> Int[Tensor, "batch entries"]:
    """The number of an entry among those of its row that count; anything for the others."""
    return (counted.cumsum(1) - 1).clamp_min(0)


def keyed_uniforms(
    seed: int,
    stream: int,
    first: int,
    like: Float[Tensor, "batch outputs"],
    columns: Int[Tensor, "batch outputs"] | None = None,
) -> Float[Tensor, "batch outputs"]:
    """Uniform numbers in (0, 1), a function of (seed, stream, row, column) alone, float64.

    A counter-based generator, so that the numbers do not depend on the batch size or the device:
    the finaliser of SplitMix64 (Steele, Lea & Flood, 2014), applied once per key.

    Args:
        seed: Any integer.
        stream: Which of several independent tables.
        first: Row number of the first row.
        like: Gives shape and device.
        columns: Column numbers; in their order if None.
    """
    rows = torch.arange(first, first + like.shape[0], device=like.device)[:, None]
    if columns is None:
        columns = torch.arange(like.shape[1], device=like.device)[None, :]
    state = torch.full_like(rows, seed)
    for key in (torch.full_like(rows, stream), rows, columns):
        state = _mix(state + (key + 1) * -7046029254386353131)  # 0x9E3779B97F4A7C15, signed
    return (_shift(state, 11).double() + 0.5) / 2**53


def _shift(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    values = (values ^ _shift(values, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return values ^ _shift(values, 31)
