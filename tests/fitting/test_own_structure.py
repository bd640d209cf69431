"""A curvature structure is one class and one line: fitted, planned, saved, predicted with."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.structures import STRUCTURES, CurvatureStructure
from laplace_debias.curvature.structures.diagonal import DiagonalCurvature
from laplace_debias.operators import BlockDiagonal, EigenKronecker


@dataclass(frozen=True)
class ScalarCurvature(DiagonalCurvature):
    """A user's structure: a multiple of the identity for each block, with the block's trace."""

    name = "scalar"

    def fit(self, context, directions, magnitudes=None):
        diagonal = super().fit(context, directions, magnitudes)
        blocks = {}
        for name, block in diagonal.curvature.blocks.items():
            mean = block.magnitudes.mean().expand_as(block.magnitudes)
            blocks[name] = EigenKronecker(None, None, mean.contiguous())
        return replace(diagonal, curvature=BlockDiagonal(blocks))

    def tensors(self, block):
        return {"scale": block.magnitudes.flatten()[:1], "sizes": torch.tensor(block.sizes)}

    def from_tensors(self, tensors):
        magnitudes = tensors["scale"].expand(*tensors["sizes"].tolist())
        return EigenKronecker(None, None, magnitudes.contiguous())


@pytest.fixture(autouse=True)
def _line(monkeypatch):
    monkeypatch.setitem(STRUCTURES, "scalar", ScalarCurvature)


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    return model, [(torch.randn(9, 4).double(), torch.randint(3, (9,))) for _ in range(2)]


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
def test_it_is_fitted_in_every_mode(case, mode):
    model, data = case
    la = Laplace(model, curvature="scalar").fit(data, mode, 18)
    diagonal = Laplace(model, curvature="diag").fit(data, mode, 18).posterior.curvature
    for name, block in la.posterior.curvature.blocks.items():
        expected = diagonal.blocks[name].magnitudes.mean()
        torch.testing.assert_close(block.magnitudes, expected.expand_as(block.magnitudes))


def test_an_update_is_the_fit_to_all_data(case):
    model, data = case
    updated = Laplace(model, curvature="scalar").fit(data[:1]).update(data[1:])
    fitted = Laplace(model, curvature="scalar").fit(data)
    torch.testing.assert_close(
        updated.posterior.precision.to_dense(), fitted.posterior.precision.to_dense()
    )


def test_an_update_is_refused_where_the_structure_defines_none(case, monkeypatch):
    model, data = case
    monkeypatch.setattr(ScalarCurvature, "update", CurvatureStructure.update)
    la = Laplace(model, curvature="scalar").fit(data)
    with pytest.raises(NotImplementedError, match="define `update` in ScalarCurvature"):
        la.update(data)


def test_it_predicts_as_the_dense_formula(case):
    model, data = case
    la = Laplace(model, curvature="scalar", prior_precision=2.0).fit(data)
    x = data[0][0]
    J = torch.stack([_jacobian(model, example) for example in x])
    scales = [b.magnitudes.flatten() for b in la.posterior.curvature.blocks.values()]
    variances = 1 / (18 * torch.cat(scales) + 2.0)
    expected = torch.einsum("nci,i,ndi->ncd", J, variances, J)
    torch.testing.assert_close(la.functional(x)[1], expected)


def _jacobian(model, x):
    rows = []
    for output in model(x):
        gradients = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def test_it_is_planned_tuned_saved_and_loaded(case, tmp_path):
    model, data = case
    la = Laplace(model, curvature="scalar")
    plan = la.plan(data)
    assert plan.curvature == "scalar"
    assert list(plan.stages) == ["curvature along the axes"]
    la.fit(data).tune(data)
    la.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", model)
    x = data[0][0]
    assert torch.equal(loaded.functional(x)[1], la.functional(x)[1])
    assert torch.equal(loaded.predict(x).probs, la.predict(x).probs)


def test_an_unknown_one_is_refused_with_those_that_there_are(case):
    model, _ = case
    with pytest.raises(ValueError, match=r"Unknown curvature='tri'.*kfac.*gp, scalar\."):
        Laplace(model, curvature="tri")
    with pytest.raises(ValueError, match=r"`rank` applies only to.*got 'scalar'"):
        Laplace(model, curvature="scalar", rank=2)
