"""If an example has no position in a layer, the layer's A is the mean over the other examples.

The exact block is the mean over all N examples of `G_n ⊗ A_n`, and an absent example adds zero. So
K-FAC is `(1/N) Σ G_n ⊗ (1/M) Σ A_n`, where M examples are present. The reference adds up G_n and
A_n example by example, by reverse-mode differentiation in float64.
"""

import oracle
import pytest
import torch
from failing_loader import FailingLoader, LoaderError
from torch import nn

from laplace_debias import Auto, Laplace
from laplace_debias.curvature import KFAC
from laplace_debias.curvature.fits import checkpoint, factors
from laplace_debias.curvature.fits.factors import absent_examples
from laplace_debias.training import OnlineCurvature

IGNORED = -100


class Sets(nn.Module):
    """Sets of vectors, `[B, n, 3]`, to logits; the sets of a batch may be empty."""

    name = "elements"

    def __init__(self):
        super().__init__()
        self.elements = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        """Shape `[B, 3]`."""
        return self.head(torch.tanh(self.elements(x)).sum(1))

    def data(self, sizes):
        """Return a batch for each size: sets of two vectors, or empty ones if it is negative."""
        return [
            (torch.randn(abs(n), 2 if n > 0 else 0, 3).double(), torch.randint(3, (abs(n),)))
            for n in sizes
        ]


class Tokens(nn.Module):
    """Vectors, `[B, 2, 3]`, to logits of each; all targets of an example may be ignored."""

    name = "hidden"

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        """Shape `[B, 2, 3]`."""
        return self.head(torch.tanh(self.hidden(x)))

    def data(self, sizes):
        """Return a batch for each size; all targets are ignored if it is negative."""
        batches = []
        for n in sizes:
            y = torch.randint(3, (abs(n), 2)) if n > 0 else torch.full((-n, 2), IGNORED)
            batches.append((torch.randn(abs(n), 2, 3).double(), y))
        return batches


class Experts(nn.Module):
    """An expert that is called only if an example of the batch takes it: the first number says."""

    name = "expert"

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        """Shape `[B, 3]`."""
        takes_expert = x[:, :1] > 0
        outputs = self.head(torch.tanh(x @ x.new_ones(3, 4)))
        if takes_expert.any():
            outputs = outputs + takes_expert * torch.tanh(self.expert(x))[:, :3]
        return outputs

    def data(self, sizes):
        """Return a batch for each size, of examples that take the expert unless it is negative."""
        batches = []
        for n in sizes:
            x = torch.randn(abs(n), 3).double()
            x[:, 0] = x[:, 0].abs() if n > 0 else -x[:, 0].abs()
            batches.append((x, torch.randint(3, (abs(n),))))
        return batches


KINDS = {kind.__name__.lower(): kind for kind in (Sets, Tokens, Experts)}


def build(kind, sizes):
    torch.manual_seed(0)
    model = KINDS[kind]().double().eval()
    return model, model.data(sizes)


def example_factors(model, x, y):
    """G and A of the layer for one example, or None if it is absent."""
    caught = {}

    def catch(_, inputs, output):
        caught["a"] = inputs[0].detach().flatten(0, -2)
        caught["z"] = output

    handle = model.get_submodule(model.name).register_forward_hook(catch)
    outputs = model(x.unsqueeze(0))[0]
    handle.remove()
    counted = (y != IGNORED).flatten()
    if "a" not in caught or not len(caught["a"]) or not counted.any():
        return None
    G = torch.zeros(4, 4).double()
    for logits in outputs.view(-1, 3)[counted]:
        for column in oracle.loss_hessian_root("classification", logits.unsqueeze(0))[0].T:
            (g,) = torch.autograd.grad(logits, caught["z"], column.detach(), retain_graph=True)
            g = g.flatten(0, -2)
            G += g.T @ g / len(g)
    return G, caught["a"].T @ caught["a"]


def mean_factors(model, batches, weights=None):
    """G as the mean over all examples, A as the mean over those that are present, and their share.

    With weights, the means are weighted.
    """
    G, A = torch.zeros(4, 4).double(), torch.zeros(3, 3).double()
    weight = 0.0
    present = 0.0
    for x, y in batches:
        for n in range(len(y)):
            w = 1.0 if weights is None else float(weights[int(weight > 0) and n])
            factors = example_factors(model, x[n], y[n])
            weight += w
            if factors is not None:
                G += w * factors[0]
                A += w * factors[1]
                present += w
    return G / weight, A / present, present / weight


