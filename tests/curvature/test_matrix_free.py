"""Operators of networks against dense float64 matrices, built another way."""

import copy
import math
from functools import cache

import pytest
import torch
from cases import one_axis_at_a_time, others_slow
from conformance import NetworkConformance
from networks import (
    LABELS,
    LOSSES,
    MODELS,
    RECORDED,
    N,
    batches,
    build,
    case,
    close,
    dense_ggn,
    dense_hessian,
    dense_jacobian,
    flatten,
    function_of,
    inputs,
    trainable,
)
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import grad
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher, Fisher, Hessian, Jacobian
from laplace_debias.curvature.losses import Uniforms, output_loss


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_argument_of_the_losses(name):
    model, loss, x, y = case(name)
    close(GGN(model, loss, batches(x, y, 3)), dense_ggn(model, loss, x, y))


# Torch differentiates the loss itself here: a case for each way to divide sums over batches.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ce sum", "ce positions everything", "mse", "bce both"])
def test_every_argument_of_the_losses_in_the_hessian(name):
    model, loss, x, y = case(name)
    close(Hessian(model, loss, batches(x, y, 3)), dense_hessian(model, loss, x, y))


@pytest.mark.parametrize("name", ["ce", "mse", "bce", "ce positions everything", "bce both"])
def test_the_exact_fisher_is_the_ggn(name):
    model, loss, x, y = case(name)
    close(Fisher(model, loss, batches(x, y, 3)), dense_ggn(model, loss, x, y))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_empirical_fisher_of_every_loss(name):
    model, loss, x, y = case(name)
    summed = copy.copy(loss)
    summed.reduction = "sum"
    divisor = (summed(model(x), y) / loss(model(x), y)).detach()
    J = dense_jacobian(model, x).flatten(1, -2)
    gradients = [
        jacobian(lambda f, b=b: summed(f, b), model(a)).flatten() @ J[i]
        for i, (a, b) in enumerate(batches(x, y, 1))
    ]
    dense = sum(torch.outer(g, g) for g in gradients) / divisor
    close(EmpiricalFisher(model, loss, batches(x, y, 3)), dense)


def cubic(outputs, targets):
    """A loss without a class in torch, whose Hessian is neither constant nor diagonal."""
    return ((outputs.sum(1) - targets.double()) ** 4 + outputs.exp().sum(1)).mean()


class Tempered(nn.CrossEntropyLoss):
    """A subclass that computes a different loss from its base class."""

    def forward(self, outputs, targets):
        return super().forward(outputs**3, targets)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (cubic, "mean"),
        (lambda f, y: 5 * cubic(f, y) * len(y), "sum"),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum"), "sum"),
        (Tempered(label_smoothing=0.1), None),
        (lambda f, y: f[y > 0].square().sum(), "sum"),
    ],
    ids=["mean", "sum", "function", "module", "masked"],
)
def test_any_callable(loss, reduction):
    model = build("mlp")
    x = inputs(3)
    y = LABELS
    data = batches(x, y, 3)
    close(Hessian(model, loss, data, reduction=reduction), dense_hessian(model, loss, x, y))
    G = dense_ggn(model, loss, x, y)
    close(GGN(model, loss, data, reduction=reduction), G)
    mean = (reduction or "mean") == "mean"
    g = jacobian(lambda o: loss(o, y), model(x)) * (N if mean else 1)
    g = torch.einsum("nc,ncd->nd", g, dense_jacobian(model, x))
    ef = EmpiricalFisher(model, loss, data, reduction=reduction)
    close(ef, g.T @ g / (N if mean else 1))
    assert not GGN(model, loss, data, reduction=reduction).is_positive_semidefinite


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logit", "target"), one_axis_at_a_time([25.0, -25.0, -3.0, 0.0, 3.0], [0.0, 1.0])
)
def test_binary_cross_entropy_bends_at_any_logit(logit, target):
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(logit)
    data = [(torch.ones(1, 1).double(), torch.full((1, 1), target).double())]
    expected = 1 / (math.exp(logit / 2) + math.exp(-logit / 2)) ** 2
    for operator in (Hessian, GGN, Fisher):
        dense = operator(model, nn.BCEWithLogitsLoss(), data).to_dense()
        assert float(dense) == pytest.approx(expected, rel=1e-10)


