"""Sums of a pass can be saved between batches and put back, to the same bits."""

import pytest
import torch
from torch import nn

from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.data_pass import accumulate
from laplace_debias.curvature.fits.dense import KeptRows, LeadingRows, MomentMatrix, SquaresAlong
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import FactorAccumulator, factor_sums
from laplace_debias.curvature.fits.magnitudes import (
    DirectionalCurvature,
    SquaredGradients,
    coordinate_axes,
)
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.system.memory import MemoryCounter

SIZES = (3, 5, 2)


@pytest.fixture
def context():
    torch.manual_seed(0)
    # Factors of the first layer are kept as rows, those of the last are matrices.
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    blocks = curvature_blocks(model, [name for name, _ in model.named_parameters()])
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("exact"))
    return FitContext(cotangents, blocks, Tap(shared_copy(model), blocks), torch.float64, None)


def batches():
    g = torch.Generator().manual_seed(1)
    return [
        Batch(torch.randn(n, 40, generator=g).double(), torch.randint(3, (n,), generator=g))
        for n in SIZES
    ]


def bases(context):
    sums, totals = factor_sums(context, consecutive(batches()))
    return eigenbases(context, sums, totals)


def directions(context):
    size = sum(block.size for block in context.blocks)
    g = torch.Generator().manual_seed(2)
    return torch.linalg.qr(torch.randn(size, 4, generator=g, dtype=torch.float64)).Q


ACCUMULATORS = {
    "factors": FactorAccumulator,
    "along directions": lambda context: DirectionalCurvature(context, bases(context)),
    "squares": lambda context: SquaredGradients(context, bases(context)),
    "moments of rows": MomentMatrix,
    "rows": KeptRows,
    "leading rows": lambda context: LeadingRows(context, 1),
    "squares of rows": lambda context: SquaresAlong(context, directions(context)),
}


def accumulate_unreduced(accumulator, data):
    """Run a pass over data without reducing the sums at its end."""
    accumulator.reduce = lambda: None
    accumulate(accumulator, data)


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_sums_that_are_put_back_go_on_to_the_same_bits(context, name):
    uninterrupted, interrupted, resumed = (ACCUMULATORS[name](context) for _ in range(3))
    first, *remaining = batches()
    accumulate_unreduced(uninterrupted, consecutive([first, *remaining]))
    expected = uninterrupted.state_dict()
    accumulate_unreduced(interrupted, consecutive([first]))
    saved = {key: value.clone() for key, value in interrupted.state_dict().items()}
    assert any(not torch.equal(saved[key], value) for key, value in expected.items())
    resumed.load_state_dict(saved)
    accumulate_unreduced(resumed, consecutive(remaining))
    actual = resumed.state_dict()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def test_a_checkpoint_keeps_its_names(context):
    """Under another name, sums that an earlier version saved would be left out."""
    blocks = [block.name for block in context.blocks]
    names = {}
    for name, make in ACCUMULATORS.items():
        accumulator = make(context)
        repetitions = 30 if name == "moments of rows" else 1
        accumulate_unreduced(accumulator, consecutive(repetitions * batches()))
        names[name] = set(accumulator.state_dict())
    # Bias blocks have no A: it is the number of examples.
    sums_of_G = {f"sums of G/{block}" for block in blocks}
    assert names["factors"] == {*sums_of_G, "rows of A//0.weight", "sums of A/2.weight"}
    assert names["along directions"] == names["factors"]
    assert names["squares"] == {f"table/{block}" for block in blocks}
    extremes = {f"extremes//{block}" for block in blocks}
    # More rows than two thirds of the parameters are multiplied out.
    assert names["moments of rows"] == extremes | {"rows/parameters"}
    assert names["rows"] == names["leading rows"] == extremes | {"rows//parameters"}


def test_examples_of_consecutive_pairs_are_counted_one_after_the_other():
    assert [batch.first_index for batch in consecutive(batches())] == [0, 3, 8]


def test_squares_along_the_coordinate_axes_hold_no_directions(context):
    with MemoryCounter() as memory:
        axes = {block: coordinate_axes(block) for block in context.blocks}
        squares = SquaredGradients(context, axes)
        assert memory.live <= 8 * len(axes)
    assert not squares.squares
