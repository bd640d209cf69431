"""K-FAC of padded, masked and ignored positions is that of the examples without them.

The oracle runs every example alone, without padding, by reverse-mode differentiation in float64,
and sums A and G with the example's own T.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import one_axis_at_a_time
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature import KFAC
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.layers import positions
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical

F64 = torch.float64
V = 5
D = 4
CLASSES = 3
IGNORED = -100
PAD = 0
LENGTHS = (3, 5, 2, 4, 5, 1, 4, 3)
N = len(LENGTHS)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, h, allowed):
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~allowed, torch.finfo(h.dtype).min)
        return self.out(scores.softmax(-1) @ v)


class Transformer(nn.Module):
    """Tokens and a mask, 1 where a token is real → logits of every position or of the example."""

    def __init__(self, causal, pool):
        super().__init__()
        self.causal = causal
        self.pool = pool
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(64, D)
        self.attention = Attention()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, tokens, mask):
        real = mask.bool()
        places = (mask.cumsum(1) - 1).clamp_min(0)
        h = self.token(tokens) + self.position(places)
        allowed = real[:, None, :].expand(-1, tokens.shape[1], -1)
        if self.causal:
            allowed = allowed & torch.ones_like(allowed[0]).tril()
        h = h + self.attention(self.norm(h), allowed)
        h = h + self.down(F.gelu(self.up(h)))
        if self.pool == "mean":
            h = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        elif self.pool == "last":
            steps = torch.arange(tokens.shape[1])
            h = h[torch.arange(len(h)), (mask * steps).argmax(1)]
        return self.head(h)


class Encoder(nn.Module):
    """torch's own layer, whose mask is true where a token is padding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=True)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, tokens, padded):
        h = self.layer(self.token(tokens), src_key_padding_mask=padded)
        h = h.masked_fill(padded.unsqueeze(-1), 0)
        return self.head(h.sum(1) / (~padded).sum(1, keepdim=True))


class Bag(nn.Module):
    """A model that computes its mask from the tokens."""

    def __init__(self, padding_idx):
        super().__init__()
        self.token = nn.Embedding(V + 1, D, padding_idx=padding_idx)
        self.f = nn.Linear(D, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, tokens):
        mask = (tokens != PAD).unsqueeze(-1)
        h = torch.tanh(self.f(self.token(tokens))) * mask
        return self.head(h.sum(1) / mask.sum(1))


class TextConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(V + 1, D, padding_idx=PAD)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, tokens):
        mask = (tokens != PAD).unsqueeze(1)
        h = torch.tanh(self.conv(self.token(tokens).mT)) * mask
        return self.head(h.sum(2) / mask.sum(2))


class Features(nn.Module):
    """Features with their lengths, a mask in floating point, or zeros where there is nothing."""

    def __init__(self, mask_source):
        super().__init__()
        self.mask_source = mask_source
        self.f = nn.Linear(3, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x, mask_or_lengths=None):
        if self.mask_source == "lengths":
            mask = torch.arange(x.shape[1]) < mask_or_lengths[:, None]
        elif self.mask_source == "mask":
            mask = mask_or_lengths
        else:
            mask = (x != 0).any(-1)
        mask = mask.unsqueeze(-1)
        h = torch.tanh(self.f(x)) * mask
        return self.head(h.sum(1) / mask.sum(1))


def by_token():
    """Features to logits of every position; BackPACK can take it."""
    return nn.Sequential(nn.Linear(3, D), nn.Tanh(), nn.Linear(D, CLASSES))


MODELS = {
    "causal": lambda: Transformer(True, None),
    "causal, last": lambda: Transformer(True, "last"),
    "bidirectional": lambda: Transformer(False, None),
    "bidirectional, mean": lambda: Transformer(False, "mean"),
    "encoder": Encoder,
    "padding_idx": lambda: Bag(PAD),
    "tokens": lambda: Bag(None),
    "convolution": TextConvolution,
    "lengths": lambda: Features("lengths"),
    "float mask": lambda: Features("mask"),
    "zeros": lambda: Features("zeros"),
    "by token": by_token,
}
LEFT_TOO = [name for name in MODELS if name != "lengths"]


def build(name, dtype=F64):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.7)
    if name in ("padding_idx", "convolution"):
        model.token.weight.data[PAD] = 0
    return model


