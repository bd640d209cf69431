"""Traces of matrix functions by Lanczos quadrature, with an estimate of the quadrature's bias."""

from collections.abc import Callable

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_square
from laplace_debias.linalg.estimators.quadratic_forms import ValueAndError
from laplace_debias.linalg.estimators.quadrature import Quadrature, lanczos_quadrature, values_at
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_logdet


def matrix_function_trace(
    A: LinearOperator,
    function: Callable[[Tensor], Tensor],
    num_probes: int = 10,
    num_steps: int = 30,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimate $\mathrm{tr} f(A) = \sum_i f(\lambda_i)$ for a symmetric operator A.

    The method is stochastic Lanczos quadrature. The squared standard error is the sum of three
    squares: the standard error of the mean over probes, an estimate of the quadrature's bias (from
    the change between 71 % and 100 % of the steps), and an estimate of the rounding error of the
    nodes. With 3 or more probes, 95 % intervals cover the true value in 93 to 97 % of runs if the
    bias is small, and more often otherwise. Fewer than 8 steps may resolve only a few outliers and
    miss the other eigenvalues.

    Args:
        A: Symmetric operator `[n, n]`. An error is raised if it is not symmetric.
        function: f, applied to a tensor of eigenvalues entry by entry.
        num_probes: Number of probes; the standard error falls as its inverse root.
        num_steps: Number of Lanczos steps per probe. If f is smooth, the bias decreases quickly
            with it.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        The trace, a scalar tensor. It is exact if the eigenvalues have a closed form (no products),
        or if `num_probes * num_steps` is at least n and n is at most 16,384 (n products).

    Raises:
        ValueError: If f is not finite on the spectrum, the operator is not square or not symmetric,
            a product is not finite, a number is too small, or the generator is on a different
            device.

    Example:
        >>> import torch
        >>> from laplace_debias.linalg import matrix_function_trace
        >>> from laplace_debias.operators import Diagonal
        >>> float(matrix_function_trace(Diagonal(torch.tensor([1.0, 4.0])), torch.sqrt))
        3.0
    """
    rule = lanczos_quadrature(
        A,
        num_probes,
        num_steps,
        function=function,
        generator=generator,
        progress=progress,
        label="f(A)",
    )
    return integrate(rule, function, A.shape[0])


def integrate(rule: Quadrature, function: Callable[[Tensor], Tensor], size: int) -> Estimate:
    """Compute tr f(A), n times the integral of f by a quadrature rule, and estimate the error.

    `size` is n.
    """
    if rule.is_exact or rule.forms is None:
        exact = values_at(rule.nodes, rule.weights, function)
        return Estimate.exact(size * (rule.weights * exact).sum(), rule.num_matvecs)
    mean, standard_error, degrees = rule.forms.mean()

    def integral(nodes: Tensor, weights: Tensor) -> Tensor:
        return size * (weights * values_at(nodes, weights, function)).double().sum(dim=1).mean()

    with_fewer_steps = integral(*rule.shorter(round(rule.nodes.shape[1] / 2**0.5)))
    with_all_steps = integral(rule.nodes, rule.weights)
    # The estimate of the bias is correct if the bias is inversely proportional to the root of the
    # number of steps. If it falls faster, the estimate is too large, which is safe.
    bias = (with_all_steps - with_fewer_steps) / (2**0.25 - 1)
    squared_bias = bias**2 + _rounding(rule, function, size) ** 2
    degrees = with_bias(degrees, standard_error**2, squared_bias)
    standard_error = (standard_error**2 + squared_bias).sqrt()
    estimate = ValueAndError(mean, standard_error, degrees)
    return estimate.to_estimate(rule.num_matvecs, rule.nodes.dtype)


def _rounding(rule: Quadrature, function: Callable[[Tensor], Tensor], size: int) -> Tensor:
    r"""Estimate the error of the integral that is due to the rounding of products and nodes.

    A node θ has a relative error ε, which may be the same for all probes. In addition, the n
    independent rounding errors of a product change it by about $\epsilon \|A\| / \sqrt n$.
    """
    nodes = rule.nodes
    eps = torch.finfo(nodes.dtype).eps
    errors = eps * (nodes.abs() + nodes.abs().max() / size**0.5)
    # Move nodes towards the middle of the spectrum, because f may not be defined outside of it.
    middle = (nodes.min() + nodes.max()) / 2
    moved = torch.where(nodes < middle, nodes + errors, nodes - errors)
    changes = values_at(moved, rule.weights, function) - values_at(nodes, rule.weights, function)
    return size * (rule.weights * changes.abs()).double().sum(dim=1).mean()


def with_bias(degrees: Tensor, variance: Tensor, squared_bias: Tensor) -> Tensor:
    """Compute Satterthwaite's degrees of freedom for a variance plus a known squared bias."""
    share = torch.where(squared_bias > 0, squared_bias / variance, torch.zeros_like(variance))
    return degrees * (1 + share) ** 2


def logdet(
    A: LinearOperator,
    num_probes: int = 10,
    num_steps: int = 30,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Compute the log-determinant of a symmetric positive definite operator.

    The result is exact for structured operators (without any products), and if
    `num_probes * num_steps` is at least n and n is at most 16,384 (with n products). Otherwise, it
    is estimated by stochastic Lanczos quadrature. As in `matrix_function_trace`, the standard error
    includes estimates of the quadrature's bias and of rounding errors. The bias is positive and
    decreases as $e^{-4 m / \sqrt\kappa}$ with the number of steps m, where κ is the condition
    number, so damping helps.

    Args:
        A: Symmetric positive definite operator `[n, n]`. An error is raised if it is not symmetric.
        num_probes: Number of probes; the standard error falls as its inverse root.
        num_steps: Number of Lanczos steps, and of products, per probe.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If a Ritz value is not positive, the operator is not square or not symmetric, a
            product is not finite, a number is too small, or the generator is on a different device.

    Reference:
        Ubaru, Chen, Saad. Fast estimation of tr(f(A)) via stochastic Lanczos quadrature. SIMAX,
        2017.
    """
    n = check_square(A, "log-determinant")
    closed_form = exact_logdet(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)

    def logarithm(values: Tensor) -> Tensor:
        least = float(values.min())
        if least <= 0:
            raise ValueError(
                f"{type(A).__name__} has the Ritz value {least:.4g}, but must be positive "
                "definite. Add damping, `A + c * Identity(n)`."
            )
        return values.log()

    rule = lanczos_quadrature(
        A,
        num_probes,
        num_steps,
        function=logarithm,
        generator=generator,
        progress=progress,
        label="logdet",
    )
    return integrate(rule, logarithm, n)