def block_of(la, model):
    return la.posterior.curvature.blocks[f"{model.name}.weight"]


def scales_of(la, model):
    return la.posterior.factor_scales[f"{model.name}.weight"]


# If the first batch does not call the expert, small batches are not run together. If it does, the
# first batch already shows that there is an expert.
CALLED_LATER = (-4, 3, 2, -1)
CALLED_FIRST = (3, -4, 2, -1)
FEW = (-5, -3, 4, 6, -4)
parametrize_kinds = pytest.mark.parametrize("kind", list(KINDS))


@parametrize_kinds
@pytest.mark.parametrize("sizes", [CALLED_LATER, (-1, 5)], ids=str)
@pytest.mark.parametrize("options", [{}, {"memory_bound": 200}, {"factor_dtype": torch.float32}])
def test_a_full_fit_is_that_of_the_formula(kind, sizes, options):
    model, batches = build(kind, sizes)
    G, A, share = mean_factors(model, batches)
    la = Laplace(model, **options).fit(batches)
    tolerance = 1e-5 if "factor_dtype" in options else 1e-12
    oracle.close(block_of(la, model).to_dense(), torch.kron(G, A), tolerance)
    assert float(scales_of(la, model).share_A) == pytest.approx(share)
    assert 0 < share < 1


@pytest.mark.parametrize("kind", ["sets", "experts"])
def test_the_operator_is_that_of_the_formula(kind):
    model, batches = build(kind, CALLED_LATER)
    G, A, _ = mean_factors(model, batches)
    params = [f"{model.name}.weight"]
    loss = nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED)
    K = KFAC(model, loss, batches, params)
    oracle.close(K.to_dense(), sum(map(abs, CALLED_LATER)) * torch.kron(G, A), 1e-12)


@parametrize_kinds
def test_examples_count_by_their_weights(kind):
    model, batches = build(kind, CALLED_LATER)
    repeated = []
    weighted = []
    for number, (x, y) in enumerate(batches):
        weighted.append((x, y, torch.full((len(y),), number + 1.0).double()))
        repeated += [(x, y)] * (number + 1)
    expected = Laplace(model).fit(repeated)
    la = Laplace(model).fit(weighted)
    oracle.close(block_of(la, model).to_dense(), block_of(expected, model).to_dense(), 1e-12)


@parametrize_kinds
def test_magnitudes_of_other_batches_have_their_own_count(kind):
    """The trace, which does not depend on the directions, is that of the second batches."""
    model, batches = build(kind, CALLED_LATER)
    la = Laplace(model).fit_batches(batches[:2], batches[1:], num_data=100)
    G, A, share = mean_factors(model, batches[1:])
    oracle.close(block_of(la, model).to_dense().trace(), G.trace() * A.trace(), 1e-12)
    oracle.close(scales_of(la, model).trace_A, A.trace(), 1e-12)
    assert float(scales_of(la, model).share_A) == pytest.approx(share)


@pytest.mark.parametrize("kind", ["tokens", "experts"])
def test_examples_may_be_absent_from_some_folds(kind):
    """No example of the first and the fifth of five folds is present."""
    model, batches = build(kind, (-1, 3, -2, 3, -1))
    G, A, _ = mean_factors(model, batches)
    la = Laplace(model).fit_batches(batches, folds=5, num_data=100)
    oracle.close(block_of(la, model).to_dense().trace(), G.trace() * A.trace(), 1e-12)
    assert block_of(la, model).magnitudes.isfinite().all()


def test_all_examples_of_the_other_folds_may_be_absent():
    model, batches = build("tokens", (1, -1, 1, -1))
    G, A, _ = mean_factors(model, batches)
    la = Laplace(model).fit_batches(batches, folds=2, num_data=100)
    oracle.close(block_of(la, model).to_dense().trace(), G.trace() * A.trace(), 1e-12)


@parametrize_kinds
@pytest.mark.parametrize("first", [CALLED_LATER, (-1, 3)], ids=str)
@pytest.mark.parametrize("second", [FEW, (5,)], ids=str)
def test_an_update_is_a_fit_to_all(kind, first, second, tmp_path):
    model, batches = build(kind, (*first, *second))
    expected = Laplace(model).fit(batches)
    la = Laplace(model, params=expected.param_names).fit(batches[: len(first)])
    la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    for posterior in (la, loaded):
        posterior.update(batches[len(first) :])
        for name, block in expected.posterior.curvature.blocks.items():
            updated = posterior.posterior.curvature.blocks[name]
            oracle.close(updated.to_dense(), block.to_dense(), 1e-9)


