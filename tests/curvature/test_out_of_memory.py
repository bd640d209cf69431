"""If memory runs out in a chunk, its halves give the same curvature and nothing is added twice."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.fits import block_tensors, factor_sums
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.laplace.fitting.prepared import examine
from laplace_debias.laplace.state.fitted import FitSetup

pytestmark = pytest.mark.usefixtures("batches_apart")

MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"),
]


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    batches = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (13, 8)]
    return model, batches


def fits_up_to(monkeypatch, limit, error):
    """Make backward passes of over `limit` examples fail; return the sizes that are tried."""
    tried = []
    original = ForwardPass._gradients

    def gradients(forward_pass, outputs, *arguments):
        tried.append(len(outputs))
        if len(outputs) > limit:
            raise error
        return original(forward_pass, outputs, *arguments)

    monkeypatch.setattr(ForwardPass, "_gradients", gradients)
    return tried


@pytest.mark.parametrize("error", MESSAGES, ids=["gpu", "cpu"])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_halves_give_the_same_curvature(case, curvature, error, monkeypatch):
    model, batches = case
    options = {"curvature": curvature, "backend": "hooks"}
    expected = Laplace(model, **options).fit(batches)
    tried = fits_up_to(monkeypatch, 4, error)
    la = Laplace(model, **options).fit(batches)
    assert max(tried) == 13
    # Each of the 21 examples is run equally often; the check of the model runs two more.
    assert (sum(n for n in tried if n <= 4) - 2) % 21 == 0
    grid = [la.posterior.curvature.to_dense(), expected.posterior.curvature.to_dense()]
    torch.testing.assert_close(*grid, rtol=1e-10, atol=1e-14)
    assert la.log_marginal_likelihood() == pytest.approx(float(expected.log_marginal_likelihood()))


MODES = [
    *(
        (curvature, mode, {})
        for curvature in ("kfac", "ekfac", "diag", "full", "lowrank")
        for mode in ("mini", "debiased", "crossfit")
    ),
    *(("ekfac", "full", {"fisher": fisher}) for fisher in ("mc", "empirical")),
    *((curvature, "full", {"backend": "backpack"}) for curvature in ("kfac", "ekfac")),
    ("kfac", "full", {"memory_bound": 4000}),
]


@pytest.mark.parametrize(("curvature", "mode", "options"), MODES)
def test_every_pass_goes_on_by_halves(case, curvature, mode, options, monkeypatch):
    """Forward passes of more than three examples run out of memory, in every pass of a fit."""
    model, batches = case

    def fitted():
        la = Laplace(model, curvature=curvature, **options)
        generator = torch.Generator().manual_seed(3)
        num_data = None if mode == "full" else 21
        return la.fit(batches, mode, num_data=num_data, generator=generator)

    expected = fitted().posterior.curvature.to_dense()
    original = Cotangents.__call__
    passed = []
    refused = []

    def limited(cotangents, outputs, *arguments):
        if len(outputs) > 3:
            refused.append(len(outputs))
            raise MESSAGES[0]
        passed.append(len(outputs))
        return original(cotangents, outputs, *arguments)

    monkeypatch.setattr(Cotangents, "__call__", limited)
    actual = fitted().posterior.curvature.to_dense()
    assert refused
    # Every pass reads all its examples, each once.
    examples_per_pass = {"full": 21, "mini": 13, "crossfit": 13}
    if mode in examples_per_pass:
        assert sum(passed) % examples_per_pass[mode] == 0
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * scale)


def test_one_example_that_does_not_fit_is_refused_with_remedies(case, monkeypatch):
    model, batches = case
    la = Laplace(model, backend="hooks")
    state = la._state
    stream = state.spec.training_stream(batches, state.device)
    _, problem = examine(state, [stream], reads_all=False, fisher=state.config.fisher)
    fits_up_to(monkeypatch, 0, MESSAGES[0])
    with pytest.raises(RuntimeError, match=r'1 example .*fisher="signs".*memory_bound='):
        factor_sums.factor_sums(problem, consecutive([Batch(*pair) for pair in batches]))


def fails_at_block(monkeypatch, number):
    """Raise out-of-memory errors for chunks of over two examples, at a block; list their sizes."""
    original = ForwardPass.backward
    failed_sizes = []
    chunk_outputs = []

    def limited(self, *arguments, **options):
        outputs = self.outputs
        for record in original(self, *arguments, **options):
            if chunk_outputs and chunk_outputs[-1] is not outputs:
                chunk_outputs.clear()
            chunk_outputs.append(outputs)
            if len(outputs) > 2 and len(chunk_outputs) == number:
                failed_sizes.append(len(outputs))
                raise MESSAGES[0]
            yield record

    monkeypatch.setattr(ForwardPass, "backward", limited)
    return failed_sizes


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "full", "lowrank"])
def test_what_was_added_of_a_chunk_is_not_added_again(case, curvature, monkeypatch):
    """Memory runs out while any of the blocks is measured, in a chunk of more than two examples."""
    model, batches = case
    check_that_blocks_may_fail(model, batches, curvature, range(1, 5), monkeypatch)


def test_cotangents_that_were_added_are_not_added_again(monkeypatch):
    """Convolutions take one cotangent after the other, so memory may run out between cotangents."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)]
    batches = [(torch.randn(n, 2, 4).double(), torch.randint(3, (n,))) for n in (7, 3)]
    model = nn.Sequential(*layers).double().eval()
    check_that_blocks_may_fail(model, batches, "kfac", (1, 3, 6, 8), monkeypatch)


