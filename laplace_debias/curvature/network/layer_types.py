"""The layers that are known, by their class, and how torch's own are made ready to be hooked."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
LAYERS = (
    nn.Linear,
    *CONVOLUTIONS,
    *TRANSPOSED,
    nn.Embedding,
    *NORMS,
    nn.MultiheadAttention,
)
# Query, key and value, which `nn.MultiheadAttention` packs into one parameter.
PROJECTIONS = ("query", "key", "value")


def is_hugging_face_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`: a linear layer with a transposed weight."""
    kind = type(layer)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def is_attention(layer: nn.Module) -> bool:
    """Whether a layer is torch's attention, with its projections exposed or not."""
    return type(layer) in (nn.MultiheadAttention, _ExposedAttention)


def expose_projections(attention: nn.MultiheadAttention) -> None:
    """Give an attention of a `shared_copy` layers `query`, `key` and `value`.

    They are called, as is `out_proj`, in a forward pass in which one of them has a hook.
    """
    packed = attention.in_proj_weight
    weights = (
        [getattr(attention, f"{name[0]}_proj_weight") for name in PROJECTIONS]
        if packed is None
        else packed.detach().chunk(3)
    )
    bias = attention.in_proj_bias
    biases = [None] * 3 if bias is None else bias.detach().chunk(3)
    for name, weight, offset in zip(PROJECTIONS, weights, biases, strict=True):
        attention.add_module(name, _linear(weight, offset))
    out = attention.out_proj
    exposed = _linear(out.weight, out.bias)
    # The same parameters: another layer may share them.
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
        # torch projects once more, by the identity, which changes no digit.
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
