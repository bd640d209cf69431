"""Functions of a dict of parameters as networks, against dense derivatives of the function."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from laplace_debias import Laplace
from laplace_debias.curvature import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalFisher,
    Fisher,
    FunctionModel,
    Hessian,
    Jacobian,
)

LOSS = nn.CrossEntropyLoss()


def hidden_layer(parameters, x):
    hidden = (x @ parameters["first.W"]).tanh()
    return hidden @ parameters["second.W"] + parameters["b"]


def problem():
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=g)

    parameters = {"first.W": randn(4, 5), "b": randn(3), "second.W": randn(5, 3)}
    return parameters, (randn(20, 4), torch.randint(3, (20,), generator=g))


def flat_function(parameters, x):
    """Return the outputs as a function of one vector, in the dict's order, and this vector."""
    sizes = [tensor.numel() for tensor in parameters.values()]

    def outputs(vector):
        named = {
            name: flat.view(tensor.shape)
            for (name, tensor), flat in zip(parameters.items(), vector.split(sizes), strict=True)
        }
        return hidden_layer(named, x)

    return outputs, torch.cat([tensor.flatten() for tensor in parameters.values()])


def in_layout_order(operator, parameters, matrix):
    """Permute a dense matrix from the dict's order of parameters to the operator's."""
    starts = {}
    start = 0
    for name, tensor in parameters.items():
        starts[name] = range(start, start + tensor.numel())
        start += tensor.numel()
    order = [index for name in operator.layout.names for index in starts[name]]
    return matrix[order][:, order]


def test_hessian_ggn_and_fisher_are_those_of_dense_derivatives():
    parameters, (x, y) = problem()
    model = FunctionModel(hidden_layer, parameters)
    outputs, vector = flat_function(parameters, x)
    dense_hessian = torch.autograd.functional.hessian(lambda v: LOSS(outputs(v), y), vector)
    jacobian = torch.autograd.functional.jacobian(outputs, vector)
    probs = outputs(vector).softmax(-1)
    at_outputs = probs.diag_embed() - probs[:, :, None] * probs[:, None, :]
    dense_ggn = torch.einsum("nci,ncd,ndj->ij", jacobian, at_outputs, jacobian) / len(x)
    residuals = probs - nn.functional.one_hot(y, 3)
    gradients = torch.einsum("nci,nc->ni", jacobian, residuals)
    expected = {
        Hessian: dense_hessian,
        GGN: dense_ggn,
        Fisher: dense_ggn,
        EmpiricalFisher: gradients.T @ gradients / len(x),
    }
    for kind, dense in expected.items():
        operator = kind(model, LOSS, [(x, y)])
        assert set(operator.layout.names) == set(parameters)
        torch.testing.assert_close(
            operator.to_dense(), in_layout_order(operator, parameters, dense)
        )
    assert Jacobian(model, [(x, y)]).shape == (60, len(vector))


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_without_layers_each_parameter_has_an_exact_block(kind):
    parameters, (x, y) = problem()
    model = FunctionModel(hidden_layer, parameters)
    operator = kind(model, LOSS, [(x, y)])
    ggn = GGN(model, LOSS, [(x, y)])
    for name in parameters:
        torch.testing.assert_close(operator[name, name].to_dense(), ggn[name, name].to_dense())


def test_functional_calls_have_the_operators_of_their_module():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    _, (x, y) = problem()
    model = FunctionModel(
        lambda parameters, x: functional_call(network, parameters, (x,)),
        dict(network.named_parameters()),
    )
    torch.testing.assert_close(
        GGN(model, LOSS, [(x, y)]).to_dense(), GGN(network, LOSS, [(x, y)]).to_dense()
    )
    la = Laplace(model, curvature="full").fit([(x, y)])
    expected = Laplace(network, curvature="full").fit([(x, y)])
    torch.testing.assert_close(la.predict(x).probs, expected.predict(x).probs)


def test_steps_in_place_change_the_operator():
    parameters, (x, y) = problem()
    operator = GGN(FunctionModel(hidden_layer, parameters), LOSS, [(x, y)])
    matrix_before = operator.to_dense()
    parameters["b"][0] += 1.0
    assert not torch.allclose(operator.to_dense(), matrix_before)


@pytest.mark.usefixtures("unchecked")  # passes wrong types
def test_what_is_no_function_of_parameters_is_refused():
    parameters, _ = problem()
    with pytest.raises(TypeError, match=r"`function` is a int\. Pass a function"):
        FunctionModel(3, parameters)
    with pytest.raises(TypeError, match=r"`parameters` is a list\. Pass a dict"):
        FunctionModel(hidden_layer, list(parameters.values()))
    with pytest.raises(ValueError, match="`parameters` is empty"):
        FunctionModel(hidden_layer, {})
    with pytest.raises(TypeError, match=r"'b' is torch.int64. Pass every parameter as a tensor"):
        FunctionModel(hidden_layer, {"b": torch.arange(3)})
    with pytest.raises(
        ValueError, match=r"'a' is the name of a tensor, but also the first part of the name 'a.b'"
    ):
        FunctionModel(hidden_layer, {"a": torch.ones(1), "a.b": torch.ones(1)})
