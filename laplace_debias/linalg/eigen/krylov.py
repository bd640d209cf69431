"""An orthonormal basis that grows by products with a symmetric operator (Lanczos)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_symmetric
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh

_PASSES = 5
"""Largest number of orthogonalisation passes per vector. Two are nearly always enough."""

_ROTATION_ELEMENTS = 2**22
"""Number of basis entries that are rotated at once, to bound the memory that a restart needs."""


class KrylovBasis:
    r"""An orthonormal basis V, the projection H of the operator, and unmultiplied directions W.

    At any time, $A V^\top = V^\top H + W^\top C$. The rows of V are the basis, and the rows of W
    are the pending directions, which are orthonormal to each other and to V; C is their coupling to
    V. When a pending direction is multiplied, it moves to V. The residual of its product, after
    orthogonalisation against V and W, becomes a new pending direction. In this way, one Krylov
    sequence per pending direction can grow within a single basis, and any rotation of V (a thick
    restart) preserves the relation. Ritz pairs follow from H, and their residual norms from C,
    without further products.

    Pending directions can be parked. Only their contribution to the residuals is then kept, so new
    directions need not be orthogonal to them. `refresh` recomputes the exact residuals, with one
    product per row.

    `size` is the number of rows of V so far, at most `capacity`. `scale` is the largest norm of a
    product with a unit vector. H and C are kept on the CPU in float64.

    Reference:
        Wu, Simon. Thick-restart Lanczos method for large symmetric eigenvalue problems. SIAM
        Journal on Matrix Analysis and Applications, 2000.
    """

    def __init__(
        self,
        A: LinearOperator,
        multiply: Callable[[Tensor], Tensor],
        size: int,
        capacity: int,
        generator: torch.Generator | None,
    ) -> None:
        self._operator = A
        self._multiply = multiply
        self._generator = generator
        self._vectors = torch.empty(capacity, size, dtype=A.dtype, device=A.device)
        self._pending = self._vectors.new_empty(0, size)
        self._projected = torch.zeros(capacity, capacity, dtype=torch.float64)
        self._coupling = torch.zeros(0, capacity, dtype=torch.float64)
        # The couplings of parked directions, `[parked, capacity]` for each call of `park`.
        self._parked: list[Tensor] = []
        self.scale = 0.0
        self.size = 0
        self.capacity = capacity

    @property
    def vectors(self) -> Float[Tensor, "size n"]:
        """V, whose rows are orthonormal."""
        return self._vectors[: self.size]

    @property
    def projected(self) -> Float[Tensor, "size size"]:
        """H, float64 on the CPU."""
        return self._projected[: self.size, : self.size]

    @property
    def coupling(self) -> Float[Tensor, "pending size"]:
        """C, float64 on the CPU."""
        return self._coupling[:, : self.size]

    def residuals(
        self, combinations: Float[Tensor, "size k"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Bound the residual norms of Ritz vectors, in total and without the parked directions."""
        pending = (self.coupling @ combinations).norm(dim=0)
        parked = [(rows[:, : self.size] @ combinations).norm(dim=0) for rows in self._parked]
        return pending + sum(parked, torch.zeros_like(pending)), pending

    def park(self) -> None:
        """Drop the pending directions, but keep their contribution to the residuals."""
        self._parked.append(self._coupling)
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._pending = self._pending[:0]
        self._coupling = self._coupling[:0]

    def refresh(self) -> None:
        """Multiply all rows again, so that all residuals are pending and none is parked."""
        images = torch.stack([self._multiply(vector) for vector in self.vectors])
        projected = (self.vectors @ images.T).double().cpu()
        self._parked = []
        self._clear_pending()
        check_symmetric(self._operator, (projected - projected.T).abs(), self.scale)
        self.projected.copy_((projected + projected.T) / 2)
        for row, image in enumerate(images):
            residual, _, outside = self._orthogonalise(image)
            self._coupling[:, row] = outside
            self._keep_residual(residual, row)

    def add_random(self) -> None:
        """Add a random pending direction; V and W must not already span the space."""
        direction = torch.randn(
            self._vectors.shape[1],
            generator=self._generator,
            dtype=self._vectors.dtype,
            device=self._vectors.device,
        )
        direction, _, _ = self._orthogonalise(direction / direction.norm())
        self.add(direction / direction.norm())

    def expand(self, index: int) -> bool:
        """Multiply a pending direction; return whether its residual became the last row of W."""
        direction = self._pending[index]
        # By symmetry, the new column of H must equal the coupling of the direction.
        expected = self._coupling[index, : self.size].clone()
        remaining = [row for row in range(len(self._pending)) if row != index]
        self._pending = self._pending[remaining]
        self._coupling = self._coupling[remaining]
        last = self.size
        self._vectors[last] = direction
        self.size += 1
        product = self._multiply(direction)
        self.scale = max(self.scale, float(column_norms(product)))
        residual, inside, outside = self._orthogonalise(product)
        # The direction need not be orthogonal to parked directions. Their coupling to it adds at
        # most this bound to each row.
        parked_bound = expected.new_zeros(last)
        for rows in self._parked:
            parked_bound = parked_bound + rows[:, :last].norm(dim=0)
        excess = (inside[:last] - expected).abs() - parked_bound
        check_symmetric(self._operator, excess, self.scale)
        self._projected[: last + 1, last] = inside
        self._projected[last, : last + 1] = inside
        self._coupling[:, last] = outside
        return self._keep_residual(residual, last)

    def rotate(self, rotation: Float[Tensor, "size new_size"], start: int = 0) -> None:
        """Replace the rows of V from `start` on by orthonormal combinations of them.

        The columns of `rotation` are the combinations. There may be fewer of them than rows.
        """
        size, new_size = rotation.shape
        # The same combinations as a matrix for all rows, which keeps the rows before `start`.
        combinations = torch.zeros(self.size, start + new_size, dtype=torch.float64)
        combinations[:start, :start] = torch.eye(start, dtype=torch.float64)
        combinations[start:, start:] = rotation
        projected = combinations.T @ self.projected @ combinations
        coupling = self.coupling @ combinations
        on_device = rotation.to(self._vectors)
        step = max(1, _ROTATION_ELEMENTS // size)
        for first in range(0, self._vectors.shape[1], step):
            columns = slice(first, first + step)
            rows = self._vectors[start : start + size, columns]
            self._vectors[start : start + new_size, columns] = on_device.T @ rows
        self.size = start + new_size
        self.projected.copy_((projected + projected.T) / 2)
        self._coupling[:, self.size :] = 0
        self.coupling.copy_(coupling)
        for rows in self._parked:
            rows[:, : self.size] = rows[:, : len(combinations)] @ combinations
            rows[:, self.size :] = 0

    def _keep_residual(self, residual: Tensor, row: int) -> bool:
        """Make a residual pending; return False if it is a rounding error or the space is full."""
        norm = float(column_norms(residual))
        rounding = 10 * torch.finfo(residual.dtype).eps * self.scale
        if norm <= rounding or self.size + len(self._pending) >= self._vectors.shape[1]:
            return False
        self.add(residual / norm)
        self._coupling[-1, row] = norm
        return True

    def add(self, direction: Float[Tensor, " n"]) -> None:
        """Add a pending direction, a unit vector that must be orthogonal to V and W."""
        self._pending = torch.cat([self._pending, direction[None]])
        row = torch.zeros(1, self.capacity, dtype=torch.float64)
        self._coupling = torch.cat([self._coupling, row])

    def _orthogonalise(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a vector into a part orthogonal to V and W, and its coordinates in both."""
        inside = torch.zeros(self.size, dtype=vector.dtype, device=vector.device)
        outside = torch.zeros(len(self._pending), dtype=vector.dtype, device=vector.device)
        for _ in range(_PASSES):
            norm_before = column_norms(vector)
            in_basis = self.vectors @ vector
            vector = vector - in_basis @ self.vectors
            in_pending = self._pending @ vector
            vector = vector - in_pending @ self._pending
            inside = inside + in_basis
            outside = outside + in_pending
            # If the vector keeps most of its length, no further pass is needed (Kahan and Parlett).
            if column_norms(vector) > 0.7 * norm_before:
                break
        return vector, inside.double().cpu(), outside.double().cpu()


@dataclass(frozen=True)
class RitzPairs:
    """Ritz pairs of a basis, outermost first: values, combinations of rows, and residual norms.

    `pending_residuals` is the part of the residuals that expanding the basis can reduce.
    """

    values: Tensor
    combinations: Tensor
    residuals: Tensor
    pending_residuals: Tensor


def order(values: Tensor, end: str) -> Tensor:
    """Return sort keys, which increase towards the given end of the spectrum."""
    return {"largest": values, "smallest": -values, "magnitude": values.abs()}[end]


def ritz_pairs(basis: KrylovBasis, end: str) -> RitzPairs:
    """Compute the Ritz pairs of a basis, ordered from the given end of the spectrum inwards."""
    values, combinations = eigh(basis.projected, "the projected operator")
    best = order(values, end).argsort(descending=True, stable=True)
    combinations = combinations[:, best]
    residuals, pending_residuals = basis.residuals(combinations)
    return RitzPairs(values[best], combinations, residuals, pending_residuals)
