"""Modules that are called by a reference, not as a submodule, so a copy calls the original."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import close, flat_jacobian, functional_covariance, ggn
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, Hessian
from laplace_debias.curvature.network.shared_copy import refuse_calls, shared_copy

LOSS = nn.CrossEntropyLoss()


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Network(nn.Module):
    """A layer that is called by a lambda, and one that is called as a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        inner = self.inner
        self.calls = Calls(lambda x: inner(x).tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.calls(x))


def network():
    torch.manual_seed(0)
    return Network().double().eval()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (6,), generator=generator)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: Laplace(model, curvature="full").fit_batches([data()]),
        lambda model: Laplace(model, curvature="kfac", params=["inner.weight"]).fit([data()]),
        lambda model: GGN(model, LOSS, [data()]),
        lambda model: Hessian(model, LOSS, [data()], params=["inner.bias"]),
        lambda model: KFAC(model, LOSS, [data()]).to_dense(),
    ],
    ids=["full", "kfac", "GGN", "Hessian", "KFAC"],
)
def test_a_layer_that_only_a_lambda_refers_to_is_refused(read):
    model = network()
    with pytest.raises(
        NotImplementedError, match=r"inner.*, a Linear, which is not one of its submodules"
    ):
        read(model)
    assert not nn.modules.module._global_forward_pre_hooks
    model(data()[0])


def test_the_users_modules_have_no_hooks_meanwhile():
    """Another thread may copy the model at any time."""
    model = network()
    with refuse_calls(model, ["inner.weight"], shared_copy(model)):
        assert not any(module._forward_pre_hooks for module in shared_copy(model).modules())
        with ThreadPoolExecutor() as pool:
            pool.submit(model, data()[0]).result()
        with pytest.raises(NotImplementedError, match=r"inner\.weight, a Linear"):
            model(data()[0])


def test_frozen_layers_may_be_called_by_any_reference():
    """The curvature of the head is that of a network whose layers are submodules."""
    model = network()
    x, y = data()
    features = model.inner(x).tanh().detach()
    la = Laplace(model, curvature="full", params=["head.weight"]).fit_batches([(x, y)])
    probs = model(x).detach().softmax(-1)
    H = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    exact = torch.einsum("ncd,ni,nj->cidj", H, features, features).reshape(12, 12)
    expected = torch.linalg.inv(exact + torch.eye(12, dtype=torch.float64))
    close(la.posterior.covariance.to_dense(), expected, 1e-10)
    J = GGN(model, LOSS, [(x, y)], params=["head.weight"])
    close(J.to_dense(), exact / 6, 1e-10)


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def compiled_model(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_layer(model):
    model[0].forward = torch.compile(model[0].forward, backend="eager")


def traced(compiled):
    """After some calls, a compiled function no longer runs the hooks of all modules."""

    def change(model):
        compiled(model)
        for size in (6, 2):
            model(data()[0][:size])

    change.__name__ = f"traced_{compiled.__name__}"
    return change


COMPILED = [compiled_model, compiled_layer, traced(compiled_model), traced(compiled_layer)]


def replaced_by_lambda(model):
    forward = model.forward
    model.forward = lambda x: forward(1 * x)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("change", COMPILED)
def test_covariances_of_a_model_whose_forward_is_compiled_are_exact(
    change, params, differentiable, tmp_path
):
    """It may be compiled after a fit, before a posterior is loaded, or before a fit."""
    plain = sequential()
    x, y = data()
    changed = Laplace(copy.deepcopy(plain), params=params).fit_batches([(x, y)])
    changed.save(tmp_path / "posterior.pt")
    change(changed.model)
    model = copy.deepcopy(plain)
    change(model)
    loaded = Laplace.load(tmp_path / "posterior.pt", model)
    fitted = Laplace(model, params=params).fit_batches([(x, y)])
    J = flat_jacobian(plain, x, changed.param_names)
    expected = functional_covariance(J, changed.posterior.covariance.to_dense())
    for la in (changed, loaded, fitted):
        close(la.functional(x, differentiable=differentiable)[1].detach(), expected)


@pytest.mark.parametrize("change", COMPILED)
def test_the_ggn_of_a_model_whose_forward_is_compiled_is_exact(change):
    x, y = data()
    expected = GGN(sequential(), LOSS, [(x, y)]).to_dense()
    model = sequential()
    change(model)
    close(GGN(model, LOSS, [(x, y)]).to_dense(), expected)


@pytest.fixture
def prepare():
    """Prepare a model for mixed precision, as accelerate and Hugging Face's Trainer do."""
    accelerate = pytest.importorskip("accelerate")
    reset = accelerate.state.AcceleratorState._reset_state
    reset(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare
    reset(reset_partial_state=True)


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_covariances_of_a_model_in_accelerates_mixed_precision_are_exact(
    prepare, is_part, is_compiled, params
):
    # Autocast leaves double precision as it is.
    model = sequential().float()
    plain = sequential()
    x, y = data()
    if is_compiled:
        compiled_model(model)
    model = prepare(model)
    assert (model(x.float()) - plain(x)).abs().max() > 1e-4
    if is_part:
        model, plain = nn.Sequential(model, nn.Tanh()), nn.Sequential(plain, nn.Tanh())
    la = Laplace(model, params=params, curvature="full").fit_batches([(x.float(), y)])
    precision = len(x) * ggn(plain, x, "classification", la.param_names)
    precision = precision + torch.eye(len(precision))
    J = flat_jacobian(plain, x, la.param_names)
    mean, covariance = la.functional(x.float())
    close(mean.double(), plain(x).detach(), 1e-5)
    close(covariance.double(), functional_covariance(J, precision.inverse()), 1e-5)
    operator = GGN(model, LOSS, [(x.float(), y)])
    close(operator.to_dense().double(), GGN(plain, LOSS, [(x, y)]).to_dense(), 1e-5)
    assert "_original_forward" in vars(model[0] if is_part else model)


def test_a_forward_that_is_replaced_in_accelerates_mixed_precision_is_noticed(prepare):
    x, y = data()
    model = prepare(sequential())
    la = Laplace(model).fit_batches([(x, y)])
    la.predict(x)
    replaced_by_lambda(model)
    with pytest.raises(NotImplementedError, match="a function that replaces a `forward`"):
        la.predict(x)

    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    plain = sequential()
    doubled = Doubled(*plain).eval()
    la = Laplace(prepare(doubled), curvature="full").fit_batches([(x, y)])
    close(la.functional(x)[0], 2 * plain(x).detach())


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize(
    "predict",
    [
        lambda la, x: la.functional(x),
        lambda la, x: la.functional(x, diagonal=True),
        lambda la, x: la.functional(x, joint=True),
        lambda la, x: la.functional(x, differentiable=True),
        lambda la, x: la.predict(x),
        lambda la, x: la.predict(x, "nn"),
    ],
    ids=["functional", "diagonal", "joint", "differentiable", "predict", "nn"],
)
def test_predictions_refuse_a_forward_that_calls_the_modules_of_the_user(predict, params, tmp_path):
    """Without an error, all covariances would be zero."""
    x, y = data()
    changed = Laplace(sequential(), params=params).fit_batches([(x, y)])
    changed.save(tmp_path / "posterior.pt")
    predict(changed, x)
    replaced_by_lambda(changed.model)
    model = sequential()
    replaced_by_lambda(model)
    for la in (changed, Laplace.load(tmp_path / "posterior.pt", model)):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="a function that replaces a `forward`"):
                predict(la, x)
    assert not nn.modules.module._global_forward_pre_hooks
