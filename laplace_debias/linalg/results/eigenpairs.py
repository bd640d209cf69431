"""Eigenpairs with their errors."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.results.status import Status


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """Some eigenpairs of a symmetric operator; unpacks as `values, vectors`.

    Args:
        values: Eigenvalues, descending, `[k]`; from ARPACK fewer where it did not converge.
        vectors: Orthonormal eigenvectors as columns, `[D, k]`.
        residuals: A bound of ‖A v − λ v‖ for each pair, `[k]`: some eigenvalue is at most so far
            from λ.
        num_matvecs: How many products it took.
        status: `EXACT`, `CONVERGED`, `UNVERIFIED` (converged, but the search for what the pairs
            may have missed did not come to its end) or `MAX_ITER` (not all converged).
        message: The status in words; where something is amiss, with what to do.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "D k"]
    residuals: Float[Tensor, " k"]
    num_matvecs: int
    status: Status
    message: str

    @property
    def converged(self) -> bool:
        """Whether all residuals came below the tolerance."""
        return self.status.is_success

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))
