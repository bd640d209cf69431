"""Closed-form predictions with the posterior of a last layer that has few outputs."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracle import (
    close,
    flat_jacobian,
    functional_covariance,
    kfac_block,
    kfac_factors,
    posterior_covariance,
)
from torch import nn
from torch.distributions import Categorical, Distribution

from laplace_debias import Laplace, Link
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.network.outputs import are_finite
from laplace_debias.curvature.network.shared_copy import are_constant
from laplace_debias.laplace.functional.last_layer import difference_variances, recorded_inputs

DELTA = 0.3


def fitted(scale=1.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    with torch.no_grad():
        model[2].weight *= scale
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(model, params="last_layer", prior_precision=DELTA, **options)
    return la.fit_batches([(x, torch.randint(3, (20,)))]), x


def dense_difference_variances(la, x):
    """Variances of the differences of every two outputs, by dense factors and Jacobians."""
    factors = kfac_factors(la.model, x, "classification", "2")
    blocks = [kfac_block(factors), factors["bias"]]
    covariance = posterior_covariance(blocks, len(x), DELTA)
    J = flat_jacobian(la.model, x, ["2.weight", "2.bias"])
    differences = (J[:, :, None] - J[:, None]).flatten(1, 2)
    variances = functional_covariance(differences, covariance).diagonal(dim1=1, dim2=2)
    return variances.unflatten(1, (3, 3))


def test_the_variances_of_differences_are_those_of_the_dense_jacobian():
    la, x = fitted()
    mean, variances = difference_variances(la.fitted, x)
    close(mean, la.model(x).detach(), 1e-12)
    close(variances, dense_difference_variances(la, x), 1e-12)


@pytest.mark.parametrize("scale", [1.0, 500.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_predictions_are_the_pairwise_probits_of_the_dense_variances(scale, temperature):
    la, x = fitted(scale)
    la.link = Link("pairwise", temperature)
    mean = la.model(x).detach()
    roots = (temperature**2 + math.pi / 8 * dense_difference_variances(la, x)).sqrt()
    exponents = (mean[:, None, :] - mean[:, :, None]) / roots
    expected = (-exponents.logsumexp(-1)).log_softmax(-1)
    close(la.predict(x).logits, expected, 1e-12)
    close(la.predict(x[:1]).logits, expected[:1], 1e-12)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_prediction_checks_its_labels_as_the_distributions_of_torch_do(monkeypatch, is_checked):
    monkeypatch.setattr(Distribution, "_validate_args", is_checked)  # Some libraries turn it off.
    la, x = fitted()
    predicted = la.predict(x)
    assert type(predicted) is Categorical
    assert predicted._validate_args == is_checked
    if is_checked:
        with pytest.raises(ValueError, match="support"):
            predicted.log_prob(torch.full((20,), 3))
        with pytest.raises(ValueError, match="support"):
            predicted.expand((2, 20)).log_prob(torch.full((20,), 3))


def test_an_overflow_of_the_variances_is_an_error():
    x = torch.randn(20, 4, dtype=torch.float64)
    la = Laplace(nn.Linear(4, 3).double(), params="last_layer")
    la.fit_batches([(x, torch.arange(20) % 3)])
    with pytest.raises(ValueError, match="covariance of the outputs overflows"):
        la.predict(1e155 * x)


def test_a_model_that_changes_within_a_search_is_noticed():
    la, x = fitted()
    y = torch.arange(20) % 3

    def batches():
        yield x, y
        with torch.no_grad():
            la.model[0].weight += 1
        yield x, y

    with pytest.raises(RuntimeError, match="has changed since the fit"):
        la.tune(batches())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),
        ([-3e38, -3e38, 1.0], True),
        ([math.inf, 1.0], False),
        ([math.inf, -math.inf], False),
        ([math.nan, 1.0], False),
        ([], True),
    ],
)
def test_entries_are_finite_also_if_their_sum_overflows(values, expected):
    assert bool(are_finite(torch.tensor(values))) is expected


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(4, 4), (2, 4)),
        (nn.Bilinear(4, 4, 2), None),
        (nn.Conv1d(4, 3, 2), (2, 4, 5)),
        (nn.BatchNorm1d(4), (2, 4)),
        (nn.LayerNorm(4), (2, 4)),
        (nn.Dropout(), (2, 4)),
        (nn.MaxPool1d(2), (2, 4, 6)),
        (nn.AdaptiveAvgPool1d(2), (2, 4, 6)),
        (nn.Sequential(nn.Flatten(), nn.ConstantPad1d(1, 0.0), nn.PReLU()), (2, 4, 6)),
        (nn.MultiheadAttention(4, 2), None),
    ],
)
def test_torchs_own_modules_keep_their_attributes_in_a_forward_pass(module, shape):
    module.eval()
    assert are_constant(module.modules())
    attributes_before = [attributes(submodule) for submodule in module.modules()]
    if shape is None:
        inputs = [torch.randn(3, 4) for _ in range(3 if module.__class__.__name__[0] == "M" else 2)]
    else:
        inputs = [torch.randn(shape)]
    module(*inputs)
    assert [attributes(submodule) for submodule in module.modules()] == attributes_before


def attributes(module):
    """The identities of a module's attributes and of the entries of its containers."""
    entries = []
    for name, value in vars(module).items():
        entries.append((name, id(value)))
        if isinstance(value, dict):
            entries += [
                (key, id(entry), getattr(entry, "_version", 0)) for key, entry in value.items()
            ]
    return entries