def test_a_linear_loss_has_no_ggn():
    model = build("mlp")
    data = batches(inputs(3), LABELS, 3)
    assert not GGN(model, lambda f, y: f.sum(), data, reduction="sum").to_dense().any()
    H = Hessian(model, lambda f, y: f.sum(), data, reduction="sum")
    close(H, dense_hessian(model, lambda f, y: f.sum(), inputs(3), LABELS))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = build(name)
    x = inputs(3)
    y = LABELS
    loss = nn.CrossEntropyLoss()
    operator = GGN(model, loss, batches(x, y, 3))
    close(operator, dense_ggn(model, loss, x, y))
    assert_on_its_path(operator, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", ["conv", "attention", "recurrent", "tied", "masked"])
def test_models_in_the_hessian(name):
    model = build(name)
    x = inputs(3)
    y = LABELS
    loss = nn.CrossEntropyLoss()
    operator = Hessian(model, loss, batches(x, y, 3))
    close(operator, dense_hessian(model, loss, x, y))
    assert_on_its_path(operator, name)


def test_second_derivatives_that_torch_lacks_or_has_wrong():
    model = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Hardsigmoid(True), nn.Linear(4, 3))
    # The hook returns the module's input, which the module has overwritten with its output.
    model.double()[1].register_forward_hook(lambda module, args, output: args[0])
    x = inputs(3)
    loss = nn.CrossEntropyLoss()
    t = flatten(model, trainable(model))
    f = function_of(model, trainable(model), x)
    H = Hessian(model, loss, [(x, LABELS)]).to_dense()
    above, below = (grad(lambda t: loss(f(t), LABELS))(t + h) for h in (1e-5, -1e-5))
    torch.testing.assert_close(H.sum(1), (above - below) / 2e-5, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(H, H.T)


def assert_on_its_path(operator, name):
    """As a program or as a graph, whichever the network is here to test."""
    programs = operator._lineariser.programs.values()
    assert all((program is None) == (name in RECORDED) for program in programs)


@pytest.mark.parametrize("name", ["conv", "tied", "by value", "unused"])
def test_jacobians(name):
    model = build(name)
    x = inputs(3)
    J = dense_jacobian(model, x).flatten(0, 1)
    operator = Jacobian(model, batches(x, LABELS, 4))
    close(operator, J)
    close(operator.T, J.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("weights", ["0.weight", "2.weight"]),
        ("last_layer", ["2.weight", "2.bias"]),
        (["2.bias", "0.weight"], ["0.weight", "2.bias"]),
        (lambda name, p: p.ndim == 1, ["0.bias", "2.bias"]),
    ],
    ids=["weights", "last_layer", "names", "predicate"],
)
def test_subsets_of_parameters(params, names):
    model = build("mlp")
    x = inputs(3)
    y = LABELS
    loss = nn.CrossEntropyLoss()
    data = batches(x, y, 3)
    H = Hessian(model, loss, data, params)
    G = GGN(model, loss, data, params)
    assert list(H.layout.names) == names
    close(H, dense_hessian(model, loss, x, y, names))
    close(G, dense_ggn(model, loss, x, y, names))


def test_data_in_the_place_of_the_parameters_is_refused(unchecked):
    model = build("mlp")
    data = batches(inputs(3), LABELS, 3)
    named = [({"x": x}, y) for x, y in data]  # A dict is not hashable, unlike a tensor.
    for wrong in (data, named):
        with pytest.raises(
            TypeError, match=r"got data \(list\).*pass \(model, loss, data, params\)"
        ):
            GGN(model, nn.CrossEntropyLoss(), list(model.parameters()), wrong)


def test_parameters_by_name():
    model = build("mlp")
    x = inputs(3)
    y = LABELS
    loss = nn.CrossEntropyLoss()
    operator = GGN(model, loss, batches(x, y, 3))
    product = operator @ {name: p.detach() for name, p in model.named_parameters()}
    expected = dense_ggn(model, loss, x, y) @ flatten(model, trainable(model))
    torch.testing.assert_close(torch.cat([p.flatten() for p in product.values()]), expected)
    shapes = {k: p.shape for k, p in model.named_parameters()}
    assert {k: v.shape for k, v in product.items()} == shapes


# Relations.


@pytest.mark.parametrize(
    "name",
    others_slow(
        LOSSES,
        *("ce", "ce everything", "ce positions everything", "ce probabilities positions"),
        *("mse sum", "mse positions", "bce soft sum", "bce both"),
        "bce positions",
    ),
)
def test_gradients_at_drawn_labels_have_the_hessian_as_second_moment(name):
    model, loss, x, y = case(name)
    outputs = model(x).detach()
    likelihood = output_loss(loss, None)
    labels = likelihood.labels(y, outputs.ndim)
    draws = [likelihood.drawn_gradient(outputs, labels, Uniforms(5, s, 0)) for s in range(500)]
    g = torch.stack(draws).flatten(2)
    products = torch.einsum("sni,snj->snij", g, g)
    error = products.std(0) / len(g) ** 0.5
    summed = copy.copy(loss)
    summed.reduction = "sum"
    H = hessian(lambda o: summed(o, y), outputs).reshape(N, g.shape[2], N, g.shape[2])
    deviation = products.mean(0) - torch.stack([H[n, :, n] for n in range(N)])
    assert (deviation.abs() <= 4.5 * error + 1e-9).all()
    assert error.max() > 0
    assert (g.mean(0).abs() <= 4.5 * g.std(0) / len(g) ** 0.5 + 1e-9).all()


