"""Kronecker-structured directions with free magnitudes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.dispatch import Scalar, add, multiply, scale, shift
from laplace_debias.operators.parts import same
from laplace_debias.operators.structures.composed import Symmetric

Spectrum = Callable[[Tensor], Tensor]
"""A function of eigenvalues, entry by entry: from a tensor to one of the same shape."""


@dataclass(frozen=True, eq=False, repr=False)
class EigenKronecker(Symmetric):
    r"""Symmetric operator with Kronecker-structured directions and free magnitudes.

    $$(U_G \otimes U_A)\,\mathrm{diag}(\mathrm{vec}\,\Lambda)\,(U_G \otimes U_A)^\top$$

    on matrices $V$ of shape `[d_out, d_in]` flattened row-major, so that a product is
    $U_G[\Lambda \odot (U_G^\top V U_A)]U_A^\top$. K-FAC, EKFAC, their debiased forms, a bias
    block (`d_in = 1`) and a diagonal (no U) differ only in where the three parts come from.

    With a leading dimension, it is the block-diagonal operator of g such matrices, as the groups of
    a grouped convolution have them; they are multiplied all at once.

    Args:
        U_G: Orthonormal eigenvectors on the output side, as columns, `[*groups, d_out, d_out]`;
            None for the identity, whose directions are the coordinate axes.
        U_A: Orthonormal eigenvectors on the input side, as columns, `[*groups, d_in, d_in]`, or
            None.
        magnitudes: Λ, the curvature along each direction, `[d_out, d_in]` or `[g, d_out, d_in]`.
        added: The multiple of the identity that the magnitudes contain. Where no magnitude is below
            it, it was added to a positive semi-definite operator, and small magnitudes are precise.

    Raises:
        ValueError: If the shapes, dtypes or devices do not fit each other.
    """

    U_G: Float[Tensor, "*groups d_out d_out"] | None
    U_A: Float[Tensor, "*groups d_in d_in"] | None
    magnitudes: Float[Tensor, "*groups d_out d_in"]
    added: Scalar = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if self.magnitudes.ndim not in (2, 3):
            raise ValueError(
                "Magnitudes are a matrix [d_out, d_in], or one for each group [g, d_out, d_in], "
                f"got shape {tuple(self.magnitudes.shape)}."
            )
        *groups, d_out, d_in = self.magnitudes.shape
        for name, U, size in (("U_G", self.U_G, d_out), ("U_A", self.U_A, d_in)):
            expected = (*groups, size, size)
            if U is not None and U.shape != expected:
                raise ValueError(
                    f"Magnitudes of shape {tuple(self.magnitudes.shape)} do not fit directions of "
                    f"shape {tuple(U.shape)}: {name} must be {expected}."
                )
        parts = [part for part in (self.U_G, self.U_A, self.magnitudes) if part is not None]
        if len({(part.dtype, part.device) for part in parts}) > 1:
            raise ValueError("U_G, U_A and the magnitudes must share one dtype and one device.")

    @property
    def shape(self) -> tuple[int, int]:
        """Both `d_out · d_in`, times the number of groups."""
        return self.magnitudes.numel(), self.magnitudes.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parts."""
        return self.magnitudes.dtype

    @property
    def device(self) -> torch.device:
        """The device of all parts."""
        return self.magnitudes.device

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether no magnitude is negative."""
        return bool((self.magnitudes >= 0).all())

    def _matmat(self, matrix: Tensor) -> Tensor:
        columns = matrix.T.unflatten(1, self.magnitudes.shape)
        return self.from_eigenbasis(self.magnitudes * self.to_eigenbasis(columns)).flatten(1).T

    def to_eigenbasis(
        self, matrices: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""Coordinates along the directions, $U_G^\top V U_A$.

        Args:
            matrices: V, `[*batch, *groups, d_out, d_in]`.
        """
        left = matrices if self.U_G is None else _times(self.U_G.mT, matrices)
        return left if self.U_A is None else _times_right(left, self.U_A)

    def from_eigenbasis(
        self, coordinates: Float[Tensor, "*batch d_out d_in"]
    ) -> Float[Tensor, "*batch d_out d_in"]:
        r"""The inverse of `to_eigenbasis`, $U_G C U_A^\top$."""
        left = coordinates if self.U_G is None else _times(self.U_G, coordinates)
        return left if self.U_A is None else _times_right(left, self.U_A.mT)

    def apply(self, function: Spectrum) -> "EigenKronecker":
        """The operator's function: the same directions, `function` of the magnitudes."""
        return EigenKronecker(self.U_G, self.U_A, function(self.magnitudes))


def _times(U: Tensor, matrices: Tensor) -> Tensor:
    # Of several groups `@` would copy U for every matrix.
    return U @ matrices if U.ndim == 2 else torch.einsum("gij,...gjk->...gik", U, matrices)


def _times_right(matrices: Tensor, U: Tensor) -> Tensor:
    return matrices @ U if U.ndim == 2 else torch.einsum("...gij,gjk->...gik", matrices, U)


def _same_directions(a: EigenKronecker, b: EigenKronecker) -> bool:
    return a.magnitudes.shape == b.magnitudes.shape and same(a.U_G, b.U_G) and same(a.U_A, b.U_A)


@add.register(EigenKronecker, EigenKronecker)
def _(left: EigenKronecker, right: EigenKronecker) -> LinearOperator | None:
    if not _same_directions(left, right):
        return None
    return left.apply(lambda magnitudes: magnitudes + right.magnitudes)


@multiply.register(EigenKronecker, EigenKronecker)
def _(left: EigenKronecker, right: EigenKronecker) -> LinearOperator | None:
    if not _same_directions(left, right):
        return None
    return left.apply(lambda magnitudes: magnitudes * right.magnitudes)


@scale.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator:
    return replace(operator, magnitudes=scalar * operator.magnitudes, added=scalar * operator.added)


@shift.register
def _(operator: EigenKronecker, scalar: Scalar) -> LinearOperator | None:
    return replace(operator, magnitudes=operator.magnitudes + scalar, added=operator.added + scalar)
