"""The Hessian-free optimiser, with step sizes from a second batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from matrices import randn
from spectra import Counted
from torch import nn
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close

from laplace_debias.linalg import debiased_cg
from laplace_debias.optim import DebiasedHessianFree
from laplace_debias.optim.local_model import GraphGGN


class Tied(nn.Module):
    """A weight used twice, an unused parameter and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


def closure(model, x, y, loss=F.cross_entropy):
    def evaluate():
        outputs = model(x)
        return loss(outputs, y), outputs

    return evaluate


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(seed=0, n=12):
    x = randn(n, 3, seed=seed)
    return x, (x[:, 0] + 0.3 * randn(n, seed=seed + 50) > 0).long()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, lambda f, y: (f * y).mean()])
def test_products_are_those_of_the_dense_ggn(loss):
    torch.manual_seed(0)
    model = Tied().double()
    x = randn(5, 3)
    y = torch.randint(2, (5,)) if loss is F.cross_entropy else randn(5, 2)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    value, outputs = closure(model, x, y, loss)()
    ggn = GraphGGN(value, outputs, list(parameters.values())).to_dense()
    detached = {name: p.detach() for name, p in parameters.items()}
    J = jacrev(lambda p: functional_call(model, p, x))(detached)
    J = torch.cat([entries.reshape(10, -1) for entries in J.values()], dim=1)
    H = hessian(lambda f: loss(f, y))(outputs.detach()).reshape(10, 10)
    assert_close(ggn, J.T @ H @ J, rtol=1e-10, atol=1e-12)


def test_one_step_solves_a_regularised_linear_regression():
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x = randn(20, 4)
    y = randn(20, 1, seed=1)
    groups = [{"params": [model.weight], "weight_decay": 0.3}, {"params": [model.bias]}]
    optimizer = DebiasedHessianFree(groups, damping=0.0, tol=1e-13)
    loss_before = F.mse_loss(model(x), y) + 0.15 * model.weight.square().sum()
    loss = optimizer.step(closure(model, x, y, F.mse_loss))
    X = torch.cat([x, torch.ones(20, 1).double()], dim=1)
    decay = torch.diag(torch.tensor([0.3] * 4 + [0.0]).double())
    exact = torch.linalg.solve(2 / 20 * X.T @ X + decay, 2 / 20 * X.T @ y)[:, 0]
    assert_close(torch.cat([model.weight[0], model.bias]), exact, rtol=1e-8, atol=1e-8)
    assert_close(loss, loss_before)
    report = optimizer.last_step
    assert report.step_size == 1.0
    assert abs(report.reduction_ratio - 1) < 1e-8
    loss_after = F.mse_loss(model(x), y) + 0.15 * model.weight.square().sum()
    assert_close(torch.tensor(report.new_loss).double(), loss_after)


def test_directions_are_of_the_first_batch_and_step_sizes_of_the_second():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    theta = model.weight.detach()[0].clone()
    (x, y), (x2, y2) = ((randn(6, 4, seed=s), randn(6, 1, seed=s + 9)) for s in (1, 2))
    optimizer = DebiasedHessianFree(
        model.parameters(), damping=0.2, max_iter=3, tol=0.0, line_search=False
    )
    first, second = (closure(model, *batch, F.mse_loss) for batch in ((x, y), (x2, y2)))
    optimizer.step(first, second)
    damping = 0.2 * torch.eye(4).double()
    A, A2 = (2 / 6 * X.T @ X for X in (x, x2))
    b, b2 = (2 / 6 * X.T @ (t[:, 0] - X @ theta) for X, t in ((x, y), (x2, y2)))
    expected = debiased_cg(Counted(A + damping), Counted(A2 + damping), b, b2, tol=0.0, max_iter=3)
    assert_close(model.weight[0] - theta, expected.x, rtol=1e-9, atol=1e-12)
    report = optimizer.last_step
    step = expected.x
    assert_close(report.predicted, float(0.5 * step @ A2 @ step - b2 @ step))
    assert abs(report.reduction_ratio - 1) < 1e-8
    assert report.num_matvecs == 6


