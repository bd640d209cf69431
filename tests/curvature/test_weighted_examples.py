"""Operators over batches `(x, y, w)`: an example of weight w counts as w examples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacrev

from laplace_debias import Poisson
from laplace_debias.curvature import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
)
from laplace_debias.linalg import diagonal, trace

COUNTS = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 0.0, 2.0]).double()
WEIGHTS = torch.tensor([0.3, 1.7, 0.0, 2.2, 0.9, 0.1, 1.1]).double()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()


def fourth_powers(outputs, targets):
    return (outputs - targets).pow(4).mean(1).mean()


LOSSES = {
    "cross_entropy": nn.CrossEntropyLoss(),
    "cross_entropy_sum": nn.CrossEntropyLoss(reduction="sum"),
    "class_weights": nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]).double(), ignore_index=1),
    "squares": nn.MSELoss(),
    "binary": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 1.0, 2.0]).double()),
    "callable": fourth_powers,
    "likelihood": Poisson(),
}


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


CASES = [
    "cross_entropy",
    "callable",
    *map(slow, sorted(LOSSES.keys() - {"cross_entropy", "callable"})),
]


def data(name):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    if name.startswith(("cross", "class")):
        return x, torch.randint(3, (7,), generator=generator)
    y = torch.randint(2, (7, 3), generator=generator).double()
    return x, y


def options(name):
    return {"reduction": "mean"} if name == "callable" else {}


def term(name, f, y):
    """The summed loss of one example, and its share of the divisor of a mean."""
    one = torch.ones((), dtype=torch.float64)
    if name.startswith("cross_entropy"):
        return F.cross_entropy(f, y), one
    if name == "class_weights":
        weight = torch.tensor([0.5, 1.0, 2.0]).double()[y] * (y != 1)
        return weight * F.cross_entropy(f, y), weight
    if name == "squares":
        return (f - y).square().sum(), 3 * one
    if name == "binary":
        pi = torch.tensor([0.5, 1.0, 2.0]).double()
        return -(pi * y * F.logsigmoid(f) + (1 - y) * F.logsigmoid(-f)).sum(), 3 * one
    if name == "callable":
        return (f - y).pow(4).mean(), one
    return (f.exp() - y * f + torch.lgamma(y + 1)).sum(), one


def flat_function(model):
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def outputs(theta, x):
        values = theta.split([shape.numel() for shape in shapes.values()])
        parameters = {
            name: value.view(shape)
            for (name, shape), value in zip(shapes.items(), values, strict=True)
        }
        return functional_call(model, parameters, (x[None],))[0]

    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    return outputs, theta


def dense(kind, name, x, y, w):
    """The weighted matrix, example by example."""
    outputs, theta = flat_function(network())
    total = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    count = torch.zeros((), dtype=torch.float64)
    for x_n, y_n, w_n in zip(x, y, w, strict=True):
        loss = lambda f, y_n=y_n: term(name, f, y_n)[0]  # noqa: E731
        f = outputs(theta, x_n)
        J = jacrev(outputs)(theta, x_n)
        if kind is Hessian:
            matrix = hessian(lambda p, x_n=x_n, loss=loss: loss(outputs(p, x_n)))(theta)
        elif kind is EmpiricalFisher:
            gradient = J.T @ jacrev(loss)(f)
            matrix = torch.outer(gradient, gradient)
        else:
            matrix = J.T @ hessian(loss)(f) @ J
        total += w_n * matrix
        count += w_n * term(name, f, y_n)[1]
    return total if name.endswith("_sum") else total / count


def batches(x, y, *w):
    return [tuple(column[:4] for column in (x, y, *w)), tuple(column[4:] for column in (x, y, *w))]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher])
def test_operators_are_the_weighted_sum_over_examples(kind, name):
    x, y = data(name)
    A = kind(network(), LOSSES[name], batches(x, y, WEIGHTS), **options(name))
    expected = dense(kind, name, x, y, WEIGHTS)
    close(A.to_dense(), expected)
    v = torch.randn(len(expected), dtype=torch.float64)
    close(A @ v, expected @ v)


@pytest.mark.parametrize("kind", [GGN, EmpiricalFisher, KFAC, EKFAC])
def test_weights_in_single_precision_cost_a_network_in_double_precision_no_digit(kind):
    """A weight in single precision has an exact value, but its square root has not."""
    x, y = data("cross_entropy")
    weights = WEIGHTS.float()
    fisher = {"fisher": "empirical"} if kind in (KFAC, EKFAC) else {}
    matrices = [
        kind(network(), nn.CrossEntropyLoss(), batches(x, y, w), **fisher).to_dense()
        for w in (weights, weights.double())
    ]
    torch.testing.assert_close(*matrices, rtol=1e-12, atol=1e-14)


def test_trace_and_diagonal_are_those_of_the_weighted_sum():
    x, y = data("squares")
    A = GGN(network(), LOSSES["squares"], batches(x, y, WEIGHTS))
    expected = dense(GGN, "squares", x, y, WEIGHTS)
    close(trace(A, "xtrace", num_matvecs=27).value, expected.trace())
    close(diagonal(A, "xdiag", num_matvecs=27).value, expected.diagonal())


@pytest.mark.parametrize("fisher", ["mc", "signs"])
@pytest.mark.parametrize("name", ["cross_entropy", slow("squares"), slow("binary")])
def test_the_fisher_of_drawn_labels_or_signs_is_linear_in_the_weights(name, fisher):
    """They depend on the seed and the index of an example, not on its weight."""
    x, y = data(name)

    def drawn(weights):
        generator = torch.Generator().manual_seed(0)
        arguments = {"fisher": fisher, "mc_samples": 3, "generator": generator}
        operator = Fisher(network(), LOSSES[name], batches(x, y, *weights), **arguments)
        return operator.to_dense()

    unit_vectors = torch.eye(7).double()
    by_example = torch.stack([drawn([unit]) for unit in unit_vectors])
    close(drawn([WEIGHTS]), torch.einsum("n,nij->ij", WEIGHTS / WEIGHTS.sum(), by_example))
    close(drawn([]), by_example.mean(0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_factors_of_whole_weights_are_those_of_repeated_examples(kind, fisher, name):
    if name == "callable" and fisher == "exact":
        pytest.skip("A callable has no root of its Hessian.")
    x, y = data(name)
    repeats = COUNTS.long()
    repeated = [(x.repeat_interleave(repeats, 0), y.repeat_interleave(repeats, 0))]
    arguments = {"fisher": fisher, **options(name)}
    weighted = kind(network(), LOSSES[name], batches(x, y, COUNTS), **arguments)
    close(weighted.to_dense(), kind(network(), LOSSES[name], repeated, **arguments).to_dense())
    split = kind(
        network(),
        LOSSES[name],
        repeated,
        magnitudes=batches(x, y, COUNTS),
        **arguments,
    )
    expected = kind(network(), LOSSES[name], repeated, magnitudes=repeated, **arguments)
    close(split.to_dense(), expected.to_dense())


def test_a_last_layer_is_determined_from_triples():
    x, y = data("cross_entropy")
    A = GGN(network(), LOSSES["cross_entropy"], batches(x, y, WEIGHTS), params="last_layer")
    close(A.to_dense(), dense(GGN, "cross_entropy", x, y, WEIGHTS)[-12:, -12:])


@pytest.mark.parametrize("kind", [GGN, Hessian, EmpiricalFisher, Fisher, KFAC])
@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.arange(7), TypeError, "floating-point"),
        (torch.ones(6), ValueError, "weights of shape"),
        (-torch.ones(7), ValueError, "at least 0"),
        (torch.full((7,), torch.nan), ValueError, "finite"),
        (torch.zeros(7), ValueError, "zero"),
    ],
    ids=["integers", "shape", "negative", "nan", "zero"],
)
def test_bad_weights_are_refused(kind, weights, error, message):
    x, y = data("cross_entropy")
    with pytest.raises(error, match=message):
        kind(network(), LOSSES["cross_entropy"], [(x, y, weights)])


def test_what_takes_no_weights_refuses_them():
    x, y = data("cross_entropy")
    with pytest.raises(TypeError, match="pairs"):
        Jacobian(network(), [(x, y, WEIGHTS)])


def test_changed_weights_are_noticed():
    x, y = data("cross_entropy")
    weights = WEIGHTS.clone()
    A = GGN(network(), LOSSES["cross_entropy"], [(x, y, weights)], memory_bound=0)
    weights[0] = 5.0
    with pytest.raises(ValueError, match="not the same as in the first pass"):
        A @ torch.ones(A.shape[0]).double()
