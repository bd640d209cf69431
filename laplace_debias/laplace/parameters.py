"""The Bayesian parameters of a model, and the blocks that they make."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laplace_debias.curvature.fits.dense import DENSE_BLOCK
from laplace_debias.curvature.layers.blocks import Block, curvature_blocks, parameter_order
from laplace_debias.curvature.network.inputs import Inputs
from laplace_debias.curvature.network.precision import wide
from laplace_debias.curvature.network.selection import (
    ParameterSelection,
    check_parameters,
    select_parameters,
)
from laplace_debias.laplace.settings import FitSettings


@dataclass(frozen=True, eq=False)
class BayesianParameters:
    """Which parameters are Bayesian, and what is known of them without data.

    Attributes:
        names: Their names, in the model's order.
        blocks: Their curvature blocks.
        order: Where the blocks' entries lie among the flattened parameters, as
            `GaussianPosterior` has it.
        block_names: Names of the posterior's blocks: one where the curvature is dense.
    """

    names: list[str]
    blocks: list[Block]
    order: Int[Tensor, " parameters"] | None
    block_names: list[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        selection: ParameterSelection,
        settings: FitSettings,
        example: Inputs | None,
    ) -> "BayesianParameters":
        """Those that a user selects.

        Args:
            model: The model.
            selection: As `Laplace` takes it.
            settings: How blocks are made of them.
            example: Inputs on the model's device, if the last layer is to be found by them.

        Raises:
            ValueError: As `select_parameters` and `check_parameters`.
            NotImplementedError: As `curvature_blocks`.
        """
        names = select_parameters(model, selection, example)
        check_parameters(model, names)
        blocks = curvature_blocks(model, names, settings.joint, settings.sharing)
        block_names = [DENSE_BLOCK] if settings.kind.is_dense else [b.name for b in blocks]
        return cls(names, blocks, parameter_order(model, names, blocks), block_names)

    def flat(self, model: nn.Module) -> Float[Tensor, " parameters"]:
        """Their present values, in the model's order, `[D]`, no narrower than single precision."""
        values = [model.get_parameter(name).detach().flatten() for name in self.names]
        return torch.cat([value.to(wide(value.dtype)) for value in values])