def test_the_first_batch_twice_is_the_single_batch_step():
    x, y = data()
    models = [network(), network()]
    for model, batches in zip(models, (1, 2), strict=True):
        optimizer = DebiasedHessianFree(model.parameters(), damping=0.1)
        for _ in range(3):
            optimizer.step(*[closure(model, x, y)] * batches)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_damping_follows_the_reduction_ratio():
    x = randn(20, 4)
    y = randn(20, 1, seed=1)
    model = nn.Linear(4, 1).double()
    trusting = DebiasedHessianFree(model.parameters(), damping=0.9)
    trusting.step(closure(model, x, y, F.mse_loss))
    assert trusting.param_groups[0]["damping"] == pytest.approx(0.6)
    assert trusting.last_step.damping == 0.9

    class Worse:
        """A loss that is higher wherever the model has moved to."""

        def __init__(self):
            self.calls = 0

        def __call__(self):
            self.calls += 1
            outputs = model(x)
            loss = F.mse_loss(outputs, y)
            if self.calls > 1:
                loss = 100 * loss
            return loss, outputs

    parameters_before = [p.detach().clone() for p in model.parameters()]
    distrusting = DebiasedHessianFree(model.parameters(), damping=0.6)
    distrusting.step(Worse())
    assert distrusting.param_groups[0]["damping"] == pytest.approx(0.9)
    assert distrusting.last_step.step_size == 0.0
    assert distrusting.last_step.new_loss == distrusting.last_step.loss
    for p, q in zip(model.parameters(), parameters_before, strict=True):
        assert torch.equal(p, q)
    fixed = DebiasedHessianFree(model.parameters(), damping=0.6, adapt_damping=False)
    fixed.step(Worse())
    assert fixed.param_groups[0]["damping"] == 0.6


def test_the_line_search_takes_the_first_sufficient_step_back():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    x = torch.ones(1, 1).double()
    y = torch.zeros(1, 1).double()

    def steep(outputs, targets):
        # Convex, and far flatter at 2 than its quadratic says: Newton's step overshoots.
        return (1 + (outputs - targets).square()).sqrt().mean()

    optimizer = DebiasedHessianFree(model.parameters(), damping=0.0, tol=1e-12)
    loss = optimizer.step(closure(model, x, y, steep))
    # At w the step is −w(1 + w²) = −10; 0.8ⁱ times it is tried.
    size = optimizer.last_step.step_size
    slope = -(2 / 5**0.5) * 10

    def meets(s):
        return (1 + (2 - 10 * s) ** 2) ** 0.5 <= 5**0.5 + 1e-2 * s * slope

    expected = next(0.8**i for i in range(30) if meets(0.8**i))
    assert size == pytest.approx(expected)
    assert size < 1
    assert model.weight.item() == pytest.approx(2 - 10 * size)
    assert optimizer.last_step.new_loss < loss
    # Without the search the full step is taken, for better or worse.
    nn.init.constant_(model.weight, 2.0)
    plain = DebiasedHessianFree(model.parameters(), damping=0.0, tol=1e-12, line_search=False)
    plain.step(closure(model, x, y, steep))
    assert model.weight.item() == pytest.approx(-8.0)
    assert plain.last_step.new_loss > plain.last_step.loss


def test_what_is_not_trained_stays():
    torch.manual_seed(0)
    model = Tied().double()
    frozen = model.second.bias.clone()
    unused = model.unused.detach().clone()
    optimizer = DebiasedHessianFree(model.parameters(), weight_decay=0.0)
    x, y = data()
    weight = model.first.weight.detach().clone()
    optimizer.step(closure(model, x, y), closure(model, *data(1)))
    assert torch.equal(model.second.bias, frozen)
    assert torch.equal(model.unused, unused)
    assert not torch.equal(model.first.weight, weight)
    assert all(p.grad is None for p in model.parameters())


