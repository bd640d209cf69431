"""Modules that are called by a reference which is no submodule: a copy calls the original."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import close
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
