"""What other libraries take for a model or its inputs: functions of parameters, mappings.

And the empirical Fisher of single terms, as one of them defines it.
"""

import pytest
import torch
from networks import (
    LABELS,
    N,
    batches,
    build,
    close,
    dense_ggn,
    dense_hessian,
    dense_jacobian,
    inputs,
)
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from laplace_debias import Laplace, OneArgument
from laplace_debias.curvature import (
    GGN,
    KFAC,
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
    la.export(tmp_path / "predictive.pt2", OneArgument(a=x - x.round(), b=x.round().long()))
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
