"""The search directions of conjugate gradients."""

import torch
from torch import Tensor

from laplace_debias.linalg.results import Status
from laplace_debias.linalg.solvers.line_searches import LineSearches
from laplace_debias.linalg.solvers.preconditioner import Preconditioner, precondition


class ConjugateDirections:
    """The next direction from the residual and the last direction, `[n, k]`."""

    def __init__(self, preconditioner: Preconditioner | None, reorthogonalize: bool) -> None:
        self._preconditioner = preconditioner
        self._reorthogonalize = reorthogonalize
        self._last: tuple[Tensor, Tensor] | None = None
        # Residuals with their preconditioned selves, scaled to inner products of one.
        self._residuals: list[tuple[Tensor, Tensor]] = []

    def next(self, run: LineSearches) -> Tensor:
        """The directions of the running right-hand sides, zero for the others; ends broken ones."""
        residual = run.residual
        for earlier, dual in self._residuals:
            residual = residual - earlier * torch.linalg.vecdot(dual, residual, dim=0)
        preconditioned = precondition(self._preconditioner, residual)
        rho = torch.linalg.vecdot(residual, preconditioned, dim=0)
        run.end(~rho.isfinite(), Status.BREAKDOWN)
        run.end(run.running & ~(rho > 0), Status.INDEFINITE_PRECONDITIONER)
        direction = preconditioned
        if self._last is not None:
            rho_last, direction_last = self._last
            direction = preconditioned + (rho / rho_last) * direction_last
        direction = torch.where(run.running, direction, 0)
        self._last = rho, direction
        if self._reorthogonalize:
            scale = torch.where(run.running, rho, 1).rsqrt() * run.running
            scaled = residual * scale
            dual = scaled if preconditioned is residual else preconditioned * scale
            self._residuals.append((scaled, dual))
        return direction
