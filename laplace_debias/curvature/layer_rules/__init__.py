"""Layer rules, which define each layer type's blocks, activations and output gradients."""

from functools import lru_cache

from torch import nn

from laplace_debias.curvature.layer_rules.attention import AttentionRule
from laplace_debias.curvature.layer_rules.base import WIDE, Block, LayerRule, Site
from laplace_debias.curvature.layer_rules.convolution import (
    ConvolutionRule,
    TransposedConvolutionRule,
)
from laplace_debias.curvature.layer_rules.embedding import EmbeddingBagRule, EmbeddingRule
from laplace_debias.curvature.layer_rules.generic import GENERIC
from laplace_debias.curvature.layer_rules.hugging_face_conv1d import HuggingFaceConv1DRule
from laplace_debias.curvature.layer_rules.linear import LinearRule
from laplace_debias.curvature.layer_rules.norm import ChannelNormRule, NormRule
from laplace_debias.curvature.layer_rules.recurrent import RecurrentRule

LAYER_RULES: dict[str, LayerRule] = {
    "linear": LinearRule(),
    "convolution": ConvolutionRule(),
    "transposed convolution": TransposedConvolutionRule(),
    "norm": NormRule(),
    "channel norm": ChannelNormRule(),
    "embedding": EmbeddingRule(),
    "embedding bag": EmbeddingBagRule(),
    "attention": AttentionRule(),
    "recurrent": RecurrentRule(),
    "Hugging Face Conv1D": HuggingFaceConv1DRule(),
}
"""The rules of all layer types. Rules that are added later take precedence."""

__all__ = ["GENERIC", "LAYER_RULES", "WIDE", "Block", "LayerRule", "Site", "layer_rule"]


def layer_rule(layer: nn.Module) -> LayerRule:
    """Find the rule of a layer's type or, without such a rule, of the nearest base class."""
    layer_type: type = type(layer)
    return _rule_of_type(layer_type, tuple(LAYER_RULES.values()))


@lru_cache(maxsize=1024)
def _rule_of_type(layer_type: type, rules: tuple[LayerRule, ...]) -> LayerRule:
    for ancestor in layer_type.__mro__:
        name = f"{ancestor.__module__}.{ancestor.__qualname__}"
        for rule in reversed(rules):
            if ancestor in rule.module_types or name in rule.module_types:
                return rule
    return GENERIC
