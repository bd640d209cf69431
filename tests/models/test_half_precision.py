"""With parameters in half precision, the curvature and predictives are in single precision."""

import copy

import oracle
import pytest
import torch
from torch import nn

from laplace_debias import Laplace, Quadratic
from laplace_debias.curvature import GGN, KFAC, Hessian, Jacobian
from laplace_debias.linalg import trace

NARROW = [torch.bfloat16, torch.float16]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 0, 1, 2, 2, 0])
# Half a unit in the last place of bfloat16's 8 bits.
UNIT = 2**-9


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def in_double(model):
    """The same function of the same (rounded) values, without any further rounding."""
    return copy.deepcopy(model).double()


def relative_error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("curvature", ["full", "diag", "kfac", "ekfac", "lowrank"])
def test_bayesian_parameters_in_half_precision(dtype, curvature, tmp_path):
    """The reference is in double precision at the rounded values: only single precision rounds."""
    model = network(dtype).eval()
    x = X.to(dtype)
    la = Laplace(model, curvature=curvature).fit_batches([(x, Y)])
    reference = in_double(model)
    C = oracle.ggn(reference, x.double(), "classification", names(model))
    if curvature == "diag":
        C = C.diag().diag()
    if curvature in ("full", "diag", "lowrank"):
        precision = la.posterior.precision.to_dense()
        assert relative_error(precision, 8 * C + torch.eye(len(C))) < 1e-5
        J = oracle.flat_jacobian(reference, x.double(), names(model))
        expected = J @ torch.linalg.inv(8 * C + torch.eye(len(C))) @ J.mT
    else:
        reference_la = Laplace(reference, curvature=curvature, backend="hooks")
        reference_la.fit_batches([(x.double(), Y)])
        expected = reference_la.functional(x.double())[1]
    mean, covariance = la.functional(x)
    assert relative_error(mean, reference(x.double())) < 1e-5
    assert relative_error(covariance, expected) < 1e-4
    everything = (la.mean, la.posterior.sample(2), mean, covariance)
    assert {tensor.dtype for tensor in everything} == {torch.float32}
    assert la.posterior.curvature.dtype == torch.float32
    for method, samples in (("glm", None), ("glm", 3), ("glm-mc", 3), ("nn", 3), ("map", None)):
        assert la.predict(x, method, samples).probs.dtype == torch.float32
    assert next(model.parameters()).dtype == dtype
    la.save(tmp_path / "p.safetensors")
    again = Laplace.load(tmp_path / "p.safetensors", model)
    torch.testing.assert_close(again.functional(x)[1], covariance)


@pytest.mark.parametrize("dtype", NARROW)
def test_samples_and_the_map_are_those_of_the_rounded_values(dtype):
    model = network(dtype).eval()
    x = X.to(dtype)
    la = Laplace(model, curvature="full").fit_batches([(x, Y)])
    reference = in_double(model)
    expected = reference(x.double()).softmax(1)
    assert relative_error(la.predict(x, "map").probs, expected) < 1e-6
    draws = la.posterior.sample(5, torch.Generator().manual_seed(3))
    actual = la.predict(x, "nn", 5, torch.Generator().manual_seed(3)).probs
    probs = torch.zeros(8, 3, dtype=torch.float64)
    for draw in draws:
        torch.nn.utils.vector_to_parameters(draw.double(), reference.parameters())
        probs += reference(x.double()).softmax(1).detach() / 5
    assert relative_error(actual, probs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_operators_of_parameters_in_half_precision(dtype):
    model = network(dtype).eval()
    x = X.to(dtype)
    reference = in_double(model)
    loss = nn.CrossEntropyLoss()
    data = [(x, Y)]
    exact = [(x.double(), Y)]
    for make in (GGN, Hessian, KFAC):
        operator = make(model, loss, data)
        expected = make(reference, loss, exact).to_dense()
        assert operator.dtype == torch.float32
        assert relative_error(operator.to_dense(), expected) < 1e-5
    C = oracle.ggn(reference, x.double(), "classification", names(model))
    assert relative_error(GGN(model, loss, data).to_dense(), C) < 1e-5
    J = oracle.flat_jacobian(reference, x.double(), names(model))
    assert relative_error(Jacobian(model, data).to_dense(), J.flatten(0, 1)) < 1e-5
    quadratic = Quadratic.from_data(model, loss, data)
    value = loss(reference(x.double()), Y)
    gradients = torch.autograd.grad(value, [reference.get_parameter(n) for n in names(model)])
    assert relative_error(quadratic.gradient, torch.cat([g.flatten() for g in gradients])) < 1e-5
    assert trace(quadratic.matrix, num_matvecs=20).value.isfinite()


def test_backpack_is_refused_for_parameters_in_half_precision():
    with pytest.raises(NotImplementedError, match="half precision"):
        Laplace(network(torch.bfloat16).eval(), backend="backpack")


# ------------------------------------------------------------------------------ frozen backbones


class Headed(nn.Module):
    """A frozen backbone in half precision under a head in single precision."""

    def __init__(self, narrow_outputs):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).bfloat16().requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.narrow_outputs = narrow_outputs

    def forward(self, x):
        logits = self.head(self.backbone(x.bfloat16()).float())
        return logits.bfloat16() if self.narrow_outputs else logits


