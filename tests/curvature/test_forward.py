"""Input factors from forward passes are those of a pass forward and back."""

import pytest
import torch
from torch import Tensor, nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.factor_keys import Side
from laplace_debias.curvature.fits.factor_sums import SideSums, factor_sums, sum_at_owners
from laplace_debias.curvature.fits.forward_passes import ForwardPasses
from laplace_debias.curvature.fits.gram_factor import Factor, GramFactor
from laplace_debias.curvature.fits.totals import DataTotals
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.network.shared_copy import shared_copy

PAD = 0


class Padded(nn.Module):
    """Tokens, some of which are padding, and the mean over those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(6, 4, padding_idx=PAD)
        self.up = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens.ne(PAD).to(self.head.weight)[..., None]
        return self.head((self.up(self.token(tokens)).tanh() * real).sum(1) / real.sum(1))


class Twice(nn.Module):
    """A layer that is used twice, and one of its uses on several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(x).relu()).mean(1))


def tokens() -> Tensor:
    lengths = torch.tensor([3, 5, 2, 4, 1, 5])
    drawn = torch.randint(1, 6, (6, 5), generator=torch.Generator().manual_seed(2))
    return drawn.where(torch.arange(5) < lengths[:, None], PAD)


def features(*shape: int) -> Tensor:
    return torch.randn(6, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


NETWORKS = {
    "linear": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), features(4)),
    "few rows": lambda: (nn.Linear(300, 3), features(300)),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        features(2, 6, 6),
    ),
    "attention": lambda: (
        nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        features(3, 4),
    ),
    "padding": lambda: (Padded(), tokens()),
    "two uses": lambda: (Twice(), features(3, 4)),
}


def dense(factor: Factor) -> Tensor:
    return factor.rows.mT @ factor.rows if isinstance(factor, GramFactor) else factor


@pytest.mark.parametrize("name", list(NETWORKS))
def test_input_factors_of_both_passes_agree(name: str):
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    model = model.double().eval()
    y = torch.arange(6) % 3
    names = [name for name, _ in model.named_parameters()]
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("exact"))
    blocks = curvature_blocks(model, names)
    problem = FitContext(cotangents, blocks, Tap(shared_copy(model), blocks), torch.float64, None)
    factors, expected_totals = factor_sums(problem, [Batch(x, y)])
    inputs = SideSums(problem, Side.A)
    forward = ForwardPasses(problem)
    totals = DataTotals()
    halves = [Batch(x[:2], y[:2]), Batch(x[2:], y[2:])]
    outputs = [forward(half, inputs, totals) for half in halves]
    assert totals.as_numbers().input_weights == expected_totals.input_weights
    torch.testing.assert_close(torch.cat(outputs), model(x))
    input_factors = sum_at_owners(problem, inputs)
    assert set(input_factors) == {block for block in problem.blocks if not block.is_vector}
    for block, A in input_factors.items():
        torch.testing.assert_close(dense(A), dense(factors[block][1]), rtol=1e-12, atol=1e-13)
