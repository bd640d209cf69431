"""Eigenvalues that rounding does not distinguish, and curvature along their eigenvectors."""

import torch
from jaxtyping import Float
from torch import Tensor

# If two eigenvalues differ by less than this fraction of the largest eigenvalue, rounding mixes
# their eigenvectors: the error of their angle is the rounding error divided by the difference.
_RESOLUTION = 1e-7


def numerical_rank(values: Float[Tensor, " d"], dtype: torch.dtype | None = None) -> int:
    """Count the eigenvalues that exceed the rounding errors of a dtype."""
    if not len(values):
        return 0
    # In units of the largest eigenvalue, sums of rounded products have an error of a few units of
    # rounding. A decomposition in double precision has an error that grows as the root of the size.
    error_of_sums = 8 * torch.finfo(values.dtype if dtype is None else dtype).eps
    error_of_decomposition = 4 * len(values) ** 0.5 * torch.finfo(torch.float64).eps
    return int((values > max(error_of_sums, error_of_decomposition) * values[0]).sum())


def resolution(dtype: torch.dtype) -> float:
    """Return the least relative gap of eigenvalues that determines eigenvectors."""
    return max(_RESOLUTION, 8 * torch.finfo(dtype).eps)


def average_degenerate(
    measured: Float[Tensor, "*entries"],
    eigenvalues: Float[Tensor, "*groups d"],
    dtype: torch.dtype,
    remaining: int = 1,
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
    eigenvectors. The columns of `measured` are averaged one by one. The eigenvalues may be in any
    order; the last eigenvalue belongs to `remaining` eigenvectors.
    """
    if eigenvalues.shape[-1] == 0:
        return measured
    if eigenvalues.ndim > 1 and measured.ndim == eigenvalues.ndim:
        columns = measured.unsqueeze(-1)
        return average_degenerate(columns, eigenvalues, dtype, remaining).squeeze(-1)
    counts = torch.ones_like(eigenvalues)
    counts[..., -1] = remaining
    largest = eigenvalues.amax(-1, keepdim=True)
    column_dims = tuple(range(eigenvalues.ndim - 1, measured.ndim))
    least = resolution(dtype) ** 2 * measured.amax(column_dims)
    is_one_space = largest.squeeze(-1) <= least
    mean = measured.mean(eigenvalues.ndim - 1, keepdim=True).expand_as(measured)
    if remaining > 1:
        shares = (counts / counts.sum(-1, keepdim=True)).unsqueeze(-2)
        mean = (shares @ measured.to(eigenvalues)).to(measured).expand_as(measured)
    if bool(is_one_space.all()):
        return mean
    width = resolution(dtype) * largest
    are_close = (eigenvalues.sort(-1).values.diff(dim=-1) < width).any(-1)
    if not bool((is_one_space | are_close).any()):
        return measured
    gaps = (eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2)).abs() / width.unsqueeze(-1)
    weights = (2 - 2 * gaps).clamp(0, 1) * counts.unsqueeze(-2)
    weights = weights / weights.sum(-1, keepdim=True)
    averaged = (weights @ measured.to(eigenvalues)).to(measured)
    if eigenvalues.ndim == 1:
        return averaged
    return torch.where(is_one_space[..., None, None], mean, averaged)
