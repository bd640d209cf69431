"""The local quadratic model of a batch's loss, and the loss itself along a step."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_debias.operators.base import Symmetric
from laplace_debias.system.graph import graph_nodes

# A function that recomputes the outputs and the mean loss of a batch, and returns (loss, outputs).
Closure = Callable[[], tuple[Tensor, Tensor]]


class LocalModel:
    """The quadratic model of a batch's loss at the current parameters.

    Args:
        closure: The closure of the batch.
        parameters: The parameters.
        decay: The weight decay of each entry of the parameters, `[D]`.
        theta: The current values of the parameters as a vector, `[D]`.

    Attributes:
        loss: The loss, including weight decay.
        gradient: The gradient of this loss, `[D]`.
        ggn: The GGN of the loss without weight decay, `[D, D]`.
    """

    def __init__(
        self, closure: Closure, parameters: list[Tensor], decay: Tensor, theta: Tensor
    ) -> None:
        loss, outputs = evaluate_closure(closure)
        if not (loss.requires_grad and outputs.requires_grad):
            raise ValueError(
                "The closure's loss or outputs do not depend on any parameter. Compute both with "
                "the model's forward pass, without torch.no_grad()."
            )
        self.loss = float(loss.detach()) + 0.5 * float(decay @ theta.square())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        self.gradient = flat(gradients) + decay * theta
        self.ggn = GraphGGN(loss, outputs, parameters)
        if _depends_directly(loss, outputs, parameters):
            raise ValueError(
                "The closure's loss depends on parameters directly, as a weight decay does, and "
                "not only through the outputs. Leave this part out of the loss, and pass "
                "`weight_decay=` to the optimizer."
            )


def _depends_directly(loss: Tensor, outputs: Tensor, parameters: list[Tensor]) -> bool:
    """Whether the autograd graph of a loss has a path to a parameter that avoids the outputs.

    The outputs may be a parameter themselves.
    """
    ids = {id(parameter) for parameter in parameters if parameter is not outputs}
    nodes = graph_nodes(loss, excluded=[outputs.grad_fn])
    return any(id(getattr(node, "variable", None)) in ids for node in nodes)


class GraphGGN(Symmetric):
    """The GGN of a loss whose graph is kept; each product differentiates through this graph.

    The products use the method of Pearlmutter (1994) and Schraudolph (2002): the product with the
    Jacobian is the derivative of the product with the adjoint of the Jacobian, and the product with
    the loss Hessian is the derivative of the loss gradient.
    """

    def __init__(self, loss: Tensor, outputs: Tensor, parameters: list[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._outputs = outputs
        self._cotangent = torch.zeros_like(outputs, requires_grad=True)
        adjoint = torch.autograd.grad(
            outputs, parameters, self._cotangent, create_graph=True, allow_unused=True
        )
        # The parts of Jᵀ c by parameter, with the parameter's index. Leave out parameters that the
        # outputs do not depend on; their columns of the Jacobian are zero.
        self._adjoint = [(i, part) for i, part in enumerate(adjoint) if part is not None]
        # The gradient of the loss with respect to the outputs.
        slope = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)[0]
        if slope is None:
            raise ValueError(
                "The closure returns outputs that did not take part in computing its loss. Compute "
                "the loss from the tensor that the closure returns."
            )
        self._slope = slope

    @property
    def operands(self) -> list[Tensor]:
        """The parameters, which determine the dtype and the device of the operator."""
        return list(self._parameters)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape `(D, D)`, where D is the total number of entries of the parameters."""
        size = sum(p.numel() for p in self._parameters)
        return size, size

    is_positive_semidefinite = True

    def _matmat(self, matrix: Tensor) -> Tensor:
        return torch.stack([self._product(column) for column in matrix.unbind(1)], dim=1)

    def _product(self, vector: Tensor) -> Tensor:
        """Compute Jᵀ H J v for the Jacobian J of the outputs and the loss Hessian H.

        Jᵀ c is linear in the cotangent c, so J v is its derivative with respect to c, applied to v.
        H J v is the derivative, along J v, of the gradient of the loss with respect to the outputs.
        """
        entries = vector.split([p.numel() for p in self._parameters])
        parts = [part for _, part in self._adjoint]
        tangents = [entries[i].view_as(part) for i, part in self._adjoint]
        (Jv,) = torch.autograd.grad(parts, self._cotangent, tangents, retain_graph=True)
        HJv = torch.zeros_like(Jv)
        # A linear loss has a constant gradient, so its Hessian and the product are zero.
        if self._slope.requires_grad:
            (HJv,) = torch.autograd.grad(self._slope, self._outputs, Jv, retain_graph=True)
        product = torch.autograd.grad(
            self._outputs, self._parameters, HJv, retain_graph=True, materialize_grads=True
        )
        return flat(product)