def with_hook():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def with_hook_before():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None)
    return module


def with_own_forward():
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    return module


class Own(nn.Linear):
    pass


@pytest.mark.parametrize(
    "build",
    [with_hook, with_hook_before, with_own_forward, lambda: Own(2, 2), lambda: nn.LSTM(2, 2)],
)
def test_other_modules_may_change_in_a_forward_pass(build):
    assert not are_constant(nn.Sequential(nn.Linear(2, 2), build()).modules())


def dense_covariance(la, x):
    factors = kfac_factors(la.model, x, "classification", "2")
    blocks = [kfac_block(factors), factors["bias"]]
    J = flat_jacobian(la.model, x, ["2.weight", "2.bias"])
    return functional_covariance(J, posterior_covariance(blocks, len(x), DELTA))


@pytest.mark.parametrize("is_shared", [True, False])
def test_weight_and_bias_have_one_factor_if_their_directions_are_equal(is_shared):
    la, x = fitted()
    if not is_shared:
        bias = la.posterior.curvature.blocks["2.bias"]
        # The same matrix, in eigenvectors of the opposite sign.
        bias.U_G.neg_()
    inputs = recorded_inputs(la.fitted, x)
    outputs = inputs.outputs(inputs.eigen_variances(torch.full((2,), DELTA, dtype=x.dtype)))
    assert len(outputs.factors) == (1 if is_shared else 2)
    expected = dense_covariance(la, x)
    close(outputs.covariance(), expected, 1e-12)
    close(outputs.variances(), expected.diagonal(dim1=1, dim2=2), 1e-12)


class CountedPasses(nn.Module):
    """The identity, which counts the calls of all instances: a prediction runs a copy."""

    num_calls = 0

    def forward(self, x):
        CountedPasses.num_calls += 1
        return x


