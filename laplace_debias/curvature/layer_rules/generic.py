"""The rule for any parameter as a vector with an exact block, however the network uses it."""

from jaxtyping import Float
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import Block, LayerRule


class GenericRule(LayerRule):
    """A parameter that operations multiply by or add, or that replayed calls read."""

    is_generic = True
    can_be_joint = False

    def owns(self, layer: nn.Module, key: str) -> bool:
        """Return False, because no parameter is measured at its layer."""
        return False

    def has_sequence(self, layer: nn.Module) -> bool:
        """Return False, because nothing is known about the positions."""
        return False

    def jacobian_rows(
        self,
        layer: nn.Module,
        block: Block,
        x: Float[Tensor, "batch positions size"],
        g: Float[Tensor, "columns batch positions size"],
    ) -> Float[Tensor, "columns batch size"]:
        """Compute `Σ_t g_t ⊙ x_t`, where x are the factors that multiply the parameter."""
        return (g * x).sum(2)


GENERIC = GenericRule()
"""The rule for all parameters to which no layer's rule applies."""
