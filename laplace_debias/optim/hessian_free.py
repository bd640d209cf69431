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

# Constants of the Levenberg–Marquardt rule in Martens' form: the damping is divided by the factor
# if the reduction ratio is above the upper limit, and multiplied by it if the ratio is below the
# lower limit.
_UPPER_RATIO = 0.75
_LOWER_RATIO = 0.25
_DAMPING_FACTOR = 1.5


@dataclass(frozen=True)
class StepReport:
    """The record of one step of `DebiasedHessianFree`.

    Attributes:
        loss: The loss before the step, including weight decay, on the batch that sets the step
            sizes.
        new_loss: The loss on the same batch after the step.
        predicted: The change in this loss that the undamped quadratic predicts for the full step.
        reduction_ratio: The actual change in the loss after the full step, divided by the predicted
            change; 0 if no decrease is predicted.
        step_size: The factor by which the full step was scaled: 1 without a line search, and 0 if
            the line search found no sufficient decrease.
        damping: The damping λ with which the step was computed.
        solution: The result of conjugate gradients for the step (with two batches, the debiased
            trajectory).
        num_matvecs: The total number of curvature products on both batches.
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

    Each step minimises a damped quadratic model of the batch loss, whose curvature is the
    generalised Gauss-Newton matrix (GGN). It is minimised by conjugate gradients until Martens'
    rule stops them. A line search then determines the length of the step, and the
    Levenberg–Marquardt rule adapts the damping. If there is a second batch, the directions come
    from the first batch, and the step sizes along them are measured on the second one. Damping and
    line search also use the second batch, so they are not biased by the batch that determined the
    directions. Without a second batch, the optimiser is the single-batch Hessian-free method.

    The loss must be convex in the outputs (cross-entropy, squared error, ...), so that the GGN is
    positive semi-definite. Closures must be deterministic, without dropout. Batch normalisation in
    training mode updates its running statistics every time a closure is called, that is, several
    times per step.

    Weight decay is set per parameter group, as in `torch.optim`. To exclude the biases, put them
    into a separate group with `weight_decay=0`. The quadratic includes weight decay exactly.

    Args:
        params: Parameters or groups.
        damping: The initial λ ≥ 0; λ times the identity matrix is added to the GGN. λ is adapted by
            multiplication, so 0 remains 0. The current λ is part of `state_dict`.
        max_iter: Largest number of iterations of conjugate gradients.
        tol: Tolerance of conjugate gradients: the residual norm relative to the norm of the
            gradient.
        weight_decay: β of ½ β ‖θ‖², for each group.
        adapt_damping: Whether to adapt λ.
        line_search: Whether to search along the step; if false, the full step is always taken.

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

    # A class attribute, because torch drops instance attributes when it copies an optimizer.
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
            ValueError: If the weight decay is negative or not finite, or another option differs
                from its value in the other groups.
            NotImplementedError: If parameters are split over processes.
        """
        first = self.param_groups[0] if self.param_groups else self.defaults
        # Read the options from the groups, which contain the current damping instead of the initial
        # one.
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
            first: A closure that computes the outputs and the mean loss of the batch that
                determines the directions, and returns `(loss, outputs)`. The loss must be a
                function of the outputs, and must not include weight decay. Its graph must contain
                every parameter that the step should change.
            second: A closure for the batch that sets the step sizes, which must be independent of
                the first batch. Default: the first batch also sets the step sizes.

        Returns:
            The loss before the step, including weight decay, on the batch that sets the step sizes.
            `last_step` contains a full record of the step.

        Raises:
            TypeError: If a closure does not return two tensors, the first of them a scalar.
            ValueError: If no parameter requires a gradient, the parameters differ in dtype or
                device, a loss is not finite, or a loss depends on parameters directly.
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
        # At a minimum, no change is predicted, and the ratio is undefined.
        if options["adapt_damping"] and predicted != 0:
            self._adapt_damping(reduction_ratio)
        return theta.new_tensor(second_model.loss)

    def _weight_decays(self) -> Tensor:
        """Return the weight decay that applies to each entry of the parameters, `[D]`."""
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
        """Compute the step by conjugate gradients, whose step sizes come from the second model.

        Args:
            first_model: The model that determines the directions.
            second_model: The model that determines the step sizes.
            shift: Weight decay plus damping, which is added to the diagonals of both GGNs, `[D]`.

        Returns:
            The solution, and the total number of products with the GGNs.
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
        """Return the parameters to train, which must all have the same dtype and device."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
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
