"""The log-determinant of a positive definite operator."""

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_finite, check_square
from laplace_debias.linalg.estimators.function_trace import integrate
from laplace_debias.linalg.estimators.quadrature import lanczos_quadrature
from laplace_debias.linalg.results import Estimate
from laplace_debias.operators.base import LinearOperator
from laplace_debias.operators.exact import exact_logdet


def logdet(
    A: LinearOperator,
    num_probes: int = 10,
    num_steps: int = 30,
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""The log-determinant of a symmetric positive definite operator, $\mathrm{tr} \log A$.

    Exact for a structured operator (no products) and where `num_probes * num_steps` is at least n
    (n products) and n at most 16,384; else by stochastic Lanczos quadrature, whose standard error
    contains an estimate of the quadrature's bias, as `matrix_function_trace` has it. That bias is
    upward, and falls as $e^{-4 m / \sqrt\kappa}$ with the steps m and the condition number κ:
    damping helps.

    Args:
        A: Symmetric positive definite operator `[n, n]`. Asymmetry is noticed.
        num_probes: Probes; the standard error falls as the root of their number.
        num_steps: Lanczos steps, and products, a probe.
        generator: Source of randomness, on the operator's device.
        progress: Whether to show a progress bar.

    Returns:
        The log-determinant, a scalar tensor, with its standard error.

    Raises:
        ValueError: A Ritz value is not positive, the operator not square or not symmetric, a
            product not finite, a number too small, or the generator on another device.

    Reference:
        Ubaru, Chen, Saad. Fast estimation of tr(f(A)) via stochastic Lanczos quadrature. SIMAX,
        2017.
    """
    n = check_square(A, "log-determinant")
    check_finite(A)
    closed_form = exact_logdet(A)
    if closed_form is not None:
        return Estimate.exact(closed_form)

    def logarithm(values: Tensor) -> Tensor:
        least = float(values.min())
        if least <= 0:
            raise ValueError(
                f"{type(A).__name__} has the Ritz value {least:.4g}; expected a positive definite "
                "operator. Add damping, `A + c * Identity(n)`."
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
