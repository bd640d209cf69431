"""Operators of networks against dense float64 matrices from torch.func, built another way."""

import copy
import subprocess
import sys
from functools import cache

import pytest
import torch
from conformance import NetworkConformance, fingerprint
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.curvature import GGN, EmpiricalFisher, Fisher, Hessian, Jacobian
from laplace_debias.curvature.losses import Uniforms, output_loss

N = 7


class Net(nn.Module):
    """A network whose inputs are what `call` makes of them."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def tied():
    """The first layer's matrix is used a second time, transposed, and once more as it is."""

    def forward(self, x):
        h = self.second(self.first(x).tanh()).tanh()
        return self.head(h) + F.linear(h, self.first.weight).sum(1, keepdim=True)

    net = Net(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3), head=nn.Linear(3, 3))
    net.second.weight = net.first.weight
    return net


def frozen():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    return net


def in_place(self, x):
    h = self.one(x)
    h += 0.5
    F.relu_(h)
    return self.two(h)


def by_value(self, x):
    """Takes a course that depends on values: cannot be recorded as a program."""
    h = self.one(x).tanh()
    return self.two(h) if h.sum() > -1e9 else h


def masked(self, x):
    """Shapes depend on values: a program of one batch would be wrong for the next."""
    h = self.one(x)
    positive = h[h > 0]
    return self.two(torch.zeros_like(h).masked_scatter(h > 0, positive**2 / len(positive)))


def layers():
    return {"one": nn.Linear(3, 4), "two": nn.Linear(4, 3)}


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 1)),
        nn.Conv2d(1, 2, (2, 1)),
        nn.BatchNorm2d(2).eval(),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 4),
        nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(12, 3),
    ),
    "embedding": lambda: Net(
        lambda self, x: self.two(self.one((x > 0).long()).flatten(1).tanh()),
        one=nn.Embedding(2, 2),
        two=nn.Linear(6, 3),
    ),
    "recurrent": lambda: Net(
        lambda self, x: self.two(self.one(x[:, :, None])[0][:, -1]),
        one=nn.LSTM(1, 2, batch_first=True),
        two=nn.Linear(2, 3),
    ),
    "tied": tied,
    "frozen": frozen,
    "in place": lambda: Net(in_place, **layers()),
    "by value": lambda: Net(by_value, **layers()),
    "masked": lambda: Net(masked, **layers()),
    "unused": lambda: Net(
        lambda self, x: self.two(self.one(x).tanh()), **layers(), spare=nn.Linear(2, 2)
    ),
}
RECORDED = ("by value", "masked")  # graphs of automatic differentiation, not programs


def build(name, dtype=torch.float64):
    torch.manual_seed(1)
    return MODELS[name]().to(dtype).eval()


def inputs(*shape):
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def batches(x, y, size):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, N, size)]


def flatten(model, names):
    return torch.cat([model.get_parameter(name).detach().flatten() for name in names])


def function_of(model, names, x):
    """The outputs for all data as a function of the flattened parameters."""
    shapes = [model.get_parameter(name).shape for name in names]

    def outputs(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        values = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, values, (x,))

    return outputs


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def dense_hessian(model, loss, x, y, names=None):
    names = names or trainable(model)
    f = function_of(model, names, x)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        return hessian(lambda v: loss(f(v), y), flatten(model, names))


def dense_jacobian(model, x, names=None):
    """[N, C, D]."""
    names = names or trainable(model)
    return jacobian(function_of(model, names, x), flatten(model, names))


def dense_ggn(model, loss, x, y, names=None):
    J = dense_jacobian(model, x, names).flatten(0, -2)
    outputs = model(x).detach()
    H = hessian(lambda o: loss(o, y), outputs).reshape(len(J), len(J))
    return J.T @ H @ J


def close(operator, dense):
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-8, atol=1e-8 * dense.abs().max())
    assert dense.abs().max() > 1e-6


LABELS = torch.tensor([0, 2, 1, 1, 2, 0, 2])
W = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)


