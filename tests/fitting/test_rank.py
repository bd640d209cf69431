"""`rank=` of K-FAC and EKFAC keeps few directions of each factor, but the trace of all."""

from functools import partial

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace_debias import Laplace
from laplace_debias.operators.exact import exact_trace

MODES = ["full", "mini", "debiased", "crossfit"]
# The factors below have at most this rank; those of 24 columns or more are streamed.
RANK = 3
close = partial(oracle.close, tolerance=1e-10)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 26)
        self.head = nn.Linear(26, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Pooled(nn.Module):
    """A network that maps each position, and then takes the mean over the positions."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(30, 26)
        self.head = nn.Linear(26, 3)

    def forward(self, x):
        return self.head(self.mix(x).mean(1))


def flat(g, *shape):
    """Random rows `[*shape, 30]` that lie in a plane."""
    return torch.randn(*shape, 2, generator=g) @ torch.randn(2, 30, generator=g)


def perceptron(g):
    return nn.Sequential(nn.Linear(30, 26), nn.Linear(26, 3)), flat(g, 48)


def sequences(g):
    return Pooled(), flat(g, 48, 4)


def tagger(g):
    """A network with outputs at 4 positions, and inputs; `problem` ignores some of its targets."""
    return nn.Sequential(nn.Linear(30, 26), nn.Linear(26, 3)), flat(g, 48, 4)


def convolution(g):
    model = nn.Sequential(nn.Conv2d(4, 26, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    plane = torch.randn(48, 2, generator=g) @ torch.randn(2, 4, generator=g)
    return model.append(nn.Linear(26, 3)), plane[:, :, None, None].expand(-1, -1, 5, 5).clone()


def grouped(g):
    """Factors of groups are no wider than what is made of them whole."""
    model, x = convolution(g)
    model[0] = nn.Conv2d(4, 26, 3, groups=2)
    return model, x


def words(g):
    model = Words()
    with torch.no_grad():
        model.table.weight.copy_(flat(g, 5)[:, :26])
    return model, torch.randint(5, (48, 3), generator=g)


MODELS = {f.__name__: f for f in (perceptron, sequences, tagger, convolution, grouped, words)}


def problem(name):
    """A network, and batches; every other one is large."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, x = MODELS[name](g)
    y = torch.randint(3, (48, 4) if name == "tagger" else (48,), generator=g)
    if name == "tagger":
        y[:, 2:][::2] = -100
    x = x.double() if x.is_floating_point() else x
    sizes = [9, 2, 12, 1, 14, 10]
    return model.double().eval(), list(zip(x.split(sizes), y.split(sizes), strict=True))


def fitted(name, mode="full", data=None, **options):
    model, batches = problem(name)
    la = Laplace(model, prior_precision=0.3, **options)
    return la.fit(data or batches, mode=mode, num_data=48)


def blocks(la):
    return la.posterior.curvature.blocks


@pytest.mark.parametrize(
    ("name", "curvature", "mode", "options"),
    [
        *one_axis_at_a_time(
            MODELS,
            ["kfac", "ekfac"],
            MODES,
            [{}, {"joint": True}, {"sharing": "reduce"}, {"fisher": "empirical"}],
        ),
        *(("convolution", "ekfac", mode, {"joint": True}) for mode in MODES),
        *(("tagger", "kfac", mode, {}) for mode in MODES),
    ],
)
def test_at_the_true_rank_nothing_is_lost(name, curvature, mode, options):
    """Other tests compare the factors of full rank with the dense oracle."""
    full_rank = fitted(name, mode, curvature=curvature, **options)
    low_rank = fitted(name, mode, curvature=curvature, rank=RANK, **options)
    assert any(b.U_G is not None and b.U_G.shape[-1] == RANK for b in blocks(low_rank).values())
    for actual, expected in zip(blocks(low_rank).values(), blocks(full_rank).values(), strict=True):
        close(actual.to_dense(), expected.to_dense())
    x = problem(name)[1][0][0]
    for actual, expected in zip(low_rank.functional(x), full_rank.functional(x), strict=True):
        close(actual, expected)
    close(low_rank.log_marginal_likelihood(), full_rank.log_marginal_likelihood())


def test_at_the_true_rank_factors_are_those_of_the_oracle():
    la = fitted("perceptron", rank=RANK)
    model, batches = problem("perceptron")
    x = torch.cat([x for x, _ in batches])
    expected = oracle.kfac_block(oracle.kfac_factors(model, x, "classification", "0"))
    close(blocks(la)["0.weight"].to_dense(), expected)


def decaying(num_batches=4, width=40):
    """A perceptron whose factors have full rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh())
    model.append(nn.Linear(30, 3)).double().eval()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(32 * num_batches, width, generator=g) * torch.arange(1, width + 1) ** -1.0
    y = torch.randint(3, (len(x),), generator=g)
    return model, list(zip(x.double().split(32), y.split(32), strict=True))


@pytest.mark.parametrize("rank", [1, 4, 12, 0.5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_the_trace_is_exact_at_any_rank(curvature, mode, rank):
    model, data = decaying()
    # EKFAC's trace is that of the diagonal, whatever the directions. A share or a rank of 12
    # decomposes whole factors, whose nearly equal eigenvalues are pooled with weights, also out of
    # fold. That moves 1e-6 of the trace, so the reference for them is EKFAC at full rank.
    is_whole = rank in (12, 0.5, 0.99)
    traces = []
    reference = "diag" if curvature == "ekfac" and not is_whole else curvature
    for name, max_rank in ((reference, None), (curvature, rank)):
        la = Laplace(model, curvature=name, rank=max_rank)
        la.fit(data, mode=mode, num_data=128)
        traces.append([exact_trace(block) for block in blocks(la).values()])
    assert blocks(la)["0.weight"].U_G.shape[1] < 25
    is_pooled = curvature == "ekfac" or mode in ("debiased", "crossfit")
    torch.testing.assert_close(*traces, rtol=1e-6 if is_pooled else 1e-12, atol=0)


def test_streamed_directions_are_nearly_the_best():
    model, data = decaying()
    full_rank = blocks(Laplace(model).fit(data))["0.weight"]
    low_rank = blocks(Laplace(model, rank=4).fit(data))["0.weight"]
    for U, V in ((full_rank.U_G, low_rank.U_G), (full_rank.U_A, low_rank.U_A)):
        # Cosines of the angles between the two spaces.
        assert torch.linalg.svdvals(U[:, :4].T @ V).min() > 0.99
    close(low_rank.magnitudes[:4, :4], full_rank.magnitudes[:4, :4], tolerance=0.01)


def test_a_share_keeps_the_fewest_directions_that_hold_it():
    model, data = decaying()
    full_rank = blocks(Laplace(model).fit(data))["0.weight"]
    low_rank = blocks(Laplace(model, rank=0.9).fit(data))["0.weight"]
    along = full_rank.magnitudes.sum(1).cumsum(0) / full_rank.magnitudes.sum()
    rank = low_rank.U_G.shape[1]
    assert along[rank - 2] < 0.9 <= along[rank - 1]
    assert torch.equal(low_rank.U_G, full_rank.U_G[:, :rank])


class Largest(TorchDispatchMode):
    """Records the size of the largest matrix with `width` rows or columns that torch returns."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self.width in tensor.shape:
                self.largest = max(self.largest, tensor.numel() // self.width)
        return result


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize("mode", MODES)
def test_no_matrix_is_made_of_a_wide_factor(mode):
    model, data = decaying(num_batches=20, width=600)
    largest = []
    for rank in (None, 4):
        with Largest(600) as tensors_made:
            Laplace(model, rank=rank, params=["0.weight"]).fit(data, mode=mode, num_data=640)
        largest.append(tensors_made.largest)
    # The rows of one batch at a time. The modes that read one or two batches have few rows anyway.
    assert largest[1] < 300
    assert (largest[0] >= 600) == (mode == "full")


@pytest.mark.parametrize("rank", [4, 0.9])
def test_a_file_knows_the_rank(rank, tmp_path):
    model, data = decaying()
    la = Laplace(model, rank=rank).fit(data)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    for actual, expected in zip(
        la.functional(data[0][0]), loaded.functional(data[0][0]), strict=True
    ):
        assert torch.equal(actual, expected)
    again = loaded.fit(data)
    for actual, expected in zip(blocks(again).values(), blocks(la).values(), strict=True):
        close(actual.to_dense(), expected.to_dense(), tolerance=0)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_plan_counts_kept_directions_alone(curvature):
    model, data = decaying()
    la = Laplace(model, curvature=curvature, rank=4)
    planned = la.plan(data)
    la.fit(data)
    size = la.posterior.mean.nbytes
    for block in blocks(la).values():
        tensors = (block.U_G, block.U_A, block.magnitudes)
        size += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    # Biases have a one as their input directions, which a plan leaves out.
    assert planned.posterior == size - 3 * la.posterior.mean.element_size()
    assert planned.peak < Laplace(model, curvature=curvature).plan(data).peak


def test_wrong_ranks_are_refused():
    model, data = decaying(2)
    for curvature in ("diag", "full"):
        with pytest.raises(ValueError, match=f"`rank` applies only to.*got '{curvature}'"):
            Laplace(model, curvature=curvature, rank=3)
    for rank in (1.0, 0.0, 64.0, float("nan")):
        with pytest.raises(ValueError, match="or the fraction of the trace to keep"):
            Laplace(model, rank=rank)
    with pytest.raises(ValueError, match="rank"):
        Laplace(model, rank=0)
    with pytest.raises(TypeError, match="rank"):
        Laplace(model, curvature="lowrank", rank=0.9)
    with pytest.raises(ValueError, match=r'mode="auto".*Remove `rank='):
        Laplace(model, rank=3).fit(data, mode="auto", num_data=64)