def examples(name, dtype=F64):
    """Batches of one example each, without padding."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for length in LENGTHS:
        tokens = torch.randint(1, V, (1, length), generator=generator)
        features = torch.randn(1, length, 3, dtype=F64, generator=generator).to(dtype)
        by_position = name in ("causal", "bidirectional", "by token")
        y = torch.randint(CLASSES, (1, length) if by_position else (1,), generator=generator)
        data.append((inputs(name, tokens, features, torch.ones(1, length)), y))
    return data


def inputs(name, tokens, features, mask):
    """The tokens or features of an example, and the mask that the model needs, if any."""
    if name in ("padding_idx", "tokens", "convolution"):
        return tokens
    if name in ("zeros", "by token"):
        return features
    if name == "float mask":
        return features, mask.to(features.dtype)
    if name == "lengths":
        return features, mask.sum(1).long()
    if name == "encoder":
        return tokens, mask == 0
    return tokens, mask.long()


def padded(name, data, length, side="right"):
    """All examples in one batch, padded to a length on one side."""

    def extend(x, value):
        missing = length - x.shape[1]
        padding = (missing, 0) if side == "left" else (0, missing)
        return F.pad(x, (*[0, 0] * (x.ndim - 2), *padding), value=value)

    def join(tensors):
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        if tensors[0].dtype == torch.bool:
            return torch.cat([extend(x, True) for x in tensors])
        return torch.cat([extend(x, 0) for x in tensors])

    xs = [x if isinstance(x, tuple) else (x,) for x, _ in data]
    x = tuple(join(list(tensors)) for tensors in zip(*xs, strict=True))
    ys = [y for _, y in data]
    if ys[0].ndim > 1:
        ys = [extend(y, IGNORED) for y in ys]
    if len(x) == 1:
        x = x[0]
    return x, torch.cat(ys)


# ------------------------------------------------------------------------------------- oracle


def call(model, x):
    if isinstance(x, tuple):
        return model(*x)
    return model(x)


def root(logits):
    """Columns of the Hessian's root of the cross-entropy of some terms, [T, C, columns]."""
    p = logits.softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def cotangents(outputs, y):
    """[K, 1, ..., C]: one column at one counted position each."""
    terms = outputs.detach().flatten(0, -2)
    columns_at_positions = []
    for t, columns in enumerate(root(terms)):
        if y.flatten()[t] == IGNORED:
            continue
        for column in columns.T:
            cotangent = torch.zeros_like(terms)
            cotangent[t] = column
            columns_at_positions.append(cotangent.view_as(outputs))
    return columns_at_positions


def rows_of(layer, x, z, gradients):
    """Activations [T, d_in] and output gradients [K, T, d_out] of a layer's only use."""
    if isinstance(layer, nn.Embedding):
        a = F.one_hot(x[0], layer.num_embeddings).to(z.dtype)
        return a, torch.stack([g[0] for g in gradients])
    if isinstance(layer, nn.Conv1d):
        # Only for kernel 3 with padding 1.
        wide = F.pad(x[0], (1, 1))
        a = torch.stack([wide[:, t : t + 3].flatten() for t in range(x.shape[2])])
        return a, torch.stack([g[0].T for g in gradients])
    a = x.reshape(-1, x.shape[-1])
    return a, torch.stack([g.reshape(-1, g.shape[-1]) for g in gradients])


def run_with_layers(model, x, names):
    """The outputs of a model, and the inputs and outputs of the layers with these names."""
    layer_inputs = {}
    layer_outputs = {}

    def record(name):
        def hook(_, inputs, outputs):
            layer_inputs[name] = inputs[0].detach()
            layer_outputs[name] = outputs

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in names]
    outputs = call(model, x)
    for handle in handles:
        handle.remove()
    return outputs, layer_inputs, layer_outputs


def factors_of(a, g, sharing):
    """A and G of an example, from activations [T, d_in] and output gradients [K, T, d_out]."""
    T = max(1, len(a))
    if sharing == "expand":
        return a.T @ a, torch.einsum("kti,ktj->ij", g, g) / T
    mean = a.sum(0) / T
    total = g.sum(1)
    return torch.outer(mean, mean), total.T @ total


