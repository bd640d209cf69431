"""The base of every linear operator: what it takes to be multiplied."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor


class LinearOperator(ABC):
    """A matrix that is only ever multiplied.

    A subclass gives its shape, dtype and device, a product with a matrix and its adjoint;
    everything else (structure, spectrum, solves) is either a method of a structured operator or a
    function on operators.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where products are computed."""

    @abstractmethod
    def _matmat(self, matrix: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        """Multiply with the columns of a matrix whose shape has been checked."""

    @property
    @abstractmethod
    def T(self) -> "LinearOperator":  # noqa: N802 (numpy's and torch's name)
        """The adjoint."""

    def __matmul__(self, other: Float[Tensor, "columns *k"]) -> Float[Tensor, "rows *k"]:
        """Multiply with a vector `[columns]` or a matrix `[columns, k]`.

        Raises:
            ValueError: If the shape, dtype or device does not fit.
        """
        if other.ndim not in (1, 2) or other.shape[0] != self.shape[1]:
            raise ValueError(
                f"{type(self).__name__} of shape {self.shape} cannot multiply a tensor of shape "
                f"{tuple(other.shape)}: expected ({self.shape[1]},) or ({self.shape[1]}, k)."
            )
        if other.dtype != self.dtype or other.device != self.device:
            raise ValueError(
                f"{type(self).__name__} is {self.dtype} on {self.device}, the tensor {other.dtype} "
                f"on {other.device}: convert one of them with `.to(...)`."
            )
        if other.ndim == 1:
            return self._matmat(other[:, None])[:, 0]
        return self._matmat(other)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        """The matrix itself, `[rows, columns]`; costs as many products as columns."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
