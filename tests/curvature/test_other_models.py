"""What other libraries take for a model or its inputs: functions of parameters, mappings.

And the empirical Fisher of single terms, as one of them defines it.
"""

import pytest
import torch
from networks import (
    LABELS,
    LOSSES,
    N,
    batches,
    build,
    case,
    close,
    dense_ggn,
    dense_hessian,
    dense_jacobian,
    inputs,
)
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from laplace_debias import Categorical, Laplace, OneArgument
from laplace_debias.curvature import (
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    Hessian,
    Jacobian,
    ParametricFunction,
)

# ------------------------------------------------------------ one mapping as one argument


class OfAMapping(nn.Module):
    """`model(batch)` with a mapping of two tensors, one of which adds to the other's features."""

    def __init__(self):
        super().__init__()
        self.net = build("mlp")

    def forward(self, batch):
        assert type(batch) is dict
        return self.net(batch["a"] + batch["b"].double())


def mapping(x):
    """x as a sum of numbers and whole numbers."""
    return OneArgument(a=x - x.round(), b=x.round().long(), flag="kept")


def test_operators_take_a_mapping_whole():
    model, x, y = OfAMapping(), inputs(3), LABELS
    data = [(mapping(a), b) for a, b in batches(x, y, 2)]
    plain = model.net
    close(GGN(model, nn.CrossEntropyLoss(), data), dense_ggn(plain, nn.CrossEntropyLoss(), x, y))
    expected = dense_hessian(plain, nn.CrossEntropyLoss(), x, y)
    close(Hessian(model, nn.CrossEntropyLoss(), data), expected)
    close(Jacobian(model, data), dense_jacobian(plain, x).flatten(0, 1))
    expected = KFAC(plain, nn.CrossEntropyLoss(), batches(x, y, 2)).to_dense()
    close(KFAC(model, nn.CrossEntropyLoss(), data), expected)


@pytest.mark.parametrize("mode", ["full", "mini", "debiased", "crossfit"])
def test_a_laplace_takes_a_mapping_whole(mode):
    model, x, y = OfAMapping(), inputs(3), LABELS
    data = [(mapping(a), b) for a, b in batches(x, y, 3)]
    la = Laplace(model).fit(data, mode=mode, num_data=N)
    plain = Laplace(model.net).fit(batches(x, y, 3), mode=mode, num_data=N)
    options = [{}, {"method": "map"}]
    options += [{"method": method, "samples": 3} for method in ("glm", "glm-mc", "nn")]
    for option in options:
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        if option.get("method", "glm") == "map" or not option:
            generators = [None, None]
        ours = la.predict(mapping(x), generator=generators[0], **option).probs
        theirs = plain.predict(x, generator=generators[1], **option).probs
        torch.testing.assert_close(ours, theirs)
    found = la.tune(data, grid=[0.1, 10.0])
    assert found.value == pytest.approx(plain.tune(batches(x, y, 3), grid=[0.1, 10.0]).value)


def test_a_mapping_goes_through_a_loader_and_an_exported_program(tmp_path):
    model, x, y = OfAMapping(), inputs(3), LABELS
    examples = [
        (OneArgument(a=a - a.round(), b=a.round().long()), b) for a, b in zip(x, y, strict=True)
    ]
    la = Laplace(model, params="last_layer").fit(DataLoader(examples, batch_size=4))
    plain = Laplace(model.net, params="last_layer").fit(batches(x, y, 4), num_data=N)
    torch.testing.assert_close(la.predict(mapping(x)).probs, plain.predict(x).probs)
    la.export(tmp_path / "predictive.pt2", mapping(x))
    program = torch.export.load(tmp_path / "predictive.pt2").module()
    found = program(a=x - x.round(), b=x.round().long())["probs"]
    torch.testing.assert_close(found, plain.predict(x).probs)


# ------------------------------------------------------------------- plain functions


