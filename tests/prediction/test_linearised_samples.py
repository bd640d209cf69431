"""`method="glm-mc"` of operations whose forward derivative torch lacks, or has wrong."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import close
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, Hessian
from laplace_debias.laplace.functional.sampled_outputs import linearised_outputs

SAMPLES = 11


def flat_parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def dense_linear_outputs(model, x, draws):
    """f(x) + J (θ − θ*) by reverse mode, output by output, without a replaced operation."""
    outputs = model(*x) if isinstance(x, tuple) else model(x)
    rows = []
    for entry in outputs.flatten():
        gradients = torch.autograd.grad(
            entry, list(model.parameters()), retain_graph=True, materialize_grads=True
        )
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    products = (draws - flat_parameters(model)) @ torch.stack(rows).mT
    return outputs.detach() + products.view(len(draws), *outputs.shape)


def names_of(model):
    return [name for name, _ in model.named_parameters()]


class Packed(nn.Module):
    def __init__(self, kind, bidirectional=False, reads_last=True):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(8 if bidirectional else 4, 2)
        self.reads_last = reads_last

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, states = self.rnn(packed)
        if not self.reads_last:
            padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=5)
            return self.head(padded.sum(1))
        last = states[0] if isinstance(states, tuple) else states
        return self.head(torch.cat(list(last), -1))


class Bag(nn.Module):
    def __init__(self, mode, padding=None, is_weighted=False):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding)
        self.head = nn.Linear(4, 2)
        self.is_weighted = is_weighted

    def forward(self, tokens):
        weights = None
        if self.is_weighted:
            weights = torch.linspace(0.5, 2, tokens.shape[1]).double().expand(tokens.shape)
        return self.head(self.bag(tokens, per_sample_weights=weights).tanh())


class Cube(torch.autograd.Function):
    """A function of a user's own, as most are: with a derivative backwards only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return Cube.apply(self.layer(x))


def sequences():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)
    return x, torch.tensor([5, 3, 2, 5, 1, 4])