def oracle_blocks(model, data, sharing, counted=None):
    """The dense block of the mean loss for every weight matrix, by name.

    A is the mean over the examples that have a target. `counted` is a function of a layer's name
    and an example's number. It returns which positions the layer counts; all if None.
    """
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    names = [name for name in names if "self_attn" not in name]
    sums_of_A = dict.fromkeys(names, 0)
    sums_of_G = dict.fromkeys(names, 0)
    num_present = 0
    for number, (x, y) in enumerate(data):
        outputs, layer_inputs, layer_outputs = run_with_layers(model, x, names)
        z = [layer_outputs[name] for name in names]
        gradients = [
            torch.autograd.grad(outputs, z, cotangent, retain_graph=True)
            for cotangent in cotangents(outputs, y)
        ]
        if not gradients:
            continue
        num_present += 1
        for index, name in enumerate(names):
            layer = model.get_submodule(name)
            layer_gradients = [gradients_of_column[index] for gradients_of_column in gradients]
            a, g = rows_of(layer, layer_inputs[name], layer_outputs[name], layer_gradients)
            if counted is not None and len(a) > 1:
                is_counted = counted(name, number)
                a = a[is_counted]
                g = g[:, is_counted]
            A, G = factors_of(a, g, "expand" if isinstance(layer, nn.Embedding) else sharing)
            sums_of_A[name] = sums_of_A[name] + A
            sums_of_G[name] = sums_of_G[name] + G
    return {
        f"{name}.weight": torch.kron(sums_of_G[name] / len(data), sums_of_A[name] / num_present)
        for name in names
    }


def assert_blocks(la, expected, rtol=1e-10):
    blocks = la.posterior.curvature.blocks
    num_blocks = 0
    for name, dense in expected.items():
        actual = blocks[name].to_dense().double()
        error = (actual - dense).abs().max() / dense.abs().max()
        assert error < rtol, (name, float(error))
        num_blocks += 1
    assert num_blocks == len(expected) > 0


def assert_same(first, second, rtol):
    blocks = first.posterior.curvature.blocks
    largest = max(float(block.magnitudes.max()) for block in blocks.values())
    for name, block in blocks.items():
        actual = block.to_dense()
        expected = second.posterior.curvature.blocks[name].to_dense()
        # The bias of the keys has no curvature, only rounding errors.
        scale = actual.abs().max().clamp_min(1e-6 * largest)
        error = float((actual - expected).abs().max() / scale)
        assert error < rtol, (name, error)


def fitted(model, *data, curvature="kfac", mode="full", generator=0, **settings):
    fit = {}
    if settings.get("fisher") in ("mc", "signs"):
        fit["generator"] = torch.Generator().manual_seed(generator)
    # Some examples are as long as there are classes.
    la = Laplace(model, curvature=curvature, class_dim=-1, **settings)
    return la.fit(list(data), mode=mode, num_data=N, **fit)


# ---------------------------------------------------------------------- the right number at all


@pytest.mark.parametrize(("name", "sharing"), one_axis_at_a_time(MODELS, ["expand", "reduce"]))
def test_kfac_is_that_of_every_example_without_padding(name, sharing):
    model = build(name)
    data = examples(name)
    expected = oracle_blocks(model, data, sharing)
    for length, side in ((5, "right"), (9, "left" if name in LEFT_TOO else "right")):
        la = fitted(model, padded(name, data, length, side), sharing=sharing)
        assert_blocks(la, expected)


@pytest.mark.parametrize(
    ("backend", "sharing", "joint"),
    one_axis_at_a_time(["hooks", "backpack"], ["expand", "reduce"], [False, True]),
)
def test_both_backends_leave_ignored_positions_out(backend, sharing, joint):
    model = build("by token")
    data = examples("by token")
    batch = padded("by token", data, 7)
    la = fitted(model, batch, sharing=sharing, backend=backend, joint=joint)
    if not joint:
        assert_blocks(la, oracle_blocks(model, data, sharing))
    assert_same(la, fitted(model, *data, sharing=sharing, joint=joint), 1e-10)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_token_of_ignored_target_counts_below_the_attention_and_not_above(sharing):
    """A prompt has no targets, and yet later positions attend to it."""
    model = build("causal")
    data = examples("causal")
    data = [(x, y.clone()) for x, y in data]
    for _, y in data:
        y[:, : y.shape[1] // 2] = IGNORED

    def counted(layer, number):
        length = LENGTHS[number]
        real = torch.ones(length, dtype=torch.bool)
        if layer not in ("token", "position", "attention.qkv"):
            real[: length // 2] = False
        return real

    expected = oracle_blocks(model, data, sharing, counted)
    for length, side in ((5, "right"), (8, "right"), (8, "left")):
        assert_blocks(
            fitted(model, padded("causal", data, length, side), sharing=sharing), expected
        )


class Graph(nn.Module):
    """Features of nodes, and perhaps the edges `[B, 2, E]` → logits of every node."""

    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 5], [1, 0, 1, 2, 0, 4, 3]])

    def __init__(self):
        super().__init__()
        self.node = nn.Linear(3, D)
        self.message = nn.Linear(2 * D, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x, edges=None):
        edges = self.edges.expand(len(x), 2, -1) if edges is None else edges
        h = torch.tanh(self.node(x))
        source, target = edges.unsqueeze(-1).expand(-1, -1, -1, D).unbind(1)
        pairs = torch.cat([h.gather(1, source), h.gather(1, target)], -1)
        messages = torch.tanh(self.message(pairs))
        return self.head(torch.zeros_like(h).scatter_add(1, target, messages))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("passes_edges", [False, True])
