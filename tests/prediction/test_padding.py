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
V, D, CLASSES, IGNORED, PAD = 5, 4, 3, -100, 0
LENGTHS = (3, 5, 2, 4, 5, 1, 4, 3)
N = len(LENGTHS)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, h, allowed):
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~allowed, torch.finfo(h.dtype).min)
        return self.out(scores.softmax(-1) @ v)


class Transformer(nn.Module):
    """Tokens and a mask, 1 where a token is real → logits of every position or of the example."""

    def __init__(self, causal, pool):
        super().__init__()
        self.causal, self.pool = causal, pool
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(64, D)
        self.attention, self.norm = Attention(), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
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
    """A mask made of the tokens inside."""

    def __init__(self, padding_idx):
        super().__init__()
        self.token = nn.Embedding(V + 1, D, padding_idx=padding_idx)
        self.f, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

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

    def __init__(self, told_by):
        super().__init__()
        self.told_by = told_by
        self.f, self.head = nn.Linear(3, D), nn.Linear(D, CLASSES)

    def forward(self, x, other=None):
        if self.told_by == "lengths":
            mask = torch.arange(x.shape[1]) < other[:, None]
        elif self.told_by == "mask":
            mask = other
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
    """One example after the other, without padding, as the model takes a batch of one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(1, V, (1, length), generator=generator)
        features = torch.randn(1, length, 3, dtype=F64, generator=generator).to(dtype)
        by_position = name in ("causal", "bidirectional", "by token")
        y = torch.randint(CLASSES, (1, length) if by_position else (1,), generator=generator)
        found.append((inputs(name, tokens, features, torch.ones(1, length)), y))
    return found


def inputs(name, tokens, features, mask):
    if name in ("padding_idx", "tokens", "convolution"):
        return tokens
    if name in ("zeros", "by token"):
        return features
    if name == "float mask":
        return features, mask.to(features.dtype)
    if name == "lengths":
        return features, mask.sum(1).long()
    return (tokens, mask == 0) if name == "encoder" else (tokens, mask.long())


def padded(name, data, length, side="right"):
    """All examples in one batch."""

    def extend(x, value):
        missing = length - x.shape[1]
        where = (missing, 0) if side == "left" else (0, missing)
        return F.pad(x, (*[0, 0] * (x.ndim - 2), *where), value=value)

    def joined(parts):
        if parts[0].ndim == 1:
            return torch.cat(parts)
        if parts[0].dtype == torch.bool:
            return torch.cat([extend(x, True) for x in parts])
        return torch.cat([extend(x, 0) for x in parts])

    xs = [x if isinstance(x, tuple) else (x,) for x, _ in data]
    x = tuple(joined(list(parts)) for parts in zip(*xs, strict=True))
    ys = [y for _, y in data]
    y = torch.cat([extend(y, IGNORED) for y in ys] if ys[0].ndim > 1 else ys)
    return (x if len(x) > 1 else x[0]), y


# ------------------------------------------------------------------------------------- oracle


def call(model, x):
    return model(*x) if isinstance(x, tuple) else model(x)


def root(logits):
    """Columns of the Hessian's root of the cross-entropy of some terms, [T, C, columns]."""
    p = logits.softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def cotangents(outputs, y):
    """[K, 1, ..., C]: one column at one counted position each."""
    terms = outputs.detach().flatten(0, -2)
    found = []
    for t, columns in enumerate(root(terms)):
        if y.flatten()[t] == IGNORED:
            continue
        for column in columns.T:
            at = torch.zeros_like(terms)
            at[t] = column
            found.append(at.view_as(outputs))
    return found


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


