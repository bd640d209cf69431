"""Checked eigendecompositions of symmetric matrices. No other module calls LAPACK's drivers.

LAPACK's drivers can fail silently. On some processors, for example, MKL's single-precision `syevd`
returns NaN for some well-scaled Kronecker factors, and reports for others that it did not converge.
Therefore, every result is compared with the matrix, and a failed decomposition is repeated: first
in double precision, and then by another algorithm on the CPU.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# The allowed error in trace, residual and orthogonality, in units of √d times the rounding error of
# the largest eigenvalue. In these units, the errors of correct decompositions are below 3 for d up
# to 2,000.
_SLACK = 16
_PROBES = 2
# A matrix is scaled only if its largest entry is above this number or below its inverse.
_NOT_SCALED_UP_TO = 2.0**32
_GOLDEN = (math.sqrt(5) - 1) / 2

Decomposition = tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d d"]]


def eigh(matrix: Float[Tensor, "*batch d d"], name: str = "the matrix") -> Decomposition:
    """Compute ascending eigenvalues, and eigenvectors as columns, like `torch.linalg.eigh`.

    The result is checked: it must be finite, the eigenvalues must sum to the trace, and
    `A U z = U Λ z` and `Uᵀ U z = z` must hold for a few vectors z, all to the accuracy of the
    dtype. The checks cost O(d²). If a decomposition fails them, it is repeated in double precision,
    and then by QR iterations on the CPU.

    Args:
        matrix: Symmetric matrices. Only their lower triangles are used, so the upper triangles may
            differ by rounding errors.
        name: The name of the matrix in error messages.

    Raises:
        ValueError: If the matrix contains NaN or Inf.
        torch.linalg.LinAlgError: If every attempt fails its checks.
    """
    if matrix.numel() == 0:
        return torch.linalg.eigh(matrix)
    scaled, exponent = _scale_by_powers_of_two(matrix, name)
    if matrix.shape[-1] == 1:
        return matrix.squeeze(-1), torch.ones_like(matrix)
    cpu = torch.device("cpu")
    attempts = [
        (torch.linalg.eigh, scaled.dtype, scaled.device),
        (torch.linalg.eigh, torch.float64, scaled.device),
        (torch.linalg.eigh, torch.float64, cpu),
    ]
    if not scaled.requires_grad:
        # The QR iterations are not differentiable.
        attempts.append((_eigh_by_qr_iterations, torch.float64, cpu))
    # In double precision or on the CPU, some attempts are the same.
    for decompose, dtype, device in dict.fromkeys(attempts):
        try:
            values, vectors = decompose(scaled.to(device, dtype))
        except torch.linalg.LinAlgError:
            continue
        values = values.to(scaled)
        vectors = vectors.to(scaled)
        if _is_accurate(scaled, values, vectors):
            if exponent is not None:
                values = _ldexp(values, exponent.squeeze(-1))
            return values, vectors
    raise torch.linalg.LinAlgError(
        f"The eigendecomposition of {name}, of shape {tuple(matrix.shape)} in "
        f"{matrix.dtype}, is not accurate. It was repeated in double precision "
        "and on the CPU, but is still not accurate. Check the scale of the "
        "matrix, and the installation of torch and its BLAS."
    )


def _scale_by_powers_of_two(matrix: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Divide matrices by powers of two, so that their largest entries lie in [½, 1).

    LAPACK may not converge if entries are close to the smallest or largest number of the dtype.
    Scaling by a power of two causes no rounding errors.

    Returns:
        The scaled matrices and the exponents of the powers of two; or the unscaled matrices and
        None if no largest entry is close to either limit.
    """
    entries = matrix.detach()
    greatest_entries = entries.amax((-2, -1), keepdim=True)
    least_entries = entries.amin((-2, -1), keepdim=True)
    largest = torch.maximum(greatest_entries, -least_entries)
    low, high = torch.stack(largest.aminmax()).tolist()
    if not math.isfinite(high):
        raise ValueError(
            f"{name} contains NaN or Inf, so it has no eigenvalues. Look for an input, an "
            "activation or a gradient that overflows, or compute in a wider dtype."
        )
    if low >= 1 / _NOT_SCALED_UP_TO and high <= _NOT_SCALED_UP_TO:
        return matrix, None
    exponent = torch.frexp(largest).exponent
    return _ldexp(matrix, -exponent), exponent


