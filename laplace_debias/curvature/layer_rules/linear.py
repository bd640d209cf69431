"""Linear layers."""

from typing import ClassVar

from torch import nn

from laplace_debias.curvature.layer_rules.base import LayerRule, ModuleTypes


class LinearRule(LayerRule):
    """A linear layer; any number of positions may lie between examples and features."""

    module_types: ClassVar[ModuleTypes] = (nn.Linear,)
    kind = "linear"
    is_linear = True

    def backpack_derivatives(self, layer: nn.Module) -> str | None:
        """Return the class with which BackPACK pushes cotangents through the layer, or None."""
        return "linear.LinearDerivatives" if type(layer) is nn.Linear else None