def test_a_node_of_ignored_target_counts_below_its_neighbours_and_not_above(passes_edges, sharing):
    """Only nodes 0 and 1 have targets; nodes 2 and 4 are their neighbours, nodes 3 and 5 are not.

    Edges are not examined for padding if the inputs are a single tensor of features.
    """
    torch.manual_seed(0)
    model = Graph().to(F64)
    x = torch.randn(N, 6, 3, dtype=F64)
    y = torch.randint(CLASSES, (N, 6))
    y[:, 2:] = IGNORED
    x = (x, model.edges.expand(N, 2, -1)) if passes_edges else x
    is_counted = {
        "node": torch.tensor([True, True, True, False, True, False]),
        "message": (model.edges[1] < 2) | (not passes_edges),
        "head": torch.arange(6) < 2,
    }
    data = [
        (tuple(part[n : n + 1] for part in x) if passes_edges else x[n : n + 1], y[n : n + 1])
        for n in range(N)
    ]
    expected = oracle_blocks(model, data, sharing, lambda layer, _: is_counted[layer])
    assert_blocks(fitted(model, (x, y), sharing=sharing), expected)


def test_an_example_whose_targets_are_all_ignored_is_not_in_the_mean_of_the_inputs():
    model = build("by token")
    data = examples("by token")
    data[1] = (data[1][0], torch.full_like(data[1][1], IGNORED))
    expected = oracle_blocks(model, data, "expand")
    assert_blocks(fitted(model, padded("by token", data, 6)), expected)


def test_positions_of_a_dead_relu_count():
    """A position without a gradient at these parameters is not padding."""

    class Rectified(Bag):
        def forward(self, tokens):
            mask = (tokens != PAD).unsqueeze(-1)
            h = torch.relu(self.f(self.token(tokens))) * mask
            return self.head(h.sum(1) / mask.sum(1))

    torch.manual_seed(3)
    model = Rectified(None).double().eval()
    with torch.no_grad():
        model.f.weight.copy_(torch.eye(D))
        model.f.bias.zero_()
        model.token.weight[2] = -1.0  # dead in every unit
    data = examples("tokens")
    assert any((x == 2).any() for x, _ in data)
    expected = oracle_blocks(model, data, "expand")
    for length in (5, 8):
        assert_blocks(fitted(model, padded("tokens", data, length)), expected)


# ------------------------------------------------------------- the same whatever the padding is


@pytest.mark.parametrize(
    ("name", "fisher", "sharing", "curvature"),
    one_axis_at_a_time(
        ["causal", "bidirectional, mean"],
        ["exact", "mc", "signs", "empirical"],
        ["expand", "reduce"],
        ["kfac", "ekfac"],
    ),
)
def test_posteriors_do_not_depend_on_the_padding(name, fisher, sharing, curvature):
    model = build(name)
    data = examples(name)
    settings = {"fisher": fisher, "sharing": sharing, "curvature": curvature}
    short = fitted(model, padded(name, data, 5), **settings)
    long = fitted(model, padded(name, data, 11, "left"), **settings)
    assert_same(short, long, 1e-10)


