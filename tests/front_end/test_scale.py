"""The scale of a few examples' curvature, taken from forward passes over more."""

import pytest
import torch
from cases import one_axis_at_a_time
from torch import nn
from torch.func import hessian
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.losses.likelihoods import Bernoulli, Categorical, Gaussian


def network(outputs=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))
    with torch.no_grad():
        model[2].weight.mul_(5)
    return model.double().eval()


def data(number, seed, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(outputs, (number,), generator=generator)


def loss_curvature(model, x, y, kind="exact"):
    """Mean over examples of the trace of the dense Hessian of the cross-entropy in the logits."""
    total = 0.0
    for logits, label in zip(model(x).detach(), y, strict=True):

        def loss(f, label=label):
            return cross_entropy(f[None], label[None])

        if kind == "empirical":
            total += torch.func.grad(loss)(logits).square().sum().item()
        else:
            total += hessian(loss)(logits).trace().item()
    return total / len(x)


def curvature_of(la):
    return torch.block_diag(*(b.to_dense() for b in la.posterior.curvature.blocks.values()))


@pytest.mark.parametrize(
    ("kind", "curvature", "way"),
    one_axis_at_a_time(
        ["exact", "mc", "empirical"],
        ["kfac", "ekfac", "diag", "lowrank", "full"],
        ["mini", "debiased", "crossfit"],
    ),
)
def test_the_magnitudes_are_multiplied_by_the_ratio_of_loss_curvatures(kind, curvature, way):
    model = network()
    first, second, everything = data(8, 0), data(6, 1), data(50, 2)
    seen = second if way == "debiased" else first
    options = {"folds": 4} if way == "crossfit" else {}
    batches = ([first], [second] if way == "debiased" else None)

    def fitted(scale):
        la = Laplace(model, curvature=curvature, fisher=kind)
        generator = torch.Generator().manual_seed(0)
        return la.fit_batches(*batches, num_data=99, scale=scale, generator=generator, **options)

    as_it_is = fitted(None)
    parts = [(everything[0][:20], everything[1][:20]), (everything[0][20:], everything[1][20:])]
    scaled = fitted(parts)
    ratio = loss_curvature(model, *everything, kind) / loss_curvature(model, *seen, kind)
    assert abs(ratio - 1) > 0.01
    torch.testing.assert_close(curvature_of(scaled), ratio * curvature_of(as_it_is))
    assert scaled.num_data == 99
    same = fitted([seen])
    torch.testing.assert_close(curvature_of(same), curvature_of(as_it_is))


def test_ignored_positions_do_not_count():
    model = network()
    x, y = data(40, 0)
    x, y = x.reshape(8, 5, 4), y.reshape(8, 5)
    y[2:, 1:] = -100
    as_it_is, scaled = (
        Laplace(model).fit_batches([(x[:4], y[:4])], num_data=8, scale=scale)
        for scale in (None, [(x, y)])
    )
    counted = y.flatten() >= 0
    per_example = [
        loss_curvature(model, x[:n].flatten(0, 1)[counted[: 5 * n]], y[:n][y[:n] >= 0])
        * counted[: 5 * n].sum().item()
        / n
        for n in (4, 8)
    ]
    ratio = per_example[1] / per_example[0]
    torch.testing.assert_close(curvature_of(scaled), ratio * curvature_of(as_it_is))


def test_traces_of_the_loss_hessian_are_those_of_the_dense_one():
    f = torch.randn(7, 4).double() * 3
    for likelihood, outputs, target in (
        (Categorical(), f, torch.tensor([2])),
        (Bernoulli(), f[:, :1], torch.ones(1, 1).double()),
        (Gaussian([0.5, 1.0, 2.0, 3.0]), f, torch.zeros(1, 4).double()),
    ):

        def loss(row, likelihood=likelihood, target=target):
            return likelihood.nll(row[None], target).sum()

        expected = torch.stack([hessian(loss)(row).trace() for row in outputs])
        torch.testing.assert_close(likelihood.hessian_trace(outputs), expected)
    certain = torch.tensor([[30.0, 0.0, 0.0]])
    trace = Categorical().hessian_trace(certain)
    torch.testing.assert_close(trace, torch.tensor([4 * torch.tensor(-30.0).double().exp()]))


def test_fit_scales_by_the_whole_loader():
    model = network()
    x, y = data(40, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    la = Laplace(model).fit(loader, mode="crossfit", scale=True)
    expected = Laplace(model).fit_batches([(x[:8], y[:8])], num_data=40, folds=2, scale=[(x, y)])
    torch.testing.assert_close(curvature_of(la), curvature_of(expected))


def test_what_cannot_be_scaled_is_told_before_any_work():
    model = network()
    batches = [data(8, 0), data(8, 1)]
    la = Laplace(model)
    with pytest.raises(ValueError, match="leave out scale=True"):
        la.fit(batches, scale=True, num_data=16)
    for way in (
        lambda: la.fit(iter(batches), mode="mini", num_data=16, scale=True),
        lambda: la.fit_batches(batches, scale=iter(batches)),
        lambda: la.fit_batches(iter(batches), scale=batches),
        lambda: la.fit_batches(batches, iter(batches), scale=batches),
    ):
        with pytest.raises(TypeError, match="read only once"):
            way()
    # Told by forward passes, not after the fit, whose first pass would raise as well.
    with pytest.raises(ValueError, match="scale holds no example"):
        la.fit_batches(batches, scale=[])
    with pytest.raises(RuntimeError, match="Not fitted"):
        la.posterior
    certain = network()
    with torch.no_grad():
        certain[2].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    with pytest.raises(ValueError, match="nothing to scale"):
        Laplace(certain).fit_batches(batches, scale=batches)