def tokens():
    return torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "packed RNN": (partial(Packed, nn.RNN), sequences),
    "packed LSTM": (partial(Packed, nn.LSTM), sequences),
    "packed GRU": (partial(Packed, nn.GRU, True), sequences),
    "padded again": (partial(Packed, nn.LSTM, True, False), sequences),
    "sum of a bag": (partial(Bag, "sum"), tokens),
    "weighted sum": (partial(Bag, "sum", 3, True), tokens),
    "mean of a bag": (partial(Bag, "mean", 3), tokens),
    "largest of a bag": (partial(Bag, "max", 0), tokens),
    "a function of one's own": (Cubed, lambda: sequences()[0][:, 0]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_linearised_samples_are_the_dense_ones(name):
    build, inputs = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    x = inputs()
    y = torch.randn(6, 2, dtype=torch.float64)
    la = Laplace(model, "regression", sigma=1.0).fit_batches([(x, y)])
    drawn = partial(torch.Generator().manual_seed, 3)
    draws = la.sample(SAMPLES, drawn())
    expected = dense_linear_outputs(model, x, draws)
    predictive = la.predict(x, method="glm-mc", samples=SAMPLES, generator=drawn())
    close(predictive.mean, expected.mean(0))
    close(predictive.variance, 1 + expected.var(0, unbiased=False))


@pytest.mark.parametrize("name", [name for name in NETWORKS if "bag" in name or "sum" in name])
@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_operators_of_bags(name, operator):
    """Against bags by a loop over their tokens."""
    build, inputs = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    x = inputs()
    y = torch.randint(2, (6,))
    table = model.bag.weight.detach()
    padding = model.bag.padding_idx
    mode = model.bag.mode

    def outputs(rows, weight, bias):
        bags = []
        for sequence in x:
            scale = torch.linspace(0.5, 2, len(sequence)).double()
            terms = []
            for position, token in enumerate(sequence):
                if token == padding:
                    continue
                term = rows[token]
                if model.is_weighted:
                    term = term * scale[position]
                terms.append(term)
            bag = torch.stack(terms)
            if mode == "max":
                bags.append(bag.max(0).values)
            elif mode == "sum":
                bags.append(bag.sum(0))
            else:
                bags.append(bag.mean(0))
        return torch.stack(bags).tanh() @ weight.mT + bias

    values = (table, model.head.weight.detach(), model.head.bias.detach())
    close(outputs(*values), model(x).detach())

    vector = torch.cat([value.flatten() for value in values])
    sizes = [value.numel() for value in values]

    def outputs_of_vector(vector):
        rows, weight, bias = (
            entries.view(value.shape)
            for entries, value in zip(vector.split(sizes), values, strict=True)
        )
        return outputs(rows, weight, bias)

    if operator is Hessian:
        expected = torch.func.hessian(lambda v: F.cross_entropy(outputs_of_vector(v), y))(vector)
    else:
        J = torch.func.jacrev(outputs_of_vector)(vector)
        p = outputs_of_vector(vector).softmax(-1)
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        expected = torch.einsum("nci,ncd,ndj->ij", J, H, J) / len(x)
    actual = operator(model, nn.CrossEntropyLoss(), [(x, y)]).to_dense()
    close(actual, expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("includes_last", [False, True])
def test_bags_by_their_offsets(mode, padding, includes_last):
    """With bags of several lengths, one of them empty, as torch's own has them."""

    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(
                9, 4, mode=mode, padding_idx=padding, include_last_offset=includes_last
            )

        def forward(self, starts):
            offsets = torch.cat([starts, torch.tensor([12])]) if includes_last else starts
            return self.bag(entries, offsets)

    torch.manual_seed(0)
    entries = torch.randint(9, (12,))
    model = Ragged().double().eval()
    starts = torch.tensor([0, 3, 3, 4, 9])
    draws = torch.randn(3, 36, dtype=torch.float64)
    expected = dense_linear_outputs(model, starts, draws)
    close(linearised_outputs(model, names_of(model), starts, draws), expected)


class Operation(nn.Module):
    """Outputs of an operation on a parameter, each multiplied by the input."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x):
        return x * self.function(self.weight).reshape(1, -1)


def from_seed(function):
    """Other operands, the same at every call."""
    return function(torch.Generator().manual_seed(2))


INDEX = torch.tensor([0, 2, 1, 0, 2])
PLACES = torch.tensor([[0, 1, 2, 0], [2, 0, 0, 1], [1, 1, 0, 2]])
SOURCE = from_seed(lambda g: torch.rand(5, 4, generator=g, dtype=torch.float64) + 0.5)
ROWS = from_seed(lambda g: torch.rand(3, 4, generator=g, dtype=torch.float64) + 0.5)
EYE = torch.eye(3, dtype=torch.float64)
SQUARE = from_seed(lambda g: torch.randn(4, 4, generator=g, dtype=torch.float64))


def reduced(mode, w):
    return w.index_reduce(0, INDEX, SOURCE, mode)


def scattered(mode, w):
    return ROWS.scatter_reduce(0, PLACES, w, mode)


def unpooled(w):
    values, indices = F.max_pool1d(w.unsqueeze(0), 2, return_indices=True)
    return F.max_unpool1d(values, indices, 2)


def positive(w):
    return w @ w.mT + torch.eye(len(w)).to(w)


def strided(w):
    return torch.zeros(3, 4).to(w).as_strided_scatter(w, (2, 2), (1, 2))


def fractional_pool(w):
    offsets = torch.full((1, 1, 2), 0.3).to(w)
    return F.fractional_max_pool2d(w.unsqueeze(0), 2, 2, _random_samples=offsets)


def at_grid(w):
    grid = SQUARE.view(1, 2, 4, 2).tanh()
    return F.grid_sample(w.unsqueeze(0), grid, align_corners=False)


def householder(w):
    return torch.ormqr(w.tril(-1), torch.ones(3).to(w), SQUARE[:, :3].contiguous())


OPERATIONS = {
    **{f"index_reduce {mode}": (partial(reduced, mode), 3, 4) for mode in ("prod", "mean", "amax")},
    **{
        f"scatter_reduce {mode}": (partial(scattered, mode), 3, 4)
        for mode in ("sum", "prod", "mean", "amax", "amin")
    },
    "pdist": (F.pdist, 4, 3),
    "cdist": (lambda w: torch.cdist(w, ROWS), 3, 4),
    "cdist, p = 1": (lambda w: torch.cdist(w, ROWS, 1.0), 3, 4),
    "max_unpool": (unpooled, 3, 4),
    "as_strided_scatter": (strided, 2, 2),
    "ormqr": (householder, 4, 3),
    "cholesky": (lambda w: torch.linalg.cholesky(positive(w)), 3, 3),
    "cholesky_inverse": (lambda w: torch.cholesky_inverse(w.tril() + 3 * EYE), 3, 3),
    "lstsq": (lambda w: torch.linalg.lstsq(positive(w), ROWS).solution, 3, 3),
    "inverse": (lambda w: torch.linalg.inv(positive(w)), 3, 3),
    "eigh": (lambda w: torch.linalg.eigvalsh(positive(w)), 3, 3),
    "svd": (torch.linalg.svdvals, 3, 4),
    "matrix_exp": (torch.matrix_exp, 3, 3),
    "fft": (lambda w: torch.fft.rfft(w).abs(), 3, 4),
    "logcumsumexp": (lambda w: torch.logcumsumexp(w, 0), 3, 4),
    "cummax": (lambda w: torch.cummax(w, 0).values, 3, 4),
    "cumprod": (lambda w: torch.cumprod(w, 0), 3, 4),
    "sort": (lambda w: torch.sort(w, 0).values, 3, 4),
    "median": (lambda w: torch.median(w, 0).values, 3, 4),
    "quantile": (lambda w: torch.quantile(w, 0.3, 0), 3, 4),
    "kthvalue": (lambda w: torch.kthvalue(w, 2, 0).values, 3, 4),
    "renorm": (lambda w: torch.renorm(w, 2, 0, 1.0), 3, 4),
    "grid_sample": (at_grid, 2, 4, 4),
    "interpolate": (
        lambda w: F.interpolate(w.unsqueeze(0), scale_factor=2, mode="bicubic"), 1, 3, 3
    ),
    "fold": (lambda w: F.fold(w.unsqueeze(0), (3, 3), 2), 4, 4),
    "unfold": (lambda w: F.unfold(w.unsqueeze(0), 2), 1, 3, 3),
    "max_pool": (lambda w: F.max_pool2d(w.unsqueeze(0), 2), 1, 4, 4),
    "fractional_max_pool": (fractional_pool, 1, 5, 5),
    "adaptive_max_pool": (lambda w: F.adaptive_max_pool2d(w.unsqueeze(0), 2), 1, 5, 5),
    "lp_pool": (lambda w: F.lp_pool1d(w.unsqueeze(0), 2, 2), 3, 4),
    "local_response_norm": (lambda w: F.local_response_norm(w.unsqueeze(0), 2), 3, 4),
    "layer_norm": (lambda w: F.layer_norm(w, (4,)), 3, 4),
    "rms_norm": (lambda w: F.rms_norm(w, (4,)), 3, 4),
    "group_norm": (lambda w: F.group_norm(w.unsqueeze(0), 2), 4, 3),
    "attention": (lambda w: F.scaled_dot_product_attention(*[w.view(1, 1, 3, 4)] * 3), 3, 4),
    "glu": (F.glu, 3, 4),
    "gelu": (F.gelu, 3, 4),
    "hardsigmoid": (F.hardsigmoid, 3, 4),
    "hardswish": (F.hardswish, 3, 4),
    "mish": (F.mish, 3, 4),
    "rrelu": (lambda w: F.rrelu(w, training=False), 3, 4),
    "softshrink": (F.softshrink, 3, 4),
    "pixel_shuffle": (lambda w: F.pixel_shuffle(w.unsqueeze(0), 2), 4, 3, 3),
    "cosine_similarity": (lambda w: F.cosine_similarity(w, ROWS), 3, 4),
    "pairwise_distance": (lambda w: F.pairwise_distance(w, ROWS), 3, 4),
    "bilinear": (lambda w: F.bilinear(ROWS, ROWS, w), 2, 4, 4),
    "conv_transpose": (lambda w: F.conv_transpose1d(ROWS.unsqueeze(0), w), 3, 2, 2),
    "weight_norm": (lambda w: torch._weight_norm(w, ROWS[:, :1]), 3, 4),
    "embedding": (lambda w: F.embedding(INDEX, w), 3, 4),
    "embedding, padded": (lambda w: F.embedding(INDEX, w, 1), 3, 4),
    "embedding_bag": (lambda w: F.embedding_bag(PLACES, w, mode="max"), 3, 4),
    "ctc_loss": (
        lambda w: F.ctc_loss(w.unsqueeze(1).log_softmax(-1), PLACES[:1, 1:3], (4,), (2,)), 4, 3
    ),
    "segment_reduce": (
        lambda w: torch.segment_reduce(w, "max", lengths=torch.tensor([1, 3]), unsafe=True), 4, 3
    ),
    "a function of one's own": (Cube.apply, 3, 4),
    "checkpoint": (lambda w: checkpoint(torch.tanh, w, use_reentrant=False), 3, 4),
}  # fmt: skip
NO_SECOND_DERIVATIVE = {"ctc_loss", "segment_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_torch(name):
    function, *shape = OPERATIONS[name]
    torch.manual_seed(0)
    model = Operation(function, *shape).double()
    x = torch.randn(3, 1, dtype=torch.float64)
    draws = torch.randn(SAMPLES, model.weight.numel(), dtype=torch.float64)
    if name in NO_SECOND_DERIVATIVE:
        with pytest.raises(
            NotImplementedError, match="cannot compute them for one of the model's operations"
        ):
            linearised_outputs(model, ["weight"], x, draws)
        return
    expected = dense_linear_outputs(model, x, draws)
    assert not torch.allclose(expected, expected[:1])
    # torch's own derivative of hardsigmoid, which is the reference, has 1/6 in single precision.
    tolerance = 1e-7 if name == "hardsigmoid" else 1e-9
    close(linearised_outputs(model, ["weight"], x, draws), expected, tolerance)


def fitted_classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(20, 3, dtype=torch.float64)
    y = torch.randint(2, (20,))
    return Laplace(model).fit([(x, y)]), x[:3]


def test_sampled_outputs_have_the_functional_moments():
    la, x = fitted_classifier()
    draws = la.sample_outputs(x, 20_000, generator=torch.Generator().manual_seed(0))
    mean, covariance = la.functional(x)
    scale = covariance.amax() ** 0.5
    torch.testing.assert_close(draws.mean(0), mean, atol=0.03 * float(scale), rtol=0)
    for index in range(len(x)):
        sample_covariance = torch.cov(draws[:, index].T)
        torch.testing.assert_close(
            sample_covariance, covariance[index], atol=0.05 * float(scale), rtol=0.05
        )
    # Different inputs are drawn independently of each other.
    between = torch.corrcoef(draws.flatten(1).T)[0:2, 2:]
    assert between.abs().max() < 0.03


def test_jointly_sampled_outputs_are_functions_of_all_inputs():
    la, x = fitted_classifier()
    draws = la.sample_outputs(x, 20_000, generator=torch.Generator().manual_seed(0), joint=True)
    expected = la.functional(x, joint=True)[1].reshape(6, 6)
    sample_covariance = torch.cov(draws.flatten(1).T)
    torch.testing.assert_close(
        sample_covariance, expected, atol=0.05 * float(expected.max()), rtol=0
    )
    # The covariance of nearly equal inputs is singular.
    close = x[:1] + 1e-9 * torch.arange(50, dtype=torch.float64)[:, None]
    assert la.sample_outputs(close, 5, joint=True).shape == (5, 50, 2)


def test_outputs_at_sampled_parameters_are_those_of_the_parameters():
    la, x = fitted_classifier()
    draws = la.sample_outputs(x, 3, "nn", torch.Generator().manual_seed(1))
    parameters = la.sample(3, torch.Generator().manual_seed(1))
    model = copy.deepcopy(la.model)
    for theta, outputs in zip(parameters, draws, strict=True):
        nn.utils.vector_to_parameters(theta, model.parameters())
        torch.testing.assert_close(model(x), outputs)


def test_what_cannot_be_sampled_says_so():
    la, x = fitted_classifier()
    with pytest.raises(ValueError, match=r'"map"` is the trained network, which has no samples'):
        la.sample_outputs(x, 3, "map")
    with pytest.raises(ValueError, match="n must be at least 1"):
        la.sample_outputs(x, 0)