def test_training_goes_on_from_a_saved_state():
    x, y = data()
    model = network()
    optimizer = DebiasedHessianFree(model.parameters(), damping=0.5)
    for _ in range(3):
        optimizer.step(closure(model, x, y), closure(model, *data(1)))
    resumed_model = network(1)
    resumed_model.load_state_dict(model.state_dict())
    resumed = DebiasedHessianFree(resumed_model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"] != 0.5
    optimizer.step(closure(model, x, y), closure(model, *data(1)))
    resumed.step(closure(resumed_model, x, y), closure(resumed_model, *data(1)))
    for p, q in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_copy_can_be_asked_for_its_last_step():
    x, y = data()
    model = network()
    optimizer = DebiasedHessianFree(model.parameters())
    optimizer.step(closure(model, x, y))
    assert optimizer.last_step is not None
    assert copy.deepcopy(optimizer).last_step is None


def test_a_closure_that_raises_in_the_line_search_leaves_the_parameters():
    x, y = data()
    model = network()
    parameters_before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def fails():
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return closure(model, x, y)()

    with pytest.raises(KeyboardInterrupt):
        DebiasedHessianFree(model.parameters()).step(fails)
    for p, q in zip(model.parameters(), parameters_before, strict=True):
        assert torch.equal(p, q)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -1.0}, "`damping` is"),
        ({"max_iter": 0}, "`max_iter` is"),
        ({"tol": -1.0}, "`tol` is"),
        ({"weight_decay": -1.0}, "`weight_decay` is"),
        ({"weight_decay": float("nan")}, "`weight_decay` is"),
        ({"weight_decay": float("inf")}, "`weight_decay` is"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DebiasedHessianFree(network().parameters(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"weight_decay": -1.0}, "`weight_decay` is"), ({"max_iter": 3}, "cannot differ")],
)
def test_a_group_added_later_is_checked_too(options, message):
    model = network()
    optimizer = DebiasedHessianFree(model[0].parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": model[2].parameters(), **options})
    assert len(optimizer.param_groups) == 1


def test_a_group_added_later_is_part_of_the_step():
    model = network()
    x, y = data()
    optimizer = DebiasedHessianFree(model[0].parameters(), damping=0.4)
    optimizer.step(closure(model, x, y))
    damping = optimizer.param_groups[0]["damping"]
    assert damping != 0.4
    weight_before = model[2].weight.clone()
    optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.1})
    optimizer.step(closure(model, x, y))
    assert optimizer.last_step.damping == damping
    assert optimizer.param_groups[1]["damping"] == optimizer.param_groups[0]["damping"]
    assert not torch.equal(model[2].weight, weight_before)


def test_at_a_minimum_the_damping_stays():
    model = network()
    x, y = data()
    optimizer = DebiasedHessianFree(model.parameters(), damping=0.4)
    optimizer.step(closure(model, x, y, loss=lambda outputs, _: outputs.square().mean() * 0))
    assert optimizer.last_step.predicted == 0
    assert optimizer.param_groups[0]["damping"] == 0.4


def test_the_outputs_may_be_the_parameter_itself():
    """The GGN is then the Hessian of the loss, as for a copy of the parameter."""
    A = randn(3, 3)

    def moved(function):
        theta = nn.Parameter(randn(3, seed=1))

        def evaluate():
            outputs = function(theta)
            return (A @ outputs - 1).square().sum() / 2, outputs

        DebiasedHessianFree([theta], damping=0.1).step(evaluate)
        return theta.detach()

    assert_close(moved(lambda theta: theta), moved(torch.clone), rtol=1e-12, atol=1e-12)
    assert not torch.equal(moved(lambda theta: theta), randn(3, seed=1))


def penalised(model, closure):
    loss, outputs = closure()
    return loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters()), outputs


def test_closures_and_groups_that_cannot_work_are_named():
    model = network()
    x, y = data()
    optimizer = DebiasedHessianFree(model.parameters())
    good = closure(model, x, y)
    for bad, error, message in (
        (lambda: good()[0], TypeError, r"must return \(loss, outputs\)"),
        (lambda: (model(x), model(x)), TypeError, "Return its mean"),
        (
            lambda: (good()[0], model(x)),
            ValueError,
            "did not take part in computing its loss",
        ),
        (lambda: penalised(model, good), ValueError, "depends on parameters directly"),
        (lambda: tuple(t.detach() for t in good()), ValueError, "do not depend on any parameter"),
        (lambda: (good()[0] * torch.nan, good()[1]), ValueError, "NaN or Inf before the step"),
    ):
        with pytest.raises(error, match=message):
            optimizer.step(bad)
    with pytest.raises(ValueError, match="cannot differ between parameter groups"):
        DebiasedHessianFree([{"params": model.parameters(), "damping": 2.0}])
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter requires a gradient"):
        optimizer.step(good)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="have the same dtype"):
        DebiasedHessianFree(mixed.parameters()).step(good)
