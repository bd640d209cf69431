"""Diagonal matrices and the identity."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator, Symmetric
from laplace_debias.operators.dispatch import (
    Scalar,
    add,
    identity_multiple,
    multiply,
    scale,
    shift,
)
from laplace_debias.system.checks import check_is


@dataclass(eq=False, repr=False)
class Diagonal(Symmetric):
    """A diagonal matrix.

    Args:
        values: The diagonal, `[n]`.

    Raises:
        ValueError: If the values are not a vector.
    """

    values: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        check_is(self.values, "the values of Diagonal", Tensor)
        if self.values.ndim != 1 or not self.values.is_floating_point():
            raise ValueError(
                "Diagonal needs a vector of real floating-point numbers, but got shape "
                f"{tuple(self.values.shape)} and {self.values.dtype}. Convert the vector, or use "
                "Dense for a matrix."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`, where n is the number of values."""
        return len(self.values), len(self.values)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether all values are at least 0."""
        return bool((self.values >= 0).all())

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.values[:, None] * matrix


@add.register(Diagonal, Diagonal)
def _(left: Diagonal, right: Diagonal) -> LinearOperator:
    return Diagonal(left.values + right.values)


@multiply.register(Diagonal, Diagonal)
def _(left: Diagonal, right: Diagonal) -> LinearOperator:
    return Diagonal(left.values * right.values)


@scale.register
def _(operator: Diagonal, scalar: Scalar) -> LinearOperator:
    return Diagonal(scalar * operator.values)


@shift.register
def _(operator: Diagonal, scalar: Scalar) -> LinearOperator | None:
    return Diagonal(operator.values + scalar)


@dataclass(eq=False, repr=False, init=False)
class Identity(Symmetric):
    """The identity matrix.

    If no dtype or device is passed, the identity adopts those of the first operator or tensor that
    it is combined with. Therefore, `H + 0.1 * Identity(n)` needs neither. On its own, such an
    identity has torch's defaults.

    Args:
        n: The number of rows and columns, at least 0.
        dtype: The dtype of the entries.
        device: The device on which products are computed.

    Raises:
        ValueError: If n is negative.
        TypeError: If the dtype is not a real floating-point dtype.
    """

    n: int
    _dtype: torch.dtype | None
    _device: torch.device | None

    def __init__(
        self,
        n: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if n < 0:
            raise ValueError(f"The number of rows is {n}. Pass a number of at least 0.")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(
                f"An identity must have a real floating-point dtype, got {dtype}. Use "
                "torch.float32 or torch.float64."
            )
        self.n = int(n)
        self._dtype = dtype
        self._device = None
        if device is not None:
            # Add the index of the device, because tensors on "cuda" have a device such as "cuda:0".
            self._device = torch.empty(0, device=device).device

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, n)`."""
        return self.n, self.n

    @property
    def dtype(self) -> torch.dtype:
        """The dtype passed to the constructor, or torch's default."""
        return self._dtype or torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        """The device passed to the constructor, or torch's default."""
        return self._device or torch.empty(0).device

    is_positive_semidefinite = True

    def _matmat(self, matrix: Tensor) -> Tensor:
        # Return a copy, so that changing the product in place does not change the matrix.
        return matrix.clone()

    def to(self, *args: Any, **kwargs: Any) -> "Identity":
        """Convert dtype or device as `Tensor.to` does."""
        target = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        return Identity(self.n, target.dtype, target.device)

    def adopted(self, dtype: torch.dtype, device: torch.device) -> "Identity":
        """Return the identity; if its dtype or device is open, it adopts the given one."""
        return Identity(self.n, self._dtype or dtype, self._device or device)


@identity_multiple.register
def _(operator: Identity) -> Scalar | None:
    return 1.0


@shift.register
def _(operator: Identity, scalar: Scalar) -> LinearOperator | None:
    return scale(operator, 1.0 + scalar)


@multiply.register(Identity, LinearOperator)
def _(left: Identity, right: LinearOperator) -> LinearOperator:
    return right


@multiply.register(LinearOperator, Identity)
def _(left: LinearOperator, right: Identity) -> LinearOperator:
    return left