def check_that_blocks_may_fail(model, batches, curvature, places, monkeypatch):
    options = {"curvature": curvature, "backend": "hooks"}
    expected = Laplace(model, **options).fit(batches).posterior.curvature.to_dense()
    scale = float(expected.abs().max())
    for number in places:
        failed = fails_at_block(monkeypatch, number)
        actual = Laplace(model, **options).fit(batches).posterior.curvature.to_dense()
        monkeypatch.undo()
        assert failed, number
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * scale)


def test_a_sum_that_is_broken_off_is_not_gone_on_with(case, monkeypatch):
    model, batches = case
    original = block_tensors.add_to
    calls = []

    def add_to(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MESSAGES[0]
        return original(*arguments)

    monkeypatch.setattr(factor_sums, "add_to", add_to)
    la = Laplace(model, backend="hooks")
    with pytest.raises(RuntimeError, match=r"13 example.*Nothing was fitted"):
        la.fit(batches)
    assert isinstance(la._state, FitSetup)


class Branches(nn.Module):
    """Two layers, each called only if an example of the batch takes it: the first number says."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)
        self.positive = nn.Linear(5, 5)
        self.negative = nn.Linear(5, 5)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        is_positive = x[:, :1] > 0
        for layer, takes in ((self.positive, is_positive), (self.negative, ~is_positive)):
            if takes.any():
                h = h + takes * torch.tanh(layer(h))
        return self.head(h)


@pytest.mark.parametrize("curvature", ["kfac", "diag", "full", "lowrank"])
@pytest.mark.parametrize("number", range(1, 9))
def test_halves_of_a_chunk_may_call_other_layers(curvature, number, monkeypatch):
    """Rows that were kept of the whole chunk are not joined with those of a half."""
    torch.manual_seed(0)
    model = Branches().double().eval()
    x = torch.randn(12, 4).double()
    y = torch.randint(3, (12,))
    x[:, 0] = torch.tensor([1.0, -1.0]).double().repeat_interleave(6)
    x[1, 0] = -1.0
    options = {"curvature": curvature, "backend": "hooks"}
    expected = Laplace(model, **options).fit([(x, y)]).posterior.curvature.to_dense()
    failed = fails_at_block(monkeypatch, number)
    actual = Laplace(model, **options).fit([(x, y)]).posterior.curvature.to_dense()
    assert failed
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-13)
