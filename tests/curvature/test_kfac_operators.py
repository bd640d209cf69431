"""K-FAC and EKFAC as operators, against factors and GGNs built from torch's own derivatives."""

import copy
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import oracle
import pytest
import torch
from cases import others_slow
from conformance import NetworkConformance
from networks import dense_ggn, dense_jacobian, output_hessian
from torch import nn
from torch.func import jacrev

from laplace_debias.curvature import EKFAC, GGN, KFAC, EmpiricalFisher
from laplace_debias.linalg import cg, inverse, trace
from laplace_debias.operators import EigenKronecker, Identity, Permuted

N, C = 6, 3
F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for layer in layers)).to(F64).eval()


def mlp(outputs=C):
    return network(lambda: nn.Linear(4, 5), nn.Tanh, lambda: nn.Linear(5, outputs))


def grouped():
    """A network whose blocks' rows are not in the order of the parameters."""
    return network(
        lambda: nn.ConvTranspose2d(2, 3, 2), nn.Tanh, nn.Flatten, lambda: nn.Linear(27, C)
    )


class Positions(nn.Module):
    """Logits [B, C, T], classes in dimension 1 as `nn.CrossEntropyLoss` has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2 * C).to(F64)

    def forward(self, x):
        return torch.tanh(self.layer(x)).unflatten(1, (C, 2))


LABELS = torch.tensor([0, 2, 1, 2, -100, 0])
WEIGHTS = torch.tensor([0.5, 2.0, 1.5], dtype=F64)
SOFT = randn(N, C, seed=3).softmax(1)
BITS = (randn(N, C, seed=4) > 0).double()
CASES = {
    "cross-entropy": (mlp, nn.CrossEntropyLoss(), LABELS.clamp(min=0)),
    "ignored": (mlp, nn.CrossEntropyLoss(), LABELS),
    "other ignored": (mlp, nn.CrossEntropyLoss(ignore_index=2), LABELS.clamp(min=0)),
    "class weights": (mlp, nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
    "smoothed": (mlp, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), LABELS),
    "probabilities": (mlp, nn.CrossEntropyLoss(weight=WEIGHTS), SOFT),
    "summed": (mlp, nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "positions": (
        Positions,
        nn.CrossEntropyLoss(weight=WEIGHTS),
        torch.stack([LABELS, LABELS.flip(0)], dim=1),
    ),
    "squared": (mlp, nn.MSELoss(), randn(N, C, seed=5)),
    "squared, summed": (mlp, nn.MSELoss(reduction="sum"), randn(N, C, seed=5)),
    "binary": (mlp, nn.BCEWithLogitsLoss(), BITS),
    "binary, weighted": (mlp, nn.BCEWithLogitsLoss(pos_weight=3 * WEIGHTS, weight=WEIGHTS), BITS),
    "binary, soft": (mlp, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), SOFT),
    "other order": (grouped, nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
}
INPUTS = {mlp: (4,), grouped: (2, 2, 2), Positions: (4,)}


@pytest.fixture(params=CASES)
def case(request):
    make, loss, targets = CASES[request.param]
    return make(), loss, randn(N, *INPUTS[make], seed=1), targets


def split(x, y, *sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def dense_empirical(model, loss, x, y):
    """The empirical Fisher: examples' outer products of gradients, over the loss's divisor."""
    summed = copy.copy(loss)
    summed.reduction = "sum"
    outputs = model(x).detach().requires_grad_()
    mean = loss(outputs, y)
    total = summed(outputs, y)
    g = torch.autograd.grad(total, outputs)[0].flatten(1)
    J = dense_jacobian(model, x).flatten(1, -2)
    rows = torch.einsum("no,nod->nd", g, J)
    return rows.T @ rows * (mean / total).detach()


def blocks_of(model, dense):
    """Set the entries outside the blocks of single parameters to zero."""
    starts, ends = bounds([p.numel() for p in model.parameters()])
    blocks = [dense[start:end, start:end] for start, end in zip(starts, ends, strict=True)]
    return torch.block_diag(*blocks)


def bounds(sizes):
    """First and last positions (exclusive) of consecutive blocks of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends


def rotation_of(K):
    """The eigenvectors as a dense matrix in the order of the parameters, and their magnitudes."""
    columns = []
    magnitudes = []
    for block in K.blocks.blocks.values():
        U_G = torch.eye(block.magnitudes.shape[0], dtype=F64) if block.U_G is None else block.U_G
        U_A = torch.eye(block.magnitudes.shape[1], dtype=F64) if block.U_A is None else block.U_A
        columns.append(torch.kron(U_G, U_A))
        magnitudes.append(block.magnitudes.flatten())
    U = torch.block_diag(*columns)
    if K.order is not None:
        U = torch.zeros_like(U).index_copy_(0, K.order, U)
    return U, torch.cat(magnitudes)


def example_weights(loss, y):
    """The mean weight of each example's terms in the loss, 0 for a target that is ignored."""
    if isinstance(loss, nn.MSELoss):
        return torch.ones(N, dtype=F64)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        ones = torch.ones(C, dtype=F64)
        weight = ones if loss.weight is None else loss.weight
        pos_weight = ones if loss.pos_weight is None else loss.pos_weight
        return (weight * (pos_weight * y + 1 - y)).mean(1)
    weight = torch.ones(C, dtype=F64) if loss.weight is None else loss.weight
    if y.is_floating_point():
        return y @ weight
    smoothing = loss.label_smoothing
    omega = (1 - smoothing) * weight[y.clamp(min=0)] + smoothing * weight.mean()
    return omega * (y != loss.ignore_index)


def mlp_factors(model, loss, x, y):
    """A and G of the layers of `mlp`, written out, and the divisor of the loss.

    A is the mean over the examples, with their weights in the loss.
    """
    first, _, second = model

    def outputs(shifts):
        hidden = torch.tanh(first(x) + shifts[0])
        return second(hidden) + shifts[1]

    zeros = (torch.zeros(N, 5, dtype=F64), torch.zeros(N, C, dtype=F64))
    with torch.no_grad():
        activations = [x, torch.tanh(first(x))]
    H = output_hessian(model, loss, x, y)
    omega = example_weights(loss, y)
    factors = []
    for layer, a in enumerate(activations):
        J = jacrev(
            lambda s, layer=layer: outputs(
                tuple(s if i == layer else z for i, z in enumerate(zeros))
            ).flatten()
        )(zeros[layer]).detach()  # [N·C, N, d]
        G = torch.einsum("onp,om,mnq->pq", J, H, J)
        # With opt_einsum it comes in columns, and `torch.kron` of rows and columns raises.
        factors.append((G.contiguous(), a.T @ (omega[:, None] * a) / omega.sum()))
    return factors


@pytest.mark.parametrize("operator", [GGN, KFAC, EKFAC])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_labels_are_not_rounded_to_the_dtype_of_the_targets(operator, dtype):
    weight, pos_weight = WEIGHTS / 3, WEIGHTS / 7
    loss = nn.BCEWithLogitsLoss(weight=weight, pos_weight=pos_weight)
    x = randn(N, 4, seed=5)
    actual = operator(mlp(), loss, [(x, BITS.to(dtype))]).to_dense()
    expected = operator(mlp(), loss, [(x, BITS)]).to_dense()
    oracle.close(actual, expected, 1e-12)


@pytest.mark.parametrize("name", [name for name, (make, _, _) in CASES.items() if make is mlp])
def test_kfac_has_the_factors_of_torchs_loss(name):
    make, loss, y = CASES[name]
    model = make()
    x = randn(N, 4, seed=1)
    (G1, A1), (G2, A2) = mlp_factors(model, loss, x, y)
    expected = torch.block_diag(torch.kron(G1, A1), G1, torch.kron(G2, A2), G2)
    K = KFAC(model, loss, split(x, y, 4, 2))
    torch.testing.assert_close(K.to_dense(), expected, rtol=0, atol=1e-12)