@parametrize_kinds
def test_a_fit_in_rounds_counts_who_is_present(kind):
    model, batches = build(kind, (40, -30, 50, -20) * 12)
    scheme = Auto(batches, tolerance=1e-6, examples=400, forward_ratio=1)
    with pytest.warns(UserWarning, match="budget of examples"):
        la = Laplace(model).fit(scheme, num_data=2000)
    read = []
    num_read = 0
    for x, y in batches:
        read.append((x, y))
        num_read += len(y)
        if num_read >= la.fit_report.num_read + 16:
            break
    # 16 examples are set aside, and do not count.
    x, y = read[0]
    read[0] = (x[16:], y[16:])
    _, A, share = mean_factors(model, read)
    assert float(scales_of(la, model).share_A) == pytest.approx(share)
    oracle.close(scales_of(la, model).trace_A, A.trace(), 1e-9)


@pytest.mark.parametrize("kind", ["sets", "experts"])
def test_running_means_count_who_is_present(kind):
    model, batches = build(kind, CALLED_FIRST)
    online = OnlineCurvature(
        model, decay=1, every=1, refresh=2, fisher="exact", curvature="kfac", joint=True
    )
    for batch in batches:
        online.update(*batch)
    again = OnlineCurvature(
        model, decay=1, every=1, refresh=2, fisher="exact", curvature="kfac", joint=True
    )
    again.load_state_dict(online.state_dict())
    extra = model.data([2])[0]
    for means in (online, again):
        means.update(*extra)
        la = means.posterior(100)
        # The first batch is not measured along directions.
        G, A, _ = mean_factors(model, [*batches[1:], extra])
        oracle.close(block_of(la, model).to_dense().trace(), G.trace() * A.trace(), 1e-9)


