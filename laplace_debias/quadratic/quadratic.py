"""The quadratic model of a loss around a point: slopes, curvatures, cuts and its minimum."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laplace_debias.curvature.losses import Loss
from laplace_debias.linalg import Iterate, Status, cg
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.operators import Diagonal, Identity, LinearOperator
from laplace_debias.operators.eigh import eigh
from laplace_debias.quadratic.objective import objective
from laplace_debias.system.checks import check_no_autocast
from laplace_debias.system.shown import one_line


@dataclass(frozen=True, eq=False, repr=False)
class Cut:
    r"""A quadratic restricted to a line, plane or hyperplane through a position θ.

    $$q(\theta + V a) = L + s^\top a + \tfrac12 a^\top C a$$

    Args:
        value: L = q(θ), a number.
        slopes: s = Vᵀ∇q(θ), `[k]`.
        curvatures: C = VᵀHV, symmetric, `[k, k]`.
    """

    value: Float[Tensor, ""]
    slopes: Float[Tensor, " k"]
    curvatures: Float[Tensor, "k k"]

    __repr__ = one_line

    def __call__(self, *coordinates: Tensor | float) -> Tensor:
        """Evaluate the restricted quadratic at points, without any matrix product.

        Args:
            *coordinates: The coordinates along each of the k directions, in shapes that can be
                broadcast against each other: `cut(a)` for points on a line, `cut(a[:, None], b)`
                for a grid `[len(a), len(b)]`, or numbers for a single point.

        Returns:
            A value for every point.

        Raises:
            ValueError: If the number of coordinates is not k.
        """
        if len(coordinates) != len(self.slopes):
            raise ValueError(
                f"A cut along {len(self.slopes)} directions needs {len(self.slopes)} coordinates, "
                f"one for each direction, but got {len(coordinates)}. Call it as cut(a, b, ...)."
            )
        check_no_autocast(self.slopes.device, self.slopes.dtype)
        tensors = [torch.as_tensor(coordinate).to(self.slopes) for coordinate in coordinates]
        a = torch.stack(torch.broadcast_tensors(*tensors), dim=-1)
        return self.value + a @ self.slopes + ((a @ self.curvatures) * a).sum(-1) / 2

    def minimizer(self) -> Float[Tensor, " k"]:
        """Compute the coordinates a of the minimum, −C⁻¹s.

        Raises:
            ValueError: If C is not positive definite, so that there is no minimum.
        """
        return solve_exactly(self.curvatures, -self.slopes)


_WITHOUT_STEP = (
    Status.NEGATIVE_CURVATURE,
    Status.ZERO_CURVATURE,
    Status.INDEFINITE_PRECONDITIONER,
)


def solve_exactly(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a small positive definite system `[k, k]` by a Cholesky factorisation of its matrix."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info > 0:
        smallest = float(eigh(matrix, "the curvature in the subspace")[0][0])
        raise ValueError(
            "The quadratic function has no minimum, because its smallest curvature "
            f"is {smallest:.3g}. Add damping, or use the GGN instead of the Hessian."
        )
    return torch.cholesky_solve(right[:, None], factor)[:, 0]


@dataclass(frozen=True, eq=False, repr=False)
class Quadratic:
    r"""A quadratic model of a loss (Eq. 2).

    $$q(\theta) = L + g^\top (\theta - \theta_0)
    + \tfrac12 (\theta - \theta_0)^\top H (\theta - \theta_0)$$

    Build quadratics from one mini-batch, from several mini-batches or from the full set, and
    compare them along the same directions. A direction is a vector `[D]` of any length; several
    directions are the columns of a matrix `[D, k]`. Slopes and curvatures are per unit of length,
    as if the directions were normalised.

    Args:
        value: L, the loss at θ₀, a number.
        gradient: g, the gradient of the loss at θ₀, `[D]`.
        matrix: H, the symmetric curvature of the loss (Hessian or GGN), `[D, D]`.
        position: θ₀, `[D]`.

    Raises:
        ValueError: If shapes, dtypes or devices do not match.

    Reference:
        Tatzel et al. (2025), Debiasing mini-batch quadratics for applications in deep learning.
    """

    value: Float[Tensor, ""]
    gradient: Float[Tensor, " dim"]
    matrix: LinearOperator
    position: Float[Tensor, " dim"]

    __repr__ = one_line

    def __post_init__(self) -> None:
        shape = self.gradient.shape
        if self.matrix.shape != (*shape, *shape) or self.position.shape != shape:
            raise ValueError(
                f"A gradient of shape {tuple(self.gradient.shape)}, a matrix of shape "
                f"{self.matrix.shape} and a position of shape "
                f"{tuple(self.position.shape)} do not match. Pass them with the shapes "
                "[D], (D, D) and [D]."
            )
        fields = (self.value, self.gradient, self.matrix, self.position)
        if len({(field.dtype, field.device) for field in fields}) > 1:
            dtypes = ", ".join(f"{field.dtype} on {field.device}" for field in fields)
            raise ValueError(
                "The value, gradient, matrix and position must have the same dtype and device, "
                f"got {dtypes}. Convert them with `.to(...)`."
            )
        check_no_autocast(self.position.device, self.position.dtype)

    @classmethod
    def from_data(
        cls,
        model: nn.Module,
        loss: Loss,
        data: Iterable[Any],
        curvature: str = "ggn",
        params: str | Sequence[str] | Callable[..., bool] = "all",
        weight_decay: float = 0.0,
        decay_biases: bool = False,
        num_data: int | None = None,
        reduction: str | None = None,
        progress: bool = False,
        batch: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> "Quadratic":
        r"""Build the quadratic model of a loss on data, at the network's parameters (Eq. 1, 2).

        Computing the value and the gradient needs one pass over the data, and every product with
        the curvature needs another pass. The model is not changed. You can continue to train it,
        because the quadratic has its own copy of the parameters.

        Args:
            model: A deterministic model, in eval mode.
            loss: A torch loss, a function of outputs and targets, or a `Likelihood`.
            data: Batches (inputs, targets) that can be iterated over repeatedly: a loader, or a
                list with one or more batches.
            curvature: `"ggn"` or `"hessian"`.
            params: The parameters that form θ; see `GGN`.
            weight_decay: β, which adds ½ β ‖θ‖² (Eq. 1), unless `decay_biases` is set only for
                weights. For a prior precision δ, which acts on all parameters, pass δ/N and
                `decay_biases=True`.
            decay_biases: Whether β acts on all parameters. If false, it acts only on weights
                (parameters of more than one dimension), and not on biases and normalisation scales.
            num_data: The number of examples, or None if the number is not known; see `GGN`.
            reduction: `"mean"` or `"sum"` over examples, for a loss that does not specify it; see
                `GGN`.
            progress: Whether to show a progress bar.
            batch: A function that converts a batch of `data` to `(inputs, targets)`; see `GGN`.

        Raises:
            ValueError: If the curvature is unknown. Also raises the errors of `GGN`.
        """
        if not 0 <= weight_decay < math.inf:
            raise ValueError(
                f"`weight_decay` is {weight_decay}. Pass a finite number of at least 0."
            )
        terms = objective(
            model,
            loss,
            data,
            curvature,
            params=params,
            num_data=num_data,
            reduction=reduction,
            progress=progress,
            batch=batch,
        )
        quadratic = cls(terms.value, terms.gradient, terms.matrix, terms.position)
        if weight_decay == 0:
            return quadratic
        return quadratic.regularized(weight_decay, None if decay_biases else terms.decayed)

    def regularized(
        self, weight_decay: float, on: Bool[Tensor, " dim"] | None = None
    ) -> "Quadratic":
        r"""Add weight decay, $\tfrac{\beta}{2} \|\theta\|^2$ (Eq. 1).

        Args:
            weight_decay: β ≥ 0. For a prior precision δ on N examples, pass δ/N.
            on: A mask of the parameters that weight decay acts on, such as all parameters but the
                biases. Default: all parameters.

        Raises:
            ValueError: If β is negative or not finite, or the mask has the wrong shape.
        """
        if not 0 <= weight_decay < math.inf:
            raise ValueError(
                f"`weight_decay` is {weight_decay}. Pass a finite number of at least 0."
            )
        mask = torch.ones_like(self.position, dtype=torch.bool) if on is None else on
        if mask.shape != self.position.shape:
            raise ValueError(
                f"`on` has shape {tuple(mask.shape)}, but the parameters have shape "
                f"{tuple(self.position.shape)}. Pass a mask of the same shape."
            )
        diagonal = weight_decay * mask.to(self.position)
        pull = diagonal * self.position
        return Quadratic(
            value=self.value + 0.5 * pull @ self.position,
            gradient=self.gradient + pull,
            matrix=self.matrix + Diagonal(diagonal),
            position=self.position,
        )

    def __call__(self, theta: Float[Tensor, "dim *k"]) -> Float[Tensor, "*k"]:
        """Compute q(θ) at a position `[D]`, or at k positions `[D, k]`; each needs one product."""
        offset = self._offset(theta)
        product = self.matrix @ offset
        return self.value + (_inner(self.gradient, offset) + _inner(offset, product) / 2)

    def gradient_at(self, theta: Float[Tensor, "dim *k"]) -> Float[Tensor, "dim *k"]:
        """Compute the gradient ∇q(θ) = g + H(θ − θ₀), which has the shape of θ."""
        return _columns(self.gradient, theta) + self.matrix @ self._offset(theta)

    def slope(
        self,
        direction: Float[Tensor, "dim *k"],
        at: Float[Tensor, "dim *m"] | None = None,
    ) -> Float[Tensor, "*k"]:
        """Compute the slopes dᵀ(g + H(θ − θ₀)) along normalised directions d (Eq. 10).

        Args:
            direction: `[D]`, or k of them `[D, k]`.
            at: The position θ: `[D]` for all directions, or `[D, k]` with one position per
                direction, such as the iterates of CG. Each position needs one product. Default: θ₀,
                which needs none.

        Returns:
            The slopes: a scalar, or `[k]` for k directions or positions, in units of the loss per
            unit of length.

        Raises:
            ValueError: If a shape does not match, or a direction is zero or not finite.
        """
        unit = self._unit(direction)
        if at is None:
            return _inner(self.gradient, unit)
        if at.ndim == 2 and at.shape != direction.shape:
            raise ValueError(
                f"Positions of shape {tuple(at.shape)} do not match directions of shape "
                f"{tuple(direction.shape)}. Pass one position [D] for all directions, or one "
                "position per direction."
            )
        return _inner(self.gradient_at(at), unit)

    def curvature(self, direction: Float[Tensor, "dim *k"]) -> Float[Tensor, "*k"]:
        """Compute the curvatures dᵀHd along normalised directions d (Eq. 10).

        Args:
            direction: `[D]`, or k of them `[D, k]`. Each direction needs one product.

        Returns:
            The curvatures: a scalar, or `[k]`, in units of the loss per squared unit of length.

        Raises:
            ValueError: If a shape does not match, or a direction is zero or not finite.
        """
        unit = self._unit(direction)
        return _inner(unit, self.matrix @ unit)

    def cut(
        self,
        directions: Float[Tensor, "dim *k"],
        at: Float[Tensor, " dim"] | None = None,
    ) -> Cut:
        """Restrict the quadratic to a line or (hyper)plane, given by directions.

        This needs one product per direction, and one more if the position is not θ₀. The result can
        then be evaluated at any number of points without further products: the plane of Figure 1,
        for example, consists of only six numbers.

        Args:
            directions: V, `[D]` or `[D, k]`. They are not normalised, so a coordinate of 1 is one
                full step along the direction.
            at: θ, `[D]`. Default: θ₀.

        Returns:
            The restriction, as a polynomial of the coordinates a: q(θ + V a).
        """
        self._check(directions, "directions")
        V = directions.reshape(len(directions), -1)
        product = self.matrix @ V
        value = self.value
        slopes = V.T @ self.gradient
        if at is not None:
            value = self(at)
            slopes = slopes + product.T @ self._offset(at)
        curvatures = V.T @ product
        return Cut(value, slopes, (curvatures + curvatures.T) / 2)

    def newton_step(
        self,
        method: str = "cg",
        damping: float = 0.0,
        *,
        tol: float = 1e-6,
        max_iter: int | None = None,
        preconditioner: LinearOperator | Callable[[Tensor], Tensor] | None = None,
        stop: Callable[[Iterate], bool | Tensor] | None = None,
    ) -> Float[Tensor, " dim"]:
        """Compute −(H + damping·I)⁻¹ g, the step from θ₀ to the minimum (Eq. 3).

        Args:
            method: `"cg"`: conjugate gradients, truncated by `tol`, `max_iter` or `stop`. (To get
                the full history, call `cg(q.matrix, -q.gradient, ...)`.) `"exact"`: a Cholesky
                factorisation of the dense matrix, which needs D products and D² memory.
            damping: The multiple of the identity to add to H.
            tol: For `"cg"`: the tolerance on the residual, relative to the gradient.
            max_iter: For `"cg"`: the largest number of iterations. Default: 10 D.
            preconditioner: For `"cg"`: a symmetric positive definite approximation of the inverse,
                as an operator or as a function of a matrix.
            stop: For `"cg"`: a rule that is called after every iteration; see `cg`.

        Returns:
            The step, `[D]`.

        Raises:
            ValueError: If the method is unknown, the damping is negative, or an option of `"cg"` is
                passed with a different method; or if the damped matrix turns out not to be positive
                definite, so that there is no minimum.
            FloatingPointError: If a product is not finite.
        """
        if not damping >= 0:
            raise ValueError(f"`damping` is {damping}. Pass a number of at least 0.")
        if method not in ("cg", "exact"):
            raise ValueError(f"Unknown method {method!r}. Use 'cg' or 'exact'.")
        damped = self.matrix + damping * Identity(len(self.gradient))
        if method == "exact":
            if (tol, max_iter, preconditioner, stop) != (1e-6, None, None, None):
                raise ValueError(
                    '`tol`, `max_iter`, `preconditioner` and `stop` apply only to `method="cg"`. '
                    "Remove them."
                )
            return solve_exactly(damped.to_dense(), -self.gradient)
        solution = cg(
            damped,
            -self.gradient,
            tol,
            max_iter,
            preconditioner=preconditioner,
            stop=stop,
        )
        if solution.status is Status.BREAKDOWN:
            raise FloatingPointError(solution.message)
        if solution.status in _WITHOUT_STEP:
            raise ValueError(solution.message)
        return solution.x

    def _offset(self, theta: Tensor) -> Tensor:
        self._check(theta, "theta")
        return theta - _columns(self.position, theta)

    def _unit(self, direction: Tensor) -> Tensor:
        """Normalise directions, which must be finite and not zero."""
        self._check(direction, "direction")
        norm = column_norms(direction)
        if not (norm.isfinite() & (norm > 0)).all():
            raise ValueError(
                "A direction has length zero or contains NaN or Inf. Pass directions of "
                "positive, finite length."
            )
        return direction / norm.to(direction)

    def _check(self, tensor: Tensor, name: str) -> None:
        """Raise an error unless a tensor is a vector `[D]`, or k vectors `[D, k]`."""
        check_no_autocast(self.position.device, self.position.dtype)
        size = self.gradient.shape[0]
        if tensor.ndim not in (1, 2) or tensor.shape[0] != size:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}. Pass a tensor of shape ({size},) or "
                f"({size}, k)."
            )


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Compute inner products of a vector with a vector or columns, or of columns with columns."""
    if x.ndim < y.ndim:
        return x @ y
    return torch.linalg.vecdot(x, y, dim=0)


def _columns(vector: Tensor, like: Tensor) -> Tensor:
    return vector[:, None] if like.ndim == 2 else vector
