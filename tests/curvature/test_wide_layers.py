"""If a side of a layer is too wide for a dense factor, only the factor's diagonal is computed."""

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.layer_rules import base
from laplace_debias.curvature.layers.blocks import curvature_blocks

# Sizes above which a side is wide. For the weights `[3, 8]` and `[4, 12]` these are all sides, then
# the four outputs and the inputs, then only the inputs.
WIDE = [2, 3, 7]


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)
    return nn.Sequential(*layers).double().eval()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=generator)
    return x, torch.randint(4, (6,), generator=generator)


def diagonal_if(is_wide, factor):
    return factor.diagonal().diag() if is_wide else factor


def expected_blocks(model, x, wide, sharing="expand"):
    blocks = {}
    for layer in ("0", "3"):
        factors = oracle.kfac_factors(model, x, "classification", layer, sharing=sharing)
        G, A = (diagonal_if(len(factors[key]) > wide, factors[key]) for key in "GA")
        blocks[f"{layer}.weight"] = torch.kron(G, A)
        blocks[f"{layer}.bias"] = diagonal_if(len(factors["bias"]) > wide, factors["bias"])
    return blocks


def assert_blocks(la, expected):
    for name, block in expected.items():
        actual = la.posterior.curvature.blocks[name].to_dense()
        torch.testing.assert_close(actual, block, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("wide", "sharing", "backend"),
    one_axis_at_a_time(WIDE, ["expand", "reduce"], ["hooks", "backpack"]),
)
def test_kfac_has_the_diagonals_of_wide_factors(model, data, monkeypatch, wide, sharing, backend):
    monkeypatch.setattr(base, "WIDE", wide)
    la = Laplace(model, sharing=sharing, backend=backend).fit([data])
    assert_blocks(la, expected_blocks(model, data[0], wide, sharing))
    axes = {name: block.U_G for name, block in la.posterior.curvature.blocks.items()}
    assert (axes["3.weight"] is None) == (axes["3.bias"] is None) == (wide < 4)


@pytest.mark.parametrize("wide", WIDE)
def test_ekfac_has_the_exact_diagonal_along_the_axes(model, data, monkeypatch, wide):
    monkeypatch.setattr(base, "WIDE", wide)
    la = Laplace(model, curvature="ekfac").fit([data])
    for name in la.block_names:
        block = la.posterior.curvature.blocks[name]
        U_G = torch.eye(block.magnitudes.shape[0]) if block.U_G is None else block.U_G
        U_A = torch.eye(block.magnitudes.shape[1]) if block.U_A is None else block.U_A
        exact = oracle.ggn_block(model, data[0], "classification", name)
        U = torch.kron(U_G.double().contiguous(), U_A.double().contiguous())
        expected = (U.T @ exact @ U).diagonal()
        # Directions of the null space share their mean.
        close = {"rtol": 1e-9, "atol": 1e-13}
        if block.U_G is None and block.U_A is None:
            torch.testing.assert_close(block.magnitudes.flatten(), expected, **close)
        torch.testing.assert_close(block.magnitudes.sum(), expected.sum(), **close)


def test_folds_and_halves_of_factors_without_directions(model, data, monkeypatch):
    """Axes need no data: a cross-fit equals the full fit, a debiased fit the second half's."""
    monkeypatch.setattr(base, "WIDE", 2)
    x, y = data
    folds = Laplace(model).fit([data], mode="crossfit", num_data=6)
    assert_blocks(folds, expected_blocks(model, x, 2))
    halves = [(x[:3], y[:3]), (x[3:], y[3:])]
    debiased = Laplace(model).fit(halves, mode="debiased", num_data=6)
    assert_blocks(debiased, expected_blocks(model, x[3:], 2))


def test_axes_whose_curvature_coincides_in_the_first_batch_are_not_averaged(monkeypatch):
    """In the first batch, two inputs are zero, and all classes have the same probability."""
    monkeypatch.setattr(base, "WIDE", 2)
    model = nn.Sequential(nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(2, 6, 4, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.long)
    with torch.no_grad():
        x[0, :, :2] = 0
        model[0].weight[:, 2:] = 0
        model[0].bias.zero_()
    batches = list(zip(x, y, strict=True))
    la = Laplace(model, curvature="ekfac").fit(batches, mode="debiased", num_data=12)
    for name in la.block_names:
        expected = oracle.ggn_block(model, x[1], "classification", name).diagonal()
        magnitudes = la.posterior.curvature.blocks[name].magnitudes.flatten()
        torch.testing.assert_close(magnitudes, expected, rtol=1e-10, atol=1e-13)


def test_positions_that_do_not_count(monkeypatch):
    """The diagonals of the factors of an embedding, a hidden layer and a head with padding."""
    torch.manual_seed(0)
    layers = nn.Embedding(6, 3), nn.Tanh(), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6)
    model = nn.Sequential(*layers).double().eval()
    x, y = torch.randint(6, (4, 5)), torch.randint(6, (4, 5))
    y[0, 2:] = y[2, 4:] = -100
    dense = Laplace(model).fit([(x, y)]).posterior.curvature.blocks
    monkeypatch.setattr(base, "WIDE", 2)
    wide = Laplace(model).fit([(x, y)]).posterior.curvature.blocks
    for name, block in wide.items():
        assert block.U_G is None
        expected = dense[name].to_dense().diagonal()
        torch.testing.assert_close(block.magnitudes.flatten(), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("wide", WIDE)
def test_predictions_and_files(model, data, monkeypatch, tmp_path, wide, curvature):
    monkeypatch.setattr(base, "WIDE", wide)
    la = Laplace(model, curvature=curvature, prior_precision=0.3).fit([data])
    x = data[0][:3]
    J = oracle.flat_jacobian(model, x, la.param_names)
    expected = J @ torch.linalg.inv(la.posterior.precision.to_dense()) @ J.mT
    torch.testing.assert_close(la.functional(x)[1], expected, rtol=1e-8, atol=1e-11)
    outputs = torch.tensor([[2, 0, 2], [1, 3, 1], [0, 1, 2]])
    chosen_rows = expected.gather(1, outputs[:, :, None].expand(-1, -1, 4))
    chosen_covariance = chosen_rows.gather(2, outputs[:, None, :].expand(-1, 3, -1))
    actual = la.functional(x, outputs=outputs)[1]
    torch.testing.assert_close(actual, chosen_covariance, rtol=1e-8, atol=1e-11)
    flat = J.flatten(0, 1)
    joint = flat @ torch.linalg.inv(la.posterior.precision.to_dense()) @ flat.T
    actual = la.functional(x, joint=True)[1].flatten(2).flatten(0, 1)
    torch.testing.assert_close(actual, joint, rtol=1e-8, atol=1e-11)
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    saved = la.functional(x)[1]
    torch.testing.assert_close(loaded.functional(x)[1], saved, rtol=1e-12, atol=1e-13)


def test_the_bound_is_that_of_the_documentation():
    assert base.WIDE == 8192
    layer = nn.Linear(2, 8193)
    blocks = curvature_blocks(nn.Sequential(layer), ["0.weight", "0.bias"])
    assert [block.has_diagonal_G for block in blocks] == [True, True]
    assert [block.has_diagonal_A for block in blocks] == [False, False]
    narrow = curvature_blocks(nn.Sequential(nn.Linear(8192, 8192)), ["0.weight", "0.bias"])
    assert not any(block.has_diagonal_G or block.has_diagonal_A for block in narrow)
