"""An orthonormal basis that grows by products with a symmetric operator (Lanczos)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_symmetric
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.eigh import eigh

_PASSES = 5
"""Orthogonalisations at most; two nearly always do."""

_ROTATION_ELEMENTS = 2**22
"""Entries of the part of the basis that is rotated at once, to bound the memory of a restart."""


class KrylovBasis:
    r"""Orthonormal rows V with the operator's projection H, and directions still to be multiplied.

    At any time $A V^\top = V^\top H + W^\top C$: W are the pending directions, orthonormal to each
    other and to V, and C tells how they couple to V. A pending direction that is multiplied moves
    to V and leaves its residual as a new one, orthogonalised against everything. So one Krylov
    sequence a pending direction can grow within one basis, and any rotation of V (a thick restart)
    keeps the relation. Ritz pairs come from H, their residual norms from C, at no product.

    Pending directions may be parked: forgotten but for what they add to residuals, so that new ones
    need not be orthogonal to them. `refresh` finds them again, for a product a row.

    `size` is the number of rows of V so far, at most `capacity`, `scale` the length of the longest
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
        self._operator, self._multiply, self._generator = A, multiply, generator
        self._vectors = torch.empty(capacity, size, dtype=A.dtype, device=A.device)
        self._pending = self._vectors.new_empty(0, size)
        self._projected = torch.zeros(capacity, capacity, dtype=torch.float64)
        self._coupling = torch.zeros(0, capacity, dtype=torch.float64)
        self._parked: list[Tensor] = []
        self.scale = 0.0
        self.size, self.capacity = 0, capacity

    @property
    def vectors(self) -> Float[Tensor, "size n"]:
        """V, orthonormal rows."""
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
        """Residual norms of Ritz vectors: bounds of all, and the part that is not parked."""
        pending = (self.coupling @ combinations).norm(dim=0)
        parked = [(part[:, : self.size] @ combinations).norm(dim=0) for part in self._parked]
        return pending + sum(parked, torch.zeros_like(pending)), pending

    def park(self) -> None:
        """Forgets the pending directions, but for what they add to residuals."""
        self._parked.append(self._coupling)
        self._pending, self._coupling = self._pending[:0], self._coupling[:0]

    def refresh(self) -> None:
        """Multiplies all rows again: what they miss is pending, and nothing parked."""
        images = torch.stack([self._multiply(vector) for vector in self.vectors])
        projected = (self.vectors @ images.T).double().cpu()
        self._parked = []
        self._pending, self._coupling = self._pending[:0], self._coupling[:0]
        check_symmetric(self._operator, (projected - projected.T).abs(), self.scale)
        self.projected.copy_((projected + projected.T) / 2)
        for row, image in enumerate(images):
            residual, _, outside = self._orthogonalise(image)
            self._coupling[:, row] = outside
            self._keep_residual(residual, row)

    def add_random(self) -> None:
        """Adds a random pending direction; rows and pending ones must not span the space yet."""
        direction = torch.randn(
            self._vectors.shape[1],
            generator=self._generator,
            dtype=self._vectors.dtype,
            device=self._vectors.device,
        )
        direction, _, _ = self._orthogonalise(direction / direction.norm())
        self.add(direction / direction.norm())

    def expand(self, index: int) -> bool:
        """Multiply a pending direction; false if it leaves no residual, else that is the last."""
        direction = self._pending[index]
        expected = self._coupling[index, : self.size].clone()
        kept = [row for row in range(len(self._pending)) if row != index]
        self._pending, self._coupling = self._pending[kept], self._coupling[kept]
        last = self.size
        self._vectors[last] = direction
        self.size += 1
        product = self._multiply(direction)
        self.scale = max(self.scale, float(product.norm()))
        residual, inside, outside = self._orthogonalise(product)
        # Rows couple to all that is parked by at most so much.
        hidden = sum(
            (part[:, :last].norm(dim=0) for part in self._parked), expected.new_zeros(last)
        )
        check_symmetric(self._operator, (inside[:last] - expected).abs() - hidden, self.scale)
        self._projected[: last + 1, last] = self._projected[last, : last + 1] = inside
        self._coupling[:, last] = outside
        return self._keep_residual(residual, last)

    def rotate(self, rotation: Float[Tensor, "size kept"], start: int = 0) -> None:
        """Replaces the rows of V from `start` on by combinations of them, orthonormal columns."""
        size, kept = rotation.shape[0], rotation.shape[1]
        whole = torch.zeros(self.size, start + kept, dtype=torch.float64)
        whole[:start, :start] = torch.eye(start, dtype=torch.float64)
        whole[start:, start:] = rotation
        projected, coupling = whole.T @ self.projected @ whole, self.coupling @ whole
        part = rotation.to(self._vectors)
        step = max(1, _ROTATION_ELEMENTS // size)
        for columns in range(0, self._vectors.shape[1], step):
            place = self._vectors[start : start + size, columns : columns + step]
            self._vectors[start : start + kept, columns : columns + step] = part.T @ place
        self.size = start + kept
        self.projected.copy_((projected + projected.T) / 2)
        self._coupling[:, self.size :] = 0
        self.coupling.copy_(coupling)
        for part in self._parked:
            part[:, : self.size] = part[:, : len(whole)] @ whole
            part[:, self.size :] = 0

    def _keep_residual(self, residual: Tensor, row: int) -> bool:
        """Makes what a row's product left a pending direction, unless it is rounding."""
        norm = float(residual.norm())
        rounding = 10 * torch.finfo(residual.dtype).eps * self.scale
        if norm <= rounding or self.size + len(self._pending) >= self._vectors.shape[1]:
            return False
        self.add(residual / norm)
        self._coupling[-1, row] = norm
        return True

    def add(self, direction: Float[Tensor, " n"]) -> None:
        """Makes a unit vector pending, which is orthogonal to all others."""
        self._pending = torch.cat([self._pending, direction[None]])
        row = torch.zeros(1, self.capacity, dtype=torch.float64)
        self._coupling = torch.cat([self._coupling, row])

    def _orthogonalise(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part orthogonal to V and W, and the coordinates in both."""
        inside = torch.zeros(self.size, dtype=vector.dtype, device=vector.device)
        outside = torch.zeros(len(self._pending), dtype=vector.dtype, device=vector.device)
        for _ in range(_PASSES):
            before = vector.norm()
            in_basis = self.vectors @ vector
            vector = vector - in_basis @ self.vectors
            in_pending = self._pending @ vector
            vector = vector - in_pending @ self._pending
            inside, outside = inside + in_basis, outside + in_pending
            # A vector that keeps its length was orthogonal already (Kahan and Parlett).
            if vector.norm() > 0.7 * before:
                break
        return vector, inside.double().cpu(), outside.double().cpu()


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs in a basis, best first: values, combinations of rows, residuals.

    `pending_residuals` is the part of the residuals that expanding the basis can lessen.
    """

    values: Tensor
    combinations: Tensor
    residuals: Tensor
    pending_residuals: Tensor


def order(values: Tensor, which: str) -> Tensor:
    """How wanted eigenvalues are: the greatest first."""
    return {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]


def ritz_pairs(basis: KrylovBasis, which: str) -> RitzPairs:
    """The Ritz pairs of a basis, the most wanted first."""
    values, combinations = eigh(basis.projected, "the projected operator")
    best = order(values, which).argsort(descending=True, stable=True)
    values, combinations = values[best], combinations[:, best]
    return RitzPairs(values, combinations, *basis.residuals(combinations))
