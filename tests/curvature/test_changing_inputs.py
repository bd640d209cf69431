"""Modules measured at their calls, whose inputs have another form from batch to batch.

A mask is None without padding, `[1, ...]` where all examples have the same, and `[B, ...]` else.
The reference runs one example after the other.
"""

import pytest
import torch
from oracle import close, flat_jacobian, ggn, loss_hessian
from torch import nn
from torch.func import functional_call

from laplace_debias import Laplace
from laplace_debias.curvature import EKFAC


class Mixing(nn.Module):
    """A bilinear form of positions, with a mask in one of three forms, or none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, mask=None):
        scores = torch.einsum("bsi,ij,btj->bst", x, self.weight, x)
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1) @ x


class Shifting(nn.Module):
    """A learned bias of positions, `[1, T, d]` for all examples or `[B, T, d]`, through a layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.inner = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, positions):
        return x + (self.table[positions].sin() @ self.inner).tanh()


class Network(nn.Module):
    """Drops a mask of ones, and shares a mask and positions that all examples have in common."""

    def __init__(self, shares):
        super().__init__()
        self.shifting = Shifting()
        self.mixing = Mixing()
        self.head = nn.Linear(4, 3)
        self.shares = shares

    def forward(self, x, mask):
        positions = (mask.cumsum(1) * mask).long()
        added = (~mask.bool()).unsqueeze(1) * -30.0
        if self.shares and bool((mask == mask[:1]).all()):
            positions, added = positions[:1], added[:1]
        if bool(mask.all()):
            added = None
        h = self.mixing(self.shifting(x, positions), added)
        return self.head((h * mask.unsqueeze(2)).sum(1))


class Gated(nn.Module):
    """A recurrent layer with a state that is None, shared or an example's own."""

    def __init__(self, shares):
        super().__init__()
        self.layer = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)
        self.shares = shares

    def forward(self, x, mask):
        state = (x[:, 0, :3] * (1 - mask[:, :1])).unsqueeze(0)
        if bool(mask[:, 0].all()):
            state = None if self.shares else state.new_zeros(1, 1, 3).expand(1, len(x), 3)
        hidden, _ = self.layer(x, state)
        return self.head(hidden[:, -1])


class Positions(nn.Module):
    """Embeds positions: `[T]` or `[1, T]` where all examples have the same, `[B, T]` else."""

    def __init__(self, has_batch):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)
        self.has_batch = has_batch

    def forward(self, x, mask):
        positions = (mask.cumsum(1) * mask).long()
        if bool((mask == mask[:1]).all()):
            positions = positions[:1] if self.has_batch else positions[0]
        h = (x + self.table(positions)).tanh()
        return self.head((h * mask.unsqueeze(2)).sum(1))


def batch(lengths, first=1.0):
    """Examples of at most five positions, of which the first ones count."""
    x = torch.randn(len(lengths), 5, 4, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor(lengths).unsqueeze(1)).double()
    mask[:, 0] = first
    return {"x": x, "mask": mask}, torch.randint(3, (len(lengths),))


# Batches without padding, with different padding, with equal padding, and of one example.
FORMS = {
    "none": lambda: batch([5, 5, 5]),
    "own": lambda: batch([3, 5, 2, 4]),
    "alike": lambda: batch([4, 4, 4]),
    "one": lambda: batch([5]),
    "one padded": lambda: batch([2]),
    "five": lambda: batch([5, 4, 3, 2, 1]),
    "five alike": lambda: batch([5, 5, 5, 5, 5]),
    "state": lambda: batch([5, 3], first=0.0),
}
ORDERS = [
    ["none", "own", "alike", "none", "five", "five alike", "five"],
    ["own", "none", "alike", "own", "one"],
    ["alike", "own", "one padded", "none"],
    ["one", "own", "alike", "none"],
    ["five", "one padded", "state", "none", "own"],
    ["state", "none", "five"],
]


def jacobian(model, inputs, names):
    """Compute the Jacobians `[B, C, D]`, one example and one output after the other."""
    parameters = {
        name: model.get_parameter(name).detach().clone().requires_grad_() for name in names
    }
    rows = []
    for n in range(len(inputs["x"])):
        example = {key: value[n : n + 1] for key, value in inputs.items()}
        outputs = functional_call(model, parameters, (), example)
        for f in outputs[0]:
            gradients = torch.autograd.grad(
                f, list(parameters.values()), retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows).unflatten(0, (len(inputs["x"]), -1))


def dense_curvature(model, batches, names):
    total, size = 0, 0
    for inputs, _ in batches:
        J = jacobian(model, inputs, names)
        H = loss_hessian("classification", model(**inputs))
        total = total + torch.einsum("ncd,nce,nef->df", J, H, J)
        size += len(J)
    return total / size


