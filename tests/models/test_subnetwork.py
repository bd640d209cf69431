"""Posteriors over single entries, against dense derivatives and laplace-torch."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, Hessian, Subnetwork, largest_magnitude, largest_variance
from laplace_debias.linalg import diagonal

INDICES = [0, 3, 17, 28, 33, 40]


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(30, 4, dtype=torch.float64)
    return model, x, torch.randint(3, (30,))


def dense_ggn(model, x):
    """The summed GGN of cross-entropy in all parameters, `[D, D]`, and the Jacobians."""
    names = list(dict(model.named_parameters()))

    def outputs(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    values = tuple(parameter.detach() for parameter in model.parameters())
    jacobians = torch.autograd.functional.jacobian(outputs, values)
    J = torch.cat([jacobian.flatten(2) for jacobian in jacobians], dim=2)
    p = model(x).detach().softmax(-1)
    at_outputs = p.diag_embed() - p[:, :, None] * p[:, None, :]
    return torch.einsum("nci,ncd,ndj->ij", J, at_outputs, J), J


def masks(model):
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.bool)
    flat[INDICES] = True
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {
        name: mask.view(parameter.shape)
        for (name, parameter), mask in zip(model.named_parameters(), flat.split(sizes), strict=True)
        if mask.any()
    }


@pytest.mark.parametrize("curvature", ["full", "kfac", "diag", "lowrank"])
def test_the_posterior_is_that_of_the_entries_of_the_dense_curvature(curvature):
    model, x, y = problem()
    original = {name: value.clone() for name, value in model.state_dict().items()}
    la = Laplace(Subnetwork(model, INDICES[::-1]), curvature=curvature, prior_precision=0.7)
    la.fit([(x[:11], y[:11]), (x[11:], y[11:])])
    ggn, J = dense_ggn(model, x)
    submatrix = ggn[INDICES][:, INDICES]
    if curvature == "diag":
        submatrix = submatrix.diagonal().diag()
    precision = submatrix + 0.7 * torch.eye(len(INDICES), dtype=torch.float64)
    torch.testing.assert_close(la.posterior.precision.to_dense(), precision)
    mean, covariance = la.functional(x)
    torch.testing.assert_close(mean, model(x).detach())
    rows = J[:, :, INDICES]
    torch.testing.assert_close(covariance, rows @ torch.linalg.inv(precision) @ rows.mT)
    for name, value in model.state_dict().items():
        assert value.equal(original[name])


def test_masks_select_the_same_entries_as_indices():
    model, x, _ = problem()
    by_mask, by_index = Subnetwork(model, masks(model)), Subnetwork(model, INDICES)
    assert by_mask.indices.tolist() == by_index.indices.tolist() == INDICES
    assert by_mask.entries.equal(by_index.entries)
    torch.testing.assert_close(by_mask(x), model(x))


@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_operators_of_entries_are_sub_matrices(kind):
    model, x, y = problem()
    loss = nn.CrossEntropyLoss()
    matrix = kind(model, loss, [(x, y)]).to_dense()
    submatrix = kind(Subnetwork(model, INDICES), loss, [(x, y)]).to_dense()
    torch.testing.assert_close(submatrix, matrix[INDICES][:, INDICES])


def test_samples_files_and_tuning_work(tmp_path):
    model, x, y = problem()
    la = Laplace(Subnetwork(model, INDICES), curvature="full").fit([(x, y)])
    la.tune([(x, y)])
    assert la.sample(4).shape == (4, len(INDICES))
    assert la.evaluate([(x, y)])["nll"] > 0
    assert torch.isfinite(la.log_marginal_likelihood())
    la.save(tmp_path / "entries.safetensors")
    loaded = Laplace.load(tmp_path / "entries.safetensors", Subnetwork(model, INDICES))
    torch.testing.assert_close(loaded.predict(x).probs, la.predict(x).probs)
    draws = la.predict(x, method="nn", samples=20, generator=torch.Generator().manual_seed(0))
    assert draws.probs.isfinite().all()


def test_selections_take_the_largest():
    model, x, y = problem()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    order = flat.abs().argsort(descending=True)
    assert largest_magnitude(model, 7).tolist() == sorted(order[:7].tolist())
    last = largest_magnitude(model, 5, ["2.weight", "2.bias"])
    assert last.min() >= 25
    assert set(last.tolist()) == set([i for i in order.tolist() if i >= 25][:5])
    la = Laplace(model, curvature="diag", prior_precision=0.5).fit([(x, y)])
    variances = diagonal(la.posterior.covariance).value
    ggn, _ = dense_ggn(model, x)
    expected = (1 / (ggn.diagonal() + 0.5)).argsort(descending=True)[:6]
    assert largest_variance(model, 6, variances).tolist() == sorted(expected.tolist())


def test_laplace_torch_has_the_same_posterior():
    laplace = pytest.importorskip("laplace", reason="compares with laplace-torch")
    model, x, y = problem()
    theirs = laplace.Laplace(
        model,
        "classification",
        subset_of_weights="subnetwork",
        hessian_structure="full",
        prior_precision=0.7,
        subnetwork_indices=torch.tensor(INDICES),
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=30)
    theirs.fit(loader)
    la = Laplace(Subnetwork(model, INDICES), curvature="full", prior_precision=0.7).fit(loader)
    torch.testing.assert_close(
        la.posterior.precision.to_dense(),
        theirs.posterior_precision.to(torch.float64),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_what_selects_no_entries_is_refused():
    model, _, _ = problem()
    for entries, error, message in (
        ([], ValueError, "selects no entry"),
        ([1, 1], ValueError, "contains an index twice"),
        ([0, 43], ValueError, r"contains indices from 0 to 43, but the model has 43"),
        ([0.5], TypeError, "Pass indices as integers"),
        ({"1.weight": torch.ones(1).bool()}, ValueError, r"names \['1.weight'\]"),
        (
            {"2.bias": torch.ones(2).bool()},
            ValueError,
            r"has shape \(2,\), but the parameter has shape \(3,\)",
        ),
        ({"2.bias": torch.ones(3)}, TypeError, "Pass booleans"),
    ):
        with pytest.raises(error, match=message):
            Subnetwork(model, entries)
    with pytest.raises(ValueError, match="count must be at least 1 and at most 18"):
        largest_magnitude(model, 19, ["2.weight", "2.bias"])
    with pytest.raises(ValueError, match=r"`variances` has shape \(3,\), but the model has 43"):
        largest_variance(model, 2, torch.ones(3))


def test_the_selected_entries_are_not_counted_as_further_parameters(tmp_path):
    model, x, y = problem()
    la = Laplace(Subnetwork(model, INDICES), curvature="full")
    assert "parameters: 6 of 43\n" in repr(la)
    assert "parameters: 6 of 43\n" in repr(la.fit([(x, y)]))
    with pytest.raises(NotImplementedError, match="belong to no such layer, but to the Subnetwork"):
        la.export(tmp_path / "predictive.pt2", x)
