"""From SciPy's operators, sparse matrices and NumPy arrays to operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laplace_debias.operators.algebra import Transpose
from laplace_debias.operators.base import NUMPY_TYPES, LinearOperator
from laplace_debias.operators.structures.dense import Dense

_TORCH_TYPES = {np.dtype(numpy_type): dtype for dtype, numpy_type in NUMPY_TYPES.items()}


@dataclass(frozen=True, eq=False, repr=False)
class FromScipy(LinearOperator):
    """A SciPy operator; products are computed by NumPy on the CPU, without gradients.

    Args:
        operator: SciPy's operator, real.
        _dtype: The dtype of tensors in and out.
        _device: The device of tensors in and out.
    """

    operator: Any
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
        TypeError: If it is something else, or complex.
    """
    if isinstance(operator, np.ndarray):
        source = operator
    else:
        # Slow to import, and few need it.
        from scipy.sparse.linalg import aslinearoperator

        try:
            source = aslinearoperator(operator)
        except TypeError as error:
            raise TypeError(
                f"expected a SciPy operator, a sparse matrix or a NumPy array, got "
                f"{type(operator).__name__}."
            ) from error
    # SciPy leaves the dtype open where nobody gave it.
    numpy_dtype = np.dtype(source.dtype or np.float64)
    if numpy_dtype.kind == "c":
        raise TypeError("Operators are real, got a complex one: take its real part.")
    dtype = dtype or _TORCH_TYPES.get(numpy_dtype, torch.float64)
    target = torch.empty(0, device=device).device
    if isinstance(source, np.ndarray):
        return Dense(torch.tensor(source, dtype=dtype, device=target))
    return FromScipy(source, dtype, target)
