r"""Conjugate gradients, and debiased conjugate gradients on two quadratics.

Both methods do exact line searches on $\tfrac12 x^\top A x - b^\top x$ along conjugate directions
(Eq. 3). `_conjugate_directions` computes the directions, and `LineSearches` measures the step
sizes, for the debiased method on a second quadratic (Eq. 8).
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_debias.linalg.checks import check_operator
from laplace_debias.linalg.results import DebiasedSolution, Iterate, Solution, Status
from laplace_debias.linalg.solvers.line_searches import LineSearches, Verdict
from laplace_debias.operators.base import LinearOperator
from laplace_debias.system.checks import whole

Preconditioner = LinearOperator | Callable[[Tensor], Tensor]


def precondition(preconditioner: Preconditioner | None, residual: Tensor) -> Tensor:
    """Apply the preconditioner to residuals, or return them unchanged if it is None."""
    if preconditioner is None:
        return residual
    if isinstance(preconditioner, LinearOperator):
        result = preconditioner @ residual
    else:
        result = preconditioner(residual)
    if result.shape != residual.shape or result.dtype != residual.dtype:
        raise ValueError(
            f"The preconditioner maps a tensor of shape {tuple(residual.shape)} and dtype "
            f"{residual.dtype} to one of shape {tuple(result.shape)} and dtype {result.dtype}. It "
            "must return a tensor of the same shape and dtype."
        )
    return result


def cg(
    A: LinearOperator,
    b: Float[Tensor, "n *k"],
    tol: float = 1e-6,
    max_iter: int | None = None,
    preconditioner: Preconditioner | None = None,
    x0: Float[Tensor, "n *k"] | None = None,
    *,
    stop: Callable[[Iterate], Verdict] | None = None,
    keep_directions: bool = False,
    callback: Callable[[Iterate], object] | None = None,
    progress: bool = False,
) -> Solution:
    r"""Solve $A x = b$ for a **symmetric positive definite** operator.

    The solution minimises the quadratic $\tfrac12 x^\top A x - b^\top x$; for $b = -g$, it is the
    Newton step of $q$ (Eq. 2). In iteration t, a step of size $\tau_t = -s(x_t; d_t) / c(d_t)$ (Eq.
    3) leads to the minimum along the direction $d_t$. The directions are conjugate,
    $d_i^\top A d_j = 0$.

    If there are several right-hand sides, as columns, the operator is multiplied by matrices. Each
    right-hand side has its own search directions and stopping reason, and needs no products after
    it has stopped. A breakdown raises no error; `Solution.statuses` contains the reasons for
    stopping, and `Solution.message` the remedies.

    Args:
        A: Symmetric operator, `[n, n]`. If the curvature along a search direction is not positive,
            the solver stops and returns this direction in the solution.
        b: Right-hand side `[n]`, or k of them `[n, k]`, with the dtype and on the device of A.
        tol: A right-hand side has converged when ‖b − Ax‖ ≤ tol·‖b‖. Because the residual is
            updated recursively, the true residual `b - A @ x` can be larger, especially in single
            precision: rounding errors contribute about eps·‖A‖·‖x‖.
        max_iter: The largest number of iterations. Default: 10 n, as in SciPy.
        preconditioner: Symmetric positive definite approximation of A⁻¹, as an operator or as a
            function of a matrix `[n, k]`. The inverse of K-FAC reduces the number of products for
            the GGN of a single layer or a small network, but increases it for a deep network.
        x0: The initial x. Default: zero, which saves a product.
        stop: A rule that is called after every iteration, such as `relative_progress()`. It returns
            a boolean, or one boolean per right-hand side.
        keep_directions: Whether the solution contains the search directions, `[n, T]`.
        callback: A function that is called with the start and with every iterate.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: If A is not an operator, or b or x0 is not a tensor.
        ValueError: If shapes, dtypes or devices do not match, b or x0 contains NaN or Inf, or an
            argument is out of range. The error is raised before any product.

    Reference:
        Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.
    """
    check_operator(A)
    iterations = _iterations(max_iter, A, progress, "cg")
    run = LineSearches(A, b, x0, tol=tol, keep_directions=keep_directions)
    directions = _conjugate_directions(run, preconditioner)
    if callback is not None:
        callback(run.iterate())
    for _ in iterations:
        if run.is_done:
            break
        if run.step(next(directions)):
            if callback is not None:
                callback(run.iterate())
            if stop is not None:
                run.end(stop(run.iterate()), Status.STOPPED)
    return run.solution(Status.MAX_ITER)


def debiased_cg(
    A: LinearOperator,
    A2: LinearOperator,
    b: Float[Tensor, "n *k"],
    b2: Float[Tensor, "n *k"],
    tol: float = 1e-6,
    max_iter: int | None = None,
    preconditioner: Preconditioner | None = None,
    x0: Float[Tensor, "n *k"] | None = None,
    *,
    stop: Callable[[Iterate, Iterate], Verdict] | None = None,
    keep_directions: bool = False,
    callback: Callable[[Iterate, Iterate], object] | None = None,
    progress: bool = False,
) -> DebiasedSolution:
    r"""Run conjugate gradients, but with step sizes that minimise a second quadratic (Eq. 8).

    $$\tilde\tau_t = -s_{\tilde B}(\tilde x_t; d_t) / c_{\tilde B}(d_t), \qquad
    \tilde x_{t+1} = \tilde x_t + \tilde\tau_t d_t, \qquad \tilde x_0 = x_0$$

    for the directions $d_t$ of `cg(A, b)`. The two runs advance together. Because the second
    gradient is updated recursively (Eq. 12), each iteration needs exactly one product with `A2` in
    addition to the product with `A`. The only additional memory is for the position and the
    gradient of the second trajectory. If both quadratics are the same, the result is that of `cg`.

    Compute `A` and `b = −g` from one mini-batch, and `A2` and `b2 = −g̃` from another, independent
    mini-batch. The slopes and curvatures along each direction are then unbiased.

    Args:
        A: The operator that determines the directions, `[n, n]`.
        A2: The operator that determines the step sizes, `[n, n]`.
        b: The right-hand side that determines the directions, `[n]` or `[n, k]`.
        b2: The right-hand side that determines the step sizes, of the same shape as `b`.
        tol: A right-hand side is done when, in either of the two runs, the residual norm is at most
            `tol` times the norm of that run's right-hand side.
        max_iter: The largest number of iterations. Default: 10 n, as in SciPy.
        preconditioner: Symmetric positive definite approximation of A⁻¹, as an operator or as a
            function of a matrix `[n, k]`. It is used only to compute the directions.
        x0: The initial x of both runs. Default: zero, which saves products.
        stop: A rule that is called after every iteration with the iterates of both runs, for
            example `lambda single, debiased: rule(debiased)`.
        keep_directions: Whether the solution contains the search directions, `[n, T]`.
        callback: A function that is called with both starts, and with both iterates of every
            iteration.
        progress: Whether to show a progress bar.

    Returns:
        Both trajectories. When one run ends, the other one ends too: the debiased run with the
        status `EXHAUSTED`, the first run with `STOPPED`.

    Raises:
        ValueError: If the two systems differ in shape, dtype or device. Also raises the errors of
            `cg`.
    """
    first_system = f"{b.shape} in {A.dtype} on {A.device}"
    second_system = f"{b2.shape} in {A2.dtype} on {A2.device}"
    if first_system != second_system:
        raise ValueError(
            "The two linear systems must have the same shape, dtype and device, got "
            f"{first_system} and {second_system}. Pass systems that differ only in "
            "their entries."
        )
    iterations = _iterations(max_iter, A, progress, "debiased cg")
    single = LineSearches(A, b, x0, tol=tol, keep_directions=keep_directions)
    debiased = LineSearches(A2, b2, x0, tol=tol)
    directions = _conjugate_directions(single, preconditioner)
    if callback is not None:
        callback(single.iterate(), debiased.iterate())
    for _ in iterations:
        debiased.end(~single.running, Status.EXHAUSTED)
        single.end(~debiased.running, Status.STOPPED)
        if single.is_done:
            break
        direction = next(directions)
        if not single.step(direction):
            continue
        # Move the second system only along directions that the first one has accepted, because each
        # step costs a product.
        debiased.step(torch.where(single.moved, direction, 0), always=True)
        if callback is not None:
            callback(single.iterate(), debiased.iterate())
        if stop is not None:
            verdict = stop(single.iterate(), debiased.iterate())
            single.end(verdict, Status.STOPPED)
            debiased.end(verdict, Status.STOPPED)
    debiased.end(~single.running, Status.EXHAUSTED)
    single.end(~debiased.running, Status.STOPPED)
    return DebiasedSolution(debiased.solution(Status.EXHAUSTED), single.solution(Status.MAX_ITER))


def relative_progress(
    epsilon: float = 5e-4, fraction: float = 0.1, at_least: int = 10
) -> Callable[[Iterate], Tensor]:
    r"""Return Martens' rule, which stops `cg` once the quadratic hardly decreases any more.

    With $w = \max(\text{at\_least}, \lceil\text{fraction}\cdot t\rceil)$, stop at iteration
    $t > w$ if $q_t < 0$ and $(q_t - q_{t-w}) / q_t < w\,\epsilon$.

    Args:
        epsilon: The relative progress per iteration below which to stop.
        fraction: The fraction of the iterations so far over which progress is averaged.
        at_least: The smallest number of iterations over which progress is averaged.

    Raises:
        ValueError: If an argument is not positive.

    Reference:
        Martens (2010), Deep learning via Hessian-free optimization, Section 4.4.
    """
    if not (epsilon > 0 and fraction > 0 and at_least > 0):
        raise ValueError(
            f"`epsilon`, `fraction` and `at_least` must be positive, got {epsilon}, {fraction}, "
            f"{at_least}. Pass positive numbers."
        )

    def rule(iterate: Iterate) -> Tensor:
        value = iterate.values[-1]
        window = max(at_least, -int(-fraction * iterate.iteration // 1))
        if iterate.iteration <= window:
            return torch.zeros_like(value, dtype=torch.bool)
        decrease = value - iterate.values[-1 - window]
        return (value < 0) & (decrease / value < window * epsilon)

    return rule


def _conjugate_directions(
    run: LineSearches, preconditioner: Preconditioner | None
) -> Iterator[Tensor]:
    """Yield the next directions, `[n, k]`, and stop the right-hand sides that break down.

    Each direction is computed from the current residual and the previous direction. It is zero for
    right-hand sides that are not running.
    """
    last_rho: Tensor | None = None
    last_direction: Tensor | None = None
    while True:
        direction = precondition(preconditioner, run.residual)
        rho = torch.linalg.vecdot(run.residual, direction, dim=0)
        run.end(~rho.isfinite(), Status.BREAKDOWN)
        run.end(run.running & ~(rho > 0), Status.INDEFINITE_PRECONDITIONER)
        if last_direction is not None and last_rho is not None:
            direction = direction + (rho / last_rho) * last_direction
        direction = torch.where(run.running, direction, 0)
        last_rho = rho
        last_direction = direction
        yield direction


def _iterations(
    max_iter: int | None, A: LinearOperator, progress: bool, label: str
) -> Iterable[int]:
    """Yield the iteration numbers and show a progress bar."""
    count = 10 * A.shape[0] if max_iter is None else whole(max_iter, "max_iter")
    return tqdm(range(count), desc=label, unit="iteration", leave=False, disable=not progress)
