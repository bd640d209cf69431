"""Covariances between inputs, against J P⁻¹ Jᵀ with the dense Jacobian of all inputs."""

import re
from dataclasses import replace

import oracle
import pytest
import torch
from cases import one_axis_at_a_time
from networks_of_tokens import Words
from oracle import close
from torch import nn

from laplace_debias import Laplace

CURVATURES = ["kfac", "ekfac", "diag", "lowrank", "full"]
DELTA = 0.7


def words():
    torch.manual_seed(0)
    return Words().double().eval(), torch.randint(6, (5, 3)), torch.randint(3, (5,))


def tagger():
    """Outputs at positions, [B, T, C]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    return model, torch.randn(5, 3, 4).double(), torch.randint(2, (5, 3))


def small(name):
    return lambda: oracle.SMALL_MODELS[name]()[:3]


MODELS = {
    "convolution": small("conv2d"),
    "mlp": small("mlp_tanh"),
    "words": words,
    "tagger": tagger,
}


def fitted(name="mlp", curvature="kfac", **options):
    model, x, y = MODELS[name]()
    if curvature == "lowrank":
        options["rank"] = 4
    la = Laplace(model, curvature=curvature, prior_precision=DELTA, **options)
    la.fit([(x[:3], y[:3]), (x[3:], y[3:])], mode="debiased", num_data=30)
    return la, x


def dense(la, x):
    """J Σ Jᵀ between all inputs and outputs, `[B, C, B, C]`, from the inverted precision."""
    J = oracle.flat_jacobian(la.model, x, la.param_names)
    P = la.posterior.precision.to_dense()
    return torch.einsum("nid,de,mje->nimj", J, torch.linalg.inv(P), J)


@pytest.mark.parametrize(("name", "curvature"), one_axis_at_a_time(MODELS, CURVATURES))
def test_it_is_the_dense_one(name, curvature):
    la, x = fitted(name, curvature)
    mean, covariance = la.functional(x, joint=True)
    expected = dense(la, x)
    close(covariance, expected)
    close(mean, la.model(x).detach())
    # Different inputs are correlated, and an input's covariance with itself is the usual one.
    assert expected[0, :, 1].abs().max() > 1e-3 * expected.abs().max()
    covariance_per_input = torch.stack([covariance[n, :, n] for n in range(len(x))])
    close(covariance_per_input, la.functional(x)[1])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("params", ["last_layer", "weights", ["head.bias"]])
def test_of_some_parameters_it_is_the_dense_one(params, joint):
    la, x = fitted("words", params=params, joint=joint)
    close(la.functional(x, joint=True)[1], dense(la, x))


@pytest.mark.parametrize("name", ["convolution", "words", "tagger"])
@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_groups_of_inputs_give_the_same(name, curvature):
    """The tightest bound lets two examples through at a time."""
    la, x = fitted(name, curvature)
    expected = la.functional(x, joint=True)[1]

    def bounded(memory):
        config = replace(la.fitted.config, memory_bound=memory)
        la._state = replace(la.fitted, config=config)

    bounded(1)
    with pytest.raises(ValueError, match=r"joint covariance of 2 example\(s\) needs") as error:
        la.functional(x, joint=True)
    needed = int(re.search(r"needs (\d+) bytes", str(error.value))[1])
    for memory in (needed, 2 * needed):
        bounded(memory)
        close(la.functional(x, joint=True)[1], expected)
    bounded(needed // 2)
    close(la.functional(x[:1], joint=True)[1], expected[:1, :, :1])


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_some_outputs(params):
    la, x = fitted("words", params=params)
    chosen = torch.randint(3, (len(x), 2))
    mean, covariance = la.functional(x, joint=True, outputs=chosen)
    rows = torch.arange(len(x))[:, None]
    close(mean, la.model(x).detach()[rows, chosen])
    close(covariance, dense(la, x)[rows, chosen][:, :, rows, chosen])
    top = la.functional(x, joint=True, outputs=1)
    assert top[1].shape == (len(x), 1, len(x), 1)
    close(top[0], la.model(x).detach().amax(1, keepdim=True))


def test_variances_have_no_joint():
    la, x = fitted()
    with pytest.raises(ValueError, match="Remove one of"):
        la.functional(x, diagonal=True, joint=True)


class WithToken(nn.Module):
    """A parameter of its own and a scale: blocks that belong to no layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.rand(2) + 1)
        self.mix = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.scale * self.head(self.mix(x + self.token).tanh())


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_of_parameters_of_no_layer(curvature):
    torch.manual_seed(0)
    model = WithToken().double().eval()
    x = torch.randn(5, 3).double()
    la = Laplace(model, curvature=curvature).fit_batches([(x, torch.tensor([0, 1, 1, 0, 1]))])
    assert {"token", "scale"} <= set(la.param_names)
    close(la.functional(x, joint=True)[1], dense(la, x))