def positions():
    """Three classes at two positions."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), nn.Unflatten(1, (3, 2)))


def random_labels(*shape):
    return torch.randint(0, 3, (N, *shape), generator=torch.Generator().manual_seed(3))


def some_ignored(labels, index):
    labels = labels.clone()
    labels.flatten()[1::3] = index
    return labels


def probabilities(*shape):
    return inputs(*shape).softmax(1)


def zero_one(*shape):
    return (inputs(*shape) > 0).double()


# Loss, targets, and whether the outputs have positions.
CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss
EVERYTHING = {"weight": W, "ignore_index": 1, "label_smoothing": 0.1}
ROWS = torch.arange(1.0, N + 1, dtype=torch.float64)[:, None]
LOSSES = {
    "ce": (CE(), LABELS, False),
    "ce sum": (CE(reduction="sum"), LABELS, False),
    "ce weight": (CE(weight=W), LABELS, False),
    "ce weight sum": (CE(weight=W, reduction="sum"), LABELS, False),
    "ce ignore": (CE(), some_ignored(LABELS, -100), False),
    "ce ignore a class": (CE(ignore_index=2), LABELS, False),
    "ce smoothing": (CE(label_smoothing=0.2), LABELS, False),
    "ce everything": (CE(**EVERYTHING), LABELS, False),
    "ce positions": (CE(), random_labels(2), True),
    "ce positions everything": (CE(**EVERYTHING), random_labels(2), True),
    "ce probabilities": (CE(weight=W, label_smoothing=0.1), probabilities(3), False),
    "ce probabilities positions": (CE(weight=W), 2 * probabilities(3, 2), True),
    "mse": (MSE(), inputs(3), False),
    "mse sum": (MSE(reduction="sum"), inputs(3), False),
    "mse positions": (MSE(), inputs(3, 2), True),
    "bce": (BCE(), zero_one(3), False),
    "bce soft sum": (BCE(reduction="sum"), probabilities(3), False),
    "bce weight": (BCE(weight=W), zero_one(3), False),
    "bce weight rows": (BCE(weight=ROWS), zero_one(3), False),
    "bce pos_weight": (BCE(pos_weight=W), zero_one(3), False),
    "bce both": (BCE(weight=W.flip(0), pos_weight=W), zero_one(3), False),
    "bce positions": (BCE(pos_weight=W[:, None]), zero_one(3, 2), True),
}


def case(name):
    loss, targets, has_positions = LOSSES[name]
    torch.manual_seed(1)
    model = positions().double() if has_positions else build("mlp")
    return model, loss, inputs(3), targets


@pytest.mark.parametrize("name", LOSSES)
def test_every_argument_of_the_losses(name):
    model, loss, x, y = case(name)
    data = batches(x, y, 3)
    close(Hessian(model, loss, data), dense_hessian(model, loss, x, y))
    G = dense_ggn(model, loss, x, y)
    close(GGN(model, loss, data), G)
    close(Fisher(model, loss, data), G)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bce weight rows"])
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
    """No class of torch's; its Hessian is neither constant nor diagonal."""
    return ((outputs.sum(1) - targets.double()) ** 4 + outputs.exp().sum(1)).mean()


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (cubic, "mean"),
        (lambda f, y: 5 * cubic(f, y) * len(y), "sum"),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum"), "sum"),
        (nn.MultiMarginLoss(p=2), None),
        (lambda f, y: f[y > 0].square().sum(), "sum"),
    ],
    ids=["mean", "sum", "function", "module", "masked"],
)
def test_any_callable(loss, reduction):
    model, x, y = build("mlp"), inputs(3), LABELS
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


def test_a_linear_loss_has_no_ggn():
    model, data = build("mlp"), batches(inputs(3), LABELS, 3)
    operator = GGN(model, lambda f, y: f.sum(), data, reduction="sum")
    assert operator.to_dense().abs().max() == 0
    H = Hessian(model, lambda f, y: f.sum(), data, reduction="sum")
    close(H, dense_hessian(model, lambda f, y: f.sum(), inputs(3), LABELS))


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, x, y, loss = build(name), inputs(3), LABELS, nn.CrossEntropyLoss()
    data = batches(x, y, 3)
    operators = Hessian(model, loss, data), GGN(model, loss, data)
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    for operator in operators:  # on the path that the network is here to test
        programs = operator._lineariser._programs.values()
        assert all((program is None) == (name in RECORDED) for program in programs)
    J = dense_jacobian(model, x).flatten(0, 1)
    operator = Jacobian(model, data)
    close(operator, J)
    close(operator.T, J.T)


