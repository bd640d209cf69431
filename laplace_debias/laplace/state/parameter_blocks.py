"""The Bayesian parameters and their curvature blocks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules import Block
from laplace_debias.curvature.layers.blocks import curvature_blocks, parameter_order
from laplace_debias.curvature.layers.resolve import resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.selection import (
    LAST_LAYER,
    SUPPORTED,
    check_parameters,
    leaving_out,
    select_parameters,
)
from laplace_debias.curvature.network.shared_copy import refuse_calls
from laplace_debias.curvature.network.unwrapping import unwrapped
from laplace_debias.laplace.state.curvature_config import CurvatureConfig
from laplace_debias.operators import ParameterLayout
from laplace_debias.system.shown import warn


class UnusedParametersError(ValueError):
    """Selected parameters on which the outputs for the examples that were read do not depend."""


@dataclass(frozen=True, eq=False)
class ParameterBlocks:
    """The Bayesian parameters, divided into the blocks whose curvature is measured.

    Attributes:
        names: The names of the parameters, in the model's order.
        blocks: The curvature blocks, in the order in which the posterior holds them.
        replay_modules: For each parameter whose curvature is not measured at its layer, the paths
            of the modules that use it; see `curvature_blocks`.
        order: The index of each block entry among the flattened parameters, `[D]`; None if both
            have the same order.
        block_names: The names of the blocks; a single name if the curvature is one dense block.
        size: D, the number of Bayesian parameters.
    """

    names: list[str]
    blocks: list[Block]
    replay_modules: Mapping[str, Sequence[str]]
    order: Int[Tensor, " parameters"] | None
    block_names: list[str]
    size: int

    @cached_property
    def is_linear_layer(self) -> bool:
        """Whether all Bayesian parameters belong to one linear layer."""
        first = self.blocks[0]
        return first.rule.is_linear and all(block.site == first.site for block in self.blocks)

    @classmethod
    def selected(
        cls,
        model: nn.Module,
        config: CurvatureConfig,
        example: Inputs | None,
        replay_modules: Mapping[str, Sequence[str]] | None = None,
    ) -> "ParameterBlocks":
        """Select the parameters as configured, and divide them into blocks.

        An example is needed only if the last layer cannot be found from the structure of the model.
        """
        names = select_parameters(model, config.params, example)
        check_parameters(model, names)
        replay_modules = {} if replay_modules is None else replay_modules
        blocks = curvature_blocks(model, names, config.joint, config.sharing, calls=replay_modules)
        if config.params == SUPPORTED:
            blocks = [block for block in blocks if not block.calls]
            supported = {name for block in blocks for name in block.parameters}
            names = [name for name in names if name in supported]
            if not names:
                raise ValueError(
                    f"`params={SUPPORTED!r}` selects no parameter, because the model has no "
                    "supported layer. Use a model with a supported layer."
                )
        max_rank = config.structure.directions_per_factor
        blocks = [replace(block, rank=max_rank) for block in blocks]
        block_names = config.structure.block_names(blocks)
        order = parameter_order(model, names, blocks)
        size = sum(block.size for block in blocks)
        return cls(names, blocks, replay_modules, order, block_names=block_names, size=size)

    def verified(
        self,
        tap: Tap,
        model: nn.Module,
        config: CurvatureConfig,
        x: Inputs,
        *,
        all_inputs: Iterable[Inputs] | None,
    ) -> "ParameterBlocks":
        """Compare the blocks with autograd on a few examples, and return the correct blocks.

        The examples come from the first batch `x`. If this batch does not use all parameters,
        further examples come from `all_inputs` (None if the data cannot be read again). If the
        outputs do not depend on a parameter, a general selection such as `"all"` leaves it out with
        a warning.
        """
        with refuse_calls(unwrapped(model), self.names, tap.network):
            resolved = resolve(
                tap,
                self.names,
                x,
                config.joint,
                sharing=config.sharing,
                more_batches=all_inputs or (),
            )
        names = self.names
        replay_modules = resolved.calls
        if config.params == SUPPORTED and replay_modules:
            names = [name for name in names if name not in replay_modules]
            replay_modules = {}
        if resolved.unused:
            names = [name for name in names if name not in resolved.unused]
            is_general = isinstance(config.params, str) and config.params != LAST_LAYER
            _report_unused(
                resolved.unused,
                may_leave_out=is_general and bool(names),
                saw_all_data=all_inputs is not None,
            )
        if not names:
            raise ValueError(
                f"`params={config.params!r}` selects no parameter of a supported layer. Select "
                'others, such as `params="all"`.'
            )
        if names == self.names and dict(replay_modules) == dict(self.replay_modules):
            return self
        return ParameterBlocks.selected(model, replace(config, params=names), x, replay_modules)

    def layout(self, model: nn.Module) -> ParameterLayout:
        """Return the names and shapes of the parameters."""
        return ParameterLayout.of({name: model.get_parameter(name) for name in self.names})

    def flattened(self, model: nn.Module) -> Float[Tensor, " parameters"]:
        """Return the current values in the model's order, `[D]`, in at least single precision."""
        values = []
        for name in self.names:
            value = model.get_parameter(name).detach().flatten()
            values.append(value.to(wide(value.dtype)))
        return torch.cat(values)


def _report_unused(unused: Sequence[str], may_leave_out: bool, saw_all_data: bool) -> None:
    """Warn that parameters on which the outputs do not depend are left out, or raise an error.

    Raises:
        UnusedParametersError: If they may not be left out.
    """
    outputs = "outputs" if saw_all_data else "outputs of the first batch"
    reason = (
        f"The {outputs} do not depend on {list(unused)} through differentiable "
        "operations (an unused branch, `detach`, `no_grad`)"
    )
    if not may_leave_out:
        raise UnusedParametersError(f"{reason}. Exclude them with `{leaving_out(unused)}`.")
    warn(
        f"{reason}, so they are excluded from the posterior. To avoid this warning, pass "
        f"`{leaving_out(unused)}`, or freeze them with requires_grad_(False)."
    )