@pytest.mark.parametrize(
    ("curvature", "mode"), one_axis_at_a_time(["kfac", "ekfac"], ["debiased", "mini", "crossfit"])
)
def test_every_mode(curvature, mode):
    model = build("bidirectional")
    data = examples("bidirectional")
    halves = data[: N // 2], data[N // 2 :]
    fits = []
    for length, side in ((5, "right"), (9, "left")):
        batches = [padded("bidirectional", half, length, side) for half in halves]
        if mode == "crossfit":
            batches = [padded("bidirectional", data, length, side)]
        fits.append(fitted(model, *batches, curvature=curvature, mode=mode))
    assert_same(*fits, 1e-10)


@pytest.mark.parametrize("name", ["causal", "bidirectional, mean", "padding_idx"])
def test_single_precision(name):
    model = build(name, torch.float32)
    data = examples(name, torch.float32)
    for parameter in model.parameters():
        # Variances of a saturated network multiply rounding by more than the tolerance.
        parameter.data.mul_(0.3)
    for sharing in ("expand", "reduce"):
        short, long = (
            fitted(model, padded(name, data, length, side), sharing=sharing)
            for length, side in ((5, "right"), (32, "left"))
        )
        assert_same(short, long, 1e-6)
        x, _ = padded(name, data, 5)
        short_variances, long_variances = (
            la.functional(x, diagonal=True)[1] for la in (short, long)
        )
        torch.testing.assert_close(short_variances, long_variances, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_cuts_into_batches_and_chunks_and_columns_do_not_matter(name):
    model = build(name)
    data = examples(name)
    in_one_batch = fitted(model, padded(name, data, 6))
    in_two_batches = fitted(
        model, padded(name, data[:5], 8), padded(name, data[5:], 6), memory_bound=2**13
    )
    assert_same(in_one_batch, in_two_batches, 1e-10)


@pytest.mark.parametrize("fisher", ["exact", "mc", "signs", "empirical"])
def test_the_operator_of_a_torch_loss(fisher):
    """Outputs [B, C, T], as `nn.CrossEntropyLoss` has them."""

    class ClassesFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("causal")

        def forward(self, tokens, mask):
            return self.inner(tokens, mask).mT

    model = ClassesFirst().eval()
    data = examples("causal")
    operators = []
    for length, side in ((5, "right"), (12, "right"), (7, "left")):
        is_random = fisher in ("mc", "signs")
        generator = torch.Generator().manual_seed(2) if is_random else None
        x, y = padded("causal", data, length, side)
        loss = nn.CrossEntropyLoss(reduction="sum")
        operators.append(KFAC(model, loss, [(x, y)], fisher=fisher, generator=generator))
    first = operators[0].to_dense()
    for operator in operators[1:]:
        error = (operator.to_dense() - first).abs().max() / first.abs().max()
        assert error < 1e-10
    if fisher == "exact":
        expected = oracle_blocks(model.inner, data, "expand")
        for name, block in expected.items():
            actual = operators[0].blocks.blocks[f"inner.{name}"].to_dense()
            # The operator is that of the summed loss.
            torch.testing.assert_close(actual, N * block, rtol=1e-9, atol=1e-12)


def test_drawn_labels_belong_to_the_counted_positions():
    outputs = torch.randn(3, 4, CLASSES, generator=torch.Generator().manual_seed(0))
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("mc", 2, 7))
    y = torch.zeros(3, 4, dtype=torch.long)
    expected = cotangents(outputs, y, 10).columns
    for num_left in (0, 3):
        padded_outputs = F.pad(outputs, (0, 0, num_left, 3 - num_left), value=1.7)
        targets = F.pad(y, (num_left, 3 - num_left), value=IGNORED)
        columns = cotangents(padded_outputs, targets, 10).columns
        torch.testing.assert_close(columns[:, :, num_left : num_left + 4], expected, rtol=0, atol=0)
        assert columns.count_nonzero() == expected.count_nonzero()


# ------------------------------------------------------------------------ what stays as it was


@pytest.fixture
def passes(monkeypatch):
    """A list with an entry for each pass that finds the positions."""
    calls = []
    original = positions._Pass.run

    def run(self, *arguments):
        calls.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(positions._Pass, "run", run)
    return calls


def test_models_without_padding_take_no_further_pass(passes):
    x = torch.randn(6, 3, 6, 6).double()
    y = torch.randint(3, (6,))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    fitted(network, (x, y))
    data = examples("by token")
    same_length = [data[i] for i, length in enumerate(LENGTHS) if length == 5]
    fitted(build("by token"), padded("by token", same_length, 5))
    x, y = padded("causal", [examples("causal")[i] for i in (1, 4)], 5)
    fitted(build("causal"), (x, y))
    fitted(build("causal"), padded("causal", examples("causal"), 5), curvature="diag")
    assert not passes
    fitted(build("causal"), padded("causal", examples("causal"), 6))
    assert passes


def test_images_keep_all_their_positions():
    """The first token of the last block is all that the head sees; T is that of the layer."""

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Linear(4, D)
            self.mlp = nn.Linear(D, D)
            self.head = nn.Linear(D, 3)

        def forward(self, x):
            h = torch.tanh(self.patches(x))
            h = torch.tanh(self.mlp(h + h.mean(1, keepdim=True)))
            return self.head(h[:, 0])

    torch.manual_seed(0)
    model = Vision().double().eval()
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(1, 6, 4, dtype=F64, generator=generator), torch.tensor([n % 3]))
        for n in range(8)
    ]
    batch = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    assert_blocks(fitted(model, batch), oracle_blocks(model, data, "expand"))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_of_an_encoder_whose_length_is_that_of_the_decoder(sharing):
    """An encoder's position does not take part because the decoder has a position of its number."""

    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = nn.Embedding(V, D)
            self.mix = Attention()
            self.key = nn.Linear(D, D)
            self.value = nn.Linear(D, D)
            self.target = nn.Embedding(V, D)
            self.query = nn.Linear(D, D)
            self.head = nn.Linear(D, CLASSES)

        def forward(self, source, mask, target):
            allowed = mask.bool()[:, None]
            h = self.source(source)
            h = h + self.mix(h, allowed)
            t = self.target(target)
            scores = self.query(t) @ self.key(h).mT
            attention = scores.masked_fill(~allowed, torch.finfo(h.dtype).min).softmax(-1)
            return self.head(t + attention @ self.value(h))

    torch.manual_seed(0)
    model = EncoderDecoder().double().eval()
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(V, (N, 5), generator=generator)
    y = torch.randint(CLASSES, (N, 5), generator=generator)
    # A softmax over a single position has no gradient, so there are at least two.
    lengths = [max(2, length) for length in LENGTHS]
    sources = [torch.randint(V, (1, length), generator=generator) for length in lengths]
    data = []
    for n, source in enumerate(sources):
        data.append(((source, torch.ones_like(source), target[n : n + 1]), y[n : n + 1]))
    expected = oracle_blocks(model, data, sharing)
    if sharing == "reduce":
        # The gradients of a softmax's scores sum to zero, so the keys have only rounding errors.
        del expected["key.weight"]
    for length in (5, 7):
        source = torch.cat([F.pad(source, (0, length - source.shape[1])) for source in sources])
        mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        la = fitted(model, ((source, mask, target), y), sharing=sharing)
        assert_blocks(la, expected)


