"""The choices of a `Laplace`, checked; its Bayesian parameters, and the blocks that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.fits.kinds import WITH_FACTORS, CurvatureKind
from laplace_debias.curvature.layers.blocks import Block, Sharing, curvature_blocks, parameter_order
from laplace_debias.curvature.layers.resolve import resolve
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.selection import (
    SUPPORTED,
    ParameterSelection,
    check_parameters,
    is_general,
    leaving_out,
    select_parameters,
)
from laplace_debias.curvature.network.shadow import wide
from laplace_debias.system.checks import check_is, whole
from laplace_debias.system.shown import warn


@dataclass(frozen=True)
class FitSettings:
    """The choices of a fit; as `Laplace` takes them."""

    kind: CurvatureKind
    fisher: FisherType
    factor_dtype: torch.dtype
    joint: bool
    sharing: Sharing
    memory_bound: int | None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"factor_dtype must be torch.float32 or torch.float64, got {self.factor_dtype}."
            )
        check_is(self.joint, "joint", bool)
        check_is(self.sharing, "sharing", str, Mapping)
        if self.memory_bound is not None:
            whole(self.memory_bound, "memory_bound")
        if self.class_dim is not None and whole(self.class_dim, "class_dim", -(2**53)) == 0:
            raise ValueError(
                "class_dim=0 is the dimension of the examples: use class_dim=1 for outputs "
                "[B, C, ...], class_dim=-1 for outputs [B, ..., C]."
            )

    def check_used(self) -> None:
        """Require choices that have an effect on this curvature."""
        kind = self.kind
        if self.sharing != "expand" and kind.name not in WITH_FACTORS:
            raise ValueError(
                f"sharing={self.sharing!r} is for Kronecker factors, and curvature={kind.name!r} "
                "has none: leave it out."
            )
        if self.joint and kind.is_dense:
            raise ValueError(
                "joint=True makes one block of a layer's weight and bias, and "
                f"curvature={kind.name!r} is one block of all parameters: leave it out."
            )


@dataclass(frozen=True, eq=False)
class BayesianParameters:
    """The Bayesian parameters, and how their curvature is measured.

    Where parameters are not measured at their layers, `calls` tells it, as `curvature_blocks` takes
    it; `order` tells where the blocks' entries lie among the flattened parameters.
    """

    names: list[str]
    blocks: list[Block]
    calls: Mapping[str, Sequence[str]]
    order: Int[Tensor, " parameters"] | None
    block_names: list[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        selection: ParameterSelection,
        settings: FitSettings,
        example: Inputs | None,
        calls: Mapping[str, Sequence[str]] | None = None,
    ) -> "BayesianParameters":
        """The parameters that a user selects; the last layer may take an example to be found."""
        names = select_parameters(model, selection, example)
        check_parameters(model, names)
        calls = {} if calls is None else calls
        rank = settings.kind.directions_per_factor
        blocks = curvature_blocks(model, names, settings.joint, settings.sharing, calls)
        blocks = [replace(block, rank=rank) for block in blocks]
        if selection == SUPPORTED:
            blocks = [block for block in blocks if not block.calls]
            taken = {name for block in blocks for name in block.parameters}
            names = [name for name in names if name in taken]
            if not names:
                raise ValueError(f"params={SUPPORTED!r} selects no parameter: no layer is known.")
        block_names = [DENSE_BLOCK] if settings.kind.is_dense else [b.name for b in blocks]
        return cls(names, blocks, calls, parameter_order(model, names, blocks), block_names)

    def verified(
        self,
        tap: Tap,
        model: nn.Module,
        selection: ParameterSelection,
        settings: FitSettings,
        x: Inputs,
    ) -> "BayesianParameters":
        """The same parameters with blocks that an example or two were held against.

        Of a general selection, such as `"all"`, parameters that the outputs do not depend on are
        left out, with a warning.
        """
        found = resolve(tap, self.names, x, settings.joint, settings.sharing)
        names, calls = self.names, found.calls
        if selection == SUPPORTED and calls:
            names = [name for name in names if name not in calls]
            calls = {}
        if found.unused:
            names = [name for name in names if name not in found.unused]
            _report_unused(found.unused, self.names, is_general(selection) and bool(names))
        if not names:
            raise ValueError(
                f"params={selection!r} leaves no parameter: none has a block of its layer here."
            )
        if names == self.names and dict(calls) == dict(self.calls):
            return self
        return BayesianParameters.of(model, names, settings, x, calls)

    def flat(self, model: nn.Module) -> Float[Tensor, " parameters"]:
        """The present values, in the model's order, `[D]`, no narrower than single precision."""
        values = []
        for name in self.names:
            value = model.get_parameter(name).detach().flatten()
            values.append(value.to(wide(value.dtype)))
        return torch.cat(values)


def _report_unused(unused: Sequence[str], names: Sequence[str], may_leave_out: bool) -> None:
    """Say that the outputs do not depend on parameters: a warning where they may be left out."""
    says = (
        f"The outputs do not depend on {list(unused)} by differentiable operations (an unused "
        "branch, `detach`, `no_grad`)"
    )
    if not may_leave_out:
        raise ValueError(f"{says}: leave them out with {leaving_out(unused)}.")
    warn(
        f"{says}, so they are left out of the posterior. To say so yourself, pass "
        f"{leaving_out(unused)}, or freeze them with requires_grad_(False)."
    )
