"""The quadratic of a network's loss on data."""

import pytest
import torch
import torch.nn.functional as F
from cases import one_axis_at_a_time
from matrices import randn
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close

from laplace_debias.quadratic import Quadratic


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def data(n=12, batch=5):
    x = randn(n, 3)
    y = torch.arange(n) % 3
    return list(zip(x.split(batch), y.split(batch), strict=True))


def dense(model, loss, batches, curvature, weight_decay, decayed):
    """Value, gradient, curvature and position of Eq. 1 and 2, with the data as one batch."""
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    named = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in named.values()]
    theta0 = torch.cat([p.flatten() for p in named.values()])
    mask = torch.cat([torch.full((p.numel(),), float(decayed(n))) for n, p in named.items()])

    def outputs_of_vector(theta):
        entries = theta.split(sizes)
        values = {n: v.view_as(p) for (n, p), v in zip(named.items(), entries, strict=True)}
        return functional_call(model, values, (x,))

    def objective(theta):
        return loss(outputs_of_vector(theta), y) + weight_decay / 2 * (mask * theta.square()).sum()

    if curvature == "hessian":
        H = hessian(objective)(theta0)
    else:
        J = jacrev(outputs_of_vector)(theta0).flatten(0, 1)
        H_outputs = hessian(lambda f: loss(f, y))(outputs_of_vector(theta0))
        H = J.T @ H_outputs.reshape(len(J), len(J)) @ J + weight_decay * torch.diag(mask.double())
    return objective(theta0), torch.func.grad(objective)(theta0), H, theta0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curvature", "decay_biases", "loss"),
    one_axis_at_a_time(
        ["ggn", "hessian"],
        [False, True],
        [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 4.0]).double())],
    ),
)
def test_it_is_the_dense_one_however_the_data_is_cut(curvature, decay_biases, loss):
    model = network()
    expected = dense(
        model, loss, data(), curvature, 0.2, lambda name: decay_biases or "bias" not in name
    )
    for batch in (5, 12):
        q = Quadratic.from_data(
            model,
            loss,
            data(batch=batch),
            curvature,
            weight_decay=0.2,
            decay_biases=decay_biases,
        )
        actual = (q.value, q.gradient, q.matrix.to_dense(), q.position)
        for actual_value, expected_value in zip(actual, expected, strict=True):
            assert_close(actual_value, expected_value, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_the_mean_over_a_partition_is_the_full_batch():
    """Eq. 5 on a network."""
    model = network()
    batches = data(8, 4)
    D = randn(31, 3)
    theta = randn(31, seed=1)
    for curvature in ("ggn", "hessian"):
        full = Quadratic.from_data(model, nn.CrossEntropyLoss(), batches, curvature)
        quadratics = [
            Quadratic.from_data(model, nn.CrossEntropyLoss(), [batch], curvature)
            for batch in batches
        ]
        slopes = torch.stack([q.slope(D, at=theta) for q in quadratics]).mean(0)
        curvatures = torch.stack([q.curvature(D) for q in quadratics]).mean(0)
        assert_close(slopes, full.slope(D, at=theta), rtol=1e-8, atol=1e-8)
        assert_close(curvatures, full.curvature(D), rtol=1e-8, atol=1e-8)


def test_a_newton_step_decreases_the_real_loss_and_leaves_the_model():
    model = network()
    state_before = {name: p.clone() for name, p in model.state_dict().items()}
    q = Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), weight_decay=0.01)
    step = q.newton_step(damping=0.5)
    for name, p in model.state_dict().items():
        assert torch.equal(p, state_before[name])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    nn.utils.vector_to_parameters(q.position + step, model.parameters())
    x, y = (torch.cat(tensors) for tensors in zip(*data(), strict=True))
    weights = sum(m.weight.square().sum() for m in model if isinstance(m, nn.Linear))
    assert F.cross_entropy(model(x), y) + 0.005 * weights < q.value


def test_the_quadratic_stays_where_it_was_when_the_model_moves_on():
    model = network()
    q = Quadratic.from_data(model, nn.CrossEntropyLoss(), data())
    position = q.position.clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(q.position, position)


def test_parameters_reduction_and_progress_are_honoured(capsys):
    model = network()
    weights = Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), params="weights")
    assert weights.gradient.shape == (12 + 12,)

    def summed(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    total = Quadratic.from_data(model, summed, data(), reduction="sum")
    mean = Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), progress=True)
    assert "loss" in capsys.readouterr().err
    assert_close(total.value, 12 * mean.value)
    assert_close(total.gradient, 12 * mean.gradient)
    assert_close(total.curvature(randn(31)), 12 * mean.curvature(randn(31)))


def test_bad_input_is_named():
    model = network()
    with pytest.raises(ValueError, match=r"`curvature` is 'hesian'.*Did you mean 'hessian'"):
        Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), "hesian")
    for decay in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`weight_decay` is"):
            Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), weight_decay=decay)
        with pytest.raises(ValueError, match="`weight_decay` is"):
            Quadratic.from_data(model, nn.CrossEntropyLoss(), data()).regularized(decay)
    with pytest.raises(ValueError, match="num_data=7"):
        Quadratic.from_data(model, nn.CrossEntropyLoss(), data(), num_data=7)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_quadratic_stays_where_it_was_built(curvature):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).double().eval()
    x = randn(12, 3)
    y = torch.arange(12) % 3
    q = Quadratic.from_data(model, nn.CrossEntropyLoss(), [(x, y)], curvature)
    theta = q.position + 0.1 * randn(*q.position.shape, seed=3)
    expected = (q(theta), q.matrix.to_dense(), q.curvature(theta))
    with torch.no_grad():
        for tensor in (*model.parameters(), layers[1].running_mean):
            tensor.add_(0.3)
    actual = (q(theta), q.matrix.to_dense(), q.curvature(theta))
    for actual_value, expected_value in zip(actual, expected, strict=True):
        assert_close(actual_value, expected_value, rtol=0, atol=0)


def test_a_model_in_training_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="dropout"):
        Quadratic.from_data(
            model, nn.CrossEntropyLoss(), [(torch.randn(4, 3), torch.zeros(4).long())]
        )
