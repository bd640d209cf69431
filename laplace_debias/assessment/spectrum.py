"""The spectrum of a trained network's curvature: leading eigenpairs, trace and density."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from laplace_debias.curvature import GGN, Hessian
from laplace_debias.linalg import (
    EigenPairs,
    Estimate,
    SpectralDensity,
    eigsh,
    spectral_density,
    trace,
)
from laplace_debias.linalg.probes import draw
from laplace_debias.operators import LinearOperator, LowRankPlusDiagonal
from laplace_debias.sources.loaded import Loaded
from laplace_debias.sources.shares import share


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A measured spectrum.

    Attributes:
        eigenpairs: The leading eigenpairs.
        trace: The trace, including the leading eigenvalues.
        density: The density of the remaining eigenvalues; None if all of them count as zero.
        seconds: The time that the measurement took, in seconds.
    """

    eigenpairs: EigenPairs
    trace: Estimate
    density: SpectralDensity | None
    seconds: float


def curvature_of(
    loaded: Loaded,
    matrix: Literal["ggn", "hessian"],
    batches: Sequence[tuple[Tensor, Tensor]],
    memory_bound: int,
) -> LinearOperator:
    """Build the curvature of a loaded network's loss; several processes share the batches."""
    operator = GGN if matrix == "ggn" else Hessian
    _, loss = loaded.likelihood.training_loss()
    return operator(
        loaded.model, loss, list(share(batches, loaded.model)), memory_bound=memory_bound
    )


def first_batches(loaded: Loaded, examples: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first training examples on the network's device, in the form the loss expects.

    If the data contains fewer examples, all of them are returned.

    Raises:
        ValueError: If the batches are not pairs of tensors.
    """
    device = next(loaded.model.parameters()).device
    batches: list[tuple[Tensor, Tensor]] = []
    num_missing = examples
    for batch in loaded.train:
        is_pair = isinstance(batch, Sequence) and len(batch) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(
                "A spectrum needs batches (inputs, targets) of tensors, but the loader yields "
                f"batches of type {type(batch).__name__}. Change the batches in the function that "
                "returns the loaders."
            )
        x, y = batch
        if loaded.likelihood.activation == "sigmoid":
            y = y.reshape(len(y), -1).float()
        batches.append((x[:num_missing].to(device), y[:num_missing].to(device)))
        num_missing -= len(batches[-1][1])
        if not num_missing:
            break
    return batches


def measure_spectrum(
    A: LinearOperator,
    *,
    eigenpairs: int,
    tolerance: float,
    max_matvecs: int,
    trace_matvecs: int,
    density_probes: int,
    density_steps: int,
    density_width: float,
    density_floor: float,
    seed: int = 0,
    progress: bool = False,
) -> Spectrum:
    r"""Measure a symmetric operator's leading eigenpairs, trace and remaining density.

    The leading eigenpairs are deflated. The remaining operator $A - V\Lambda V^\top$ has no
    outliers, so few products are enough to estimate its trace and density well. This is the
    deflation of Hutch++, with the eigenvectors instead of a sketch.

    Args:
        A: The operator.
        eigenpairs: Number of leading eigenpairs.
        tolerance: Largest residual norm of an eigenpair, relative to the largest eigenvalue.
        max_matvecs: Largest number of products for the eigenpairs.
        trace_matvecs: Number of products for the trace of the remaining operator.
        density_probes: Number of probes of the density.
        density_steps: Number of Lanczos steps per probe.
        density_width: Width of the density's smoothing, in decades.
        density_floor: Eigenvalues up to this multiple of the largest eigenvalue count as zero.
        seed: Seed of all random vectors.
        progress: Whether to show progress bars.

    Reference:
        Gambhir, Stathopoulos, Orginos. Deflation as a method of variance reduction for estimating
        the trace of a matrix inverse. SISC, 2017.
    """
    start = time.perf_counter()
    generator = torch.Generator(A.device).manual_seed(seed)
    with warnings.catch_warnings():
        # Convergence warnings are not needed, because the status is printed.
        warnings.simplefilter("ignore", RuntimeWarning)
        pairs = eigsh(
            A,
            k=eigenpairs,
            tol=tolerance,
            max_matvecs=max_matvecs,
            generator=generator,
            progress=progress,
        )
    deflated = A - LowRankPlusDiagonal(pairs.vectors, pairs.values, 0.0)
    remaining_trace = trace(
        deflated,
        num_matvecs=trace_matvecs,
        generator=generator,
        progress=progress,
    )
    floor = density_floor * float(pairs.values.abs().max())
    density = None
    # If no eigenvalue is negative, all remaining ones are at most the smallest leading eigenvalue.
    are_zero = A.is_positive_semidefinite and float(pairs.values.min()) <= floor
    num_remaining = A.shape[0] - len(pairs.values)
    if not are_zero and num_remaining and _exceeds(deflated, floor, density_steps):
        density = spectral_density(
            deflated,
            scale="log",
            num_probes=density_probes,
            num_steps=density_steps,
            width=density_width,
            floor=floor,
            generator=generator,
            progress=progress,
        )
        density = _without_zeros(density, A.shape[0], num_remaining)
    whole_trace = replace(
        remaining_trace,
        value=pairs.values.sum() + remaining_trace.value,
        num_matvecs=pairs.num_matvecs + remaining_trace.num_matvecs,
    )
    return Spectrum(pairs, whole_trace, density, time.perf_counter() - start)


def _exceeds(A: LinearOperator, bound: float, max_matvecs: int) -> bool:
    """Whether an absolute eigenvalue exceeds a bound, according to the power method.

    Unlike Lanczos, the power method also works if an operator consists only of rounding errors.
    """
    vector = draw(A, 1, "gaussian", torch.Generator().manual_seed(0))[:, 0]
    for _ in range(max_matvecs):
        # The norm of a unit vector's image is a lower bound on the largest absolute eigenvalue.
        vector = A @ (vector / vector.norm())
        norm = float(vector.norm())
        if norm > bound or norm == 0:
            return norm > bound
    return False


def _without_zeros(density: SpectralDensity, size: int, num_remaining: int) -> SpectralDensity:
    """Return the density of the remaining eigenvalues, without the zeros that deflation creates.

    Deflation replaces the `size - num_remaining` leading eigenvalues by zeros.
    """
    num_null = size * density.null_fraction - (size - num_remaining)
    null_fraction = max(0.0, num_null) / num_remaining
    # The density integrates to the fraction of eigenvalues that are not null, before and after.
    growth = (1 - null_fraction) / (1 - density.null_fraction)
    return replace(
        density,
        density=growth * density.density,
        standard_error=growth * density.standard_error,
        quadrature_error=growth * density.quadrature_error,
        null_fraction=null_fraction,
        negative_fraction=growth * density.negative_fraction,
    )