@pytest.mark.parametrize("kind", ["tuple", "list", "mapping", "logits"])
def test_inputs_of_any_kind(kind):
    torch.manual_seed(1)

    class Logits:
        def __init__(self, logits):
            self.logits = logits

    def forward(self, first, second=None, flag=None):
        assert flag in (None, "on")
        outputs = self.one(first) + self.two(second).tanh()
        return Logits(outputs) if kind == "logits" else outputs

    model = Net(forward, one=nn.Linear(3, 3), two=nn.Linear(2, 3)).double()
    x, z, y = inputs(3), inputs(2), LABELS

    def pack(a, b):
        if kind == "mapping":
            return {"second": b, "first": a, "flag": "on"}
        return [a, b] if kind == "list" else (a, b)

    data = [(pack(x[i : i + 3], z[i : i + 3]), y[i : i + 3]) for i in range(0, N, 3)]
    bare = copy.deepcopy(model)
    bare.function = lambda self, a: self.one(a) + self.two(z).tanh()
    loss = nn.CrossEntropyLoss()
    close(GGN(model, loss, data), dense_ggn(bare, loss, x, y))
    close(Hessian(model, loss, data), dense_hessian(bare, loss, x, y))


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
    model, x, y, loss = build("mlp"), inputs(3), LABELS, nn.CrossEntropyLoss()
    data = batches(x, y, 3)
    H, G = Hessian(model, loss, data, params), GGN(model, loss, data, params)
    assert list(H.layout.names) == names
    close(H, dense_hessian(model, loss, x, y, names))
    close(G, dense_ggn(model, loss, x, y, names))


def test_parameters_by_name():
    model, x, y, loss = build("mlp"), inputs(3), LABELS, nn.CrossEntropyLoss()
    operator = GGN(model, loss, batches(x, y, 3))
    product = operator @ {name: p.detach() for name, p in model.named_parameters()}
    expected = dense_ggn(model, loss, x, y) @ flatten(model, trainable(model))
    torch.testing.assert_close(torch.cat([p.flatten() for p in product.values()]), expected)
    assert {k: v.shape for k, v in product.items()} == {
        k: p.shape for k, p in model.named_parameters()
    }


# Relations.


@pytest.mark.parametrize("name", ["ce everything", "mse", "bce both"])
def test_hessian_of_a_linear_model_is_its_ggn(name):
    loss, y, _ = LOSSES[name]
    torch.manual_seed(1)
    model = nn.Linear(3, 3).double()
    data = batches(inputs(3), y, 3)
    close(GGN(model, loss, data), Hessian(model, loss, data).to_dense())


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_drawn_labels_have_the_hessian_as_second_moment(name):
    model, loss, x, y = case(name)
    outputs = model(x).detach()
    known = output_loss(loss, None, N)
    labels = known.labels(y, 0)
    draws = [known.drawn_gradient(outputs, labels, Uniforms(5, s, 0)) for s in range(2000)]
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


def test_the_monte_carlo_fisher_converges():
    model, loss, x, y = case("ce")
    data = batches(x, y, 3)
    truth = GGN(model, loss, data).to_dense()

    def error(samples):
        g = torch.Generator().manual_seed(0)
        drawn = Fisher(model, loss, data, fisher="mc", mc_samples=samples, generator=g)
        return (drawn.to_dense() - truth).norm() / truth.norm()

    # The error falls with the root of the number of samples.
    assert error(4000) < 0.05 < 0.2 < error(10)


def test_labels_belong_to_examples():
    model, loss, x, y = case("ce positions")
    v = inputs(GGN(model, loss, [(x, y)]).shape[0])[0]
    products = [
        Fisher(
            model,
            loss,
            batches(x, y, size),
            fisher="mc",
            mc_samples=2,
            generator=torch.Generator().manual_seed(seed),
        )
        @ v
        for seed, size in [(0, 1), (0, 3), (0, N), (1, N)]
    ]
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2])
    assert not torch.allclose(products[0], products[3])


