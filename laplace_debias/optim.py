"""Hessian-free optimisation with step sizes from a second batch."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laplace_debias.linalg import Solution, cg, debiased_cg, relative_progress
from laplace_debias.operators import Diagonal
from laplace_debias.operators.base import LinearOperator

# Computes a batch's outputs and its mean loss anew: returns (loss, outputs).
Closure = Callable[[], tuple[Tensor, Tensor]]

# Levenberg and Marquardt's rule in Martens' form: trust the quadratic more or less.
_TRUSTED, _DISTRUSTED, _FACTOR = 0.75, 0.25, 1.5
# Armijo's share of the decrease that the slope promises, and how the step is cut until it is met.
_SUFFICIENT, _BACKTRACK, _MAX_BACKTRACKS = 1e-2, 0.8, 30


@dataclass(frozen=True)
class StepReport:
    """What one step of `DebiasedHessianFree` did.

    Attributes:
        loss: The loss of the batch that sets step sizes, weight decay included, before the step.
        new_loss: The same after it.
        predicted: The change that the undamped quadratic of that batch predicts for the full step.
        reduction_ratio: The full step's change of the loss over the predicted one; 0 where that
            is no decrease.
        step_size: The line search's factor; 0 if no factor decreased the loss.
        damping: The damping that the step was computed with.
        solution: Conjugate gradients on the step (the debiased trajectory where there are two
            batches).
        num_matvecs: Curvature products, of either batch.
    """

    loss: float
    new_loss: float
    predicted: float
    reduction_ratio: float
    step_size: float
    damping: float
    solution: Solution
    num_matvecs: int


class DebiasedHessianFree(Optimizer):
    r"""Truncated Newton steps: directions from one batch, step sizes from another (Eq. 8).

    A step minimises the batch's quadratic, with the generalised Gauss-Newton matrix (GGN) and
    damping, by conjugate gradients until Martens' rule stops them; adapts the damping by
    Levenberg and Marquardt's rule; and searches the line to the minimum. With a second batch the
    first one's directions are walked by step sizes measured on the second, which also decides on
    damping and line search: neither is then fooled by the extremes of the batch that made the
    directions. Without, it is the single-batch Hessian-free method.

    The loss must be convex in the outputs (cross-entropy, squared error, ...), so that the GGN
    is positive semi-definite, and closures must be deterministic: no dropout. Batch normalisation
    in training mode updates its running statistics with every call of a closure, a handful a
    step.

    Weight decay goes with the parameter groups, as in `torch.optim`: give the biases a group of
    their own with `weight_decay=0`. It is part of the quadratic, exactly.

    Args:
        params: Parameters or groups.
        damping: λ ≥ 0 at the start, a multiple of the identity. Adapted by factors, so that 0
            stays 0; part of the state.
        max_iter: Iterations of conjugate gradients, at most.
        tol: Their tolerance on the residual, relative to the gradient.
        weight_decay: β of ½ β ‖θ‖², for each group.
        adapt_damping: Whether to adapt λ.
        line_search: Whether to search the line; if not, the full step is taken.

    Raises:
        ValueError: If an option is out of its range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.optim import DebiasedHessianFree
        >>> model = nn.Linear(3, 2)
        >>> optimizer = DebiasedHessianFree(model.parameters(), weight_decay=1e-3)
        >>> def closure(x, y):
        ...     def evaluate():
        ...         outputs = model(x)
        ...         return nn.functional.cross_entropy(outputs, y), outputs
        ...
        ...     return evaluate
        >>> batches = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
        >>> loss = optimizer.step(*(closure(x, y) for x, y in batches))

    Reference:
        Martens (2010), Deep learning via Hessian-free optimization; Tatzel et al. (2025),
        Debiasing mini-batch quadratics for applications in deep learning, Section 4.2.1.
    """

    # Of the class: torch's copies of an optimizer keep nothing else of the instance.
    last_step: StepReport | None = None

    def __init__(
        self,
        params: Iterable[Any],
        damping: float = 1.0,
        max_iter: int = 50,
        tol: float = 1e-4,
        weight_decay: float = 0.0,
        adapt_damping: bool = True,
        line_search: bool = True,
    ) -> None:
        if not damping >= 0:
            raise ValueError(f"damping must be at least 0, got {damping}.")
        if max_iter < 1:
            raise ValueError(f"max_iter must be at least 1, got {max_iter}.")
        if not tol >= 0:
            raise ValueError(f"tol must be at least 0, got {tol}.")
        options = {
            "damping": damping,
            "max_iter": max_iter,
            "tol": tol,
            "adapt_damping": adapt_damping,
            "line_search": line_search,
        }
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with a weight decay of their own; all else is the whole step's.

        Args:
            param_group: `params`, and perhaps `weight_decay`.

        Raises:
            ValueError: If the weight decay is negative or not finite, or another option differs
                from the other groups'.
        """
        first = self.param_groups[0] if self.param_groups else self.defaults
        # The damping of the moment, not that of the start.
        shared = {name: first[name] for name in self.defaults if name != "weight_decay"}
        for name, value in shared.items():
            if param_group.get(name, value) != value:
                raise ValueError(
                    f"{name} belongs to the whole step and cannot differ between groups: pass "
                    "it to the optimizer."
                )
        weight_decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}.")
        super().add_param_group({**shared, **param_group})

    def step(self, first: Closure, second: Closure | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            first: Computes the outputs and the mean loss of the batch that makes the directions
                and returns `(loss, outputs)`, without weight decay. Its graph must reach every
                parameter that is to move, and the loss must be a function of the outputs.
            second: The same for the batch that sets step sizes, independent of the first; None to
                use the first for both.

        Returns:
            The loss before the step, weight decay included, of the batch that sets step sizes. The
            record of the step is in `last_step`.

        Raises:
            TypeError: If a closure returns something else.
            ValueError: If there is no parameter to move, or a loss is not finite.
        """
        parameters = self._parameters()
        options = self.param_groups[0]
        theta = _flat(parameters)
        decay = torch.cat(
            [
                torch.full_like(p, group["weight_decay"]).flatten()
                for group in self.param_groups
                for p in group["params"]
                if p.requires_grad
            ]
        )
        shift = decay + options["damping"]

        with torch.enable_grad():
            batch = _Batch(first, parameters, decay, theta)
            A = batch.ggn + Diagonal(shift)
            rule = relative_progress()
            limits = {"tol": options["tol"], "max_iter": options["max_iter"]}
            if second is None:
                solution = cg(A, -batch.gradient, stop=rule, **limits)
                judge, num_matvecs = batch, solution.num_matvecs
            else:
                judge = _Batch(second, parameters, decay, theta)
                both = debiased_cg(
                    A,
                    judge.ggn + Diagonal(shift),
                    -batch.gradient,
                    -judge.gradient,
                    stop=lambda single, debiased: rule(debiased),
                    **limits,
                )
                solution, num_matvecs = both.debiased, both.num_matvecs

        step = solution.x
        # What conjugate gradients minimised holds the damping, which is no part of the loss.
        predicted = float(solution.values[-1] - options["damping"] * step.square().sum() / 2)
        evaluate = _Line(second or first, parameters, decay, theta, step)
        full = evaluate(1.0)
        ratio = (full - judge.loss) / predicted if predicted < 0 else 0.0
        size, new_loss = 1.0, full
        if options["line_search"]:
            slope = float(judge.gradient @ step)
            size, new_loss = _backtrack(evaluate, judge.loss, slope, full)
        evaluate.move(size)
        self.last_step = StepReport(
            loss=judge.loss,
            new_loss=new_loss,
            predicted=predicted,
            reduction_ratio=ratio,
            step_size=size,
            damping=options["damping"],
            solution=solution,
            num_matvecs=num_matvecs,
        )
        # Where no change is predicted, as at a minimum, there is nothing to judge by.
        if options["adapt_damping"] and predicted != 0:
            self._adapt(ratio)
        return theta.new_tensor(judge.loss)

    def _parameters(self) -> list[Tensor]:
        parameters = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if not parameters:
            raise ValueError("No parameter requires a gradient: there is nothing to move.")
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1:
            found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
            raise ValueError(f"Parameters must share one dtype and one device, found {found}.")
        return parameters

    def _adapt(self, ratio: float) -> None:
        for group in self.param_groups:
            # NaN, of a loss that has overflowed, counts as distrust.
            if not ratio >= _DISTRUSTED:
                group["damping"] *= _FACTOR
            elif ratio > _TRUSTED:
                group["damping"] /= _FACTOR


class _Batch:
    """A batch's loss, gradient (both with weight decay) and GGN at the present parameters."""

    def __init__(
        self, closure: Closure, parameters: list[Tensor], decay: Tensor, theta: Tensor
    ) -> None:
        loss, outputs = _evaluated(closure)
        if not (loss.requires_grad and outputs.requires_grad):
            raise ValueError(
                "The closure's loss or outputs depend on no parameter: compute both from the "
                "model's forward pass, without torch.no_grad()."
            )
        self.loss = float(loss.detach()) + 0.5 * float(decay @ theta.square())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        self.gradient = _flat(_filled(gradients, parameters)) + decay * theta
        self.ggn = _GraphGGN(loss, outputs, parameters)


class _GraphGGN(LinearOperator):
    """The GGN of a loss that has been computed, by differentiating its graph twice.

    Pearlmutter's and Schraudolph's product: the Jacobian's product is the derivative of its
    adjoint's, the loss Hessian's that of the loss gradient's.
    """

    def __init__(self, loss: Tensor, outputs: Tensor, parameters: list[Tensor]) -> None:
        self._outputs, self._parameters = outputs, parameters
        self._cotangent = torch.zeros_like(outputs, requires_grad=True)
        adjoint = torch.autograd.grad(
            outputs, parameters, self._cotangent, create_graph=True, allow_unused=True
        )
        # A parameter that the outputs do not depend on has no column.
        self._adjoint = [(i, row) for i, row in enumerate(adjoint) if row is not None]
        slope = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)[0]
        if slope is None:
            raise ValueError(
                "The closure's loss is not computed from the outputs that it returns: return the "
                "very tensor that goes into the loss."
            )
        self._slope = slope

    @property
    def shape(self) -> tuple[int, int]:
        size = sum(p.numel() for p in self._parameters)
        return size, size

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def is_symmetric(self) -> bool:
        return True

    @property
    def is_positive_semidefinite(self) -> bool:
        return True

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        return self

    def _matmat(self, matrix: Tensor) -> Tensor:
        return torch.stack([self._product(column) for column in matrix.unbind(1)], dim=1)

    def _product(self, vector: Tensor) -> Tensor:
        sizes = [p.numel() for p in self._parameters]
        parts = vector.split(sizes)
        rows = [row for _, row in self._adjoint]
        tangents = [parts[i].view_as(row) for i, row in self._adjoint]
        (pushed,) = torch.autograd.grad(rows, self._cotangent, tangents, retain_graph=True)
        bent = torch.zeros_like(pushed)
        # The gradient of a squared error is linear, that of a linear loss constant.
        if self._slope.requires_grad:
            (bent,) = torch.autograd.grad(self._slope, self._outputs, pushed, retain_graph=True)
        pulled = torch.autograd.grad(
            self._outputs, self._parameters, bent, retain_graph=True, allow_unused=True
        )
        return _flat(_filled(pulled, self._parameters))


class _Line:
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
                loss, _ = _evaluated(self._closure, finite=False)
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


def _backtrack(evaluate: _Line, loss: float, slope: float, full: float) -> tuple[float, float]:
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


def _evaluated(closure: Closure, finite: bool = True) -> tuple[Tensor, Tensor]:
    result = closure()
    pair = isinstance(result, tuple) and len(result) == 2
    if not (pair and all(isinstance(part, Tensor) for part in result)):
        raise TypeError(
            f"A closure must return (loss, outputs), two tensors, got {type(result).__name__}."
        )
    loss, outputs = result
    if loss.ndim != 0:
        raise TypeError(
            f"A closure's loss must be a number, got shape {tuple(loss.shape)}: take its mean."
        )
    if finite and not loss.isfinite():
        raise ValueError(
            "The loss is NaN or Inf before the step: look at data and parameters, or start from a "
            "smaller step or more damping."
        )
    return loss, outputs


def _filled(gradients: Iterable[Tensor | None], parameters: list[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
