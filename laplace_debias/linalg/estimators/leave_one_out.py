"""XTrace and XDiag, which evaluate every probe on a sketch of all the others."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.linalg.estimators.quadratic_forms import ValueAndError, at_least_rounding
from laplace_debias.linalg.probes import draw
from laplace_debias.linalg.products import Products


def xtrace(products: Products, total: int, generator: torch.Generator | None) -> ValueAndError:
    """Estimate the trace from half as many probes as products."""
    A = products.operator
    # Draw probes with uniform directions. The length of a probe's part outside a range is only
    # noise, so it is divided out.
    probes = draw(A, total // 2, "spherical", generator)
    images = products(probes)
    U = range_basis(images)
    images_of_basis = products(U)
    # In the coordinates of the basis, no array's size depends on n, so leaving out another probe
    # for the jackknife is cheap.
    problem = TraceInCoordinates(
        num_rows=len(probes),
        precision=relative_precision(images),
        forms=(probes * images).sum(dim=0).double(),
        images=(U.T @ images).double(),
        basis_images=(U.T @ images_of_basis).double(),
        probes=(U.T @ probes).double(),
        probe_forms=(images_of_basis.T @ probes).double(),
    )
    value = problem.estimate()
    without_each = torch.stack([problem.without(i).estimate() for i in range(probes.shape[1])])
    standard_error, degrees = jackknife(without_each)
    magnitude = problem.basis_images.diagonal().abs().sum() + problem.forms.abs().mean()
    standard_error = at_least_rounding(standard_error, magnitude, A.dtype)
    return ValueAndError(value, standard_error, degrees)


@dataclass(frozen=True)
class TraceInCoordinates:
    r"""The products of XTrace in an orthonormal basis U of the range of $A\Omega$.

    Attributes:
        num_rows: n.
        precision: Singular values below this fraction of the largest one count as zero.
        forms: $\omega_i^\top A\,\omega_i$.
        images: $U^\top A\Omega$.
        basis_images: $U^\top A U$.
        probes: $U^\top\Omega$.
        probe_forms: $(A U)^\top\Omega$.
    """

    num_rows: int
    precision: float
    forms: Float[Tensor, " k"]
    images: Float[Tensor, "r k"]
    basis_images: Float[Tensor, "r r"]
    probes: Float[Tensor, "r k"]
    probe_forms: Float[Tensor, "r k"]

    def estimate(self) -> Float[Tensor, ""]:
        """Average over the probes the trace inside and outside the range of the others' images.

        With the projector Q onto this range, tr(Q A Q) is computed exactly, and the trace on the
        complement is estimated from the probe's part outside, (I − Q) ω, whose length is
        normalised.
        """
        basis, left_out = leave_one_out(self.images, self.precision)
        H = self.basis_images
        trace_inside = ((basis.T @ H) * basis.T).sum() - (left_out * (H @ left_out)).sum(dim=0)
        inside = without_own(basis, left_out, self.probes)
        squared_lengths = self.num_rows - inside.square().sum(dim=0)
        # The form of (I − Q) ω is ωᵀAω − ωᵀQAω − ωᵀAQω + ωᵀQAQω.
        forms_inside = (inside * (self.probe_forms + self.images - H @ inside)).sum(dim=0)
        forms_outside = self.forms - forms_inside
        dimensions_outside = self.num_rows - basis.shape[1] + left_out.any(dim=0).double()
        return (trace_inside + dimensions_outside / squared_lengths * forms_outside).mean()

    def without(self, i: int) -> "TraceInCoordinates":
        """Return the same problem without probe i."""
        is_kept = torch.arange(len(self.forms), device=self.forms.device) != i
        return TraceInCoordinates(
            num_rows=self.num_rows,
            precision=self.precision,
            forms=self.forms[is_kept],
            images=self.images[:, is_kept],
            basis_images=self.basis_images,
            probes=self.probes[:, is_kept],
            probe_forms=self.probe_forms[:, is_kept],
        )


def xdiag(products: Products, total: int, generator: torch.Generator | None) -> ValueAndError:
    """Estimate the diagonal from half as many probes as products.

    For each probe ω, the diagonal is the sum of two parts. With the projector Q onto the range of
    the other probes' images, diag(Q A) is computed exactly, and diag((I − Q) A) is estimated by
    ω ⊙ (I − Q) A ω.
    """
    A = products.operator
    probes = draw(A, total // 2, "rademacher", generator)
    num_probes = probes.shape[1]
    images = products(probes)
    U = range_basis(images)
    adjoint_images = products.adjoint(U)
    precision = relative_precision(images)
    # Both are Uᵀ A Ω: the first from the images, whose ranges it determines, and the second from
    # the products with the adjoint, from which diag(Q A) is also computed.
    coordinates = U.T @ images
    probe_coordinates = adjoint_images.T @ probes

    def estimate(indices: Tensor) -> Tensor:
        """Estimate the diagonal from the probes with these indices."""
        basis, left_out = leave_one_out(coordinates[:, indices], precision)
        mean_projector = basis @ basis.T - left_out @ left_out.T / len(indices)
        inside = U @ without_own(basis, left_out, probe_coordinates[:, indices])
        outside = probes[:, indices] * (images[:, indices] - inside)
        return ((U @ mean_projector) * adjoint_images).sum(dim=1) + outside.mean(dim=1)

    every = torch.arange(num_probes, device=probes.device)
    value = estimate(every)
    without_each = torch.stack([estimate(every[every != i]) for i in range(num_probes)])
    standard_error, degrees = jackknife(without_each)
    magnitude = (U * adjoint_images).abs().sum(dim=1)
    standard_error = at_least_rounding(standard_error, magnitude, A.dtype)
    return ValueAndError(value, standard_error, degrees)


def relative_precision(images: Float[Tensor, "n k"]) -> float:
    """Return the fraction of the largest singular value below which rounding errors dominate."""
    return torch.finfo(images.dtype).eps * max(images.shape)


def range_basis(images: Float[Tensor, "n k"]) -> Float[Tensor, "n r"]:
    """Compute an orthonormal basis of the range of the images."""
    basis, singular_values, _ = torch.linalg.svd(images, full_matrices=False)
    return basis[:, singular_values > relative_precision(images) * singular_values[0]]


def leave_one_out(
    images: Float[Tensor, "r k"], precision: float
) -> tuple[Float[Tensor, "r q"], Float[Tensor, "r k"]]:
    r"""Compute a basis of the range and, for each image, the direction that only it contributes.

    The range of the other images has the projector $B B^\top - s_i s_i^\top$. The direction $s_i$
    is zero if the other images span the whole range.
    """
    basis, singular_values, right = torch.linalg.svd(images, full_matrices=False)
    if not len(singular_values):
        return basis, torch.zeros_like(images)
    is_resolved = singular_values > precision * singular_values[0]
    basis = basis[:, is_resolved]
    # If the images are B S Vᵀ, the direction S⁻¹ v_i is orthogonal to all images but the i-th.
    weights = right[is_resolved]
    directions = weights / (singular_values[is_resolved, None] / singular_values[0])
    lengths = directions.norm(dim=0).clamp(min=torch.finfo(directions.dtype).tiny)
    # An image is independent of the others if its leverage is 1.
    is_independent = weights.square().sum(dim=0) > 1 - 100 * precision
    return basis, basis @ (directions / lengths * is_independent)


def without_own(
    basis: Float[Tensor, "r q"], left_out: Float[Tensor, "r k"], vectors: Float[Tensor, "r k"]
) -> Float[Tensor, "r k"]:
    """Project each probe's vector onto the range of the other probes' images."""
    return basis @ (basis.T @ vectors) - left_out * (left_out * vectors).sum(dim=0)


def jackknife(without_each: Float[Tensor, "k *shape"]) -> tuple[Tensor, Tensor]:
    """Compute an estimate's standard error from the estimates that leave out one probe each.

    According to Efron and Stein, the expectation of its square is at least the variance of the
    estimate with one probe fewer.
    """
    num_probes = len(without_each)
    deviations = without_each - without_each.mean(dim=0)
    # In single precision, the squares underflow or overflow.
    norms = torch.linalg.vector_norm(deviations, dim=0, dtype=torch.float64)
    standard_error = (1 - 1 / num_probes) ** 0.5 * norms
    return standard_error, torch.full_like(standard_error, num_probes - 1.0)