def test_empirical_fisher_is_the_ggn_where_residuals_have_the_models_variance():
    """Squared error and residuals of ±√½: then E[(f − y)²] is ½ for every example."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    x = inputs(3)
    signs = torch.tensor([1, -1, 1, 1, -1, -1, 1], dtype=torch.float64)[:, None]
    y = model(x).detach() + signs * 0.5**0.5
    loss = nn.MSELoss()
    G = GGN(model, loss, batches(x, y, 3)).to_dense()
    close(EmpiricalFisher(model, loss, batches(x, y, 3)), G)
    off = EmpiricalFisher(model, loss, batches(x, y + 1, 3)).to_dense()
    assert (off - G).norm() > 0.5 * G.norm()


# Independence of how products are computed.


@pytest.mark.parametrize(
    ("operator", "name"), [(Hessian, "mlp"), (GGN, "by value"), (EmpiricalFisher, "mlp")]
)
def test_memory_bound_and_chunks_do_not_matter(operator, name):
    model, loss, x, y = build(name), nn.CrossEntropyLoss(), inputs(3), LABELS
    data = batches(x, y, 2)
    whole = operator(model, loss, [(x, y)])
    V = inputs(whole.shape[0]).T.contiguous()
    expected = whole @ V
    every = operator(model, loss, data)
    every @ V
    assert every.num_bytes_kept > 0
    for bound, chunk in [(0, 1), (every.num_bytes_kept // 2, 2), (every.num_bytes_kept, 100)]:
        some = operator(model, loss, data, memory_bound=bound, chunk_size=chunk)
        torch.testing.assert_close(some @ V, expected)
        assert some.num_bytes_kept <= bound
        torch.testing.assert_close(some @ V[:, 0], expected[:, 0])
    assert every.num_bytes_kept == some.num_bytes_kept


def test_kept_batches_are_not_read_again():
    class Counted(list):
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return super().__iter__()

    model, loss, x, y = build("mlp"), nn.CrossEntropyLoss(), inputs(3), LABELS
    operator = GGN(model, loss, Counted(batches(x, y, 3)))
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    first = operator @ v
    before = Counted.passes
    torch.testing.assert_close(operator @ v, first)
    assert Counted.passes == before


def test_a_changed_model_is_linearised_again():
    model, loss, x, y = build("conv"), nn.CrossEntropyLoss(), inputs(3), LABELS
    operators = [Hessian(model, loss, [(x, y)]), GGN(model, loss, [(x, y)])]
    before = [operator.to_dense() for operator in operators]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(model(x), y).backward()
    optimizer.step()
    model[2].running_mean.add_(0.3)
    close(operators[0], dense_hessian(model, loss, x, y))
    close(operators[1], dense_ggn(model, loss, x, y))
    for operator, old in zip(operators, before, strict=True):
        assert not torch.allclose(operator.to_dense(), old)


def test_sequences_of_several_lengths():
    torch.manual_seed(1)
    model = nn.Conv1d(2, 3, 1).double()
    x, y = inputs(2, 4), random_labels(4)
    data = [(x[:3, :, :4], y[:3, :4]), (x[3:, :, :2], y[3:, :2])]
    loss = nn.CrossEntropyLoss()
    padded = y.clone()
    padded[3:, 2:] = -100
    close(GGN(model, loss, data), dense_ggn(model, loss, x, padded))
    with pytest.raises(ValueError, match="one shape"):
        Jacobian(model, data).to_dense()
    wrong = [data[0], (x[3:, :, :2], y[3:, :3])]
    with pytest.raises(ValueError, match="class indices of shape"):
        GGN(model, loss, wrong).to_dense()


def test_inference_tensors_and_no_grad():
    model, loss, y = build("mlp"), nn.CrossEntropyLoss(), LABELS
    with torch.inference_mode():
        x = inputs(3) + 0
    with torch.no_grad():
        for name in ("mlp", "by value"):
            model = build(name)
            product = GGN(model, loss, [(x, y)]) @ torch.ones(31, dtype=torch.float64)
            expected = dense_ggn(model, loss, inputs(3), y).sum(1)
            torch.testing.assert_close(product, expected)


# The model stays untouched.


@pytest.mark.parametrize(
    ("operator", "name"),
    [(Hessian, "conv"), (GGN, "tied"), (EmpiricalFisher, "by value"), (Hessian, "by value")],
)
def test_the_model_is_untouched(operator, name):
    model, loss, x, y = build(name), nn.CrossEntropyLoss(), inputs(3), LABELS
    before = fingerprint(model)

    def unchanged():
        after = fingerprint(model)
        return before.keys() == after.keys() and all(
            a.equal(after[k]) if isinstance(a, torch.Tensor) else a == after[k]
            for k, a in before.items()
        )

    op = operator(model, loss, batches(x, y, 3))
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert unchanged()
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        operator(model, loss, [(x, y)])
    assert unchanged()


# Bad input.


def good():
    return {
        "model": build("mlp"),
        "loss": nn.CrossEntropyLoss(),
        "data": batches(inputs(3), LABELS, 3),
    }


def random_net():
    return Net(
        lambda self, x: self.one(x) + torch.rand(3, dtype=torch.float64), one=nn.Linear(3, 3)
    ).double()


BAD = {
    "dropout": (
        {"model": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()},
        ValueError,
        "model.eval",
    ),
    "batch norm": (
        {"model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()},
        ValueError,
        "model.eval",
    ),
    "random": ({"model": random_net()}, ValueError, "deterministic"),
    "model": ({"model": F.relu}, TypeError, "nn.Module"),
    "iterator": ({"data": iter(batches(inputs(3), LABELS, 3))}, TypeError, "only once"),
    "generator": ({"data": (b for b in batches(inputs(3), LABELS, 3))}, TypeError, "only once"),
    "no iterable": ({"data": 3}, TypeError, "iterable"),
    "empty": ({"data": []}, ValueError, "empty"),
    "no pairs": ({"data": [inputs(3)]}, TypeError, "pairs"),
    "sizes": ({"data": [(inputs(3), LABELS[:3])]}, ValueError, "targets of shape"),
    "nan": ({"data": [(inputs(3) / 0 * 0, LABELS)]}, ValueError, "NaN"),
    "dtype": ({"data": [(inputs(3).float(), LABELS)]}, TypeError, "convert"),
    "shuffled": (
        {
            "data": DataLoader(
                TensorDataset(inputs(3), LABELS),
                3,
                shuffle=True,
                generator=torch.Generator().manual_seed(0),
            )
        },
        ValueError,
        "shuffle=False",
    ),
    "num_data": ({"num_data": 6}, ValueError, "holds 7"),
    "loss class": ({"loss": nn.CrossEntropyLoss}, TypeError, "instance"),
    "none": ({"loss": nn.CrossEntropyLoss(reduction="none")}, ValueError, "scalar loss"),
    "no reduction": ({"loss": F.cross_entropy}, ValueError, "reduction="),
    "two reductions": ({"reduction": "sum"}, ValueError, "leave it out"),
    "weighted mean": ({"loss": nn.NLLLoss(weight=W)}, ValueError, 'reduction="sum"'),
    "not scalar": ({"loss": lambda f, y: f, "reduction": "sum"}, TypeError, "scalar"),
    "weight": ({"loss": nn.CrossEntropyLoss(weight=W[:2])}, ValueError, "weight of shape"),
    "negative weight": ({"loss": nn.CrossEntropyLoss(weight=-W)}, ValueError, "weight must be"),
    "pos_weight": (
        {"loss": nn.BCEWithLogitsLoss(pos_weight=W[:2]), "data": [(inputs(3), zero_one(3))]},
        ValueError,
        "pos_weight of shape",
    ),
    "weight rows": (
        {"loss": nn.BCEWithLogitsLoss(weight=ROWS[:3]), "data": batches(inputs(3), zero_one(3), 3)},
        ValueError,
        "7 rows",
    ),
    "ignore probabilities": (
        {"loss": nn.CrossEntropyLoss(ignore_index=1), "data": [(inputs(3), probabilities(3))]},
        ValueError,
        "ignore_index=1",
    ),
    "all ignored": (
        {"data": [(inputs(3), torch.full_like(LABELS, -100))]},
        ValueError,
        "ignore_index",
    ),
    "labels": ({"data": [(inputs(3), LABELS + 1)]}, ValueError, "0 … 2"),
    "one-hot": ({"data": [(inputs(3), F.one_hot(LABELS))]}, ValueError, "class indices of shape"),
    "bool": ({"data": [(inputs(3), LABELS > 0)]}, TypeError, "int64"),
    "shape": (
        {"loss": nn.MSELoss(), "data": [(inputs(3), inputs(1))]},
        ValueError,
        "outputs' shape",
    ),
    "integers": (
        {"loss": nn.MSELoss(), "data": [(inputs(3), random_labels(3))]},
        TypeError,
        "float",
    ),
    "range": (
        {"loss": nn.BCEWithLogitsLoss(), "data": [(inputs(3), inputs(3))]},
        ValueError,
        r"in \[0, 1\]",
    ),
    "params": ({"params": ["5.weight"]}, ValueError, "5.weight"),
    "memory_bound": ({"memory_bound": -1}, ValueError, "memory_bound"),
    "chunk_size": ({"chunk_size": 0}, ValueError, "chunk_size"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_work(name):
    change, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        GGN(**{**good(), **change})


@pytest.mark.usefixtures("unchecked")
def test_fisher_refuses_what_it_cannot_draw():
    for change, kind, message in [
        ({"fisher": "empirical"}, ValueError, "EmpiricalFisher"),
        ({"mc_samples": 3}, ValueError, 'fisher="mc"'),
        ({"generator": torch.Generator()}, ValueError, 'fisher="mc"'),
        ({"fisher": "mc", "mc_samples": 0}, ValueError, "at least 1"),
        ({"loss": nn.L1Loss()}, TypeError, "distribution"),
    ]:
        with pytest.raises(kind, match=message):
            Fisher(**{**good(), **change})


def test_outputs_that_are_nan_name_the_remedy():
    model = Net(lambda self, x: self.one(x).log(), one=nn.Linear(3, 3)).double()
    with pytest.raises(ValueError, match="scale"):
        GGN(model, nn.CrossEntropyLoss(), [(inputs(3), LABELS)])


def test_data_that_changes_between_products_is_refused():
    data = batches(inputs(3), LABELS, 3)
    operator = GGN(build("mlp"), nn.CrossEntropyLoss(), data, memory_bound=0)
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    operator @ v
    data[1] = (data[1][0].flip(1), data[1][1])
    with pytest.raises(ValueError, match="Batch 1 of the data"):
        operator @ v
    del data[1:]
    with pytest.raises(ValueError, match="Batch 1 of the data"):
        operator @ v


def test_importing_the_package_is_cheap():
    code = (
        "import sys, laplace_debias.curvature as c; c.GGN; "
        "print([m for m in ('torchvision', 'torchmetrics', 'backpack') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The suite that every operator passes.


class OfANetwork(NetworkConformance):
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-10}  # noqa: RUF012

    def network(self, dtype, device):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(device, dtype)
        x, y = inputs(3).to(dtype), (LABELS > 0).long()
        return net, nn.CrossEntropyLoss(), x, y

    def of(self, net, loss, data, **options):
        raise NotImplementedError

    def dense(self, net, loss, x, y):
        return dense_ggn(net, loss, x, y)

    @classmethod
    @cache
    def case_of(cls, dtype, device):
        self = cls()
        net, loss, x, y = self.network(dtype, device)
        twin = copy.deepcopy(net).double().cpu()
        operator = self.of(net, loss, batches(x, y, 3))
        return net, operator, self.dense(twin, loss, x.double(), y)

    def make(self, dtype, device):
        self.net, *case = self.case_of(dtype, device)
        return tuple(case)

    def variants(self, dtype, device):
        net, loss, x, y = self.network(dtype, device)
        return [
            self.of(net, loss, [(x, y)]),
            self.of(net, loss, batches(x, y, 2), chunk_size=2),
            self.of(net, loss, batches(x, y, 4), memory_bound=0),
        ]

    def model(self, operator):
        return self.net


class TestHessian(OfANetwork):
    symmetric, positive_semidefinite = True, False
    of = staticmethod(Hessian)

    def dense(self, net, loss, x, y):
        return dense_hessian(net, loss, x, y)


class TestGGN(OfANetwork):
    symmetric = positive_semidefinite = True
    of = staticmethod(GGN)


class TestFisher(OfANetwork):
    symmetric = positive_semidefinite = True
    of = staticmethod(Fisher)


class TestEmpiricalFisher(OfANetwork):
    symmetric = positive_semidefinite = True
    of = staticmethod(EmpiricalFisher)

    def dense(self, net, loss, x, y):
        residuals = net(x).softmax(1).detach() - F.one_hot(y, 2)
        g = torch.einsum("nc,ncd->nd", residuals, dense_jacobian(net, x))
        return g.T @ g / N


class TestJacobian(OfANetwork):
    symmetric = positive_semidefinite = False

    def of(self, net, loss, data, **options):
        return Jacobian(net, data, **options)

    def dense(self, net, loss, x, y):
        return dense_jacobian(net, x).flatten(0, 1)