class WithOptions(nn.Sequential):
    """A network with an attribute whose changes leave no trace: each prediction copies it."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.options = SimpleNamespace(factor=1.0)


@pytest.mark.parametrize("verb", ["predict", "uncertainty", "functional"])
@pytest.mark.parametrize(
    ("network", "params", "tail"),
    [
        (nn.Sequential, "last", []),
        (nn.Sequential, "last", [nn.LayerNorm(3)]),
        (nn.Sequential, "all", []),
        (WithOptions, "last", []),
    ],
)
def test_a_prediction_needs_one_forward_pass(network, params, tail, verb):
    model = network(CountedPasses(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), *tail).eval()
    x = torch.randn(20, 4)
    names = ["3.weight", "3.bias"] if params == "last" else params
    la = Laplace(model, params=names).fit([(x, torch.randint(3, (20,)))])
    predict = getattr(la, verb)
    predict(x)
    num_calls_before = CountedPasses.num_calls
    predict(x)
    assert CountedPasses.num_calls == num_calls_before + 1


@pytest.mark.parametrize("likelihood", ["regression", "multilabel"])
def test_the_moments_of_a_last_layer_are_those_of_the_dense_jacobian(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(20, 4, dtype=torch.float64)
    y = torch.rand(20, 3, dtype=torch.float64).round()
    la = Laplace(model, likelihood, params="last_layer", prior_precision=DELTA)
    la.fit_batches([(x, y)])
    J = flat_jacobian(model, x, ["2.weight", "2.bias"])
    expected = functional_covariance(J, torch.linalg.inv(la.posterior.precision.to_dense()))
    mean, covariance = la.functional(x)
    close(mean, model(x).detach(), 1e-12)
    close(covariance, expected, 1e-12)
    assert torch.equal(covariance, covariance.mT)
    _, variances = la.functional(x, diagonal=True)
    close(variances, expected.diagonal(dim1=1, dim2=2), 1e-12)


class Head(nn.Module):
    """A linear layer, and one of several ways to use it."""

    def __init__(self, use):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.use = use

    def forward(self, x):
        """Shape `[B, 4]`."""
        return self.use(self.head, self.body(x).tanh())


def overwrite_input(head, h):
    outputs = head(h)
    h += 1
    return outputs


USES = {
    "once": lambda head, h: head(h),
    "by name": lambda head, h: head(input=h),
    "twice": lambda head, h: head(head(h)),
    "first by name": lambda head, h: head(head(input=h)),
    "scaled": lambda head, h: head(h) / 2,
    "scaled in place": lambda head, h: head(h).div_(2),
    "input overwritten": overwrite_input,
}


@pytest.mark.parametrize("use", USES)
def test_the_inputs_of_a_last_layer_suffice_only_if_it_alone_gives_the_outputs(use):
    torch.manual_seed(0)
    model = Head(USES[use]).double().eval()
    x = torch.randn(9, 4, dtype=torch.float64)
    network = model.requires_grad_(False)
    tap = Tap(network, curvature_blocks(network, ["head.weight", "head.bias"]))
    recorded = tap.forward_of_last_layer(x)
    assert (recorded is not None) == (use in ("once", "by name"))
    if recorded is not None:
        outputs, phi = recorded
        close(outputs, model(x), 1e-12)
        close(phi, model.body(x).tanh(), 1e-12)
    assert not model.head._forward_hooks


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (0, ValueError, r"outputs must be at least 1 .* got 0"),
        (-1, ValueError, r"outputs must be at least 1 .* got -1"),
        (True, TypeError, r"outputs must be a whole number, got True"),
        (4, ValueError, r"outputs=4. is too large, because the model has 3 outputs"),
        (torch.full((20, 2), 3), ValueError, r"contains indices from 3 to 3\. .* from 0 to 2"),
        (torch.full((20, 2), -1), ValueError, r"contains indices from -1 to -1\. .* from 0 to 2"),
        (torch.ones(20, 3, dtype=torch.bool), ValueError, r"dtype torch.bool and shape \(20, 3\)"),
        (torch.zeros(19, 1, dtype=torch.long), ValueError, r"shape \(19, 1\)\. .* \(20, k\)"),
    ],
)
def test_outputs_that_do_not_exist_are_refused(outputs, error, message):
    la, x = fitted()
    with pytest.raises(error, match=message):
        la.functional(x, outputs=outputs)
