"""Eigenvalues that are equal up to rounding, and the curvature along their eigenvectors."""

import torch
from jaxtyping import Float
from torch import Tensor

# If two eigenvalues differ by less than this fraction of the largest eigenvalue, rounding mixes
# their eigenvectors: the error in their angle is the rounding error divided by the difference.
_RESOLUTION = 1e-7


def numerical_rank(values: Float[Tensor, " d"], dtype: torch.dtype | None = None) -> int:
    """Count the eigenvalues that exceed the rounding errors of a dtype."""
    if not len(values):
        return 0
    # Relative to the largest eigenvalue, sums of rounded products have an error of a few units of
    # rounding, and the error of a decomposition in double precision grows as the root of the size.
    error_of_sums = 8 * torch.finfo(values.dtype if dtype is None else dtype).eps
    error_of_decomposition = 4 * len(values) ** 0.5 * torch.finfo(torch.float64).eps
    return int((values > max(error_of_sums, error_of_decomposition) * values[0]).sum())


def resolution(dtype: torch.dtype) -> float:
    """Return the smallest relative gap between eigenvalues that determines their eigenvectors."""
    return max(_RESOLUTION, 8 * torch.finfo(dtype).eps)


def average_degenerate(
    measured: Float[Tensor, "*entries"],
    eigenvalues: Float[Tensor, "*groups d"],
    dtype: torch.dtype,
    multiplicity: int = 1,
) -> Float[Tensor, "*entries"]:
    r"""Average curvature over eigenvectors whose eigenvalues nearly coincide.

    Any orthonormal basis of an eigenspace, above all of the null space, consists of eigenvectors.
    The basis that a decomposition returns depends on the order of the examples, on the batch size
    and on the machine, and so does the curvature of *other* data along this basis. The mean over
    the eigenspace depends on none of these, and is the expected curvature along a random basis. Let
    the weight k be 1 up to half the `resolution`, fall linearly, and be 0 above the full
    resolution. The average is

    $$\tilde\Lambda_i = \frac{\sum_j k(\lambda_i - \lambda_j)\,\Lambda_j}
    {\sum_j k(\lambda_i - \lambda_j)}.$$

    It is a quotient of two traces of functions of the matrix, and is therefore continuous in the
    matrix.

    A matrix may also consist only of rounding errors of a sum that cancels: for example, gradients
    at the keys of attention add up to zero over positions. Therefore, if all eigenvalues are below
    the square of the resolution, as a fraction of the measured curvature, the average is over all
    eigenvectors. The columns of `measured` are averaged one by one.

    Args:
        measured: Curvature along the eigenvectors, `[*groups, d]` or `[*groups, d, columns]`.
        eigenvalues: The eigenvalues, in any order.
        dtype: The dtype in which the matrix was computed.
        multiplicity: The number of eigenvectors that share the last eigenvalue.
    """
    if eigenvalues.shape[-1] == 0:
        return measured
    if eigenvalues.ndim > 1 and measured.ndim == eigenvalues.ndim:
        columns = measured.unsqueeze(-1)
        return average_degenerate(columns, eigenvalues, dtype, multiplicity).squeeze(-1)
    largest = eigenvalues.amax(-1, keepdim=True)
    column_dims = tuple(range(eigenvalues.ndim - 1, measured.ndim))
    least = resolution(dtype) ** 2 * measured.amax(column_dims)
    are_rounding_errors = largest.squeeze(-1) <= least
    mean = _mean_over_all(measured, eigenvalues, multiplicity)
    if bool(are_rounding_errors.all()):
        return mean
    width = resolution(dtype) * largest
    have_close_pairs = (eigenvalues.sort(-1).values.diff(dim=-1) < width).any(-1)
    if not bool((are_rounding_errors | have_close_pairs).any()):
        return measured
    averaged = _mean_over_close(measured, eigenvalues, width, multiplicity)
    if eigenvalues.ndim == 1:
        return averaged
    return torch.where(are_rounding_errors[..., None, None], mean, averaged)


def _mean_over_all(
    measured: Float[Tensor, "*entries"], eigenvalues: Float[Tensor, "*groups d"], multiplicity: int
) -> Float[Tensor, "*entries"]:
    """Average curvature over all eigenvectors, of which several may share the last entry."""
    if multiplicity == 1:
        return measured.mean(eigenvalues.ndim - 1, keepdim=True).expand_as(measured)
    counts = _multiplicities(eigenvalues, multiplicity)
    weights = (counts / counts.sum(-1, keepdim=True)).unsqueeze(-2)
    return (weights @ measured.to(eigenvalues)).to(measured).expand_as(measured)


def _mean_over_close(
    measured: Float[Tensor, "*entries"],
    eigenvalues: Float[Tensor, "*groups d"],
    width: Float[Tensor, "*groups 1"],
    multiplicity: int,
) -> Float[Tensor, "*entries"]:
    """Average curvature with the weights k, which are 0 where eigenvalues differ by `width`."""
    gaps = (eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2)).abs() / width.unsqueeze(-1)
    weights = (2 - 2 * gaps).clamp(0, 1)
    weights = weights * _multiplicities(eigenvalues, multiplicity).unsqueeze(-2)
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights @ measured.to(eigenvalues)).to(measured)


def _multiplicities(
    eigenvalues: Float[Tensor, "*groups d"], multiplicity: int
) -> Float[Tensor, "*groups d"]:
    """Return the number of eigenvectors of each eigenvalue, which is 1 except for the last."""
    counts = torch.ones_like(eigenvalues)
    counts[..., -1] = multiplicity
    return counts
