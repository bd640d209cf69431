"""Exact line searches on many quadratics at once, for conjugate gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from laplace_debias.linalg.checks import check_right_side, check_square
from laplace_debias.linalg.column_norms import column_norms
from laplace_debias.linalg.results import Iterate, Solution, Status
from laplace_debias.operators.base import LinearOperator
from laplace_debias.system.checks import real

# Whether to stop: one boolean for all right-hand sides, or a tensor [k] with one for each.
Verdict = bool | Tensor

_STATUSES = list(Status)
_RUNNING = -1


class LineSearches:
    r"""The iterates $x_{t+1} = x_t + \tau_t d_t$ that minimise $\tfrac12 x^\top A x - b^\top x$.

    There is one quadratic per right-hand side, and every step has one direction per quadratic. The
    negative gradient is updated recursively, $r_{t+1} = r_t - \tau_t A d_t$ (Eq. 12), so slope and
    curvature together need only one product. A right-hand side is done when its residual norm is at
    most `tol` times the norm of b.

    Internally, b and all iterates are matrices `[n, k]`, in a unit of each right-hand side's own
    (`_unit`) that keeps their squares in the range of single precision. Results are in the units
    and the shape of b.

    Attributes:
        residual: b − A x for the current iterate, `[n, k]`, in internal units.
        moved: Whether the last step moved each right-hand side, `[k]`.
    """

    def __init__(
        self,
        A: LinearOperator,
        b: Tensor,
        x0: Tensor | None,
        tol: float,
        keep_directions: bool = False,
    ) -> None:
        check_square(A, "quadratic")
        if not 0 <= real(tol, "tol") < math.inf:
            raise ValueError(f"`tol` is {tol}. Pass a finite number of at least 0.")
        check_right_side(A, b, "b", least_columns=0)
        self._A = A
        self._is_vector = b.ndim == 1
        shape = b.shape
        b = b.unsqueeze(1) if self._is_vector else b
        self._x = torch.zeros_like(b)
        self.residual = b
        self._num_matvecs = 0
        if x0 is not None:
            check_right_side(A, x0, "x0", least_columns=0)
            if x0.shape != shape:
                raise ValueError(
                    f"`x0` has shape {tuple(x0.shape)}, but `b` has shape {tuple(shape)}. Pass "
                    "tensors of the same shape."
                )
            # If a right-hand side is zero, start from the solution, which is zero, as SciPy does.
            self._x = torch.where(b.any(0), x0.reshape(b.shape), 0)
            self.residual = b - A @ self._x
            self._num_matvecs = b.shape[1]
        self._unit = _choose_units(b, self.residual)
        b = b / self._unit
        self._x = self._x / self._unit
        self.residual = self.residual / self._unit
        norms = self.residual.norm(dim=0)
        self._tolerance = tol * b.norm(dim=0)
        # For each right-hand side, the index of its status in `_STATUSES`, or `_RUNNING`.
        self._codes = torch.full((b.shape[1],), _RUNNING, device=b.device)
        # The largest norm of a product with a unit vector so far, which bounds rounding errors.
        self._largest_product = torch.zeros_like(norms)
        # The last direction without positive curvature, and its curvature.
        self._bad_direction: Tensor | None = None
        self._bad_curvature = torch.full_like(norms, torch.nan)
        self.moved = torch.zeros_like(self.running)
        self._num_iterations = torch.zeros_like(self._codes)
        value = -((b + self.residual) * self._x).sum(0) / 2
        self._history: dict[str, list[Tensor]] = {
            "residual_norms": [self._like_b(norms * self._unit)],
            "values": [self._like_b(value * self._unit * self._unit)],
            "slopes": [],
            "curvatures": [],
            "step_sizes": [],
        }
        self._direction: Tensor | None = None
        self._directions: list[Tensor] | None = [] if keep_directions else None
        self.end(~norms.isfinite(), Status.BREAKDOWN)
        self.end(norms <= self._tolerance, Status.CONVERGED)

    @property
    def running(self) -> Tensor:
        """Whether each right-hand side is still running, booleans `[k]`."""
        return self._codes == _RUNNING

    @property
    def is_done(self) -> bool:
        """Whether all right-hand sides are done."""
        return not bool(self.running.any())

    def end(self, verdict: Verdict, status: Status) -> None:
        """End the running right-hand sides for which the verdict is true, with the given status."""
        is_ended = torch.as_tensor(verdict, dtype=torch.bool, device=self._codes.device)
        self._codes = torch.where(self.running & is_ended, _STATUSES.index(status), self._codes)

    def step(self, direction: Tensor, always: bool = False) -> bool:
        """Move the iterate of each running right-hand side to the minimum along its direction.

        A right-hand side does not move, and its run ends, if the curvature along the direction is
        not positive or a result is not finite. It does not move either if its direction is zero.

        Args:
            direction: The directions, `[n, k]`, of any length.
            always: Whether to record a step even if no right-hand side moves.

        Returns:
            Whether a step was recorded.
        """
        length = column_norms(direction)
        active = self.running & (length > 0)
        direction = direction / torch.where(active, length, 1).to(direction)
        product = self._multiply(direction, active)
        # Along the direction, the quadratic has the slope -dᵀr and the curvature dᵀA d.
        negative_slope = torch.linalg.vecdot(direction, self.residual, dim=0)
        curvature = torch.linalg.vecdot(direction, product, dim=0)
        # The error of any product can be as large as the rounding error of the largest product so
        # far.
        product_norm = column_norms(product)
        self._largest_product = torch.fmax(self._largest_product, product_norm)
        threshold = torch.finfo(product.dtype).eps * self._largest_product
        finite = product_norm.isfinite()
        positive = active & finite & (curvature > threshold)
        tau = torch.where(positive, negative_slope / curvature, 0)
        residual = self.residual - tau * product
        residual_norm = residual.norm(dim=0)
        broken = active & ~(finite & residual_norm.isfinite())
        moved = positive & ~broken
        flat = active & ~positive & ~broken
        self.end(broken, Status.BREAKDOWN)
        self._end_flat(flat, direction, curvature, threshold)
        self.moved = moved
        if not (always or bool(moved.any())):
            return False

        self._x = torch.where(moved, self._x + tau * direction, self._x)
        self.residual = torch.where(moved, residual, self.residual)
        self._num_iterations = self._num_iterations + moved
        self._direction = self._like_b(torch.where(moved, direction, 0))
        if self._directions is not None:
            self._directions.append(self._direction)
        # A right-hand side that is not active has no slope and curvature, because they were not
        # measured.
        self._record(
            residual_norm=residual_norm,
            slope=torch.where(active, -negative_slope, torch.nan),
            curvature=torch.where(active, curvature, torch.nan),
            step_size=tau,
        )
        self.end(moved & (residual_norm <= self._tolerance), Status.CONVERGED)
        return True

    def _record(
        self, *, residual_norm: Tensor, slope: Tensor, curvature: Tensor, step_size: Tensor
    ) -> None:
        """Add a step to the history, in the units of b; all arguments are `[k]`."""
        slope = slope * self._unit
        step_size = step_size * self._unit
        last_norm = self._history["residual_norms"][-1]
        entries = {
            "residual_norms": torch.where(self.moved, residual_norm * self._unit, last_norm),
            "values": self._history["values"][-1]
            + torch.where(self.moved, slope * step_size / 2, 0),
            "slopes": slope,
            "curvatures": curvature,
            "step_sizes": torch.where(self.moved, step_size, 0),
        }
        for name, entry in entries.items():
            self._history[name].append(self._like_b(entry))

    def iterate(self) -> Iterate:
        """Return the current iterate."""
        iteration = len(self._history["step_sizes"])
        x = self._like_b(self._x * self._unit)
        return Iterate(iteration, x, self._direction, **self._history)

    def solution(self, otherwise: Status) -> Solution:
        """Return the solution so far; `otherwise` is the status of running right-hand sides."""
        self.end(True, otherwise)
        no_step = self._like_b(self._x[:0])
        history: dict[str, Any] = {
            name: torch.stack(entries) if entries else no_step
            for name, entries in self._history.items()
        }
        directions = None
        if self._directions is not None:
            empty = self._like_b(self._x[:, None][:, :0])
            directions = torch.cat([empty, *(d[:, None] for d in self._directions)], dim=1)
        negative_direction = None
        negative_curvature = None
        if self._bad_direction is not None:
            negative_direction = self._like_b(self._bad_direction)
            negative_curvature = self._like_b(self._bad_curvature)
        return Solution(
            x=self._like_b(self._x * self._unit),
            statuses=tuple(_STATUSES[code] for code in self._codes.tolist()),
            num_iterations=self._like_b(self._num_iterations),
            num_matvecs=self._num_matvecs,
            negative_direction=negative_direction,
            negative_curvature=negative_curvature,
            directions=directions,
            **history,
        )

    def _multiply(self, direction: Tensor, active: Tensor) -> Tensor:
        """Multiply only the active columns; the product is zero for the others."""
        columns = active.nonzero()[:, 0]
        self._num_matvecs += len(columns)
        if len(columns) == direction.shape[1]:
            return self._A @ direction
        product = torch.zeros_like(direction)
        if len(columns):
            product[:, columns] = self._A @ direction[:, columns]
        return product

    def _end_flat(
        self, flat: Tensor, direction: Tensor, curvature: Tensor, threshold: Tensor
    ) -> None:
        """End right-hand sides whose curvature is not positive, and record their directions."""
        if not bool(flat.any()):
            return
        negative = flat & (curvature < -threshold)
        self.end(negative, Status.NEGATIVE_CURVATURE)
        self.end(flat, Status.ZERO_CURVATURE)
        last = torch.zeros_like(direction) if self._bad_direction is None else self._bad_direction
        self._bad_direction = torch.where(flat, direction, last)
        self._bad_curvature = torch.where(flat, curvature, self._bad_curvature)

    def _like_b(self, tensor: Tensor) -> Tensor:
        """If b is a vector, drop the last dimension of values per column, `[..., columns]`."""
        return tensor[..., 0] if self._is_vector else tensor


def _choose_units(b: Tensor, residual: Tensor) -> Tensor:
    """Choose a unit for each right-hand side `[k]`, in which its largest entry is about 1.

    The squares of b and the residual are then in the range of single precision. Scaling by these
    units is exact, because they are powers of two.
    """
    # Without the row of zeros, there would be no largest entry if the operator has no rows.
    entries = [b.abs(), residual.abs(), b.new_zeros(1, b.shape[1])]
    largest = torch.cat(entries).amax(dim=0)
    return torch.exp2(largest.frexp().exponent.to(b.dtype) - 1)