MODELS = {
    "masks dropped": lambda: Network(shares=False),
    "masks shared": lambda: Network(shares=True),
    "positions [1, T]": lambda: Positions(has_batch=True),
    "positions [T]": lambda: Positions(has_batch=False),
    "recurrent": lambda: Gated(shares=True),
    "recurrent with zeros": lambda: Gated(shares=False),
}


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_fits_and_predictions_are_the_dense_ones_in_any_order_of_batches(name, order):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batches = [FORMS[form]() for form in order]
    la = Laplace(model, curvature="full").fit_batches(batches)
    assert la.param_names == [name for name, _ in model.named_parameters()]
    exact = dense_curvature(model, batches, la.param_names)
    covariance = la.posterior.covariance.to_dense()
    close(covariance, torch.linalg.inv(la.num_data * exact + torch.eye(len(exact))), 1e-8)
    for inputs, _ in batches:
        J = jacobian(model, inputs, la.param_names)
        close(la.functional(inputs)[1], J @ covariance @ J.mT, 1e-8)


@pytest.mark.parametrize("order", ORDERS[:2], ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_exact_blocks_and_the_diagonal_are_the_dense_ones(name, order):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batches = [FORMS[form]() for form in order]
    la = Laplace(model).fit_batches(batches)
    for parameter, block in la.posterior.curvature.blocks.items():
        if not parameter.startswith(("head.weight", "table")):
            close(block.to_dense(), dense_curvature(model, batches, [parameter]))
    la = Laplace(model, curvature="diag").fit_batches(batches)
    exact = dense_curvature(model, batches, la.param_names).diagonal()
    expected = 1 / (la.num_data * exact + 1)
    close(la.posterior.covariance.to_dense().diagonal(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_operators_read_batches_of_any_form(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batches = [FORMS[form]() for form in ORDERS[1]]
    names = [name for name, _ in model.named_parameters()]
    exact = dense_curvature(model, batches, names)
    E = EKFAC(model, nn.CrossEntropyLoss(), batches)
    close(E.to_dense().trace(), exact.trace())


class TimeMajor(nn.Module):
    """Embeds tokens `[T, B]`, of which each example has a column, for a layer of sequences."""

    def __init__(self, kind, has_positions):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)
        self.positions = nn.Embedding(6, 4) if has_positions else None
        if kind == "recurrent":
            self.layer = nn.LSTM(4, 4)
        else:
            self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0)

    def forward(self, tokens):
        h = self.table(tokens.T)
        if self.positions is not None:
            h = h + self.positions(torch.arange(tokens.shape[1]).unsqueeze(1))
        h = self.layer(h)
        if isinstance(h, tuple):
            h = h[0]
        return self.head(h.tanh().mean(0))


@pytest.mark.parametrize("sizes", [[(3, 5), (4, 5), (1, 5)], [(2, 4), (4, 4)], [(1, 2), (2, 3)]])
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_embeddings_of_sequences_with_the_examples_in_the_second_dimension(
    kind, has_positions, sizes
):
    torch.manual_seed(0)
    model = TimeMajor(kind, has_positions).double().eval()
    batches = [(torch.randint(7, size), torch.randint(3, size[:1])) for size in sizes]
    for curvature in ("full", "diag"):
        la = Laplace(model, curvature=curvature).fit_batches(batches)
        assert la.param_names == [name for name, _ in model.named_parameters()]
        total = 0
        for tokens, _ in batches:
            exact = ggn(model, tokens, "classification", la.param_names)
            total = total + len(tokens) * exact
        if curvature == "diag":
            total = total.diagonal().diag()
        close(la.posterior.precision.to_dense(), total + torch.eye(len(total)))
        covariance = la.posterior.covariance.to_dense()
        for tokens, _ in batches:
            J = flat_jacobian(model, tokens, la.param_names)
            close(la.functional(tokens)[1], J @ covariance @ J.mT, 1e-8)


class RelativePositions(nn.Module):
    """A bias `[1, T, T]` of relative positions, which all examples have in common, as in T5."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 1)

    def forward(self, x, bias=None):
        if bias is None:
            positions = torch.arange(x.shape[1])
            bias = self.table(positions - positions.unsqueeze(1) + 4).squeeze(2).unsqueeze(0)
        return (x @ x.mT + bias).softmax(-1) @ x, bias


class Biased(nn.Module):
    """Two layers with one bias of relative positions."""

    def __init__(self):
        super().__init__()
        self.first = RelativePositions()
        self.second = Mixing()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h, bias = self.first(x)
        return self.head(self.second(h, bias).tanh().sum(1))


@pytest.mark.parametrize(
    "sizes",
    [
        [(3, 5), (4, 4), (5, 5)],
        [(2, 5), (5, 2), (2, 2)],
        [(4, 2), (2, 4), (4, 4), (4, 2)],
        [(5, 5), (1, 5), (3, 3)],
        [(1, 4), (4, 4), (1, 1)],
    ],
)
def test_batches_with_as_many_positions_as_examples(sizes):
    torch.manual_seed(0)
    model = Biased().double().eval()
    batches = []
    for num_examples, num_positions in sizes:
        x = torch.randn(num_examples, num_positions, 4, dtype=torch.float64)
        batches.append((x, torch.randint(3, (num_examples,))))
    la = Laplace(model, curvature="full").fit_batches(batches)
    total = 0
    for x, _ in batches:
        total = total + len(x) * ggn(model, x, "classification", la.param_names)
    close(la.posterior.precision.to_dense(), total + torch.eye(len(total)))
    covariance = la.posterior.covariance.to_dense()
    for x, _ in reversed(batches):
        J = flat_jacobian(model, x, la.param_names)
        close(la.functional(x)[1], J @ covariance @ J.mT, 1e-8)
