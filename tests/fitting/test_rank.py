"""`rank=` of K-FAC and EKFAC: few directions of each factor, of the trace of all."""

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
        self.table, self.head = nn.Embedding(5, 26), nn.Linear(26, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Pooled(nn.Module):
    """Position by position, and then the mean of all."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(30, 26), nn.Linear(26, 3)

    def forward(self, x):
        return self.head(self.mix(x).mean(1))


def flat(g, *shape):
    """Rows in a plane."""
    return torch.randn(*shape, 2, generator=g) @ torch.randn(2, 30, generator=g)


def perceptron(g):
    return nn.Sequential(nn.Linear(30, 26), nn.Linear(26, 3)), flat(g, 48)


def sequences(g):
    return Pooled(), flat(g, 48, 4)


def tagger(g):
    """Outputs at positions, of which some do not take part."""
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
    """Whole factors are held against the dense oracle elsewhere."""
    whole = fitted(name, mode, curvature=curvature, **options)
    few = fitted(name, mode, curvature=curvature, rank=RANK, **options)
    assert any(b.U_G is not None and b.U_G.shape[-1] == RANK for b in blocks(few).values())
    for actual, expected in zip(blocks(few).values(), blocks(whole).values(), strict=True):
        close(actual.to_dense(), expected.to_dense())
    x = problem(name)[1][0][0]
    for actual, expected in zip(few.functional(x), whole.functional(x), strict=True):
        close(actual, expected)
    close(few.log_marginal_likelihood(), whole.log_marginal_likelihood())


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
    # EKFAC's trace is that of the diagonal, whatever the directions. Of whole factors, which are
    # decomposed for a share or a rank of 12, eigenvalues that nearly coincide are pooled with
    # weights, out of fold too: that moves 1e-6 of it, and the leading directions are of the same.
    is_whole = rank in (12, 0.5, 0.99)
    traces, reference = [], "diag" if curvature == "ekfac" and not is_whole else curvature
    for name, kept in ((reference, None), (curvature, rank)):
        la = Laplace(model, curvature=name, rank=kept)
        la.fit(data, mode=mode, num_data=128)
        traces.append([exact_trace(block) for block in blocks(la).values()])
    assert blocks(la)["0.weight"].U_G.shape[1] < 25
    is_pooled = curvature == "ekfac" or mode in ("debiased", "crossfit")
    torch.testing.assert_close(*traces, rtol=1e-6 if is_pooled else 1e-12, atol=0)


def test_streamed_directions_are_nearly_the_best():
    model, data = decaying()
    whole, few = (blocks(Laplace(model, rank=rank).fit(data))["0.weight"] for rank in (None, 4))
    for U, V in ((whole.U_G, few.U_G), (whole.U_A, few.U_A)):
        # Cosines of the angles between the two spaces.
        assert torch.linalg.svdvals(U[:, :4].T @ V).min() > 0.99
    close(few.magnitudes[:4, :4], whole.magnitudes[:4, :4], tolerance=0.01)


def test_a_share_keeps_the_fewest_directions_that_hold_it():
    model, data = decaying()
    whole, few = (blocks(Laplace(model, rank=rank).fit(data))["0.weight"] for rank in (None, 0.9))
    along = whole.magnitudes.sum(1).cumsum(0) / whole.magnitudes.sum()
    rank = few.U_G.shape[1]
    assert along[rank - 2] < 0.9 <= along[rank - 1]
    assert torch.equal(few.U_G, whole.U_G[:, :rank])


class Largest(TorchDispatchMode):
    """Remembers the largest matrix of `width` columns or rows that is made within."""

    def __init__(self, width):
        super().__init__()
        self.width, self.largest = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for new in tree_leaves(made):
            if isinstance(new, torch.Tensor) and self.width in new.shape:
                self.largest = max(self.largest, new.numel() // self.width)
        return made


@pytest.mark.usefixtures("batches_apart")
@pytest.mark.parametrize("mode", MODES)
def test_no_matrix_is_made_of_a_wide_factor(mode):
    model, data = decaying(num_batches=20, width=600)
    largest = []
    for rank in (None, 4):
        with Largest(600) as made:
            Laplace(model, rank=rank, params=["0.weight"]).fit(data, mode=mode, num_data=640)
        largest.append(made.largest)
    # Rows of a batch. Of one or two batches they are few anyway.
    assert largest[1] < 300
    assert (largest[0] >= 600) == (mode == "full")


@pytest.mark.parametrize("rank", [4, 0.9])
def test_a_file_knows_the_rank(rank, tmp_path):
    model, data = decaying()
    la = Laplace(model, rank=rank).fit(data)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    for one, two in zip(la.functional(data[0][0]), loaded.functional(data[0][0]), strict=True):
        assert torch.equal(one, two)
    again = loaded.fit(data)
    for one, two in zip(blocks(again).values(), blocks(la).values(), strict=True):
        close(one.to_dense(), two.to_dense(), tolerance=0)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_plan_counts_kept_directions_alone(curvature):
    model, data = decaying()
    la = Laplace(model, curvature=curvature, rank=4)
    planned = la.plan(data)
    la.fit(data)
    parts = [p for b in blocks(la).values() for p in (b.U_G, b.U_A, b.magnitudes) if p is not None]
    size = sum(part.nbytes for part in parts) + la.posterior.mean.nbytes
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
