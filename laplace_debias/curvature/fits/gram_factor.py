"""Kronecker factors that are kept as rows if there are few rows, and products of rows."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.eigh import eigh

# Rows with at least this many columns have thin directions. With fewer columns, computing all
# directions is cheaper.
_THIN_FROM = 256
# If rows have more entries than `_WHOLE_UP_TO`, and at least `_STRIPS_FROM` columns, only one of
# the two symmetric halves of their products is computed, in strips. For smaller products, computing
# both halves is faster. This was measured on one thread of a processor with AVX-512, for 64 to
# 16,384 rows of 25 to 4,608 columns.
_WHOLE_UP_TO = 2**16
_STRIPS_FROM = 128
_NUM_STRIPS = 4


@dataclass(frozen=True)
class GramFactor:
    """A factor that is kept as rows, because there are fewer rows than dimensions.

    The factor is `rowsᵀ rows`, plus an unknown remainder of known trace in other directions.

    Attributes:
        rows: The rows, `[n, *groups, d]`; without `max_rows`, n is at most half of d.
        residual_trace: The trace of the remainder.
        max_rows: The number of rows above which a sum keeps only half as many leading directions.
            If it is None, all rows are kept.
    """

    rows: Float[Tensor, "n *groups d"]
    residual_trace: Float[Tensor, ""] | float = 0.0
    max_rows: int | None = None

    def __add__(self, other: "Factor") -> "Factor":
        """Add two factors; the sum is a matrix if a factor is a matrix or there are many rows."""
        if isinstance(other, Tensor):
            return gram(self.rows) + other
        rows = torch.cat([self.rows, other.rows])
        trace = self.residual_trace + other.residual_trace
        total = GramFactor(rows, trace, self.max_rows).compressed()
        are_few = self.max_rows is not None or 2 * len(rows) <= rows.shape[-1]
        return total if are_few else gram(rows)

    __radd__ = __add__

    def __mul__(self, number: float) -> "GramFactor":
        return GramFactor(self.rows * number**0.5, self.residual_trace * number, self.max_rows)

    def __truediv__(self, number: float) -> "GramFactor":
        return self * (1 / number)

    def compressed(self) -> "GramFactor":
        """Return only the leading directions if there are more rows than `max_rows`.

        The trace of the other directions is added to the remainder.
        """
        if self.max_rows is None or len(self.rows) <= self.max_rows:
            return self
        values, vectors = eigh(self.rows @ self.rows.mT, "the products of rows")
        num_dropped = len(values) - self.max_rows // 2
        trace = self.residual_trace + values[:num_dropped].clamp_min(0).sum()
        return GramFactor(vectors[:, num_dropped:].mT @ self.rows, trace, self.max_rows)

    def to(self, dtype: torch.dtype) -> "GramFactor":
        """Convert to another dtype."""
        return replace(self, rows=self.rows.to(dtype))

    @property
    def has_thin_directions(self) -> bool:
        """Whether the directions are only those that the rows span."""
        is_wide = self.rows.ndim == 2 and self.rows.shape[1] >= _THIN_FROM
        return self.max_rows is not None or is_wide


# A matrix `[*groups, d, d]`, the diagonal `[d]` of a matrix, or rows.
Factor = Tensor | GramFactor


def gram(rows: Float[Tensor, "n *groups d"]) -> Float[Tensor, "*groups d d"]:
    """Compute `rowsᵀ rows`."""
    if rows.ndim == 2 and not _takes_strips(rows):
        return rows.T @ rows
    total = rows.new_zeros(*rows.shape[1:], rows.shape[-1])
    add_gram(total, rows)
    return total


def add_gram(total: Float[Tensor, "*groups d d"], rows: Float[Tensor, "n *groups d"]) -> None:
    """Add `rowsᵀ rows` to a sum; only one of two symmetric halves is computed if this is faster."""
    size = rows.shape[-1]
    if rows.ndim == 3:
        groups = rows.transpose(0, 1)
        total.baddbmm_(groups.mT, groups)
    elif not _takes_strips(rows):
        total.addmm_(rows.T, rows)
    else:
        step = -(-size // _NUM_STRIPS)
        for start in range(0, size, step):
            stop = min(start + step, size)
            upper = total[start:stop, start:]
            upper.addmm_(rows[:, start:stop].T, rows[:, start:])
            total[stop:, start:stop] = upper[:, stop - start :].T


def _takes_strips(rows: Float[Tensor, "n d"]) -> bool:
    """Whether computing one of two symmetric halves of the product in strips is faster."""
    return rows.numel() > _WHOLE_UP_TO and rows.shape[1] >= _STRIPS_FROM
