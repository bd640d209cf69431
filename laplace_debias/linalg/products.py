"""Products with an operator, in chunks of columns, with a count, checks and a progress bar."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import not_finite_error

_CHUNK_ELEMENTS = 2**26
"""Number of entries that are multiplied at once: 256 MiB in float32."""


class Products:
    """A context that counts products with an operator, and closes the progress bar when it ends."""

    def __init__(
        self,
        A: LinearOperator,
        *,
        name: str | None = None,
        progress: bool = False,
        total: int | None = None,
        label: str = "products",
    ) -> None:
        if 0 in A.shape:
            raise ValueError(
                f"{type(A).__name__} has shape {A.shape}. Pass an operator with at least one row "
                "and one column."
            )
        self.operator = A
        self.count = 0
        # The name of the user's operator, from which A may be built, for error messages.
        self._name = name or type(A).__name__
        self._chunk = max(1, _CHUNK_ELEMENTS // max(A.shape))
        self._bar = tqdm(total=total, desc=label, unit="product", disable=not progress)

    def __enter__(self) -> "Products":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, matrix: Float[Tensor, "columns *k"]) -> Float[Tensor, "rows *k"]:
        """Multiply the operator with a vector or a matrix."""
        return self._multiply(self.operator, matrix)

    def adjoint(self, matrix: Float[Tensor, "rows *k"]) -> Float[Tensor, "columns *k"]:
        """Multiply the operator's adjoint with a vector or a matrix."""
        return self._multiply(self.operator.T, matrix)

    def _multiply(self, operator: LinearOperator, matrix: Tensor) -> Tensor:
        """Multiply in chunks of columns; count the products, and check that they are finite."""
        if matrix.ndim == 1:
            return self._multiply(operator, matrix[:, None])[:, 0]
        products = []
        for columns in matrix.split(self._chunk, dim=1):
            product = operator @ columns
            if not product.isfinite().all():
                first = int((~product.isfinite()).any(dim=0).nonzero()[0])
                raise not_finite_error(f"product {self.count + first + 1} with {self._name}")
            self.count += columns.shape[1]
            self._bar.update(columns.shape[1])
            products.append(product)
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def chunks(self, columns: int) -> Iterator[int]:
        """Yield the sizes of the chunks into which `columns` columns are split."""
        for start in range(0, columns, self._chunk):
            yield min(self._chunk, columns - start)

    def columns(self) -> Iterator[tuple[slice, Float[Tensor, "rows k"]]]:
        """Yield all columns of the operator, in chunks, each with the slice that it covers."""
        n = self.operator.shape[1]
        start = 0
        for size in self.chunks(n):
            rows = slice(start, start + size)
            unit = torch.zeros(n, size, dtype=self.operator.dtype, device=self.operator.device)
            unit[rows] = torch.eye(size, dtype=unit.dtype, device=unit.device)
            yield rows, self(unit)
            start += size
