"""Permutations."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import adopt, multiply
from laplace_debias.operators.structures.dense import Dense


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Permutation(LinearOperator):
    """A permutation: `Permutation(index) @ v` is `v[index]`.

    Without a dtype it takes that of the first operator or tensor that it meets.

    Args:
        index: Every number from 0 to n - 1 once, `[n]`; its device is the operator's.
        dtype: The dtype of the entries.

    Raises:
        ValueError: If the index is not a permutation.
    """

    index: Int[Tensor, " n"]
    _dtype: torch.dtype | None

    def __init__(self, index: Int[Tensor, " n"], dtype: torch.dtype | None = None) -> None:
        is_whole = index.ndim == 1 and not index.is_floating_point()
        if not is_whole or not index.sort().values.equal(torch.arange(len(index)).to(index)):
            raise ValueError(
                f"A permutation is a vector of every number from 0 to {index.numel() - 1}, once "
                f"each, got {index.tolist()}."
            )
        object.__setattr__(self, "index", index.long())
        object.__setattr__(self, "_dtype", dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Both the length of the index."""
        return len(self.index), len(self.index)

    @property
    def dtype(self) -> torch.dtype:
        """The given one, or torch's default."""
        return self._dtype or torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        """The device of the index."""
        return self.index.device

    @property
    def is_symmetric(self) -> bool:
        """Whether it is its own inverse."""
        return self.index.equal(self.index.argsort())

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is the identity: any other has an eigenvalue of -1, or complex ones."""
        return self.index.equal(torch.arange(len(self.index), device=self.device))

    @property
    def T(self) -> "Permutation":  # noqa: N802
        """The inverse permutation."""
        return Permutation(self.index.argsort(), self._dtype)

    def _matmat(self, matrix: Tensor) -> Tensor:
        return matrix[self.index]

    def to(self, *args: object, **kwargs: object) -> "Permutation":
        """Convert dtype or device as `Tensor.to` does."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        target = empty.to(*args, **kwargs)  # type: ignore[call-overload]
        return Permutation(self.index.to(target.device), target.dtype)


@adopt.register
def _(operator: Permutation, dtype: torch.dtype, device: torch.device) -> LinearOperator:
    return operator if operator._dtype else Permutation(operator.index, dtype)


@multiply.register(Permutation, Permutation)
def _(left: Permutation, right: Permutation) -> LinearOperator:
    return Permutation(right.index[left.index], left.dtype)


@multiply.register(Dense, Permutation)
def _(left: Dense, right: Permutation) -> LinearOperator:
    return Dense(left.matrix[:, right.T.index])