@pytest.mark.parametrize("fisher", ["mc", "signs"])
def test_labels_and_signs_belong_to_examples(fisher):
    model, loss, x, y = case("ce positions")
    v = inputs(GGN(model, loss, [(x, y)]).shape[0])[0]
    options = {"fisher": fisher, "mc_samples": 2}
    products = []
    for seed, size in [(0, 1), (0, 3), (0, N), (1, N)]:
        options["generator"] = torch.Generator().manual_seed(seed)
        products.append(Fisher(model, loss, batches(x, y, size), **options) @ v)
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2])
    assert not torch.allclose(products[0], products[3])


# The suite that every operator passes.


class OfANetwork(NetworkConformance):
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-10}  # noqa: RUF012

    def network(self, dtype, device):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(device, dtype)
        x = inputs(3).to(dtype)
        y = (LABELS > 0).long()
        return net, nn.CrossEntropyLoss(), x, y

    def build_operator(self, net, loss, data, **options):
        raise NotImplementedError

    def dense(self, net, loss, x, y):
        return dense_ggn(net, loss, x, y)

    @classmethod
    @cache
    def case_of(cls, dtype, device):
        self = cls()
        net, loss, x, y = self.network(dtype, device)
        twin = copy.deepcopy(net).double().cpu()
        operator = self.build_operator(net, loss, batches(x, y, 3))
        return net, operator, self.dense(twin, loss, x.double(), y)

    def make(self, dtype, device):
        self.net, *case = self.case_of(dtype, device)
        return tuple(case)

    def variants(self, dtype, device):
        net, loss, x, y = self.network(dtype, device)
        return [
            self.build_operator(net, loss, [(x, y)]),
            self.build_operator(net, loss, batches(x, y, 2), chunk_size=2),
            self.build_operator(net, loss, batches(x, y, 4), memory_bound=0),
        ]

    def model(self, operator):
        return self.net


class TestHessian(OfANetwork):
    symmetric, positive_semidefinite = True, False
    build_operator = staticmethod(Hessian)

    def dense(self, net, loss, x, y):
        return dense_hessian(net, loss, x, y)


class TestGGN(OfANetwork):
    symmetric = True
    positive_semidefinite = True
    build_operator = staticmethod(GGN)


class TestFisher(OfANetwork):
    symmetric = True
    positive_semidefinite = True
    build_operator = staticmethod(Fisher)


class TestEmpiricalFisher(OfANetwork):
    symmetric = True
    positive_semidefinite = True
    build_operator = staticmethod(EmpiricalFisher)

    def dense(self, net, loss, x, y):
        residuals = net(x).softmax(1).detach() - F.one_hot(y, 2)
        g = torch.einsum("nc,ncd->nd", residuals, dense_jacobian(net, x))
        return g.T @ g / N


class TestJacobian(OfANetwork):
    symmetric = False
    positive_semidefinite = False

    def build_operator(self, net, loss, data, **options):
        return Jacobian(net, data, **options)

    def dense(self, net, loss, x, y):
        return dense_jacobian(net, x).flatten(0, 1)


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher, KFAC, EKFAC])
def test_autocast_is_refused(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    data = [(torch.randn(20, 8), torch.arange(20) % 3)]
    A = kind(model, nn.CrossEntropyLoss(), data)
    v = torch.randn(A.shape[1])
    expected = A @ v
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="autocast"):
            kind(model, nn.CrossEntropyLoss(), data)
        for operator in (A, A + A):
            with pytest.raises(RuntimeError, match="autocast"):
                operator @ v
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(A @ v, expected)


@pytest.mark.parametrize("make", [GGN, Hessian, EmpiricalFisher, Jacobian])
def test_products_are_differentiable_in_the_vectors(make):
    model, loss, x, y = case("ce")
    data = batches(x, y, 3)
    A = make(model, data) if make is Jacobian else make(model, loss, data)
    matrix = A.to_dense()
    for operator, dense in ((A, matrix), (A.T, matrix.T)):
        for columns in ((), (2,)):
            vectors = torch.randn(dense.shape[1], *columns, dtype=dense.dtype, requires_grad=True)
            product = operator @ vectors
            cotangents = torch.randn_like(product)
            (gradient,) = torch.autograd.grad(product, vectors, cotangents)
            torch.testing.assert_close(gradient, dense.T @ cotangents)


def test_a_quadratic_form_has_its_gradient():
    model, loss, x, y = case("ce")
    A = GGN(model, loss, batches(x, y, 3))
    vector = torch.randn(A.shape[1], dtype=A.dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(vector @ (A @ vector), vector)
    torch.testing.assert_close(gradient, 2 * dense_ggn(model, loss, x, y) @ vector.detach())
