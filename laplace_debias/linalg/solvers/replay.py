"""Exact line searches along directions that are given."""

from collections.abc import Callable, Iterable

from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_debias.linalg.results import Iterate, Solution, Status
from laplace_debias.linalg.solvers.line_searches import LineSearches, Verdict, kept
from laplace_debias.operators.base import LinearOperator


def replay(
    directions: Float[Tensor, "n steps *k"] | Iterable[Float[Tensor, "n *k"]],
    A: LinearOperator,
    b: Float[Tensor, "n *k"],
    tol: float = 0.0,
    x0: Float[Tensor, "n *k"] | None = None,
    *,
    stop: Callable[[Iterate], Verdict] | None = None,
    keep: str | Iterable[str] = (),
    callback: Callable[[Iterate], object] | None = None,
    progress: bool = False,
) -> Solution:
    r"""Walk along given directions by step sizes measured on $(A, b)$: Eq. 8, afterwards.

    The second half of `debiased_cg`, for directions that were stored or come from elsewhere
    (eigenvectors, say). They need not be conjugate or normalised. Costs one product each (Eq. 12).

    Args:
        directions: As `Solution.directions`, `[n, T]` (`[n, T, k]` for k right-hand sides); or an
            iterable of single ones `[n]` (`[n, k]`), for example read from a file. Where one is
            zero, no step is taken.
        A: The operator on which step sizes are measured, `[n, n]`.
        b: Right-hand side, `[n]` or `[n, k]`.
        tol: A right-hand side is done early when ‖b − Ax‖ ≤ tol·‖b‖.
        x0: Where to start; zero if not given.
        stop: As for `cg`.
        keep: As for `cg`.
        callback: As for `cg`.
        progress: Whether to show a progress bar.

    Returns:
        The solution; its status is `EXHAUSTED` when all directions have been used.

    Raises:
        ValueError: As `cg`; or if a direction does not have the shape of `b`.
    """
    run = LineSearches(A, b, x0, tol, kept(keep))
    if isinstance(directions, Tensor):
        if directions.ndim != b.ndim + 1 or directions.shape[:1] != b.shape[:1]:
            raise ValueError(
                f"Directions of shape {tuple(directions.shape)} do not fit right-hand sides of "
                f"shape {tuple(b.shape)}: expected [n, T] for [n], or [n, T, k] for [n, k]."
            )
        directions = directions.unbind(1)
    if callback is not None:
        callback(run.iterate())
    for direction in tqdm(directions, desc="replay", unit="step", disable=not progress):
        if run.done:
            break
        if direction.shape != b.shape:
            raise ValueError(
                f"A direction has shape {tuple(direction.shape)}, the right-hand side "
                f"{tuple(b.shape)}: they must be equal."
            )
        if run.step(direction.reshape(b.shape[0], -1), always=True):
            if callback is not None:
                callback(run.iterate())
            if stop is not None:
                run.end(stop(run.iterate()), Status.STOPPED)
    return run.solution(Status.EXHAUSTED)
