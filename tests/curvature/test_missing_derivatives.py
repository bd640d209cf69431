"""If torch has no derivative of a network, or a wrong one, the operators raise an error."""

import warnings

import pytest
import torch
from cases import others_slow
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, Hessian, Jacobian

LOSS = nn.CrossEntropyLoss()
LABELS = torch.tensor([0, 1, 1, 0, 1])


def inputs():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1] = 0  # where the prototype lies
    return x


class Prototype(nn.Module):
    """A classifier on a function of the inputs and a prototype, which is 0 by default."""

    def __init__(self, function, value=0.0):
        super().__init__()
        self.prototype = nn.Parameter(torch.full((1, 3), value))
        self.head = nn.Linear(1, 2)
        self.function = function
        self.double().eval()

    def forward(self, x):
        return self.head(self.function(x, self.prototype))


def gradient(model, parameters):
    nn.utils.vector_to_parameters(parameters, model.parameters())
    gradients = torch.autograd.grad(LOSS(model(inputs()), LABELS), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def hessian_by_differences(model, step=1e-5):
    """Central differences of the gradient."""
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    columns = []
    for unit in torch.eye(len(parameters), dtype=torch.float64):
        above = gradient(model, parameters + step * unit)
        below = gradient(model, parameters - step * unit)
        columns.append((above - below) / (2 * step))
    nn.utils.vector_to_parameters(parameters, model.parameters())
    return torch.stack(columns, 1)


NORMS = {
    "squared distance": lambda x, p: torch.cdist(x, p) ** 2,
    "kernel": lambda x, p: (-(torch.linalg.vector_norm(x - p, dim=1, keepdim=True) ** 2)).exp(),
    "distance": lambda x, p: (x - p).norm(dim=1, keepdim=True),
    "pairs": lambda x, p: F.pairwise_distance(x, p, eps=0.0, keepdim=True),
    "order 4": lambda x, p: (x - p).norm(p=4, dim=1, keepdim=True),
    "deviation": lambda x, p: (x * p).std(1, keepdim=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_hessian_through_a_norm_that_is_0_is_refused(name):
    H = Hessian(Prototype(NORMS[name]), LOSS, [(inputs(), LABELS)])
    with pytest.raises(ValueError, match=r"exactly 0.*second derivative.*square\(\)\.sum\(-1\)"):
        H @ torch.ones(H.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("name", others_slow(NORMS, "distance", "deviation"))
def test_beside_the_inputs_norms_have_their_second_derivatives(name):
    model = Prototype(NORMS[name], value=0.3)
    H = Hessian(model, LOSS, [(inputs()[2:], LABELS[2:]), (inputs()[:2], LABELS[:2])]).to_dense()
    torch.testing.assert_close(H, hessian_by_differences(model), rtol=1e-6, atol=1e-8)


NOT_DIFFERENTIATED = {
    "squares": lambda x, p: (x - p).square().sum(1, keepdim=True),
    "of the inputs only": lambda x, p: x.norm(dim=1, keepdim=True) + (x * p).sum(1, keepdim=True),
    "behind dead units": lambda x, p: (
        F.relu(p * x - 100).norm(dim=1, keepdim=True) + (x * p).sum(1, keepdim=True)
    ),
    "below a clamp": lambda x, p: (x - p).norm(dim=1, keepdim=True).clamp(min=0.01),
    "normalised": lambda x, p: F.normalize(x - p, dim=1, eps=0.01)[:, :1],
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_norms_that_are_not_differentiated_may_be_0(name):
    model = Prototype(NOT_DIFFERENTIATED[name])
    H = Hessian(model, LOSS, [(inputs(), LABELS)]).to_dense()
    torch.testing.assert_close(H, hessian_by_differences(model), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("operator", [Hessian, GGN, Jacobian])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: (x - p).square().sum(1, keepdim=True).sqrt(),
        lambda x, p: (x - p).square().sum(1, keepdim=True) ** 0.5,
        lambda x, p: torch.hypot(x[:, :1] - p[0, 0], x[:, 1:2] - p[0, 1]),
    ],
)
def test_products_that_are_nan_name_the_cause(operator, function):
    data = [(inputs(), LABELS)]
    model = Prototype(function)
    A = Jacobian(model, data) if operator is Jacobian else operator(model, LOSS, data)
    for vector in torch.eye(A.shape[1], dtype=torch.float64)[:3]:
        with pytest.raises(ValueError, match=rf"{operator.__name__}.*contains NaN.*under the root"):
            A @ vector
    if operator is Jacobian:
        with pytest.raises(ValueError, match="contains NaN"):
            A.T @ torch.ones(A.shape[0], dtype=torch.float64)
    # If the vector contains NaN, so does the product.
    assert (A @ torch.full((A.shape[1],), torch.nan, dtype=torch.float64)).isnan().any()


class OverTheBatch(nn.Module):
    """Batch normalisation without running statistics, as a function."""

    def __init__(self, normalise):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.normalise = normalise
        self.double().eval()

    def forward(self, x):
        return self.last(torch.tanh(self.normalise(self.first(x))))


def batch_norm(z):
    return F.batch_norm(z, None, None, training=True)


def own_norm(z):
    return (z - z.mean(0)) / (z.std(0, unbiased=False) + 0.1)


@pytest.mark.parametrize("normalise", [batch_norm, own_norm])
@pytest.mark.parametrize(
    "use",
    [
        lambda model, data: Hessian(model, LOSS, data),
        lambda model, data: GGN(model, LOSS, data),
        Jacobian,
        lambda model, data: KFAC(model, LOSS, data),
        lambda model, data: Laplace(model).fit_batches(data),
    ],
    ids=["hessian", "ggn", "jacobian", "kfac", "laplace"],
)
def test_statistics_over_the_batch_are_refused(normalise, use):
    """With such statistics, the matrix would depend on how the data are cut into batches."""
    with pytest.raises(ValueError, match="change with the other examples"):
        use(OverTheBatch(normalise), [(inputs(), LABELS)])


class HiddenTanh(torch.autograd.Function):
    """A Tanh whose backward pass hides its operations, as torchdiffeq's `odeint_adjoint` does."""

    @staticmethod
    def forward(ctx, h):
        """Compute the Tanh."""
        outputs = h.tanh()
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    def backward(ctx, gradient):
        """Compute the gradient without a graph."""
        with torch.no_grad():
            (outputs,) = ctx.saved_tensors
            return gradient * (1 - outputs**2)


class WithHiddenTanh(nn.Sequential):
    """A network with one hidden layer."""

    def forward(self, x):
        """Shape `[B, 2]`."""
        return self[1](HiddenTanh.apply(self[0](x)))


class Recomputed(torch.autograd.Function):
    """A layer that is called again in the backward pass, as by torchdiffeq's `odeint_adjoint`."""

    @staticmethod
    def forward(ctx, x, layer, *parameters):
        """Call the layer."""
        ctx.layer = layer
        ctx.save_for_backward(x, *parameters)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        """Call the layer again, and differentiate it by the parameters that were passed."""
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            outputs = ctx.layer(x)
            _, *gradients = torch.autograd.grad(
                outputs, (x, *parameters), gradient, materialize_grads=True
            )
        return None, None, *gradients


class WithRecomputedLayer(nn.Sequential):
    """A network whose backward pass calls the first layer again."""

    def forward(self, x):
        """Shape `[B, 2]`."""
        return self[1](Recomputed.apply(x, self[0], *self[0].parameters()).tanh())


class OwnTanh(torch.autograd.Function):
    """A Tanh whose backward pass torch can differentiate, although it cannot be recorded."""

    @staticmethod
    def forward(ctx, h):
        """Compute the Tanh."""
        ctx.save_for_backward(h)
        return h.tanh()

    @staticmethod
    def backward(ctx, gradient):
        """Compute the gradient."""
        (h,) = ctx.saved_tensors
        return gradient * (1 - h.tanh() ** 2)


class Confident(nn.Sequential):
    """A network with one hidden layer and large outputs."""

    def forward(self, x):
        """Shape `[B, 10]`."""
        return 1000 * self[1](OwnTanh.apply(self[0](x)))


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_the_hessian_of_a_confident_network_is_not_refused(seed):
    """In single precision, it consists of rounding errors, which are not symmetric."""
    torch.manual_seed(seed)
    model = Confident(nn.Linear(5, 20), nn.Linear(20, 10)).eval()
    x = torch.randn(16, 5)
    hessian = Hessian(model, LOSS, [(x, model(x).argmax(1))])
    assert (hessian @ torch.ones(330)).isfinite().all()


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_a_backward_pass_that_hides_its_operations_is_refused(operator):
    """Otherwise, torch would take the missing derivatives as zero without an error."""
    model = WithHiddenTanh(nn.Linear(3, 4), nn.Linear(4, 2)).double().eval()
    data = [(inputs(), LABELS)]
    matrix = operator(model, LOSS, data)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"second derivatives.*use Laplace or KFAC"):
            matrix @ torch.ones(26, dtype=torch.float64)
    la = Laplace(model).fit(data)
    assert la.predict(inputs()).probs.isfinite().all()
    with pytest.raises(NotImplementedError, match=r"second derivatives.*use Laplace or KFAC"):
        la.predict(inputs(), "glm-mc")


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_a_backward_pass_that_calls_a_layer_again_is_refused(operator):
    """Otherwise, the curvature of the layer would be zero."""
    model = WithRecomputedLayer(nn.Linear(3, 4), nn.Linear(4, 2)).double().eval()
    data = [(inputs(), LABELS)]
    matrix = operator(model, LOSS, data)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="calls one of its layers again"):
            matrix @ torch.ones(26, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"other paths, for example.*odeint_adjoint"):
        Laplace(model).fit(data)


class Branching(nn.Module):
    """A network with a branch on its inputs, which cannot be recorded, and an unused number."""

    def __init__(self, has_number):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if has_number:
            self.number = nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = self.layer(x)
        return h.tanh() if h.sum() > 0 else h.sin()


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_an_unused_number_has_no_curvature(operator):
    """torch has no gradient for a parameter without dimensions on which the outputs do not depend.

    In CLIP without the contrastive loss, this is the logarithm of the temperature.
    """
    with_number = Branching(has_number=True).double().eval()
    without = Branching(has_number=False).double().eval()
    without.layer = with_number.layer
    data = [(inputs(), LABELS)]
    order = operator(with_number, LOSS, data).layout.names
    V = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_number = torch.tensor([name == "number" for name in order]).repeat_interleave(
        torch.tensor([with_number.get_parameter(name).numel() for name in order])
    )
    products = operator(with_number, LOSS, data) @ V
    torch.testing.assert_close(products[~is_number], operator(without, LOSS, data) @ V[~is_number])
    assert (operator(with_number, LOSS, data) @ V[:, 0])[is_number] == 0 == products[is_number, 0]


def test_missing_rules_of_vectorisation_are_not_told_to_the_user():
    """The affine grid runs in a loop under `torch.vmap`, of which torch warns at every call."""

    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            shifts = (self.scale.sin() * x.repeat(1, 2)).view(-1, 2, 3)
            grid = F.affine_grid(shifts, [len(x), 1, 2, 2], align_corners=False)
            return self.head(grid.flatten(1))

    model = Shifts().eval()
    x = inputs().float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operator in (Hessian, GGN):
            A = operator(model, LOSS, [(x, LABELS)])
            A @ torch.eye(A.shape[0])
        Laplace(model).fit_batches([(x, LABELS)]).predict(x)
    assert not [str(w.message) for w in caught if "performance drop" in str(w.message)]
