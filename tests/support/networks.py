"""Small networks, losses and data, and dense matrices by reverse-mode differentiation alone."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

N = 6


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
    h[:, 0] += 0.5
    F.relu_(h)
    return self.two(h)


def by_value(self, x):
    """Takes a course that depends on values: cannot be recorded as a program."""
    h = self.one(x).tanh()
    return self.two(h) if h.sum() > -1e9 else h


def masked(self, x):
    """Shapes depend on values: a program of one batch would be wrong for the next."""
    h = self.one(x)
    return self.two(torch.zeros_like(h).masked_scatter(h > 0, h[h > 0] ** 2))


def product(self, x):
    """torch's derivative forward is not the adjoint of the one back, which is right."""
    return self.two(torch.ones_like(h := self.one(x)).scatter_reduce(1, h.long() * 0, h, "prod"))


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
        nn.Linear(1, 2),
        nn.TransformerEncoderLayer(2, 2, 2, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "embedding": lambda: Net(
        lambda self, x: self.two(self.one((x > 0).long()).flatten(1).tanh()),
        one=nn.Embedding(2, 2, padding_idx=1),
        two=nn.Linear(6, 3),
    ),
    "recurrent": lambda: Net(
        lambda self, x: self.two(self.one(x[:, :2, None])[0][:, -1]),
        one=nn.LSTM(1, 1, batch_first=True),
        two=nn.Linear(1, 3),
    ),
    "tied": tied,
    "frozen": frozen,
    "in place": lambda: Net(in_place, **layers()),
    "by value": lambda: Net(by_value, **layers()),
    "masked": lambda: Net(masked, **layers()),
    "product": lambda: Net(product, **layers()),
    "unused": lambda: Net(
        lambda self, x: self.two(self.one(x).tanh()), **layers(), spare=nn.Linear(2, 2)
    ),
}
RECORDED = ("by value", "masked", "product")  # graphs of automatic differentiation, not programs


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
    """Return the function from flattened parameters to the outputs for all data."""
    shapes = [model.get_parameter(name).shape for name in names]

    def outputs(vector):
        vectors = vector.split([shape.numel() for shape in shapes])
        parameters = {}
        for name, values, shape in zip(names, vectors, shapes, strict=True):
            parameters[name] = values.view(shape)
        return functional_call(model, parameters, (x,))

    return outputs


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def dense_hessian(model, loss, x, y, names=None):
    names = names or trainable(model)
    f = function_of(model, names, x)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    fused = torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), fused:  # kernels that can be differentiated twice
        return hessian(lambda v: loss(f(v), y), flatten(model, names))


def dense_jacobian(model, x, names=None):
    """[N, C, D]."""
    names = names or trainable(model)
    return jacobian(function_of(model, names, x), flatten(model, names))


def output_hessian(model, loss, x, y):
    """Hessian of the loss of all data in all outputs, `[N · outputs, N · outputs]`."""
    outputs = model(x).detach()
    return hessian(lambda o: loss(o, y), outputs).reshape(outputs.numel(), outputs.numel())


def dense_ggn(model, loss, x, y, names=None):
    J = dense_jacobian(model, x, names).flatten(0, -2)
    return J.T @ output_hessian(model, loss, x, y) @ J


def close(operator, dense):
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-8, atol=1e-8 * dense.abs().max())
    assert dense.abs().max() > 1e-6


LABELS = torch.tensor([0, 2, 1, 1, 2, 0])
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


CE = nn.CrossEntropyLoss
MSE = nn.MSELoss
BCE = nn.BCEWithLogitsLoss
EVERYTHING = {"weight": W, "ignore_index": 1, "label_smoothing": 0.1}
# The loss, the targets, and whether the outputs have positions.
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
    "bce pos_weight": (BCE(pos_weight=W), zero_one(3), False),
    "bce both": (BCE(weight=W.flip(0), pos_weight=W), zero_one(3), False),
    "bce positions": (BCE(pos_weight=W[:, None]), zero_one(3, 2), True),
}


def case(name):
    loss, targets, has_positions = LOSSES[name]
    torch.manual_seed(1)
    model = positions().double() if has_positions else build("mlp")
    return model, loss, inputs(3), targets


class Attention(nn.Module):
    """Torch's own attention, whose projections are no layers of the model."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