def affine(parameters, x):
    h = (x @ parameters["first.W"] + parameters["first.b"]).tanh()
    return h @ parameters["second.W"] * parameters["scale"]


def parameters():
    g = torch.Generator().manual_seed(5)
    shapes = {"first.W": (3, 4), "first.b": (4,), "second.W": (4, 3), "scale": ()}
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}


class Affine(nn.Module):
    """The same network, written as a module by hand, for the dense references."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in values.values()])

    def forward(self, x):
        return affine(dict(zip(parameters(), self.values, strict=True)), x)


def test_a_function_of_parameters_has_the_operators_of_a_model():
    values, x, y, loss = parameters(), inputs(3), LABELS, nn.CrossEntropyLoss()
    model, twin, data = ParametricFunction(affine, values), Affine(values), batches(x, y, 2)
    assert GGN(model, loss, data).layout.names == tuple(values)
    close(GGN(model, loss, data), dense_ggn(twin, loss, x, y))
    close(Fisher(model, loss, data), dense_ggn(twin, loss, x, y))
    close(Hessian(model, loss, data), dense_hessian(twin, loss, x, y))
    close(Jacobian(model, data), dense_jacobian(twin, x).flatten(0, 1))
    names = ["first.b", "scale"]
    operator = GGN(model, loss, data, params=names)
    whole = dense_ggn(twin, loss, x, y)
    chosen = [*range(12, 16), 28]
    close(operator, whole[chosen][:, chosen])


def test_a_function_follows_its_tensors_and_leaves_them_alone():
    values, x, y, loss = parameters(), inputs(3), LABELS, nn.CrossEntropyLoss()
    operator = GGN(ParametricFunction(affine, values), loss, batches(x, y, 2))
    operator.to_dense()
    assert not any(value.requires_grad for value in values.values())
    values["second.W"].mul_(2.0)
    close(operator, dense_ggn(Affine(values), loss, x, y))


def test_a_frozen_parameter_of_a_function_is_held_fixed():
    values, x, y, loss = parameters(), inputs(3), LABELS, nn.CrossEntropyLoss()
    frozen = {**values, "first.W": nn.Parameter(values["first.W"], requires_grad=False)}
    operator = GGN(ParametricFunction(affine, frozen), loss, batches(x, y, 2))
    close(operator, dense_ggn(Affine(values), loss, x, y)[12:, 12:])


def test_a_function_of_a_model_is_that_model():
    model, x, y, loss = build("conv"), inputs(3), LABELS, nn.CrossEntropyLoss()

    def function(values, x):
        return functional_call(model, values, (x,))

    wrapped = ParametricFunction(function, dict(model.named_parameters()))
    data = batches(x, y, 3)
    close(GGN(wrapped, loss, data), GGN(model, loss, data).to_dense())


def test_a_function_of_named_inputs_is_called_by_name():
    values, x, y, loss = parameters(), inputs(3), LABELS, nn.CrossEntropyLoss()

    def function(parameters, *, a, b):
        return affine(parameters, a + b)

    model = ParametricFunction(function, values)
    data = [({"a": x, "b": torch.ones_like(x)}, y)]
    close(GGN(model, loss, data), dense_ggn(Affine(values), loss, x + 1, y))


@pytest.mark.parametrize(
    ("function", "values", "error", "message"),
    [
        (affine, {}, ValueError, "holds no tensor"),
        (affine, {"n": torch.ones(2).long()}, TypeError, r"'n'\] must be .* got torch.int64"),
        (affine, {"a": torch.ones(2), "a.b": torch.ones(2)}, ValueError, r"'a\.b' cannot be"),
        (affine, {"a.b": torch.ones(2), "a": torch.ones(2)}, ValueError, r"'a' cannot be"),
        (affine, {"forward": torch.ones(2)}, ValueError, "'forward' cannot be"),
        (affine, {"": torch.ones(2)}, ValueError, "'' cannot be"),
    ],
)
def test_functions_and_parameters_that_cannot_be_are_refused(function, values, error, message):
    with pytest.raises(error, match=message):
        ParametricFunction(function, values)


def test_kfac_of_a_function_has_its_exact_blocks():
    data = batches(inputs(3), LABELS, 3)
    model = ParametricFunction(affine, parameters())
    exact = GGN(model, nn.CrossEntropyLoss(), data).to_dense()
    found = KFAC(model, nn.CrossEntropyLoss(), data).to_dense()
    start = 0
    for parameter in parameters().values():
        at = slice(start, start + parameter.numel())
        torch.testing.assert_close(found[at, at], exact[at, at])
        start = at.stop
        found[at, at] = 0
    assert start == len(found)
    assert not found.any()


# ------------------------------------------------- the empirical Fisher of single terms


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_empirical_fisher_per_token_sums_the_terms(name):
    """Term by term: the loss's gradient in one position's outputs alone, through its Jacobian."""
    model, loss, x, y = case(name)
    outputs = model(x).detach()
    classes = 1 if isinstance(loss, nn.CrossEntropyLoss) else -1
    J = dense_jacobian(model, x)
    J = J.movedim(classes if classes > 0 else -2, -2)  # [N, positions, C, D]
    total = torch.zeros(J.shape[-1], J.shape[-1], dtype=J.dtype)
    rest = outputs.movedim(classes, -1)
    count = 0
    summed = type(loss).__new__(type(loss))
    summed.__dict__.update(loss.__dict__)
    summed.reduction = "sum"
    divisor = (summed(outputs, y) / loss(outputs, y)).item()
    for position in torch.cartesian_prod(*map(torch.arange, rest.shape[:-1])).reshape(
        -1, outputs.ndim - 1
    ):
        index = tuple(position.tolist())
        leaf = rest[index].clone().requires_grad_()
        put = rest.clone()
        put[index] = leaf
        (g,) = torch.autograd.grad(summed(put.movedim(-1, classes), y), leaf)
        row = g @ J[index]
        total += torch.outer(row, row)
        count += 1
    assert count == outputs.numel() // outputs.shape[classes]
    operator = EmpiricalFisher(model, loss, batches(x, y, 3), per="token")
    close(operator, total / divisor)
    assert operator.is_positive_semidefinite
    V = torch.randn(J.shape[-1], 3, generator=torch.Generator().manual_seed(0), dtype=J.dtype)
    one_by_one = torch.stack([operator @ v for v in V.T], 1)
    together = EmpiricalFisher(model, loss, batches(x, y, 3), per="token", chunk_size=3) @ V
    torch.testing.assert_close(together, one_by_one)


def test_per_token_and_per_example_are_one_without_positions_and_two_with_them():
    for name, is_same in (("ce", True), ("mse", True), ("ce positions", False)):
        model, loss, x, y = case(name)
        by_token, by_example = (
            EmpiricalFisher(model, loss, batches(x, y, 3), per=per).to_dense()
            for per in ("token", "example")
        )
        assert torch.allclose(by_token, by_example) is is_same


def test_a_likelihood_has_terms_and_a_callable_has_none():
    model = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3))).double()
    x, y = inputs(3), torch.randint(3, (N, 2), generator=torch.Generator().manual_seed(0))
    operator = EmpiricalFisher(model, Categorical(), [(x, y)], per="token")
    residuals = model(x).softmax(-1).detach() - nn.functional.one_hot(y, 3)
    rows = torch.einsum("ntc,ntcd->ntd", residuals, dense_jacobian(model, x)).flatten(0, 1)
    close(operator, rows.T @ rows / N)

    def loss(f, y):
        return nn.functional.cross_entropy(f.movedim(-1, 1), y)

    with pytest.raises(TypeError, match="needs the terms of the loss"):
        EmpiricalFisher(model, loss, [(x, y)], reduction="mean", per="token")
    with pytest.raises(ValueError, match="Unknown per='sequence'"):
        EmpiricalFisher(model, Categorical(), [(x, y)], per="sequence")
