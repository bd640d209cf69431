"""Small float64 networks of tokens and sequences, whose parameters are all random."""

import torch
from torch import nn


def randomised(model):
    """Away from ones and zeros, in float64."""
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.3)
        for parameter in model.parameters():
            parameter.sub_(0.8)
    return model


class Bag(nn.Module):
    """Tokens → embeddings → outputs, with a layer behind that looks at every position."""

    def __init__(self, padding_idx=None, head=True):
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=padding_idx)
        self.head = nn.Linear(4, 3) if head else None

    def forward(self, tokens):
        z = self.table(tokens)
        return z.flatten(1) if self.head is None else self.head(torch.tanh(z)).mean(1)


class Attention(nn.Module):
    def __init__(self, cross=False, kdim=None, bias=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            4, 2, batch_first=True, kdim=kdim, vdim=kdim, bias=bias
        )
        self.cross = cross
        self.kdim = kdim
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        keys = x.flip(1)[..., : self.kdim].tanh() if self.cross else x
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        z, _ = self.attention(x, keys, keys, attn_mask=mask)
        return self.head(z).mean(1)


class Words(nn.Module):
    """A table that is looked up, positions, and a linear layer that gives the outputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 3)
        self.mix = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.mix(self.table(tokens)).tanh().mean(1))