@pytest.mark.parametrize("narrow_outputs", [False, True])
def test_a_head_on_a_frozen_backbone_in_half_precision(narrow_outputs):
    torch.manual_seed(0)
    model = Headed(narrow_outputs).eval()
    la = Laplace(model, curvature="full").fit_batches([(X, Y)])
    features = model.backbone(X.bfloat16()).double().detach()
    head = in_double(model.head)
    C = oracle.ggn(head, features, "classification", ["weight", "bias"])
    # Logits of about 1 that are rounded change p, and with it p (1 − p), by a unit; their backward
    # pass rounds a cotangent once more, and it enters squared.
    tolerance = 4 * UNIT if narrow_outputs else 1e-5
    P = 8 * C + torch.eye(len(C))
    assert relative_error(la.posterior.precision.to_dense(), P) < tolerance
    J = oracle.flat_jacobian(head, features, ["weight", "bias"])
    mean, covariance = la.functional(X)
    assert relative_error(mean, head(features)) < tolerance
    assert relative_error(covariance, J @ torch.linalg.inv(P) @ J.mT) < 2 * tolerance
    predictives = [la.predict(X, "glm"), la.predict(X, "map"), la.predict(X, "nn", 3)]
    assert {p.probs.dtype for p in predictives} == {mean.dtype} == {torch.float32}
    assert la.predict(X, "glm-mc", 3).probs.dtype == torch.float32
    G = GGN(model, nn.CrossEntropyLoss(), [(X, Y)])
    assert G.dtype == torch.float32
    assert relative_error(G.to_dense(), C) < tolerance


class Adapted(nn.Module):
    """A linear layer in half precision, frozen, with a low-rank update in single precision."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.base = nn.Linear(d_in, d_out).bfloat16().requires_grad_(False)
        self.down = nn.Linear(d_in, 2, bias=False)
        self.up = nn.Linear(2, d_out, bias=False)

    def forward(self, x):
        dtype = self.base.weight.dtype
        return self.base(x) + self.up(self.down(x.to(self.up.weight.dtype))).to(dtype)


@pytest.mark.parametrize("curvature", ["full", "kfac", "diag"])
def test_adapters_within_a_network_in_half_precision(curvature):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(4, 8), nn.Tanh(), Adapted(8, 3)).eval()
    x = X.bfloat16()
    la = Laplace(model, curvature=curvature).fit_batches([(x, Y)])
    reference = Laplace(in_double(model), curvature=curvature).fit_batches([(x.double(), Y)])
    # Three roundings forward and three backward reach a gradient, which enters squared; twice that
    # for the inverse of the posterior's precision.
    expected = reference.posterior.precision.to_dense()
    assert relative_error(la.posterior.precision.to_dense(), expected) < 12 * UNIT
    mean, covariance = la.functional(x)
    exact, exact_covariance = reference.functional(x.double())
    assert {mean.dtype, covariance.dtype, la.predict(x).probs.dtype} == {torch.float32}
    assert relative_error(mean, exact) < 6 * UNIT
    assert relative_error(covariance, exact_covariance) < 24 * UNIT


def test_a_quantised_backbone_passes_through():
    class Quantised(nn.Module):
        """A frozen layer whose weight is 4-bit integers with a scale, as `bitsandbytes` has it."""

        def __init__(self):
            super().__init__()
            codes = torch.randint(-8, 8, (6, 4), dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            hidden = nn.functional.linear(x.bfloat16(), self.codes.bfloat16() / 8)
            return self.head(hidden.float())

    torch.manual_seed(0)
    model = Quantised().eval()
    la = Laplace(model, curvature="full").fit_batches([(X, Y)])
    features = nn.functional.linear(X.bfloat16(), model.codes.bfloat16() / 8).double()
    C = oracle.ggn(in_double(model.head), features, "classification", ["weight", "bias"])
    assert relative_error(la.posterior.precision.to_dense(), 8 * C + torch.eye(len(C))) < 1e-5
