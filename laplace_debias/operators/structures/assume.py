"""Claims about operators that their structure does not show."""

from dataclasses import dataclass

from torch import Tensor

from laplace_debias.operators.base import LinearOperator, check_square
from laplace_debias.operators.structures.wrapper import Wrapper


@dataclass(frozen=True, eq=False, repr=False)
class Assumed(Wrapper):
    """A symmetric operator whose structure does not show the symmetry; made by `assume`.

    Args:
        operator: The operator, square.
        positive_semidefinite: Whether it has no negative eigenvalue either.
    """

    positive_semidefinite: bool

    is_symmetric = True

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is assumed."""
        return self.positive_semidefinite

    @property
    def T(self) -> "Assumed":  # noqa: N802
        """The operator itself."""
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        return self.operator @ matrix


def assume(
    operator: LinearOperator, symmetric: bool = False, positive_semidefinite: bool = False
) -> LinearOperator:
    """Claim what an operator's structure does not show; the claim is not checked.

    Args:
        operator: The operator, `[n, n]`.
        symmetric: Claim that it equals its adjoint.
        positive_semidefinite: Claim that it is symmetric and has no negative eigenvalue.

    Returns:
        The operator with the claims; itself if it makes them already.

    Raises:
        ValueError: If it is not square.

    Example:
        >>> import torch
        >>> from laplace_debias.operators import Dense, assume
        >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> assume(Dense(X.T @ X), positive_semidefinite=True).is_positive_semidefinite
        True
    """
    check_square(operator)
    positive_semidefinite = positive_semidefinite or operator.is_positive_semidefinite
    symmetric = symmetric or positive_semidefinite
    claims = operator.is_symmetric, operator.is_positive_semidefinite
    if not symmetric or claims == (symmetric, positive_semidefinite):
        return operator
    return Assumed(operator, positive_semidefinite)
