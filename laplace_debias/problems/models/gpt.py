"""A small GPT-like decoder."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class _Attention(nn.Module):
    """Causal self-attention, its queries, keys and values from one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
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

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """The residual stream after the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with pre-layer-norm blocks and an untied head; see `gpt`."""

    def __init__(self, vocabulary: int, context: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
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

    def forward(self, tokens: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of each position's next token, given it and those before it.

        Raises:
            ValueError: If there are more tokens than the context holds.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(
                f"{time} tokens; expected at most the context of {self.context}: shorten the "
                "input, or build the model with a longer context"
            )
        positions = torch.arange(time, device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def gpt(
    vocabulary: int = 65, context: int = 64, depth: int = 4, width: int = 128, heads: int = 4
) -> GPT:
    """A small GPT-like decoder: token and position embeddings, causal attention, an untied head.

    All it is made of are `nn.Embedding`, `nn.Linear` and `nn.LayerNorm`; it has no dropout. Weights
    start from GPT-2's initialisation. The loss of an example is the sum over its tokens of the
    cross-entropy, with targets [B, T] and −100 where a position does not count.

    Args:
        vocabulary: Number of tokens, V.
        context: Most tokens of an input.
        depth: Number of blocks.
        width: Features of the residual stream.
        heads: Attention heads, a divisor of the width.

    Returns:
        A network from integer tokens [B, T ≤ context] to logits [B, T, V].

    Raises:
        ValueError: If a number is below 1 or the heads do not divide the width.

    Reference:
        Radford et al. (2019), Language Models are Unsupervised Multitask Learners.
    """
    if min(vocabulary, context, depth, width, heads) < 1:
        raise ValueError(
            f"vocabulary {vocabulary}, context {context}, depth {depth}, width {width}, heads "
            f"{heads}; expected at least 1 each"
        )
    if width % heads:
        raise ValueError(f"width {width} with {heads} heads; expected a multiple of the heads")
    return GPT(vocabulary, context, depth, width, heads)
