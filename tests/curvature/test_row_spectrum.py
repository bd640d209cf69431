"""All eigenvalues of a GGN through the products of its rows, against dense eigendecompositions."""

import pytest
import torch
from networks import N, batches, build, dense_ggn, inputs
from torch import nn

from laplace_debias.curvature import GGN, ggn_spectrum


def labels():
    return torch.arange(N) % 3


def check(spectrum, G, k):
    values = torch.linalg.eigvalsh(G).flip(0)
    found = spectrum.values[: len(values)]
    scale = float(values[0])
    torch.testing.assert_close(found, values[: len(found)], rtol=0, atol=1e-10 * scale)
    assert values[len(found) :].abs().max() <= 1e-10 * scale if len(found) < len(values) else True
    V = spectrum.vectors
    assert V.shape == (len(G), k)
    torch.testing.assert_close(V.T @ V, torch.eye(k).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(G @ V, V * spectrum.values[:k], rtol=0, atol=1e-8 * scale)
    assert spectrum.trace == pytest.approx(float(G.trace()), rel=1e-10)


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum", ignore_index=1),
        nn.MSELoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 2.0]).double()),
    ],
    ids=["cross-entropy", "weighted", "ignored", "squares", "binary"],
)
def test_equals_the_dense_decomposition(name, loss):
    model, x = build(name), inputs(3)
    is_classes = isinstance(loss, nn.CrossEntropyLoss)
    y = labels() if is_classes else torch.rand(N, 3).double()
    spectrum = ggn_spectrum(model, loss, batches(x, y, 3), k=4)
    check(spectrum, dense_ggn(model, loss, x, y), 4)
    assert spectrum.left_out == pytest.approx(0.0, abs=1e-12 * spectrum.trace)


def test_the_memory_bound_changes_nothing():
    model, x, y, loss = build("conv"), inputs(3), labels(), nn.CrossEntropyLoss()
    whole = ggn_spectrum(model, loss, batches(x, y, 3), k=3)
    size = sum(p.numel() for p in model.parameters()) * 8
    for rows in (30, 31, 33):
        parts = ggn_spectrum(model, loss, batches(x, y, 2), k=3, memory_bound=rows * size)
        torch.testing.assert_close(parts.values, whole.values, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.vectors.abs(), whole.vectors.abs(), rtol=0, atol=1e-8)


def test_leaves_out_no_more_than_it_may():
    """A network that is sure of most examples; its eigenvalues are bounded by Weyl's inequality."""
    model, x, loss = build("mlp"), inputs(3), nn.CrossEntropyLoss()
    with torch.no_grad():
        list(model.parameters())[-1].add_(torch.tensor([3.0, 0.0, -3.0]).double())
    y = labels()
    G = dense_ggn(model, loss, x, y)
    spectrum = ggn_spectrum(model, loss, batches(x, y, 3), k=2, tol=0.05)
    assert len(spectrum.values) < 2 * N
    assert 0 < spectrum.left_out <= 0.05 * spectrum.trace
    assert spectrum.trace == pytest.approx(float(G.trace()), rel=1e-10)
    gaps = torch.linalg.eigvalsh(G).flip(0)[: len(spectrum.values)] - spectrum.values
    assert gaps.min() >= -1e-12
    assert 0 < gaps.max() <= spectrum.left_out


def test_more_vectors_than_rank_are_not_made_up():
    model, x, loss = build("mlp"), inputs(3)[:2], nn.CrossEntropyLoss()
    spectrum = ggn_spectrum(model, loss, [(x, torch.tensor([0, 1]))], k=50)
    assert spectrum.vectors.shape[1] == 4


def test_a_part_of_the_parameters_and_their_order():
    model, x, y, loss = build("conv"), inputs(3), labels(), nn.CrossEntropyLoss()
    names = [name for name, _ in model.named_parameters()][1:3]
    spectrum = ggn_spectrum(model, loss, batches(x, y, 4), k=2, params=names)
    G = GGN(model, loss, batches(x, y, 4), params=names).to_dense()
    check(spectrum, G, 2)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"k": 0}, ValueError, "at least 1"),
        ({"tol": 1.0}, ValueError, "below 1"),
        ({"memory_bound": 0}, ValueError, "at least 1"),
        ({"memory_bound": 10}, ValueError, "too small"),
        ({"loss": nn.SmoothL1Loss()}, TypeError, "GGN"),
    ],
)
def test_bad_arguments_are_refused(change, kind, message):
    model, x = build("mlp"), inputs(3)
    arguments = {"model": model, "loss": nn.CrossEntropyLoss(), "data": [(x, labels())], "k": 2}
    with pytest.raises(kind, match=message):
        ggn_spectrum(**(arguments | change))


def test_too_many_rows_are_refused(monkeypatch):
    monkeypatch.setattr("laplace_debias.curvature.operators.row_spectrum.MAX_ROWS", 2 * N - 1)
    with pytest.raises(ValueError, match=rf"{2 * N} rows.*eigsh"):
        ggn_spectrum(build("mlp"), nn.CrossEntropyLoss(), [(inputs(3), labels())], k=1)


def test_the_model_is_untouched():
    model = build("conv")
    before = {name: p.clone() for name, p in model.named_parameters()}
    ggn_spectrum(model, nn.CrossEntropyLoss(), [(inputs(3), labels())], k=1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
