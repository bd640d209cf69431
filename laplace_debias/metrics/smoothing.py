"""The calibration error of a smoothed reliability curve, without bins."""

import math

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.binned import confidence_and_right

_STEPS = 24
"""Bisections: the bandwidth is found to 2⁻²⁴."""


def smooth_ece(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    num_points: int = 2048,
) -> Float[Tensor, ""]:
    """Smooth ECE: the L1 norm of the smoothed residuals, at the bandwidth that equals the result.

    For confidences f_n and hits y_n, `smECE_σ = ∫₀¹ |(1/n) Σ_n K_σ(t, f_n) (y_n - f_n)| dt` with
    the Gaussian kernel of width σ reflected at 0 and 1, and the result is the σ with
    `smECE_σ = σ`. It changes continuously with the probabilities and needs no number of bins. Its
    bias on small sets is smaller than that of `ece`, not zero.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        num_points: Intervals of the grid on which residuals and integral are; an error of order
            `num_points⁻²`.

    Returns:
        The error, in [0, 1], float64.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, `labels` do not fit them, or `num_points` < 2.

    Reference:
        Błasiok, Nakkiran. Smooth ECE: principled reliability diagrams via kernel smoothing. ICLR,
        2024, definitions 3 and 4.
    """
    if num_points < 2:
        raise ValueError(f"`num_points` is {num_points}; expected at least 2, for example 2048.")
    confidences, right = confidence_and_right(probs, labels)
    cells, weights = on_grid(confidences, num_points)
    residuals = (right - confidences)[:, None] * weights / len(confidences)
    sums = torch.zeros(num_points + 1, dtype=torch.float64, device=cells.device)
    sums.index_add_(0, cells.flatten(), residuals.flatten())
    return smoothed_error(sums[None])[0]


def on_grid(
    confidences: Float[Tensor, " n"], num_points: int
) -> tuple[Integer[Tensor, "n 2"], Float[Tensor, "n 2"]]:
    """The two points of a grid of [0, 1] on both sides of each value, and linear weights."""
    position = confidences * num_points
    lower = position.long().clamp(0, num_points - 1)
    upper_weight = position - lower
    return torch.stack([lower, lower + 1], 1), torch.stack([1 - upper_weight, upper_weight], 1)


def smoothed_error(residuals: Float[Tensor, "sets points"]) -> Float[Tensor, " sets"]:
    """The fixed point `smECE_σ = σ` of several sets of residuals on a grid of [0, 1].

    Smoothing by the reflected Gaussian multiplies the k-th coefficient of the cosine series by
    `exp(-(πkσ)²/2)`. `smECE_σ` falls as σ grows, so that bisection finds the fixed point.

    Args:
        residuals: Sums of `(y_n - f_n) / n` at the grid's points, both ends included.

    Returns:
        The errors, `[sets]`.
    """
    num_intervals = residuals.shape[1] - 1
    # Even about both ends: the discrete Fourier transform is then the cosine series. An end has
    # its mirror image in itself and counts twice.
    doubled = residuals.clone()
    doubled[:, [0, -1]] *= 2
    spectrum = torch.fft.rfft(torch.cat([doubled, doubled[:, 1:-1].flip(1)], 1))
    frequencies = math.pi * torch.arange(
        num_intervals + 1, dtype=residuals.dtype, device=residuals.device
    )
    low, high = torch.zeros_like(residuals[:, 0]), torch.ones_like(residuals[:, 0])
    for _ in range(_STEPS):
        sigma = (low + high) / 2
        damped = spectrum * (-(frequencies * sigma[:, None]).square() / 2).exp()
        # Values are sums over a grid cell, so the trapezoidal rule needs no width.
        smoothed = torch.fft.irfft(damped, n=2 * num_intervals)[:, : num_intervals + 1].abs()
        error = smoothed.sum(1) - (smoothed[:, 0] + smoothed[:, -1]) / 2
        low, high = torch.where(error > sigma, sigma, low), torch.where(error > sigma, high, sigma)
    return (low + high) / 2
