"""Hessian-free optimisation with step sizes from a second batch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laplace_debias.linalg import Solution, cg, debiased_cg, relative_progress
from laplace_debias.operators import Diagonal
from laplace_debias.optim.local_model import Closure, LocalModel, LossAlongStep, backtrack, flat

# The constants of the rule of Levenberg and Marquardt in Martens' form: the damping is divided by
# the factor if the reduction ratio is above the upper limit, and multiplied by the factor if the
# ratio is below the lower limit.
_UPPER_RATIO = 0.75
_LOWER_RATIO = 0.25
_DAMPING_FACTOR = 1.5


@dataclass(frozen=True)
class StepReport:
    """The record of one step of `DebiasedHessianFree`.

    Attributes:
        loss: The loss before the step, including weight decay, of the batch that sets step sizes.
        new_loss: The loss of the same batch after the step.
        predicted: The change of this loss that the undamped quadratic predicts for the full step.
        reduction_ratio: The change of the loss by the full step, divided by the predicted change; 0
            if the predicted change is not a decrease.
        step_size: The factor that the line search found; 0 if no factor decreased the loss.
        damping: The damping with which the step was computed.
        solution: The result of conjugate gradients for the step (with two batches, the debiased
            trajectory).
        num_matvecs: The number of curvature products with both batches.
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
    r"""A Hessian-free optimiser that measures the lengths of its steps on a second batch.

    A step minimises the quadratic of the batch, with the generalised Gauss-Newton matrix (GGN) and
    damping, by conjugate gradients, which Martens' rule stops. The damping is adapted by the rule
    of Levenberg and Marquardt, and a line search then determines the length of the step. With a
    second batch, the step sizes along the directions of the first batch are measured on the second
    batch. Damping and line search also use the second batch, so they are not biased by the batch
    that determined the directions. Without a second batch, the optimiser is the single-batch
    Hessian-free method.

    The loss must be convex in the outputs (cross-entropy, squared error, ...), so that the GGN is
    positive semi-definite. Closures must be deterministic, without dropout. Batch normalisation in
    training mode updates its running statistics with every call of a closure, that is, several
    times per step.

    Weight decay is set per parameter group, as in `torch.optim`. To exclude the biases, give them a
    group of their own with `weight_decay=0`. Weight decay is an exact part of the quadratic.

    Args:
        params: Parameters or groups.
        damping: The initial λ ≥ 0, the factor of an identity matrix that is added to the GGN. λ is
            adapted by factors, so 0 remains 0. λ is part of the state.
        max_iter: Largest number of iterations of conjugate gradients.
        tol: Tolerance of conjugate gradients on the residual, relative to the gradient.
        weight_decay: β of ½ β ‖θ‖², for each group.
        adapt_damping: Whether to adapt λ.
        line_search: Whether to search along the step; if false, the full step is taken.

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

    # The default is an attribute of the class, because torch's copies of an optimizer drop instance
    # attributes.
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
            raise ValueError(f"`damping` is {damping}. Pass a number of at least 0.")
        if max_iter < 1:
            raise ValueError(f"`max_iter` is {max_iter}. Pass a number of at least 1.")
        if not tol >= 0:
            raise ValueError(f"`tol` is {tol}. Pass a number of at least 0.")
        defaults = {
            "damping": damping,
            "max_iter": max_iter,
            "tol": tol,
            "adapt_damping": adapt_damping,
            "line_search": line_search,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own weight decay; all other options are shared.

        Args:
            param_group: A dictionary with `params` and, optionally, `weight_decay`.

        Raises:
            ValueError: If the weight decay is negative or not finite, or if another option differs
                from its value in the other groups.
            NotImplementedError: If parameters are split over processes.
        """
        first = self.param_groups[0] if self.param_groups else self.defaults
        # The options are read from the groups, which contain the current damping, not the initial
        # damping.
        shared = {name: first[name] for name in self.defaults if name != "weight_decay"}
        for name, value in shared.items():
            if param_group.get(name, value) != value:
                raise ValueError(
                    f"`{name}` applies to the whole step and cannot differ between parameter "
                    "groups. Pass it to the optimizer itself, not in a group."
                )
        weight_decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if not 0 <= weight_decay < math.inf:
            raise ValueError(
                f"`weight_decay` is {weight_decay}. Pass a finite number of at least 0."
            )
        super().add_param_group({**shared, **param_group})
        if any(hasattr(p, "full_tensor") for p in self.param_groups[-1]["params"]):
            raise NotImplementedError(
                "The parameters are split over processes (fully_shard, tensor parallelism), "
                "which this optimizer does not support. Train the plain model on one process."
            )

    def step(self, first: Closure, second: Closure | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            first: Computes the outputs and the mean loss of the batch that makes the directions
                and returns `(loss, outputs)`, without weight decay. The graph must contain every
                parameter that the step changes, and the loss must be a function of the outputs.
            second: Computes outputs and mean loss of the batch that sets step sizes, which must be
                independent of the first batch. Default: the first batch also sets the step sizes.

        Returns:
            The loss before the step, with weight decay, of the batch that sets step sizes. The
            record of the step is in `last_step`.

        Raises:
            TypeError: If a closure does not return two tensors, the first of them a scalar.
            ValueError: If there is no parameter to move, a loss is not finite, or a loss depends
                on parameters directly.
        """
        parameters = self._parameters()
        options = self.param_groups[0]
        damping = options["damping"]
        theta = flat(parameters)
        decay = self._weight_decays()
        with torch.enable_grad():
            first_model = LocalModel(first, parameters, decay, theta)
            second_model = first_model
            if second is not None:
                second_model = LocalModel(second, parameters, decay, theta)
            solution, num_matvecs = self._newton_step(first_model, second_model, decay + damping)

        step = solution.x
        # Conjugate gradients minimise the damped quadratic, but the loss has no damping term.
        predicted = float(solution.values[-1] - damping * step.square().sum() / 2)
        loss_along_step = LossAlongStep(second or first, parameters, decay, theta=theta, step=step)
        full_step_loss = loss_along_step(1.0)
        reduction_ratio = 0.0
        if predicted < 0:
            reduction_ratio = (full_step_loss - second_model.loss) / predicted
        step_size = 1.0
        new_loss = full_step_loss
        if options["line_search"]:
            slope = float(second_model.gradient @ step)
            step_size, new_loss = backtrack(
                loss_along_step, second_model.loss, slope, full_step_loss
            )
        loss_along_step.move(step_size)
        self.last_step = StepReport(
            loss=second_model.loss,
            new_loss=new_loss,
            predicted=predicted,
            reduction_ratio=reduction_ratio,
            step_size=step_size,
            damping=damping,
            solution=solution,
            num_matvecs=num_matvecs,
        )
        # The ratio is defined only if a change is predicted, which is not the case at a minimum.
        if options["adapt_damping"] and predicted != 0:
            self._adapt_damping(reduction_ratio)
        return theta.new_tensor(second_model.loss)

    def _weight_decays(self) -> Tensor:
        """Return the weight decay of every entry of the parameters, `[D]`."""
        decays = [
            torch.full_like(p, group["weight_decay"]).flatten()
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        ]
        return torch.cat(decays)

    def _newton_step(
        self, first_model: LocalModel, second_model: LocalModel, shift: Tensor
    ) -> tuple[Solution, int]:
        """Compute the step by conjugate gradients, with step sizes from the second model.

        Returns:
            The solution, and the number of products with a GGN.
        """
        options = self.param_groups[0]
        rule = relative_progress()
        limits = {"tol": options["tol"], "max_iter": options["max_iter"]}
        A = first_model.ggn + Diagonal(shift)
        if second_model is first_model:
            solution = cg(A, -first_model.gradient, stop=rule, **limits)
            return solution, solution.num_matvecs
        result = debiased_cg(
            A,
            second_model.ggn + Diagonal(shift),
            -first_model.gradient,
            -second_model.gradient,
            stop=lambda single, debiased: rule(debiased),
            **limits,
        )
        return result.debiased, result.num_matvecs

    def _adapt_damping(self, reduction_ratio: float) -> None:
        """Multiply or divide λ according to how well the quadratic predicted the loss."""
        for group in self.param_groups:
            # If the loss has overflowed, the ratio is NaN, which increases the damping.
            if not reduction_ratio >= _LOWER_RATIO:
                group["damping"] *= _DAMPING_FACTOR
            elif reduction_ratio > _UPPER_RATIO:
                group["damping"] /= _DAMPING_FACTOR

    def _parameters(self) -> list[Tensor]:
        """Return the parameters to train, and require one dtype and one device."""
        parameters = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if not parameters:
            raise ValueError(
                "No parameter requires a gradient. Call requires_grad_(True) on the parameters "
                "to train."
            )
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1:
            names = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
            raise ValueError(
                f"The parameters must have the same dtype and device, got {names}. Convert them "
                "with `.to(...)`."
            )
        return parameters
