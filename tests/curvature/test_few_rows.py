"""Factors of few examples: a fit decomposes their rows, and forms no matrix."""

import copy

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.fits import directions, factors, gram_factor, magnitudes
from laplace_debias.curvature.fits.gram_factor import GramFactor
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.jacobians import rotated_jacobians
from laplace_debias.curvature.layers.records import BlockRecord
from laplace_debias.operators.structures.directions import Basis, ThinBasis, is_thin

MODES = ["full", "mini", "debiased", "crossfit"]


class Net(nn.Module):
    """A wide convolution, a wide layer and the outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 9, 3, stride=2)
        self.hidden = nn.Linear(9, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.hidden(self.conv(x).relu().mean((2, 3))).tanh())


def network():
    torch.manual_seed(0)
    return Net().double().eval()


def batches(*sizes):
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, 5, 5, generator=g).double(), torch.randint(3, (n,), generator=g))
        for n in sizes
    ]


def keep_rows(monkeypatch, from_size=2, thin_from=2):
    """Keep rows of factors from `from_size` columns on, and thin bases from `thin_from` on."""
    monkeypatch.setattr(factors, "_WIDE", from_size)
    monkeypatch.setattr(gram_factor, "_THIN_FROM", thin_from)


def fit(curvature, mode, sharing="expand", **options):
    sharing = {} if sharing == "expand" else {"sharing": sharing}
    la = Laplace(network(), curvature=curvature, **sharing, **options)
    folds = {"folds": 2} if mode == "crossfit" else {}
    return la.fit(batches(3, 2, 2), mode=mode, num_data=50, **folds)


def dense(la):
    return [block.to_dense() for block in la.posterior.curvature.blocks.values()]


def thin(la):
    return [
        name
        for name, block in la.posterior.curvature.blocks.items()
        if is_thin(block.U_G) or is_thin(block.U_A)
    ]


@pytest.mark.parametrize(
    ("curvature", "mode", "sharing"),
    [
        *one_axis_at_a_time(["kfac", "ekfac"], MODES, ["expand", "reduce"]),
        ("ekfac", "debiased", "expand"),
        ("ekfac", "crossfit", "expand"),
    ],
)
@pytest.mark.parametrize("thin_from", [2, 256])
def test_curvature_is_that_of_the_matrices(monkeypatch, curvature, mode, sharing, thin_from):
    """Other tests compare whole factors with the dense oracle, null spaces included."""
    keep_rows(monkeypatch, 10**6)
    from_matrices = fit(curvature, mode, sharing)
    keep_rows(monkeypatch, thin_from=thin_from)
    from_rows = fit(curvature, mode, sharing)
    if thin_from == 2:
        assert {"conv.weight", "hidden.weight"} <= set(thin(from_rows)) or mode == "full"
    assert bool(thin(from_rows)) == (thin_from == 2)
    for actual, expected in zip(dense(from_rows), dense(from_matrices), strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * scale)
    x = batches(4)[0][0]
    torch.testing.assert_close(
        from_rows.functional(x), from_matrices.functional(x), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        from_rows.log_marginal_likelihood(), from_matrices.log_marginal_likelihood()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
def test_a_loaded_posterior_has_the_bits_of_the_one_in_memory(
    monkeypatch, tmp_path, curvature, mode
):
    """The order in memory decides in which order matrix products add."""
    keep_rows(monkeypatch)
    la = fit(curvature, mode)
    assert thin(la)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", la.model)
    x = batches(40)[0][0]
    for expected, actual in zip(la.functional(x), loaded.functional(x), strict=True):
        assert torch.equal(expected, actual)
    draws = [each.sample(2, torch.Generator().manual_seed(0)) for each in (la, loaded)]
    assert torch.equal(*draws)
    pairs = (each.posterior.curvature.blocks.values() for each in (la, loaded))
    for block, loaded_block in zip(*pairs, strict=True):
        if block.U_A is not None and block.U_A.shape[1] > 1:
            assert block.U_A.stride() == loaded_block.U_A.stride()


def test_debiased_magnitudes_are_those_of_the_oracle(monkeypatch):
    keep_rows(monkeypatch)
    first_batch, second_batch = batches(3, 2)
    la = Laplace(network()).fit_batches([first_batch], [second_batch], num_data=50)
    for layer in ("conv", "hidden"):
        first, second = (
            oracle.kfac_factors(la.model, x, "classification", layer)
            for x, _ in (first_batch, second_batch)
        )
        expected = oracle.pooled_block(first, oracle.kfac_block(second))
        actual = la.posterior.curvature.blocks[f"{layer}.weight"].to_dense()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * float(expected.max()))


@pytest.mark.parametrize("num_batches", [1, 2, 20])
def test_rows_become_a_matrix_once_they_are_many(monkeypatch, num_batches):
    keep_rows(monkeypatch)
    data = batches(*[2] * num_batches)
    la = Laplace(network()).fit_batches(data)
    assert ("hidden.weight" in thin(la)) == (num_batches <= 2)
    joined = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    for actual, expected in zip(
        dense(la), dense(Laplace(network()).fit_batches(joined)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_eigenpairs_of_rows_are_those_of_the_matrix(monkeypatch, scale):
    keep_rows(monkeypatch)
    rows = torch.randn(6, 40).double() * torch.logspace(0, -5, 6).double()[:, None] * scale
    rows[5] = rows[:2].sum(0)
    values, U = directions.descending_eigenpairs(GramFactor(rows))
    A = (rows / scale).T @ (rows / scale)
    assert U.shape == (40, 5)
    assert values[-1] == 0
    torch.testing.assert_close((U * values[:-1]) @ U.T / scale**2, A, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(U.T @ U, torch.eye(5).double(), rtol=0, atol=1e-13)
    expected = directions.descending_eigenpairs(A)[0][:5]
    torch.testing.assert_close(values[:-1] / scale**2, expected, rtol=1e-8, atol=1e-14)


def test_layers_that_nothing_went_into_have_a_block_of_zeros(monkeypatch):
    keep_rows(monkeypatch)
    model = network()
    with torch.no_grad():
        model.conv.weight.zero_()
        model.conv.bias.fill_(-1)
    la = Laplace(copy.deepcopy(model)).fit_batches(batches(3))
    assert not la.posterior.curvature.blocks["hidden.weight"].to_dense().any()
    assert la.log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_refused(monkeypatch, bad):
    with pytest.raises(ValueError, match="factor A of head"):
        directions.descending_eigenpairs(
            GramFactor(torch.full((2, 8), bad).double()), "factor A of head"
        )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("num_columns", [2, 8])
def test_magnitudes_along_thin_directions_are_those_along_a_whole_basis(groups, num_columns):
    """Two cotangents at two positions give fewer rows than half of the outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6 * groups, 20 * groups, 2, groups=groups)).double()
    [block] = curvature_blocks(model, ["0.weight"])
    x = torch.randn(3, 6 * groups, 3, 2).double()
    g = torch.randn(num_columns, 3, 20 * groups, 2, 1).double()
    record = BlockRecord(block, model[0], [x], [g])
    ranks = 3, 5
    U_G, U_A = (torch.linalg.qr(torch.randn(*block.groups, d, d).double())[0] for d in block.shape)
    expected = magnitudes.ekfac_magnitudes(record, Basis(U_G), Basis(U_A))
    for dim, rank in zip((-2, -1), ranks, strict=True):
        leading, remainder = expected.tensor_split([rank], dim)
        expected = torch.cat([leading, remainder.mean(dim, keepdim=True)], dim)
    thin = (ThinBasis(U[..., :rank]) for U, rank in zip((U_G, U_A), ranks, strict=True))
    actual = magnitudes.ekfac_magnitudes(record, *thin)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 3e-2), (torch.float32, 2e-6), (torch.float64, 1e-14)],
)
def test_coordinates_of_few_positions_keep_the_products_of_the_rest(dtype, tolerance, examples):
    """The patches are large and independent, then also all ones, and zeros."""
    torch.manual_seed(0)
    model = nn.Conv2d(9, 40, 3).to(dtype)
    [block] = curvature_blocks(model, ["weight"])
    x = torch.cat([torch.randn(1, 9, 5, 5), torch.ones(1, 9, 5, 5), torch.zeros(1, 9, 5, 5)])
    g = torch.randn(2, examples, 40, 3, 3).to(dtype)
    record = BlockRecord(block, model, [1e20 * x[:examples].to(dtype)], [g])
    U_G, U_A = (torch.linalg.qr(torch.randn(d, 4).double())[0].to(dtype) for d in block.shape)
    products = []
    for frame_per_example in (True, False):
        rotated = rotated_jacobians(
            record, ThinBasis(U_G), ThinBasis(U_A), frame_per_example=frame_per_example
        )
        J = torch.cat([jacobian.J for jacobian in rotated]).double()
        quadrants = (J[..., :4, 4:], J[..., 4:, :4], J[..., 4:, 4:])
        rows = [quadrant.flatten(2) for quadrant in quadrants]
        products.append(torch.stack([each @ each.mT for each in rows]))
    assert J.shape[-1] > 4 + 9
    torch.testing.assert_close(*products, rtol=0, atol=tolerance * products[1].max().item())


@pytest.mark.parametrize(
    "shape", [(64, 256), (128, 512), (300, 256), (90, 785), (2000, 40), (700, 2, 130)]
)
def test_products_of_rows_are_those_of_dense_matrices(shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_group = rows.reshape(len(rows), -1, shape[-1]).unbind(1)
    expected = torch.stack([group.T @ group for group in by_group])
    products = gram_factor.gram(rows)
    torch.testing.assert_close(products, expected.view_as(products), rtol=1e-12, atol=1e-12)
    total = torch.ones_like(products)
    gram_factor.add_gram(total, rows)
    torch.testing.assert_close(total, expected.view_as(total) + 1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "has_strips"), [((64, 256), False), ((512, 256), True)])
def test_only_large_products_of_rows_are_computed_in_strips(shape, has_strips):
    with torch.profiler.profile() as profile:
        gram_factor.gram(torch.randn(shape))
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm_")]
    assert (len(products) > 1) == has_strips