def _ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """Multiply by 2^exponent, in two steps.

    Single precision cannot accurately represent a factor such as 2^-140, but it can represent its
    root.
    """
    half = exponent // 2
    scaled = x * torch.exp2(half.to(x.dtype))
    # Multiply in place, because copying a large matrix takes longer than multiplying it.
    return scaled.mul_(torch.exp2((exponent - half).to(x.dtype)))


def _eigh_by_qr_iterations(matrices: Tensor) -> Decomposition:
    """Decompose by `syev`, the slowest of LAPACK's algorithms and the least likely to fail."""
    # Import SciPy only here, because its import is slow and needed only if torch's algorithms fail.
    import scipy.linalg

    flat = matrices.reshape(-1, *matrices.shape[-2:])
    values = flat.new_empty(flat.shape[:-1])
    # Make each eigenvector contiguous in memory, as in torch's results.
    vectors = flat.new_empty(flat.shape).mT
    for index, matrix in enumerate(flat):
        try:
            matrix_values, matrix_vectors = scipy.linalg.eigh(matrix.numpy(), driver="ev")
        except scipy.linalg.LinAlgError as error:
            raise torch.linalg.LinAlgError(str(error)) from error
        values[index] = torch.from_numpy(matrix_values)
        vectors[index] = torch.from_numpy(matrix_vectors)
    return values.view(matrices.shape[:-1]), vectors.mT.view(matrices.shape).mT


def _probes(matrix: Tensor) -> Float[Tensor, "probes d"]:
    """Return fixed vectors of ±1, without a pattern that a matrix is likely to share.

    They are rows, because products with a few rows take a quarter of the time of those with a few
    columns.
    """
    places = torch.arange(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
    multiples = torch.arange(1, _PROBES + 1, dtype=torch.float64, device=matrix.device)
    is_positive = (multiples.unsqueeze(1) * (places * places * _GOLDEN)).frac() < 0.5
    return is_positive.to(matrix.dtype) * 2 - 1


def _is_accurate(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether a decomposition is finite and reproduces the matrix to the accuracy of the dtype.

    With the probes z as rows, `z Uᵀ A = z Λ Uᵀ` and `z Uᵀ U = z` must hold, and the eigenvalues
    must sum to the trace.
    """
    matrix = matrix.detach()
    values = values.detach()
    vectors = vectors.detach()
    # Compare only the lower triangle, because LAPACK does not read the upper one.
    lower = matrix.tril()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    # This is the norm of every probe, because its entries are ±1.
    length = math.sqrt(matrix.shape[-1])
    tolerance = _SLACK * length * torch.finfo(matrix.dtype).eps
    z = _probes(matrix)
    image = z @ vectors.mT
    product = image @ lower + image @ lower.mT - image * diagonal.unsqueeze(-2)
    residual = product - (z * values.unsqueeze(-2)) @ vectors.mT
    deviation = image @ vectors - z
    largest = values.abs().amax(-1, keepdim=True)
    # Comparisons with NaN are false, so these conditions reject NaN. A NaN that does not reach the
    # probes does reach the sum of all entries.
    is_accurate = (
        values.isfinite().all()
        & ((values.sum(-1) - diagonal.sum(-1)).abs() <= tolerance * values.abs().sum(-1)).all()
        & vectors.sum().isfinite()
        & (residual.norm(dim=-1) <= tolerance * largest * length).all()
        & (deviation.norm(dim=-1) <= tolerance * length).all()
    )
    return bool(is_accurate)
