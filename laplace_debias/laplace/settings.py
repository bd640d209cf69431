"""The choices of a `Laplace`, checked."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec

import torch

from laplace_debias.curvature.fits.kinds import WITH_FACTORS, CurvatureKind
from laplace_debias.curvature.layers.blocks import Sharing
from laplace_debias.curvature.losses.cotangents import FisherType
from laplace_debias.curvature.network.class_dim import check_class_dim
from laplace_debias.system.checks import check_is
from laplace_debias.system.memory import check_memory_bound

_P = ParamSpec("_P")
OURS = {
    "sigma_noise": "la.sigma",
    "predictive_samples": "la.sample(n), or la.predict(x, method='nn')",
    "subset_of_weights": 'params="all" or "last_layer"',
    "hessian_structure": 'curvature="kfac", "diag", "full" or "lowrank"',
    "optimize_prior_precision": "la.tune(validation_loader) or la.tune_evidence()",
}
"""Names of laplace-torch, and what takes their place."""


def knowing_laplace_torch(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that answers arguments of laplace-torch with ours."""

    @functools.wraps(init)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> None:
        for theirs in OURS.keys() & named.keys():
            raise TypeError(f"{theirs} is laplace-torch's name: use {OURS[theirs]}.")
        init(*arguments, **named)

    return checked


@dataclass(frozen=True)
class FitSettings:
    """The choices of a fit; as `Laplace` takes it.

    Attributes:
        kind: The curvature.
        fisher: Which cotangents stand for the loss Hessian.
        factor_dtype: In what Kronecker factors are summed and decomposed.
        joint: Whether a layer's weight and bias make one block.
        sharing: How positions share a weight.
        memory_bound: Bytes of working memory for output gradients; None as `granted` takes it.
        class_dim: Which dimension of the outputs has the classes; the last if None.

    Raises:
        ValueError: If a choice is unknown or out of range.
        TypeError: If one is of another type.
    """

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
        check_memory_bound(self.memory_bound)
        check_class_dim(self.class_dim)

    def check_used(self) -> None:
        """Require choices that have an effect on this curvature.

        Raises:
            ValueError: Otherwise.
        """
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
