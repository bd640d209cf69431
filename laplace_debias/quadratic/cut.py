"""A quadratic on a line or plane, as a polynomial."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.eigh import eigvalsh


@dataclass(frozen=True, eq=False)
class Cut:
    r"""A quadratic on the plane through a position θ, as a polynomial in closed form.

    $$q(\theta + V a) = L + s^\top a + \tfrac12 a^\top C a$$

    Args:
        value: L = q(θ), a number.
        slopes: s = Vᵀ∇q(θ), `[k]`.
        curvatures: C = VᵀHV, symmetric, `[k, k]`.
    """

    value: Float[Tensor, ""]
    slopes: Float[Tensor, " k"]
    curvatures: Float[Tensor, "k k"]

    def __call__(self, *coordinates: Tensor | float) -> Tensor:
        """The quadratic at points of the plane, at no product.

        Args:
            *coordinates: For each of the k directions its coordinates, of shapes that broadcast:
                `cut(a)` on a line, `cut(a[:, None], b)` on a grid `[len(a), len(b)]`; numbers for
                one point.

        Returns:
            A value for every point.

        Raises:
            ValueError: If there are not k coordinates.
        """
        if len(coordinates) != len(self.slopes):
            raise ValueError(
                f"A cut along {len(self.slopes)} directions takes as many coordinates, got "
                f"{len(coordinates)}: call it as cut(a, b, ...)."
            )
        given = [torch.as_tensor(each).to(self.slopes) for each in coordinates]
        a = torch.stack(torch.broadcast_tensors(*given), dim=-1)
        return self.value + a @ self.slopes + ((a @ self.curvatures) * a).sum(-1) / 2

    def minimizer(self) -> Float[Tensor, " k"]:
        """The coordinates of its minimum, −C⁻¹s.

        Raises:
            ValueError: If C is not positive definite, so that there is no minimum.
        """
        return solve_exactly(self.curvatures, -self.slopes)


def solve_exactly(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution of a small positive definite system `[k, k]`, by a Cholesky factor.

    Raises:
        ValueError: If the matrix is not positive definite.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info > 0:
        smallest = float(eigvalsh(matrix, "the curvature in the subspace")[0])
        raise ValueError(
            f"The quadratic has no minimum: its smallest curvature is {smallest:.3g}. Add damping, "
            "or use the GGN instead of the Hessian."
        )
    return torch.cholesky_solve(right[:, None], factor)[:, 0]