def evaluate_closure(closure: Closure, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Call a closure, check what it returns, and return the loss and the outputs.

    Raises:
        TypeError: If the closure does not return two tensors, or the first tensor is not a scalar.
        ValueError: If the loss is not finite, unless `finite` is False.
    """
    result = closure()
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(isinstance(tensor, Tensor) for tensor in result):
        raise TypeError(
            f"A closure must return (loss, outputs), two tensors, got {type(result).__name__}. "
            "Return both."
        )
    loss, outputs = result
    if loss.ndim != 0:
        raise TypeError(
            f"A closure's loss must be a number, got shape {tuple(loss.shape)}. Return its mean."
        )
    if finite and not loss.isfinite():
        raise ValueError(
            "The loss is NaN or Inf before the step. Check the data and the parameters, or use a "
            "smaller step or more damping."
        )
    return loss, outputs


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten tensors and join them into one vector, without a graph."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


_SUFFICIENT_DECREASE = 1e-2
"""Armijo's condition requires at least this fraction of the decrease that the slope predicts."""
_BACKTRACK = 0.8
"""The step is multiplied by this factor until the condition is met."""
_MAX_BACKTRACKS = 30


class LossAlongStep:
    """The loss at θ + size · step as a function of `size`; parameters are moved in place."""

    def __init__(
        self,
        closure: Closure,
        parameters: list[Tensor],
        decay: Tensor,
        theta: Tensor,
        step: Tensor,
    ) -> None:
        self._closure = closure
        self._parameters = parameters
        self._decay = decay
        self._theta = theta
        self._step = step

    def __call__(self, size: float) -> float:
        """Compute the loss, including weight decay, at θ + size · step, and move back to θ."""
        theta = self.move(size)
        try:
            with torch.no_grad():
                loss, _ = evaluate_closure(self._closure, finite=False)
        finally:
            self.move(0.0)
        return float(loss) + 0.5 * float(self._decay @ theta.square())

    def move(self, size: float) -> Tensor:
        """Move the parameters to θ + size · step, and return this position as a vector."""
        theta = self._theta + size * self._step if size else self._theta
        with torch.no_grad():
            entries = theta.split([p.numel() for p in self._parameters])
            for parameter, values in zip(self._parameters, entries, strict=True):
                parameter.copy_(values.view_as(parameter))
        return theta


def backtrack(
    loss_along_step: LossAlongStep, loss: float, slope: float, full_step_loss: float
) -> tuple[float, float]:
    """Find the largest step size 0.8ⁱ that meets Armijo's condition.

    Args:
        loss_along_step: The loss along the step.
        loss: The loss at size 0.
        slope: The derivative of the loss along the step, at size 0.
        full_step_loss: The loss at size 1.

    Returns:
        The step size and the loss at this size; 0 and the loss at 0 if no size meets the condition.
    """
    if not slope < 0:
        return 0.0, loss
    size = 1.0
    new_loss = full_step_loss
    for _ in range(_MAX_BACKTRACKS):
        # This form of the comparison is false if the loss is NaN.
        if new_loss <= loss + _SUFFICIENT_DECREASE * size * slope:
            return size, new_loss
        size *= _BACKTRACK
        new_loss = loss_along_step(size)
    return 0.0, loss
