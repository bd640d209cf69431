"""Squares of gradients that are summed over examples, against automatic differentiation."""

import oracle
import pytest
import torch
from torch import nn

from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.directions import Eigenbasis, Eigenpairs
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.network.shared_copy import shared_copy
from laplace_debias.training import OnlineCurvature
from laplace_debias.training.batch_sums import SquaredSums

NUM_EXAMPLES = 11
NUM_SUMMED = 8


class Twice(nn.Module):
    """A layer that is called at several positions, and twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def plain_matrix(layer, weight, bias):
    matrix = weight.flatten(1)
    return matrix if bias is None else torch.cat([matrix, bias[:, None]], 1)


def grouped_matrices(layer, weight, bias):
    return weight.flatten(1).unflatten(0, (layer.groups, -1))


def transposed_matrix(layer, weight, bias):
    return weight.transpose(0, 1).flatten(1)


# The layer, the shape of an input, whether the bias is joint, and the gradient as matrices.
CASES = {
    "convolution": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 6), False, plain_matrix),
    "joint": (nn.Conv2d(2, 3, 3, dilation=2), (2, 7, 6), True, plain_matrix),
    "reflecting": (
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (2, 5, 4),
        False,
        plain_matrix,
    ),
    "groups": (nn.Conv2d(4, 6, 2, groups=2), (4, 4, 3), False, grouped_matrices),
    "one dimension": (nn.Conv1d(2, 3, 2), (2, 5), True, plain_matrix),
    "transposed": (nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 2), False, transposed_matrix),
    "positions": (nn.Linear(4, 3), (5, 4), True, plain_matrix),
    "two calls": (Twice(), (5, 4), False, plain_matrix),
}


def orthonormal(*shape):
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64)).Q


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_summed_over_examples_before_they_are_squared(case):
    layer, shape, joint, matrices = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten()).double().eval()
    if isinstance(layer, Twice):
        layer = layer.layer
    x = torch.randn(NUM_EXAMPLES, *shape, dtype=torch.float64)
    columns = torch.randn(2, *model(x).shape, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    blocks = curvature_blocks(model, names, joint=joint)
    block = next(block for block in blocks if not block.is_vector)
    d_out, d_in = block.shape
    basis = Eigenbasis(
        Eigenpairs(torch.ones(*block.groups, d_out), orthonormal(*block.groups, d_out, d_out)),
        Eigenpairs(torch.ones(*block.groups, d_in), orthonormal(*block.groups, d_in, d_in)),
    )
    expected = 0
    parameters = [layer.weight, layer.bias] if joint else [layer.weight]
    for examples in (slice(0, NUM_SUMMED), slice(NUM_SUMMED, None)):
        for column in columns:
            loss = (model(x[examples]) * column[examples]).sum()
            gradients = torch.autograd.grad(loss, parameters)
            J = matrices(layer, gradients[0], gradients[1] if joint else None)
            expected = expected + (basis.G.U.mT @ J @ basis.A.U).square()
    tap = Tap(shared_copy(model), blocks)
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("mc"))
    context = FitContext(cotangents, blocks, tap, torch.float64, None)
    sums = SquaredSums(context, dict.fromkeys(blocks, basis))
    forward_pass = tap.forward(x)
    record = next(record for record in forward_pass.backward(columns) if record.block is block)
    oracle.close(sums.measure(record), expected, 1e-12)


def test_with_many_sampled_labels_the_squares_are_the_exact_curvature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)).double()
    data = [(torch.randn(5, 3, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))] * 2
    curvatures = []
    for fisher in ({"fisher": "exact"}, {"mc_samples": 400}):
        online = OnlineCurvature(model, every=1, params=["0.weight"], **fisher)
        for x, y in data:
            online.update(x, y)
        curvatures.append(online.posterior(100).posterior.curvature.to_dense())
    exact, sampled = curvatures
    # The squares have a relative standard deviation of about √(2 / 400).
    oracle.close(sampled.diagonal(), exact.diagonal(), 0.25)
    assert float(sampled.trace()) == pytest.approx(float(exact.trace()), rel=0.1)