def oracle_blocks(model, data, sharing, counted=None):
    """The dense block of the mean loss for every weight matrix, by name.

    A is the mean over the examples that have a target. `counted` says which positions of an example
    a layer counts: all if None.
    """
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d)
    names = [n for n, m in model.named_modules() if isinstance(m, kinds)]
    names = [n for n in names if "self_attn" not in n]
    sums = {}
    num_present = 0
    for number, (x, y) in enumerate(data):
        caught = {}
        handles = [
            model.get_submodule(n).register_forward_hook(
                lambda _, x, z, n=n, to=caught: to.update({n: (x[0].detach(), z)})
            )
            for n in names
        ]
        outputs = call(model, x)
        for handle in handles:
            handle.remove()
        zs = [caught[n][1] for n in names]
        gradients = [
            torch.autograd.grad(outputs, zs, c, retain_graph=True) for c in cotangents(outputs, y)
        ]
        if not gradients:
            continue
        num_present += 1
        for index, n in enumerate(names):
            layer = model.get_submodule(n)
            a, g = rows_of(layer, *caught[n], [gs[index] for gs in gradients])
            if counted is not None and len(a) > 1:
                keep = counted(n, number)
                a, g = a[keep], g[:, keep]
            T = max(1, len(a))
            if sharing == "expand" or isinstance(layer, nn.Embedding):
                A = a.T @ a
                G = torch.einsum("kti,ktj->ij", g, g) / T
            else:
                mean, total = a.sum(0) / T, g.sum(1)
                A, G = torch.outer(mean, mean), total.T @ total
            old = sums.get(n, (0, 0))
            sums[n] = (old[0] + A, old[1] + G)
    return {f"{n}.weight": torch.kron(G / len(data), A / num_present) for n, (A, G) in sums.items()}


def assert_blocks(la, expected, rtol=1e-10):
    blocks = la.posterior.curvature.blocks
    seen = 0
    for name, dense in expected.items():
        actual = blocks[name].to_dense().double()
        error = (actual - dense).abs().max() / dense.abs().max()
        assert error < rtol, (name, float(error))
        seen += 1
    assert seen == len(expected) > 0


def assert_same(one, two, rtol):
    blocks = one.posterior.curvature.blocks
    largest = max(float(block.magnitudes.max()) for block in blocks.values())
    for name, block in blocks.items():
        a, b = block.to_dense(), two.posterior.curvature.blocks[name].to_dense()
        # The bias of the keys has no curvature: rounding alone.
        scale = a.abs().max().clamp_min(1e-6 * largest)
        error = float((a - b).abs().max() / scale)
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
    model, data = build(name), examples(name)
    expected = oracle_blocks(model, data, sharing)
    for length, side in ((5, "right"), (9, "left" if name in LEFT_TOO else "right")):
        la = fitted(model, padded(name, data, length, side), sharing=sharing)
        assert_blocks(la, expected)


@pytest.mark.parametrize(
    ("backend", "sharing", "joint"),
    one_axis_at_a_time(["hooks", "backpack"], ["expand", "reduce"], [False, True]),
)
def test_both_backends_leave_ignored_positions_out(backend, sharing, joint):
    model, data = build("by token"), examples("by token")
    batch = padded("by token", data, 7)
    la = fitted(model, batch, sharing=sharing, backend=backend, joint=joint)
    if not joint:
        assert_blocks(la, oracle_blocks(model, data, sharing))
    assert_same(la, fitted(model, *data, sharing=sharing, joint=joint), 1e-10)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_token_of_ignored_target_counts_below_the_attention_and_not_above(sharing):
    """A prompt has no targets, and yet later positions attend to it."""
    model, data = build("causal"), examples("causal")
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


def test_an_example_whose_targets_are_all_ignored_is_not_in_the_mean_of_the_inputs():
    model, data = build("by token"), examples("by token")
    data[1] = (data[1][0], torch.full_like(data[1][1], IGNORED))
    expected = oracle_blocks(model, data, "expand")
    assert_blocks(fitted(model, padded("by token", data, 6)), expected)


def test_positions_of_a_dead_relu_count():
    """No gradient of the numbers at hand is not padding."""

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
    model, data = build(name), examples(name)
    settings = {"fisher": fisher, "sharing": sharing, "curvature": curvature}
    one = fitted(model, padded(name, data, 5), **settings)
    two = fitted(model, padded(name, data, 11, "left"), **settings)
    assert_same(one, two, 1e-10)


