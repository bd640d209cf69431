"""Options of a fit: which parameters are Bayesian, and how their curvature is computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.network.selection import ParameterSelection
from laplace_debias.curvature.structures import CurvatureStructure
from laplace_debias.system.checks import check_is, whole


@dataclass(frozen=True)
class CurvatureConfig:
    """The options of a fit, under the same names as the arguments of `Laplace`.

    Attributes:
        structure: The structure of the curvature, with its rank.
        fisher: The type of the Fisher matrix, or the loss Hessian in closed form.
        params: Which parameters are Bayesian.
        backend: `"backpack"`, `"hooks"` or `"auto"`.
        factor_dtype: The dtype in which factors are summed and decomposed.
        joint: Whether a layer's weight and bias form one block.
        sharing: How to treat weights that are applied at several positions.
        memory_bound: Limit on the working memory for output gradients, in bytes; None for the
            default.
    """

    structure: CurvatureStructure
    fisher: FisherType
    # A predicate is left out of the `repr`, because its string form differs between processes.
    params: ParameterSelection = field(repr=False)
    backend: str
    factor_dtype: torch.dtype
    joint: bool
    sharing: Sharing
    memory_bound: int | None

    def __post_init__(self) -> None:
        if self.factor_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"`factor_dtype` is {self.factor_dtype}. Pass torch.float32 or torch.float64."
            )
        check_is(self.joint, "joint", bool)
        check_is(self.sharing, "sharing", str, Mapping)
        if self.memory_bound is not None:
            whole(self.memory_bound, "memory_bound")
