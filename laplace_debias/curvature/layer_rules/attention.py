"""Attention: the projections that `nn.MultiheadAttention` packs into one parameter."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor, nn

from laplace_debias.curvature.layer_rules.base import Block, LayerRule
from laplace_debias.curvature.layer_rules.linear import LinearRule

# The names of the projections: query, key and value.
_PROJECTIONS = ("query", "key", "value")


class AttentionRule(LayerRule):
    """Torch's attention, whose projections become layers; `out_proj` is already a layer."""

    module_types = (nn.MultiheadAttention,)
    kind = "linear"
    can_be_joint = False
    made_layers = _PROJECTIONS

    def owns(self, layer: nn.Module, key: str) -> bool:
        """Return whether the rule applies; subclasses and modules with a `bias_k` are excluded."""
        is_plain = type(layer) in (nn.MultiheadAttention, _ExposedAttention)
        return is_plain and layer.bias_k is None

    def blocks(
        self, layer: nn.Module, path: str, key: str, sharing: str, joint: bool
    ) -> list[Block]:
        """Make a block for each of query, key and value, which project different inputs."""
        parameter = layer.get_parameter(key)
        prefix = f"{path}." if path else ""
        name = prefix + key
        is_bias = parameter.ndim == 1
        kind = self.kind
        d_in = parameter.shape[-1]
        if is_bias:
            kind = "bias"
            d_in = 1
        projections: Sequence[str] = _PROJECTIONS
        block_names = [f"{name}[{index}]" for index in range(len(_PROJECTIONS))]
        if not key.startswith("in_proj"):
            # The parameter belongs to one projection, such as `q_proj_weight` to the query.
            projections = [p for p in _PROJECTIONS if key.startswith(p[0])]
            block_names = [name]
        blocks = []
        for index, projection in enumerate(projections):
            block = Block(
                name=block_names[index],
                parameters=(name,),
                layer=prefix + projection,
                rule=_PROJECTION,
                shape=(parameter.shape[0] // len(projections), d_in),
                kind=kind,
                group=index,
                sharing=sharing,
                is_vector=is_bias,
            )
            blocks.append(block)
        return blocks

    def has_sequence(self, layer: nn.Module) -> bool:
        """Return False, because only the positions of the projections form a sequence."""
        return False

    def prepare(self, layer: nn.Module) -> None:
        """Expose the projections of torch's own attention."""
        if type(layer) is nn.MultiheadAttention:
            _expose_projections(layer)


class _ProjectionRule(LinearRule):
    """One projection of attention: a linear layer whose weight is part of a packed parameter."""

    module_types = ()

    def entries(
        self, layer: nn.Module, block: Block, values: Sequence[Tensor]
    ) -> Shaped[Tensor, "d_out d_in"]:
        """Return the entries of the projection's rows of the packed parameter."""
        start = block.group * block.shape[0]
        return super().entries(layer, block, [values[0][start : start + block.shape[0]]])


_PROJECTION = _ProjectionRule()


def _expose_projections(attention: nn.MultiheadAttention) -> None:
    """Add the layers `query`, `key` and `value` to an attention module of a working copy.

    If one of these layers or `out_proj` has a hook, the forward pass calls them as modules.
    """
    packed = attention.in_proj_weight
    weights: Sequence[Tensor]
    if packed is None:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = packed.detach().chunk(3)
    biases: Sequence[Tensor | None] = [None, None, None]
    if attention.in_proj_bias is not None:
        biases = attention.in_proj_bias.detach().chunk(3)
    for name, weight, offset in zip(_PROJECTIONS, weights, biases, strict=True):
        attention.add_module(name, _linear(weight, offset))
    out = attention.out_proj
    exposed = _linear(out.weight, out.bias)
    # The parameters stay the same objects, because another layer may share them.
    exposed.weight = out.weight
    exposed.bias = out.bias
    attention.out_proj = exposed  # type: ignore[assignment]
    attention.__class__ = _ExposedAttention


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


class _ExposedAttention(nn.MultiheadAttention):
    """Attention whose projections are calls of layers; the masks and heads are left to torch."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if not any(m._forward_hooks for m in (self.query, self.key, self.value, self.out_proj)):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        projected = [self.query(query), self.key(key), self.value(value)]
        if self.batch_first and query.ndim == 3:
            projected = [x.transpose(0, 1) for x in projected]
        # torch projects the results again with identity matrices, which adds no rounding errors.
        attend: Any = F.multi_head_attention_forward
        same = torch.eye(self.embed_dim, dtype=query.dtype, device=query.device)
        outputs, weights = attend(
            *projected,
            self.embed_dim,
            self.num_heads,
            None,
            None,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            0.0,
            same,
            None,
            training=False,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=True,
            q_proj_weight=same,
            k_proj_weight=same,
            v_proj_weight=same,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        if self.batch_first and outputs.ndim == 3:
            outputs = outputs.transpose(0, 1)
        return self.out_proj(outputs), weights
