"""From operators to SciPy's and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from laplace_debias.operators.algebra import Transpose
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.structures.dense import Dense

_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
_TORCH = {np.dtype(numpy_type): dtype for dtype, numpy_type in _NUMPY.items()}


def to_scipy(operator: LinearOperator) -> scipy.sparse.linalg.LinearOperator:
    """The operator for SciPy: NumPy arrays in and out, in the operator's dtype.

    Arrays of another real dtype are converted to it. Gradients do not flow through.

    Raises:
        TypeError: If NumPy has no such dtype.
    """
    if operator.dtype not in _NUMPY:
        raise TypeError(
            f"NumPy has no {operator.dtype}: convert the operator with `.to(torch.float32)`."
        )

    def product(of: LinearOperator, array: NDArray[Any]) -> NDArray[Any]:
        if np.iscomplexobj(array):
            raise TypeError("The operator is real: multiply with real and imaginary part apart.")
        # A copy where SciPy hands out memory that it goes on writing to, or that is read-only.
        tensor = torch.tensor(np.ascontiguousarray(array), dtype=of.dtype, device=of.device)
        return (of @ tensor).detach().cpu().numpy()

    return scipy.sparse.linalg.LinearOperator(
        operator.shape,
        matvec=lambda x: product(operator, x.reshape(-1)),
        rmatvec=lambda x: product(operator.T, x.reshape(-1)),
        matmat=lambda X: product(operator, X),
        rmatmat=lambda X: product(operator.T, X),
        dtype=_NUMPY[operator.dtype],
    )


@dataclass(frozen=True, eq=False, repr=False)
class FromScipy(LinearOperator):
    """A SciPy operator; products are computed by NumPy on the CPU, without gradients.

    Args:
        operator: SciPy's operator, real.
        _dtype: The dtype of tensors in and out.
        _device: The device of tensors in and out.
    """

    operator: scipy.sparse.linalg.LinearOperator
    _dtype: torch.dtype
    _device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """That of SciPy's operator."""
        return self.operator.shape[0], self.operator.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tensors in and out."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of tensors in and out."""
        return self._device

    @property
    def T(self) -> Transpose:  # noqa: N802
        """SciPy's adjoint."""
        return Transpose(self, lambda matrix: self._through(self.operator.rmatmat, matrix))

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self._through(self.operator.matmat, matrix)

    def _through(self, product: Callable[[NDArray[Any]], NDArray[Any]], matrix: Tensor) -> Tensor:
        return torch.as_tensor(product(matrix.cpu().numpy()), dtype=self.dtype, device=self.device)


def from_scipy(
    operator: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LinearOperator:
    """A SciPy operator, sparse matrix or NumPy array as an operator.

    Args:
        operator: `[m, n]`, real. An array becomes a `Dense`; the others stay with SciPy.
        dtype: The dtype of tensors in and out; the operator's own if None (float64 for integers).
        device: The device of tensors in and out; torch's default if None.

    Raises:
        TypeError: If it is none of these, or complex.
    """
    if isinstance(operator, np.ndarray):
        source = operator
    else:
        try:
            source = scipy.sparse.linalg.aslinearoperator(operator)
        except TypeError as error:
            raise TypeError(
                f"{type(operator).__name__} is no SciPy operator, sparse matrix or NumPy array."
            ) from error
    # SciPy leaves the dtype open where nobody gave it.
    numpy_dtype = np.dtype(source.dtype or np.float64)
    if numpy_dtype.kind == "c":
        raise TypeError("Operators are real, got a complex one: take its real part.")
    dtype = dtype or _TORCH.get(numpy_dtype, torch.float64)
    target = torch.empty(0, device=device).device
    if isinstance(source, np.ndarray):
        return Dense(torch.tensor(source, dtype=dtype, device=target))
    return FromScipy(source, dtype, target)
