"""Samples of a Gaussian from products with its precision."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.checks import check_at_least, check_generator, check_right_side
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.solvers.square_root import inverse_sqrt
from laplace_debias.operators.base import LinearOperator


def sample_gaussian(
    mean: Float[Tensor, " n"],
    precision: LinearOperator,
    num_samples: int = 1,
    *,
    tol: float = 1e-3,
    max_iter: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n"]:
    r"""Samples $\mu + P^{-1/2} z$ of $\mathcal N(\mu, P^{-1})$ with z standard normal.

    For a **matrix-free posterior** take $P = N \cdot \mathrm{GGN} + \delta I$, N the number of
    training examples and δ the prior precision. It takes products with P alone: no matrix of D²
    entries, no factorisation, no approximation of the curvature's structure. See `inverse_sqrt`.

    Args:
        mean: μ, `[n]`.
        precision: P, a symmetric positive definite operator `[n, n]`.
        num_samples: How many samples.
        tol: How far each may be from the exact $P^{-1/2} z$, relative to its norm.
        max_iter: Lanczos steps, and products with P, for each sample; by default 200, or n if that
            is less.
        generator: Source of randomness, on the operator's device.

    Returns:
        The samples, `[num_samples, n]`.

    Raises:
        TypeError: P is not an operator, or μ not a tensor.
        ValueError: P is not square or not positive definite, μ does not fit it, a product is not
            finite, a number is out of range, or the generator is on another device.

    Warns:
        RuntimeWarning: A sample did not come to `tol`; with the remedy.

    Reference:
        Chow, Saad. Preconditioned Krylov subspace methods for sampling multivariate Gaussian
        distributions. SIAM Journal on Scientific Computing, 2014.
    """
    root = inverse_sqrt(precision, tol=tol, max_iter=max_iter)
    check_right_side(precision, mean, "mean")
    if mean.ndim != 1:
        raise ValueError(f"`mean` has shape {tuple(mean.shape)}; expected ({len(mean)},).")
    check_at_least(num_samples, 1, "num_samples")
    check_generator(generator, precision)
    noise = draw(precision, num_samples, "gaussian", generator)
    return mean + (root @ noise).T