def test_missing_labels_of_some_tasks_leave_the_positions_of_the_example():
    """Each example has a label per task; the number of tasks is not that of the patches."""

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Linear(4, D)
            self.mlp = nn.Linear(D, D)
            self.head = nn.Linear(D, 2 * CLASSES)

        def forward(self, x):
            h = torch.tanh(self.patches(x))
            h = torch.tanh(self.mlp(h + h.mean(1, keepdim=True)))
            return self.head(h[:, 0]).unflatten(1, (2, CLASSES))

    torch.manual_seed(0)
    model = MultiTask().double().eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, 4, dtype=F64, generator=generator)
    y = torch.randint(CLASSES, (N, 2), generator=generator)
    y[1, 0] = y[4, 1] = IGNORED
    y[6] = IGNORED
    data = [(x[n : n + 1], y[n : n + 1]) for n in range(N)]
    for sharing in ("expand", "reduce"):
        assert_blocks(fitted(model, (x, y), sharing=sharing), oracle_blocks(model, data, sharing))


def test_the_last_block_of_a_classifier_of_tokens_counts_all_real_positions():
    model = build("causal, last")
    data = examples("causal, last")
    all_parameters = fitted(model, padded("causal, last", data, 7))
    names = {name for name, _ in model.named_parameters() if name.startswith(("down", "head"))}
    last_block = fitted(
        model, padded("causal, last", data, 7), params=lambda name, parameter: name in names
    )
    for name, block in last_block.posterior.curvature.blocks.items():
        expected = all_parameters.posterior.curvature.blocks[name].to_dense()
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-10, atol=1e-13)


# ---------------------------------------------------------------------- a real language model
