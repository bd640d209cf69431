"""Products with an operator: counted, cut into chunks of columns, checked and shown."""

import difflib
from collections.abc import Collection, Iterator
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.parts import numbers

_CHUNK_ELEMENTS = 2**26
"""Entries of a chunk of columns unless told otherwise: 256 MiB in float32."""


class Products:
    """Multiplies with an operator and keeps the books.

    A context manager: its progress bar ends with it.

    Args:
        A: The operator.
        chunk: Columns multiplied at once; by default as many as fit in 2²⁶ entries.
        progress: Whether to show a progress bar.
        total: The number of products expected, for the progress bar.
        label: What the progress bar calls them.

    Raises:
        ValueError: The operator is empty or neither float32 nor float64, or `chunk` < 1.
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        chunk: int | None = None,
        progress: bool = False,
        total: int | None = None,
        label: str = "products",
    ) -> None:
        if A.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{type(A).__name__} is {A.dtype}; expected float32 or float64. Convert its parts "
                "with `.to(torch.float32)`."
            )
        if 0 in A.shape:
            raise ValueError(
                f"{type(A).__name__} has shape {A.shape}; expected a row and a column."
            )
        if chunk is not None and chunk < 1:
            raise ValueError(f"`chunk` is {chunk}; expected at least one column, or None.")
        self.operator = A
        self.count = 0
        self._chunk = chunk or max(1, _CHUNK_ELEMENTS // max(A.shape))
        self._bar = tqdm(total=total, desc=label, unit="product", disable=not progress)

    def __enter__(self) -> "Products":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def __call__(self, matrix: Float[Tensor, "columns *k"]) -> Float[Tensor, "rows *k"]:
        """The operator times a vector or a matrix.

        Raises:
            ValueError: The product holds NaN or Inf.
        """
        return self._multiply(self.operator, matrix)

    def adjoint(self, matrix: Float[Tensor, "rows *k"]) -> Float[Tensor, "columns *k"]:
        """The operator's adjoint times a vector or a matrix.

        Raises:
            ValueError: The product holds NaN or Inf.
        """
        return self._multiply(self.operator.T, matrix)

    def chunks(self, columns: int) -> Iterator[int]:
        """Cuts a number of columns into chunks' sizes."""
        for start in range(0, columns, self._chunk):
            yield min(self._chunk, columns - start)

    def columns(self) -> Iterator[tuple[slice, Float[Tensor, "rows k"]]]:
        """All columns of the operator, chunk by chunk, each with its place."""
        n, start = self.operator.shape[1], 0
        for size in self.chunks(n):
            places = slice(start, start + size)
            unit = torch.zeros(n, size, dtype=self.operator.dtype, device=self.operator.device)
            unit[places] = torch.eye(size, dtype=unit.dtype, device=unit.device)
            yield places, self(unit)
            start += size

    def _multiply(self, operator: LinearOperator, matrix: Tensor) -> Tensor:
        if matrix.ndim == 1:
            return self._multiply(operator, matrix[:, None])[:, 0]
        parts = []
        for part in matrix.split(self._chunk, dim=1):
            product = operator @ part
            self._check(product)
            self.count += part.shape[1]
            self._bar.update(part.shape[1])
            parts.append(product)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _check(self, product: Tensor) -> None:
        if product.isfinite().all():
            return
        first = int((~product.isfinite()).any(dim=0).nonzero()[0])
        raise _not_finite(f"product {self.count + first + 1} with {type(self.operator).__name__}")


def check_finite(A: LinearOperator) -> None:
    """Checks the numbers that an operator is made of, for where a closed form takes no product.

    Raises:
        ValueError: One of them is NaN or Inf.
    """
    if not all(bool(part.isfinite().all()) for part in numbers(A)):
        raise _not_finite(type(A).__name__)


def _not_finite(what: str) -> ValueError:
    return ValueError(
        f"{what} holds NaN or Inf; expected finite values. Look for NaN in the data and the "
        "parameters, or for overflow, which float64 may avoid."
    )


def check_operator(A: object) -> None:
    """Checks that what is to be multiplied is an operator.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(A, LinearOperator):
        raise TypeError(
            f"expected a LinearOperator, got {type(A).__name__}: wrap a tensor as `Dense(matrix)`, "
            "what belongs to NumPy or SciPy by `from_scipy(matrix)`."
        )


def check_square(A: LinearOperator, what: str) -> int:
    """Checks that an operator is square, and gives its size.

    Raises:
        TypeError: It is no operator.
        ValueError: It is not square.
    """
    check_operator(A)
    if A.shape[0] != A.shape[1]:
        raise ValueError(
            f"{what} of {type(A).__name__} of shape {A.shape}; expected a square operator. "
            "Take `A.T @ A` or `A @ A.T`."
        )
    return A.shape[0]


def check_generator(generator: torch.Generator | None, A: LinearOperator) -> None:
    """Checks that random numbers can be drawn where the operator is.

    Raises:
        ValueError: The generator is on another type of device.
    """
    if generator is not None and generator.device.type != A.device.type:
        raise ValueError(
            f"`generator` is on {generator.device} and the operator on {A.device}; expected one "
            f"device. Make it with `torch.Generator({str(A.device)!r})`."
        )


def check_choice(value: str, choices: Collection[str], name: str) -> None:
    """Checks the name of a method or another choice.

    Raises:
        ValueError: It is none of the choices; the nearest is suggested.
    """
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        f"`{name}` is {value!r}; expected one of {', '.join(map(repr, choices))}.{hint}"
    )


def check_at_least(value: int, least: int, name: str, why: str = "") -> None:
    """Checks a count.

    Raises:
        ValueError: It is below `least`.
    """
    if value < least:
        raise ValueError(f"`{name}` is {value}; expected at least {least}{why and f': {why}'}.")


def asymmetry_error(A: LinearOperator, deviation: float, scale: float) -> ValueError:
    """The error for an operator that has turned out not to be symmetric."""
    return ValueError(
        f"{type(A).__name__} is not symmetric: entries that symmetry makes equal differ by "
        f"{deviation:.3g}, with products of norm {scale:.3g}. Take its symmetric part, "
        "`0.5 * (A + A.T)`, or for singular values the eigenvalues of `A.T @ A`. If it should be "
        "symmetric, see whether two products with the same vector agree."
    )


def asymmetry_tolerance(dtype: torch.dtype) -> float:
    """How far, relative to the products, symmetry may be missed by rounding."""
    return 30 * torch.finfo(dtype).eps ** 0.5
