"""A layer type of a user is one class and one line: K-FAC, predictions, files, and a check."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.layer_rules import LAYER_RULES, LayerRule


class Patches(nn.Module):
    """A user's own: a linear map of an image's patches, with its weight stored transposed."""

    def __init__(self, channels, size, width):
        super().__init__()
        self.size = size
        self.kernel = nn.Parameter(torch.randn(channels * size**2, width))
        self.offset = nn.Parameter(torch.randn(width))

    def patches(self, x):
        rows = x.unfold(2, self.size, self.size).unfold(3, self.size, self.size)
        return rows.movedim(1, 3).flatten(3).flatten(1, 2)

    def forward(self, x):
        return self.patches(x) @ self.kernel + self.offset


class PatchesRule(LayerRule):
    module_types = (Patches,)
    kind = "patches"
    weight_name = "kernel"
    bias_name = "offset"

    def matrices(self, layer, weight):
        return weight.T

    def unfold(self, layer, x):
        return layer.patches(x)


class WrongRule(PatchesRule):
    def unfold(self, layer, x):
        return layer.patches(x).flip(2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.setitem(LAYER_RULES, "patches", PatchesRule())


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(Patches(2, 2, 3), Mean(), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    return model, torch.randn(7, 2, 4, 6).double(), torch.randint(3, (7,))


def _jacobian(model, x, names):
    """`[B, C, D]`, in the order of the blocks' entries: a kernel's outputs come first."""
    examples = []
    for image in x:
        rows = []
        for output in model(image[None])[0]:
            parameters = [model.get_parameter(name) for name in names]
            gradients = torch.autograd.grad(output, parameters, retain_graph=True)
            transposed = [
                g.T if name == "0.kernel" else g for name, g in zip(names, gradients, strict=True)
            ]
            rows.append(torch.cat([g.flatten() for g in transposed]))
        examples.append(torch.stack(rows))
    return torch.stack(examples)


def _blocks(la):
    return {name: block.to_dense() for name, block in la.posterior.curvature.blocks.items()}


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("joint", [False, True])
def test_its_kfac_is_exact_if_the_outputs_are_a_mean_over_positions(joint):
    torch.manual_seed(0)
    model = nn.Sequential(Patches(2, 2, 3), Mean()).double().eval()
    x = torch.randn(8, 2, 4, 6).double()
    data = [(inputs, model(inputs).detach()) for inputs in x.split(4)]
    la = Laplace(model, "regression", sigma=1.0, joint=joint, sharing="reduce").fit(data)
    J = _jacobian(model, x, ["0.kernel", "0.offset"])
    exact = torch.einsum("nci,ncj->ij", J, J) / 8
    if joint:
        order = torch.cat([torch.arange(24).view(3, 8), torch.arange(24, 27).view(3, 1)], 1)
        order = order.flatten()
        expected = {"0.kernel+0.offset": exact[order][:, order]}
    else:
        expected = {"0.kernel": exact[:24, :24], "0.offset": exact[24:, 24:]}
    torch.testing.assert_close(_blocks(la), expected)


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("mode", ["full", "mini"])
def test_its_diagonal_is_exact(case, mode):
    model, x, y = case
    data = list(zip(x.split(4), y.split(4), strict=True))
    la = Laplace(model, curvature="diag").fit(data, mode, 7)
    names = [name for name, _ in model.named_parameters()]
    J = _jacobian(model, x, names)
    probs = model(x).softmax(1).detach()
    hessians = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    expected = torch.einsum("nci,ncd,ndi->ni", J, hessians, J)
    expected = expected[:4].mean(0) if mode == "mini" else expected.mean(0)
    actual = torch.cat([block.diagonal() for block in _blocks(la).values()])
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("rule")
def test_it_predicts_as_the_dense_formula_after_saving_and_loading(case, tmp_path):
    model, x, y = case
    la = Laplace(model, curvature="ekfac", prior_precision=2.0).fit([(x, y)])
    la.save(tmp_path / "posterior")
    J = _jacobian(model, x, la.param_names)
    precision = 7 * torch.block_diag(*_blocks(la).values())
    precision += 2.0 * torch.eye(len(precision)).double()
    expected = J @ torch.linalg.inv(precision) @ J.mT
    torch.testing.assert_close(la.functional(x)[1], expected)
    loaded = Laplace.load(tmp_path / "posterior", model)
    assert torch.equal(loaded.functional(x)[1], la.functional(x)[1])


@pytest.mark.usefixtures("rule")
def test_its_kind_has_a_prior_precision_of_its_own(case):
    model, x, y = case
    la = Laplace(model).fit([(x, y)])
    tuning = la.tune_evidence(per="kind")
    assert {row["name"] for row in tuning.table} == {"patches", "linear", "bias"}


def test_without_a_rule_its_parameters_are_exact_vectors(case):
    model, x, y = case
    la = Laplace(model).fit([(x, y)])
    assert la.posterior.curvature.blocks["0.kernel"].U_G.shape == (24, 24)


@pytest.mark.usefixtures("rule")
def test_with_its_rule_no_matrix_of_all_entries_is_made(case):
    model, x, y = case
    block = Laplace(model).fit([(x, y)]).posterior.curvature.blocks["0.kernel"]
    assert block.U_G.shape == (3, 3)
    assert block.U_A.shape == (8, 8)


def test_a_rule_that_does_not_hold_is_replaced_by_exact_vectors(case, monkeypatch):
    model, x, y = case
    expected = _blocks(Laplace(model).fit([(x, y)]))
    monkeypatch.setitem(LAYER_RULES, "patches", WrongRule())
    torch.testing.assert_close(_blocks(Laplace(model).fit([(x, y)])), expected)