@pytest.mark.parametrize(
    ("curvature", "mode"), one_axis_at_a_time(["kfac", "ekfac"], ["debiased", "mini", "crossfit"])
)
def test_every_mode(curvature, mode):
    model, data = build("bidirectional"), examples("bidirectional")
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
    model, data = build(name, torch.float32), examples(name, torch.float32)
    for parameter in model.parameters():
        # Variances of a saturated network multiply rounding by more than the tolerance.
        parameter.data.mul_(0.3)
    for sharing in ("expand", "reduce"):
        one, two = (
            fitted(model, padded(name, data, length, side), sharing=sharing)
            for length, side in ((5, "right"), (32, "left"))
        )
        assert_same(one, two, 1e-6)
        x, _ = padded(name, data, 5)
        a, b = (la.functional(x, diagonal=True)[1] for la in (one, two))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_cuts_into_batches_and_chunks_and_columns_do_not_matter(name):
    model, data = build(name), examples(name)
    whole = fitted(model, padded(name, data, 6))
    cut = fitted(model, padded(name, data[:5], 8), padded(name, data[5:], 6), memory_bound=2**13)
    assert_same(whole, cut, 1e-10)


@pytest.mark.parametrize("fisher", ["exact", "mc", "signs", "empirical"])
def test_the_operator_of_a_torch_loss(fisher):
    """Outputs [B, C, T], as `nn.CrossEntropyLoss` has them."""

    class ClassesFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("causal")

        def forward(self, tokens, mask):
            return self.inner(tokens, mask).mT

    model, data = ClassesFirst().eval(), examples("causal")
    found = []
    for length, side in ((5, "right"), (12, "right"), (7, "left")):
        is_random = fisher in ("mc", "signs")
        generator = torch.Generator().manual_seed(2) if is_random else None
        x, y = padded("causal", data, length, side)
        loss = nn.CrossEntropyLoss(reduction="sum")
        found.append(KFAC(model, loss, [(x, y)], fisher=fisher, generator=generator))
    first = found[0].to_dense()
    for other in found[1:]:
        error = (other.to_dense() - first).abs().max() / first.abs().max()
        assert error < 1e-10
    if fisher == "exact":
        expected = oracle_blocks(model.inner, data, "expand")
        for name, block in expected.items():
            actual = found[0].blocks.blocks[f"inner.{name}"].to_dense()
            # The operator is that of the summed loss.
            torch.testing.assert_close(actual, N * block, rtol=1e-9, atol=1e-12)


def test_drawn_labels_belong_to_the_counted_positions():
    outputs = torch.randn(3, 4, CLASSES, generator=torch.Generator().manual_seed(0))
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("mc", 2, 7))
    y = torch.zeros(3, 4, dtype=torch.long)
    plain = cotangents(outputs, y, 10).columns
    for left in (0, 3):
        wide = F.pad(outputs, (0, 0, left, 3 - left), value=1.7)
        targets = F.pad(y, (left, 3 - left), value=IGNORED)
        columns = cotangents(wide, targets, 10).columns
        torch.testing.assert_close(columns[:, :, left : left + 4], plain, rtol=0, atol=0)
        assert columns.count_nonzero() == plain.count_nonzero()


# ------------------------------------------------------------------------ what stays as it was


@pytest.fixture
def passes(monkeypatch):
    """How often the positions were asked for by a pass over the network."""
    made = []
    original = positions._Pass.run

    def run(self, *arguments):
        made.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(positions._Pass, "run", run)
    return made


def test_models_without_padding_take_no_further_pass(passes):
    x, y = torch.randn(6, 3, 6, 6).double(), torch.randint(3, (6,))
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
            self.patches, self.mlp, self.head = nn.Linear(4, D), nn.Linear(D, D), nn.Linear(D, 3)

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


def test_the_last_block_of_a_classifier_of_tokens_counts_all_real_positions():
    model, data = build("causal, last"), examples("causal, last")
    whole = fitted(model, padded("causal, last", data, 7))
    keep = {name for name, _ in model.named_parameters() if name.startswith(("down", "head"))}
    part = fitted(
        model, padded("causal, last", data, 7), params=lambda name, parameter: name in keep
    )
    for name, block in part.posterior.curvature.blocks.items():
        expected = whole.posterior.curvature.blocks[name].to_dense()
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-10, atol=1e-13)


# ---------------------------------------------------------------------- a real language model