def test_ekfac_has_the_curvature_of_torchs_loss_along_its_directions(case):
    model, loss, x, y = case
    K = EKFAC(model, loss, split(x, y, 1, 5))
    U, magnitudes = rotation_of(K)
    ggn = dense_ggn(model, loss, x, y)
    torch.testing.assert_close(magnitudes, (U.T @ ggn @ U).diagonal(), rtol=0, atol=1e-12)
    torch.testing.assert_close(U @ magnitudes.diag() @ U.T, K.to_dense(), rtol=0, atol=1e-12)
    torch.testing.assert_close(trace(K).value, ggn.trace(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize(
    "name", ["squared", "squared, summed", "class weights", "binary, weighted"]
)
def test_one_example_is_exact(make, name):
    build, loss, y = CASES[name]
    model = build()
    x = randn(1, 4, seed=2)
    K = make(model, loss, [(x, y[:1])])
    expected = blocks_of(model, dense_ggn(model, loss, x, y[:1]))
    torch.testing.assert_close(K.to_dense(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        K.to_dense(),
        blocks_of(model, GGN(model, loss, [(x, y[:1])]).to_dense()),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("joint", [False, True])
def test_deep_linear_networks_with_squared_error_are_exact(make, reduction, joint):
    sizes = (4, 5, 3, 2)
    layers = [partial(nn.Linear, d_in, d_out) for d_in, d_out in pairwise(sizes)]
    model = network(*layers)
    loss = nn.MSELoss(reduction=reduction)
    x, y = randn(7, 4), randn(7, 2, seed=1)
    dense = dense_ggn(model, loss, x, y)
    if joint:
        layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in model]
        starts, ends = bounds(layer_sizes)
        blocks = [dense[start:end, start:end] for start, end in zip(starts, ends, strict=True)]
        expected = torch.block_diag(*blocks)
    else:
        expected = blocks_of(model, dense)
    K = make(model, loss, split(x, y, 3, 4), joint=joint)
    torch.testing.assert_close(K.to_dense(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["class weights", "binary, weighted", "squared", "positions"])
def test_empirical_magnitudes_are_those_of_the_empirical_fisher(name):
    build, loss, y = CASES[name]
    model = build()
    x = randn(N, *INPUTS[build], seed=1)
    K = EKFAC(model, loss, split(x, y, 4, 2), fisher="empirical")
    U, magnitudes = rotation_of(K)
    expected = dense_empirical(model, loss, x, y)
    torch.testing.assert_close(magnitudes, (U.T @ expected @ U).diagonal(), rtol=0, atol=1e-12)
    operator = EmpiricalFisher(model, loss, [(x, y)])
    torch.testing.assert_close(operator.to_dense(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", others_slow(["class weights", "binary, weighted", "squared", "positions"], "positions")
)
def test_drawn_labels_converge_to_the_closed_form(name):
    build, loss, y = CASES[name]
    model = build()
    x = randn(N, *INPUTS[build], seed=1)
    ggn = dense_ggn(model, loss, x, y)
    samples = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        drawn = EKFAC(model, loss, [(x, y)], fisher="mc", mc_samples=20, generator=generator)
        samples.append(trace(drawn).value)
    mean = torch.stack(samples).mean()
    error = torch.stack(samples).std() / 12**0.5
    assert (mean - ggn.trace()).abs() <= 4 * error
    assert error < 0.15 * ggn.trace()


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=WEIGHTS), nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")],
)
def test_magnitudes_from_other_data(loss):
    model = mlp()
    x = randn(N, 4)
    y = LABELS
    x2 = randn(4, 4, seed=8)
    y2 = torch.tensor([1, 2, 2, 0])
    first = KFAC(model, loss, [(x, y)])
    second = KFAC(model, loss, [(x2, y2)])
    combined = KFAC(model, loss, split(x, y, 2, 4), magnitudes=split(x2, y2, 3, 1))
    assert combined.num_data == 4
    for name, block in combined.blocks.blocks.items():
        directions = first.blocks.blocks[name]
        measured = second.blocks.blocks[name].to_dense()
        U_G = directions.U_G
        U_A = directions.U_A
        U = torch.kron(U_G, torch.eye(1, dtype=F64) if U_A is None else U_A)
        along = (U.T @ measured @ U).diagonal().view_as(block.magnitudes)
        torch.testing.assert_close(block.magnitudes, along, rtol=0, atol=1e-12)
    debiased = EKFAC(model, loss, [(x, y)], magnitudes=[(x2, y2)])
    U, magnitudes = rotation_of(debiased)
    ggn = dense_ggn(model, loss, x2, y2)
    torch.testing.assert_close(magnitudes, (U.T @ ggn @ U).diagonal(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_arguments_that_change_no_result(make):
    model = grouped()
    loss = nn.CrossEntropyLoss()
    x = randn(N, 2, 2, 2)
    y = LABELS
    K = make(model, loss, [(x, y)])
    assert isinstance(K, Permuted)
    assert all(isinstance(block, EigenKronecker) for block in K.blocks.blocks.values())
    expected = K.to_dense()
    for arguments in ({"backend": "hooks"}, {"memory_bound": 4000}, {"num_data": N}):
        torch.testing.assert_close(make(model, loss, [(x, y)], **arguments).to_dense(), expected)


def test_arguments_that_change_the_result():
    model = network(lambda: nn.Conv2d(2, 3, 2), nn.Tanh, nn.Flatten, lambda: nn.Linear(3 * 4, C))
    loss = nn.CrossEntropyLoss()
    y = LABELS
    data = [(randn(N, 2, 3, 3), y)]
    expected = KFAC(model, loss, data).to_dense()
    for arguments in ({"sharing": "reduce"}, {"joint": True}, {"fisher": "empirical"}):
        assert not torch.allclose(KFAC(model, loss, data, **arguments).to_dense(), expected)
    narrow = KFAC(model, loss, data, factor_dtype=torch.float32).to_dense()
    torch.testing.assert_close(narrow, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(narrow, expected)


def mean_absolute(outputs, targets):
    return (outputs - targets).abs().mean()


def test_any_loss_has_an_empirical_fisher():
    model = mlp()
    x = randn(N, 4)
    y = randn(N, C, seed=1)
    K = EKFAC(model, mean_absolute, [(x, y)], fisher="empirical", reduction="mean")
    U, magnitudes = rotation_of(K)
    expected = EmpiricalFisher(model, mean_absolute, [(x, y)], reduction="mean").to_dense()
    torch.testing.assert_close(magnitudes, (U.T @ expected @ U).diagonal())
    for kind in ("exact", "mc"):
        with pytest.raises(TypeError, match='fisher="empirical"'):
            KFAC(model, mean_absolute, [(x, y)], fisher=kind, reduction="mean")


def pairs():
    return [(randn(N, 4), LABELS)]


CE = nn.CrossEntropyLoss


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": iter(pairs())}, TypeError, "read only once"),
        ({"data": []}, ValueError, "empty"),
        ({"data": [(randn(N, 4) / 0, LABELS)]}, ValueError, "NaN"),
        ({"data": [(randn(N, 4), torch.full((N,), -100))]}, ValueError, "ignore_index"),
        ({"num_data": 7}, ValueError, "num_data=7"),
        ({"fisher": "mcc"}, ValueError, "fisher='mcc'"),
        ({"mc_samples": 3}, ValueError, "mc_samples"),
        ({"fisher": "mc", "mc_samples": 0}, ValueError, "mc_samp"),
        ({"backend": "torch"}, ValueError, "backend='torch'"),
        ({"sharing": "none"}, ValueError, "sharing='none'"),
        ({"memory_bound": 0}, ValueError, "memory_bound"),
        ({"factor_dtype": torch.half}, ValueError, "factor_d"),
        ({"loss": CE(reduction="none")}, ValueError, "reduction='none'"),
        ({"loss": CE(weight=torch.ones(4))}, ValueError, "weight"),
        ({"loss": nn.MSELoss()}, TypeError, "targets must be floating point"),
        ({"model": nn.Sequential(mlp(), nn.Dropout())}, ValueError, "dropout"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_with_a_remedy(change, error, message):
    arguments = {"model": mlp(), "loss": CE(), "data": pairs(), **change}
    for make in (KFAC, EKFAC):
        with pytest.raises(error, match=message):
            make(**arguments)


class Kronecker(NetworkConformance):
    symmetric = True
    positive_semidefinite = True
    tolerance = MappingProxyType({torch.float32: 1e-4, F64: 1e-11})
    build = KFAC

    def case_of(self, dtype, device, *sizes):
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, C))
        self.network.to(device, dtype).eval()
        x = randn(N, 2, 3).to(device, dtype)
        loss = nn.CrossEntropyLoss(weight=WEIGHTS.to(device, dtype))
        return self.network, loss, split(x, LABELS.to(device), *sizes)

    def make(self, dtype, device):
        model, loss, data = self.case_of(dtype, device, N)
        operator = type(self).build(model, loss, data, joint=True)
        wide = type(self).build(*self.case_of(F64, "cpu", N), joint=True)
        self.network = model
        U, magnitudes = rotation_of(wide)
        return operator, U @ magnitudes.diag() @ U.T

    def variants(self, dtype, device):
        return [
            type(self).build(*self.case_of(dtype, device, *sizes), joint=True, **arguments)
            for sizes, arguments in [((1, 3, 2), {}), ((6,), {"memory_bound": 1000})]
        ]

    def model(self, operator):
        return self.network


class TestKFAC(Kronecker):
    build = KFAC


class TestEKFAC(Kronecker):
    build = EKFAC


del Kronecker


class MeanOfPositions(nn.Module):
    """A wide layer at several positions, and their mean."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 300)
        self.head = nn.Linear(300, 3)

    def forward(self, x):
        return self.head(self.wide(x).tanh().mean(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("positions", [2, 120])
@pytest.mark.parametrize("memory_bound", [30_000_000, 1_200_000])
def test_wide_factors_are_the_oracles_however_the_batch_is_cut(memory_bound, positions, sharing):
    """Few rows of gradients are multiplied once a batch, many once a chunk of it."""
    torch.manual_seed(0)
    model = MeanOfPositions().double()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(6, positions, 5, generator=g, dtype=torch.float64)
    y = torch.randint(3, (6,), generator=g)
    K = KFAC(
        model, nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:], y[4:])],
        sharing=sharing, memory_bound=memory_bound,
    )  # fmt: skip
    factors = oracle.kfac_factors(model, x, "classification", "wide", None, sharing)
    V = torch.randn(300, 5, generator=g, dtype=torch.float64)
    expected = factors["G"] @ V @ factors["A"]
    product = (K.blocks.blocks["wide.weight"] @ V.flatten()).view(300, 5)
    torch.testing.assert_close(product, expected, rtol=1e-9, atol=1e-12)
    bias = K.blocks.blocks["wide.bias"] @ V[:, 0]
    torch.testing.assert_close(bias, factors["bias"] @ V[:, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_kfac_of_one_layer_halves_the_products_that_cg_needs(damping):
    """This is the advice of docs/linear-algebra-benchmarks.md; a dense solve is the reference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double().eval()
    loss = nn.CrossEntropyLoss()
    head = ["2.weight", "2.bias"]
    data = [(randn(128, 8, seed=1), torch.arange(128) % 3)]
    G = GGN(model, loss, data, params=head)
    shift = damping * Identity(G.shape[0])
    preconditioner = inverse(KFAC(model, loss, data, params=head) + shift)
    b = randn(G.shape[0], seed=2)
    plain = cg(G + shift, b, tol=1e-6)
    preconditioned = cg(G + shift, b, tol=1e-6, preconditioner=preconditioner)
    assert preconditioned.num_matvecs <= plain.num_matvecs / 2
    dense = dense_ggn(model, loss, *data[0], names=head)
    expected = torch.linalg.solve(dense + damping * torch.eye(len(b), dtype=F64), b)
    torch.testing.assert_close(preconditioned.x, expected, rtol=1e-4, atol=1e-4)
