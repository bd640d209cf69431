"""Networks with parameters that belong to no layer K-FAC knows, or are used in another way."""

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, weight_norm


class ClassToken(nn.Module):
    """A class token, a position table and a learned scale, as vision transformers have them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.gamma = nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        return self.head((h + self.gamma * torch.tanh(h)).mean(1))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x.flatten(0, 1)))))
        return self.head(h).view(len(x), -1, 3).mean(1)


class TiedHead(nn.Module):
    """A language model whose head is its embedding, as a layer or as a function."""

    def __init__(self, is_layer):
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.mix = nn.Linear(3, 3)
        self.is_layer = is_layer
        if is_layer:
            self.head = nn.Linear(3, 6, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = torch.tanh(self.mix(self.embedding(x).cumsum(1)))[:, -1]
        return self.head(h) if self.is_layer else F.linear(h, self.embedding.weight)


class RootMeanSquare(nn.Module):
    """A normalisation as language models write it themselves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Recurrent(nn.Module):
    """A recurrent layer, with the examples in the first or in the second dimension."""

    def __init__(self, kind, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.rnn = kind(3, 4, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        _, state = self.rnn(x if self.batch_first else x.transpose(0, 1))
        state = state[0] if isinstance(state, tuple) else state
        return self.head(state[-1])


class RelativePositions(nn.Module):
    """Attention with a table of biases, and projections that only their parent reads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(3, 9)
        self.table = nn.Parameter(torch.randn(7))
        self.register_buffer("index", torch.arange(4)[:, None] - torch.arange(4) + 3)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return (q @ k.mT + self.table[self.index]).softmax(-1) @ v


class PermutedPositions(nn.Module):
    """A table of biases that is looked up once for all examples and then permuted, as in T5."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 2)
        self.register_buffer("index", torch.arange(4)[:, None] - torch.arange(4) + 3)

    def forward(self, x):
        scores = (x @ x.mT).unsqueeze(1) + self.table(self.index).permute([2, 0, 1])
        return (scores.softmax(-1) @ x.unsqueeze(1)).sum(1)


class Standardised(nn.Conv1d):
    """A subclass that does not compute what its base class does."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Branching(nn.Module):
    """A forward pass that looks at its numbers, which `vmap` cannot follow."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.scale if bool((x.abs() < 1e9).all()) else x


class Frames(nn.Module):
    """A convolution of frames that are merged into the examples."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.conv(x.reshape(-1, 1, 3)).view(len(x), -1, 4).mean(1))


class Several(nn.Module):
    """Parameters in a list, and one that is a single number."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (x * self.list[0] + self.list[1]).mean(1) / self.temperature


class TimeFirst(nn.Module):
    """Attention that has the examples in the second dimension."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.head(self.attention(x, x, x)[0].mean(0))


class Prototypes(nn.Module):
    """Distances from points that are learned."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.points = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return torch.cdist(x1=self.embed(x), x2=self.points, p=2).mean(1)


def _mean(*layers):
    return nn.Sequential(*layers, _MeanOverPositions(), nn.Linear(3, 3))


class _MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1)


def _features(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


NETWORKS = {
    "class token": ClassToken,
    "tied layers": Tied,
    "tied head": lambda: TiedHead(True),
    "tied head by function": lambda: TiedHead(False),
    "custom norm": lambda: _mean(nn.Linear(3, 3), RootMeanSquare()),
    "permuted norm": lambda: _features(
        nn.Unflatten(1, (4, 1)), nn.Conv2d(4, 3, (1, 2)), timm.layers.LayerNorm2d(3)
    ),
    "layer scale": lambda: _mean(nn.Linear(3, 3), timm.layers.LayerScale(3, 0.5)),
    "LSTM": lambda: Recurrent(nn.LSTM, True),
    "LSTM, time first": lambda: Recurrent(nn.LSTM, False),
    "GRU": lambda: Recurrent(nn.GRU, True),
    "weight norm": lambda: _mean(parametrizations.weight_norm(nn.Linear(3, 3))),
    "old weight norm": lambda: _mean(weight_norm(nn.Linear(3, 3))),
    "relative positions": lambda: _mean(nn.Linear(3, 3), RelativePositions()),
    "permuted positions": lambda: _mean(nn.Linear(3, 3), PermutedPositions()),
    "weight standardisation": lambda: _features(Standardised(4, 2, 2)),
    "branch on the data": lambda: _mean(nn.Linear(3, 3), Branching()),
    "merged frames": Frames,
    "parameter list": Several,
    "PReLU": lambda: _mean(nn.Linear(3, 3), nn.PReLU()),
    "attention, time first": TimeFirst,
    "prototypes": Prototypes,
}
"""By a name; all take inputs `[B, 4, 3]`, or of a "tied head" tokens `[B, 4]`."""


def network(name):
    """One of `NETWORKS` in double precision, with inputs for it, `[7, ...]`, and targets."""
    torch.manual_seed(0)
    is_of_tokens = name.startswith("tied head")
    x = torch.randint(6, (7, 4)) if is_of_tokens else torch.randn(7, 4, 3).double()
    model = NETWORKS[name]().double().eval()
    with torch.no_grad():
        num_outputs = model(x).shape[1]
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, x, torch.randint(num_outputs, (7,))
