"""What LSMR and the Neumann series return."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """An approximate solution of linear equations, one or several right-hand sides.

    Args:
        x: The solution, `[n]` or `[n, k]`.
        status: The worst right-hand side's reason to stop: `"converged"`, `"least_squares"` (LSMR:
            the equations have no solution, x minimises the residual), `"max_iter"`,
            `"ill_conditioned"` or `"diverged"`.
        message: The reason in words, with the remedy.
        residual_norms: ‖b − A x‖ of each right-hand side, a scalar or `[k]`.
        num_matvecs: How many products with the operator and its adjoint it took.
    """

    x: Float[Tensor, "n *k"]
    status: str
    message: str
    residual_norms: Float[Tensor, "*k"]
    num_matvecs: int

    @property
    def converged(self) -> bool:
        """Whether x solves the equations, or the least-squares problem, to the tolerance."""
        return self.status in ("converged", "least_squares")


def check_right_side(shape: tuple[int, int], b: Tensor, like: Tensor, name: str) -> None:
    """Checks a right-hand side against an operator's shape, and its dtype and device.

    Raises:
        ValueError: They do not fit, or it is not finite.
    """
    if b.ndim not in (1, 2) or len(b) != shape[0] or 0 in b.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(b.shape)} and the operator {shape}; expected ({shape[0]},) "
            f"or ({shape[0]}, k)."
        )
    if b.dtype != like.dtype or b.device != like.device:
        raise ValueError(
            f"`{name}` is {b.dtype} on {b.device}, the operator {like.dtype} on {like.device}: "
            "convert one of them with `.to(...)`."
        )
    if not b.isfinite().all():
        raise ValueError(f"`{name}` holds NaN or Inf; expected finite values.")
