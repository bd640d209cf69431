"""Models that checkpoint activations, also in eval mode: the numbers of the plain model."""

import threading

import pytest
import timm
import torch
from oracle import close, flat_jacobian, functional_covariance, ggn
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, Hessian
from laplace_debias.curvature.network.calling import layer_by_layer

LOSS = nn.CrossEntropyLoss()


class Network(nn.Module):
    """A network that calls its inner layers by a function."""

    def __init__(self, run):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 5))
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.run = run

    def block(self, x, factor=1.0):
        return x + self.inner(self.scale * x) * factor

    def forward(self, x):
        return self.head(self.run(self, self.first(x)).tanh())


RUNS = {
    "plain": lambda self, x: self.block(x),
    "not reentrant": lambda self, x: checkpoint(self.block, x, use_reentrant=False),
    "by name": lambda self, x: checkpoint(self.block, x, factor=1.0, use_reentrant=False),
    "through the module": lambda self, x: torch.utils.checkpoint.checkpoint(
        self.block, x, 1.0, use_reentrant=False
    ),
    "reentrant": lambda self, x: checkpoint(self.block, x, use_reentrant=True),
    "sequential": lambda self, x: (
        x + checkpoint_sequential(self.inner, 2, self.scale * x, use_reentrant=False)
    ),
    "nested": lambda self, x: checkpoint(
        lambda h: checkpoint(self.block, h, use_reentrant=False), x, use_reentrant=False
    ),
}


def network(name):
    torch.manual_seed(0)
    return Network(RUNS[name]).double().eval()


def wrapped():
    """A network whose layers torch's own wrapper checkpoints."""
    model = network("plain")
    model.inner[0] = checkpoint_wrapper(model.inner[0])
    model.inner[3] = checkpoint_wrapper(model.inner[3])
    return model


def composable():
    """A network that torch's hooks for a part of a network checkpoint."""
    model = network("plain")
    composable_checkpoint(model.inner)
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (6,), generator=generator)


def plain_names(names):
    """Names of parameters without those of torch's wrapper."""
    return [name.replace("_checkpoint_wrapped_module.", "") for name in names]


def is_inner(name, _):
    return plain_names([name])[0] in ("inner.3.weight", "scale", "inner.0.bias")


MODELS = {name: lambda name=name: network(name) for name in RUNS if name != "plain"}
MODELS["wrapped"] = wrapped
MODELS["composable"] = composable


@pytest.mark.parametrize("params", ["all", is_inner, "last_layer"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models_have_the_posterior_of_the_plain_one(name, params):
    plain = network("plain")
    x, y = data()
    la = Laplace(MODELS[name](), params=params, curvature="full").fit_batches([(x[:4], y[:4])])
    names = plain_names(la.param_names)
    precision = 4 * ggn(plain, x[:4], "classification", names)
    precision = precision + torch.eye(len(precision))
    close(la.posterior.precision.to_dense(), precision)
    J = flat_jacobian(plain, x, names)
    expected = functional_covariance(J, precision.inverse())
    for differentiable in (False, True):
        close(la.functional(x, differentiable=differentiable)[1].detach(), expected)
    generator = torch.Generator().manual_seed(0)
    la.predict(x, "glm-mc", 3, generator)
    for curvature in ("kfac", "diag"):
        expected = Laplace(plain, params=params, curvature=curvature).fit_batches([(x, y)])
        la = Laplace(MODELS[name](), params=params, curvature=curvature).fit_batches([(x, y)])
        actual = la.posterior.precision.to_dense()
        close(actual, expected.posterior.precision.to_dense())


@pytest.mark.parametrize("make", [GGN, Hessian, KFAC])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models_have_the_operators_of_the_plain_one(name, make):
    expected = make(network("plain"), LOSS, [data()])
    actual = make(MODELS[name](), LOSS, [data()])
    close(actual.to_dense(), expected.to_dense())


def test_a_transformer_of_timm_that_checkpoints_can_be_fitted():
    def transformer():
        torch.manual_seed(0)
        options = {"img_size": 32, "embed_dim": 16, "num_heads": 2, "depth": 1, "num_classes": 3}
        return timm.create_model("vit_tiny_patch16_224", **options).eval()

    model = transformer()
    model.set_grad_checkpointing(True)
    x = torch.randn(3, 3, 32, 32)
    y = torch.tensor([0, 1, 2])
    la = Laplace(model, curvature="diag").fit_batches([(x, y)])
    expected = Laplace(transformer(), curvature="diag").fit_batches([(x, y)])
    assert la.param_names == expected.param_names
    torch.testing.assert_close(la.functional(x), expected.functional(x))


def count_runs(reentrant):
    """Count the runs of a checkpointed function in a forward and a backward pass."""
    runs = []

    def square(x):
        runs.append(len(runs))
        return x.square()

    x = torch.ones(2, requires_grad=True)
    checkpoint(square, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    return len(runs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_other_threads_and_of_training_work_as_usual(reentrant):
    originals = {name: value for name, value in vars(checkpoints).items() if "generator" in name}
    is_within, may_leave = threading.Event(), threading.Event()

    def work():
        with layer_by_layer():
            is_within.set()
            may_leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_within.wait()
    try:
        assert count_runs(reentrant) == 2
        with layer_by_layer():
            assert count_runs(reentrant) == 1
        assert count_runs(reentrant) == 2
    finally:
        may_leave.set()
        thread.join()
    assert count_runs(reentrant) == 2
    for name, original in originals.items():
        assert getattr(checkpoints, name) is original
    assert "apply" not in vars(checkpoints.CheckpointFunction)