@parametrize_kinds
def test_a_resumed_fit_counts_who_is_present(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    model, batches = build(kind, CALLED_FIRST)
    expected = Laplace(model).fit(batches)
    params = expected.param_names
    with pytest.raises(LoaderError):
        Laplace(model, params=params).fit(
            FailingLoader(batches, 3), num_data=10, resume=tmp_path / "state"
        )
    la = Laplace(model, params=params).fit(batches, num_data=10, resume=tmp_path / "state")
    assert torch.equal(block_of(la, model).to_dense(), block_of(expected, model).to_dense())


def test_ignored_targets_are_absent_from_layers_with_one_position():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    x = torch.randn(9, 3).double()
    y = torch.randint(3, (9,))
    x[4:] *= 10
    y[4:] = IGNORED
    expected = Laplace(model).fit([(x[:4], y[:4])])
    la = Laplace(model).fit([(x, y)])
    for name, block in expected.posterior.curvature.blocks.items():
        actual = la.posterior.curvature.blocks[name]
        oracle.close(actual.to_dense(), 4 / 9 * block.to_dense(), 1e-12)
        if name.endswith("weight"):
            traces = [fit.posterior.factor_scales[name].trace_A for fit in (la, expected)]
            oracle.close(*traces, 1e-12)


class ExpertOfOneOutput(nn.Module):
    """Two outputs, of which only the second one depends on an expert, for some examples."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 2)
        self.expert = nn.Linear(3, 1)

    def forward(self, x):
        """Shape `[B, 2]`."""
        outputs = self.base(x)
        takes_expert = x[:, :1] > 0
        if takes_expert.any():
            added = takes_expert * self.expert(x)
            outputs = outputs + torch.cat([torch.zeros_like(added), added], 1)
        return outputs


@pytest.mark.parametrize("memory_bound", [None, 16])
def test_all_outputs_say_who_reaches_a_layer(memory_bound):
    """Output columns that are computed separately do not each decide for themselves."""
    torch.manual_seed(0)
    model = ExpertOfOneOutput().double().eval()
    x = torch.randn(12, 3).double()
    x[0, 0], x[1, 0] = -1.0, 1.0
    la = Laplace(model, "regression", sigma=1.0, memory_bound=memory_bound)
    la.fit([(x, torch.randn(12, 2).double())])
    reaches = x[:, 0] > 0
    A = x[reaches].T @ x[reaches] / reaches.sum()
    block = la.posterior.curvature.blocks["expert.weight"]
    oracle.close(block.to_dense(), reaches.double().mean() * A, 1e-12)


@pytest.mark.parametrize("mode", ["full", "auto"])
def test_a_batch_may_call_a_layer_for_examples_that_do_not_reach_it(mode):
    model, _ = build("experts", ())
    x = torch.randn(600, 3).double()
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(600) % 6 == 5, 1.0, -1.0)
    y = torch.randint(3, (600,))
    batches = list(zip(x.split(40), y.split(40), strict=True))
    if mode == "full":
        la = Laplace(model).fit(batches)
        read = (x, y)
    else:
        names = [name for name, _ in model.named_parameters()]
        scheme = Auto(batches, tolerance=1e-6, examples=300, forward_ratio=1)
        with pytest.warns(UserWarning, match="budget of examples"):
            la = Laplace(model, params=names).fit(scheme, num_data=600)
        read = (x[16 : 16 + la.fit_report.num_read], y[16 : 16 + la.fit_report.num_read])
    _, A, share = mean_factors(model, [read])
    assert scales_of(la, model).share_A == pytest.approx(share)
    oracle.close(scales_of(la, model).trace_A, A.trace(), 1e-9)


def test_memory_may_run_out_while_the_absent_are_counted(monkeypatch):
    model, batches = build("sets", (4, 6))
    expected = block_of(Laplace(model).fit(batches), model).to_dense()
    numbers = []

    def count(*arguments):
        numbers.append(0)
        if len(numbers) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return absent_examples(*arguments)

    monkeypatch.setattr(factors, "absent_examples", count)
    la = Laplace(model).fit(batches)
    oracle.close(block_of(la, model).to_dense(), expected, 1e-12)


def test_counts_do_not_depend_on_the_default_dtype():
    model, batches = build("tokens", (2, *[-1] * 600))
    torch.set_default_dtype(torch.bfloat16)
    try:
        la = Laplace(model).fit(batches)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scales_of(la, model).share_A == pytest.approx(2 / 602)


@pytest.mark.parametrize(
    ("mode", "curvature"), [("full", "kfac"), ("full", "ekfac"), ("auto", "kfac")]
)
def test_ignored_positions_below_layers_that_all_positions_reach(mode, curvature):
    """Some pixels are ignored; the first convolution has a gradient everywhere."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)]
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(80, 3, 5, 5).double()
    y = torch.randint(3, (80, 5, 5))
    y[:, 0, 0] = IGNORED
    options = {"curvature": curvature, "class_dim": 1}
    la = Laplace(model, params=["0.weight"], **options)
    all_parameters = Laplace(model, **options)
    if mode == "auto":
        for approximation in (la, all_parameters):
            approximation.fit(Auto([(x, y)], tolerance=0.9, forward_ratio=1), num_data=80)
    else:
        for approximation in (la, all_parameters):
            approximation.fit([(x, y)])
    actual, expected = (
        approximation.posterior.curvature.blocks["0.weight"]
        for approximation in (la, all_parameters)
    )
    oracle.close(actual.to_dense(), expected.to_dense(), 1e-9)


@pytest.mark.parametrize("num_leading", [0, 1, 2, 5])
@pytest.mark.parametrize("batch_size", [60, 20])
@pytest.mark.parametrize("mode", ["full", "auto"])
def test_who_reaches_a_layer_does_not_depend_on_who_comes_first(num_leading, batch_size, mode):
    """Every batch calls the expert, which every third example takes."""
    model, _ = build("experts", ())
    x = torch.randn(60, 3).double()
    takes = torch.arange(60) % 3 == 2
    x[:, 0] = x[:, 0].abs() * torch.where(takes, 1.0, -1.0)
    y = torch.randint(3, (60,))
    first = takes.nonzero()[:num_leading, 0]
    order = torch.cat([first, torch.tensor([n for n in range(60) if n not in first.tolist()])])
    x, y = x[order], y[order]
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    la = Laplace(model, params=["expert.weight"])
    if mode == "full":
        la.fit(batches)
        G, A, share = mean_factors(model, batches)
        oracle.close(block_of(la, model).to_dense(), torch.kron(G, A), 1e-12)
    else:
        la.fit(Auto(batches, tolerance=0.9, forward_ratio=1), num_data=60)
        num_probes = min(16, batch_size // 2)
        num_read = la.fit_report.num_read
        read = slice(num_probes, num_probes + num_read)
        if la.fit_report.ended_by == "data":
            read = slice(0, 60)
        _, A, share = mean_factors(model, [(x[read], y[read])])
        oracle.close(scales_of(la, model).trace_A, A.trace(), 1e-9)
    assert scales_of(la, model).share_A == pytest.approx(share)


GATES = {
    "product": lambda takes, h: takes * h,
    "where": lambda takes, h: torch.where(takes, h, 0.0),
    "choice": lambda takes, h: torch.stack([0 * h, h], 1)[torch.arange(len(h)), 1 * takes[:, 0]],
    "maximum": lambda takes, h: torch.maximum(h, (~takes) * 100.0) - (~takes) * 100.0,
    "pooling": lambda takes, h: maximum_by_pooling(h, (~takes) * 100.0) - (~takes) * 100.0,
}


def maximum_by_pooling(h, bounds):
    """Tensors that are joined before they are pooled, as channels of a maxout network are."""
    joined = torch.cat([h.unsqueeze(-1), bounds.expand_as(h).unsqueeze(-1)], -1)
    return nn.functional.max_pool1d(joined, 2).squeeze(-1)


class GatedExpert(nn.Module):
    """An expert that is called for all examples; a gate removes its outputs for many examples."""

    name = "expert"

    def __init__(self, gate="product"):
        super().__init__()
        self.base = nn.Linear(3, 4, bias=False)
        self.expert = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 3, bias=False)
        self.gate = GATES[gate]

    def forward(self, x):
        """Shape `[B, 3]`."""
        expert = torch.relu(self.expert(x))
        return self.head(torch.tanh(self.base(x)) + self.gate(x[:, :1] > 0, expert))


def gated_case(gate="product", num_examples=12):
    """A model and examples, of which the first 5 of 12 take the expert, one with dead units."""
    torch.manual_seed(0)
    model = GatedExpert(gate).double().eval()
    x = torch.randn(num_examples, 3).double()
    takes = torch.arange(num_examples) < num_examples * 5 // 12
    x[:, 0] = x[:, 0].abs() * torch.where(takes, 1.0, -1.0)
    # The larger inputs of the other examples would change A.
    x[~takes] *= 2
    candidates = torch.randn(10_000, 3).double()
    is_dead = (model.expert(candidates) <= 0).all(1) & (candidates[:, 0] > 0)
    x[2] = candidates[is_dead][0]
    return model, x, torch.randint(3, (num_examples,))


def gated_factors(model, x, y):
    """G and A of the expert: the means over all examples, and over those that take the expert."""
    factors = [example_factors(model, *example) for example in zip(x, y, strict=True)]
    takes = [float(x_n[0] > 0) for x_n in x]
    G = sum(G_n for G_n, _ in factors) / len(x)
    return G, sum(w * A_n for w, (_, A_n) in zip(takes, factors, strict=True)) / sum(takes)


ORDERS = {
    "takers first": torch.arange(12),
    "takers last": torch.arange(12).flip(0),
    "mixed": torch.tensor([7, 2, 5, 0, 9, 1, 11, 3, 6, 4, 8, 10]),
}
parametrize_orders = pytest.mark.parametrize("order", list(ORDERS))


def divided(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


@parametrize_orders
@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.usefixtures("batches_apart")
def test_a_gate_removes_the_same_examples_however_data_are_ordered_and_divided(gate, size, order):
    model, x, y = gated_case(gate)
    G, A = gated_factors(model, x, y)
    x, y = x[ORDERS[order]], y[ORDERS[order]]
    la = Laplace(model).fit(divided(x, y, size))
    oracle.close(block_of(la, model).to_dense(), torch.kron(G, A), 1e-12)
    assert scales_of(la, model).share_A == pytest.approx(5 / 12)


# Chunks of one, two and three examples, and one chunk; with 100 bytes, columns are computed apart.
MEMORY_BOUNDS = [100, 600, 1200, 1800, None]


def in_orders(x, y):
    """Yield the examples in several orders, with several limits on the memory of a chunk."""
    for number, bound in enumerate(MEMORY_BOUNDS):
        for order in (torch.arange(len(x)), torch.arange(len(x)).flip(0)):
            yield x[order], y[order], bound
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        yield x[order], y[order], bound


def test_chunks_of_any_size_have_the_eigenbases_and_magnitudes_of_the_formula():
    """EKFAC's magnitudes are the means of the squared gradients along the directions of K-FAC."""
    model, x, y = gated_case()
    G, A = gated_factors(model, x, y)
    directions = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
    factors = [example_factors(model, *example) for example in zip(x, y, strict=True)]
    exact = sum(torch.kron(*factors_n) for factors_n in factors) / len(x)
    magnitudes = (directions.T @ exact @ directions).diagonal()
    expected = {
        "kfac": torch.kron(G, A),
        "ekfac": directions @ magnitudes.diag() @ directions.T,
    }
    for curvature, block in expected.items():
        for inputs, targets, bound in in_orders(x, y):
            la = Laplace(model, curvature=curvature, memory_bound=bound).fit([(inputs, targets)])
            oracle.close(block_of(la, model).to_dense(), block, 1e-9)


def test_magnitudes_of_a_second_batch_do_not_depend_on_its_order_or_chunks():
    model, x, y = gated_case(num_examples=60)
    first, second = slice(1, 60, 2), slice(0, 60, 2)
    G, A = gated_factors(model, x[first], y[first])
    bases = torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1]
    G, A = gated_factors(model, x[second], y[second])
    magnitudes = [(U.T @ F @ U).diagonal() for U, F in zip(bases, (G, A), strict=True)]
    directions = torch.kron(*bases)
    expected = directions @ torch.kron(*magnitudes).diag() @ directions.T
    cases = zip(in_orders(x[first], y[first]), in_orders(x[second], y[second]), strict=True)
    for (*batch, bound), (*other_batch, _) in cases:
        la = Laplace(model, memory_bound=bound)
        la.fit([batch, other_batch], mode="debiased", num_data=100)
        oracle.close(block_of(la, model).to_dense(), expected, 1e-9)


def test_folds_do_not_depend_on_the_order_or_chunks_of_their_examples():
    model, x, y = gated_case(num_examples=60)
    G, A = gated_factors(model, x, y)
    curvatures = []
    folds = [slice(k, 60, 3) for k in range(3)]
    for cases in zip(*(in_orders(x[fold], y[fold]) for fold in folds), strict=True):
        # Example n belongs to fold n modulo 3.
        inputs, targets, bounds = zip(*cases, strict=True)
        batch = [torch.stack(tensors, 1).flatten(0, 1) for tensors in (inputs, targets)]
        la = Laplace(model, memory_bound=bounds[0])
        la.fit_batches([batch], folds=3, num_data=100)
        curvatures.append(block_of(la, model).to_dense())
        oracle.close(curvatures[-1].trace(), G.trace() * A.trace(), 1e-12)
        oracle.close(curvatures[-1], curvatures[0], 1e-9)


@parametrize_orders
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.usefixtures("batches_apart")
def test_an_update_does_not_depend_on_which_examples_came_before(size, order):
    model, x, y = gated_case()
    G, A = gated_factors(model, x, y)
    x, y = x[ORDERS[order]], y[ORDERS[order]]
    la = Laplace(model).fit(divided(x[:7], y[:7], size))
    la.update(divided(x[7:], y[7:], size))
    oracle.close(block_of(la, model).to_dense(), torch.kron(G, A), 1e-9)


class GatedTokens(nn.Module):
    """Tokens, `[B, T]`, to logits of each token; a gate removes the logits of some tokens."""

    name = "hidden"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 3)
        self.hidden = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        """Shape `[B, T, 4]`."""
        return self.hidden(self.embedding(x)) * (x > 4).unsqueeze(-1)


@pytest.mark.usefixtures("batches_apart")
def test_an_example_without_any_gradient_does_not_mask_tokens_of_its_batch():
    torch.manual_seed(0)
    model = GatedTokens().double().eval()
    x = torch.randint(10, (8, 5))
    x[3] = torch.arange(5)
    y = torch.randint(4, (8, 5))
    present = [n for n in range(8) if bool((x[n] > 4).any())]
    inputs = model.embedding(x[present]).detach().flatten(0, 1)
    A = inputs.T @ inputs / len(present)
    for order in (torch.arange(8), torch.arange(8).flip(0)):
        for size in (1, 2, 3, 8):
            la = Laplace(model, params=["hidden.weight"]).fit(divided(x[order], y[order], size))
            oracle.close(scales_of(la, model).trace_A, A.trace(), 1e-12)
            assert scales_of(la, model).share_A == pytest.approx(len(present) / 8)
