"""A small GPT-like decoder, and low-rank adaptation of any network's linear layers."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class _Attention(nn.Module):
    """Causal self-attention, its queries, keys and values from one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position's mixture of itself and those before it."""
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class _Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, causal blocks, an untied head; GPT-2's initialisation."""

    def __init__(self, vocabulary: int, context: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2 scales down what is added to the residual stream, which 2·depth terms share.
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, T, V]` of each position's next token, from `tokens [B, T <= context]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable product of low rank, `base(x) + B A x`."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        options = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, **options)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, **options)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def with_lora(model: nn.Module, rank: int, target: str | None = None) -> nn.Module:
    """A frozen copy of a model with low-rank additions to its linear layers.

    Args:
        model: The model; it is left as it is.
        rank: Rank of the additions.
        target: Path of the layer that is adapted; all `nn.Linear` if None.
    """
    adapted = copy.deepcopy(model).requires_grad_(False)
    for path, layer in list(adapted.named_modules()):
        if type(layer) is nn.Linear and target in (None, path):
            parent, _, child = path.rpartition(".")
            setattr(adapted.get_submodule(parent), child, LoRALinear(layer, rank))
    return adapted
