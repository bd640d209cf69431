"""From operators to SciPy's."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NUMPY_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def to_scipy(operator: Any) -> Any:
    """A `LinearOperator` as SciPy's: NumPy arrays in and out, in the operator's dtype.

    Arrays of another real dtype are converted to it. Gradients do not flow through.

    Raises:
        TypeError: If NumPy has no such dtype.
    """
    # Slow to import, and few need it.
    from scipy.sparse.linalg import LinearOperator as SciPyOperator

    if operator.dtype not in NUMPY_TYPES:
        raise TypeError(
            f"NumPy has no {operator.dtype}: convert the operator with `.to(torch.float32)`."
        )

    def product(of: Any, array: NDArray[Any]) -> NDArray[Any]:
        if np.iscomplexobj(array):
            raise TypeError("The operator is real: multiply with real and imaginary part apart.")
        # A copy where SciPy hands out memory that it goes on writing to, or that is read-only.
        tensor = torch.tensor(np.ascontiguousarray(array), dtype=of.dtype, device=of.device)
        return (of @ tensor).detach().cpu().numpy()

    return SciPyOperator(
        operator.shape,
        matvec=lambda x: product(operator, x.reshape(-1)),
        rmatvec=lambda x: product(operator.T, x.reshape(-1)),
        matmat=lambda X: product(operator, X),
        rmatmat=lambda X: product(operator.T, X),
        dtype=NUMPY_TYPES[operator.dtype],
    )
