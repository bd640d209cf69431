"""The loss on a line through the parameters, and a search for a step that decreases it."""

import torch
from torch import Tensor

from laplace_debias.optim.batch import Closure, evaluated

# Armijo's share of the decrease that the slope promises, and how the step is cut until it is met.
_SUFFICIENT, _BACKTRACK, _MAX_BACKTRACKS = 1e-2, 0.8, 30


class Line:
    """The loss on the line through the parameters, which are moved in place."""

    def __init__(
        self,
        closure: Closure,
        parameters: list[Tensor],
        decay: Tensor,
        theta: Tensor,
        step: Tensor,
    ) -> None:
        self._closure, self._parameters, self._decay = closure, parameters, decay
        self._theta, self._step = theta, step

    def __call__(self, size: float) -> float:
        """The loss with weight decay at θ + size · step, where the parameters are not left."""
        theta = self.move(size)
        try:
            with torch.no_grad():
                loss, _ = evaluated(self._closure, finite=False)
        finally:
            self.move(0.0)
        return float(loss) + 0.5 * float(self._decay @ theta.square())

    def move(self, size: float) -> Tensor:
        """Move the parameters to θ + size · step."""
        theta = self._theta + size * self._step if size else self._theta
        with torch.no_grad():
            parts = theta.split([p.numel() for p in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        return theta


def backtrack(evaluate: Line, loss: float, slope: float, full: float) -> tuple[float, float]:
    """The largest factor 0.8ⁱ that meets Armijo's condition with its loss; 0 if none does."""
    if not slope < 0:
        return 0.0, loss
    size, new_loss = 1.0, full
    for _ in range(_MAX_BACKTRACKS):
        # Written so that NaN fails.
        if new_loss <= loss + _SUFFICIENT * size * slope:
            return size, new_loss
        size *= _BACKTRACK
        new_loss = evaluate(size)
    return 0.0, loss
