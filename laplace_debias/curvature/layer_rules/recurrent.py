"""Recurrent layers, whose calls are run again for each example."""

from torch import nn

from laplace_debias.curvature.layer_rules.generic import GenericRule


class RecurrentRule(GenericRule):
    """A layer that loops over time steps; its parameters are measured at its calls."""

    module_types = (nn.RNNBase,)
    is_recurrent = True
