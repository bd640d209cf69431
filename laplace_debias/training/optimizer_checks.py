"""Checks of the optimizer and the scheduler of a training loop."""

import inspect
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laplace_debias.curvature.network.unwrapping import unwrapped


def check_steps(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Require that steps need no arguments, because the training loop has none to pass."""
    argument = _argument_of_step(optimizer)
    if argument is not None:
        raise ValueError(
            f"A step of {type(optimizer).__name__} needs the argument `{argument}`, but the "
            "training calls `optimizer.step()` once per batch, after the backward pass. Use an "
            "optimizer such as torch.optim.Adam or SGD."
        )
    argument = None if scheduler is None else _argument_of_step(scheduler)
    if argument is not None:
        raise ValueError(
            f"A step of {type(scheduler).__name__} needs the argument `{argument}`, but the "
            "training calls `scheduler.step()` after each batch. Use a schedule of the number of "
            "steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )


def _argument_of_step(
    stepping: Optimizer | LRScheduler,
) -> str | None:
    """Return the name of the first argument that `step` requires, or None if it requires none."""
    # The method of the class is inspected, because a scheduler replaces it on the optimizer object.
    _, *parameters = inspect.signature(type(stepping).step).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.kind not in kinds:
            return parameter.name
    return None


def check_optimizer(optimizer: Optimizer, model: nn.Module, names: Sequence[str]) -> None:
    """Require that the optimizer updates the Bayesian parameters without weight decay."""
    plain = unwrapped(model)
    bayesian = {id(plain.get_parameter(name)) for name in names}
    trained = set[int]()
    for group in optimizer.param_groups:
        members = {id(parameter) for parameter in group["params"]}
        trained |= members
        if group.get("weight_decay", 0) and members & bayesian:
            raise ValueError(
                f"The optimizer has `weight_decay={group['weight_decay']}` for parameters that "
                "have a prior, although the prior precision already acts as their weight decay. "
                "Set `weight_decay` to 0."
            )
    if not trained & bayesian:
        raise ValueError(
            "The optimizer contains none of the model's Bayesian parameters. Create it with "
            "model.parameters()."
        )
