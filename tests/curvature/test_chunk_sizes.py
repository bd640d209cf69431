"""Chunks of batches whose examples have several shapes: each keeps the memory bound."""

from typing import ClassVar

import pytest
import torch
from oracle import close, flat_jacobian, loss_hessian
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.layers.forward_pass import ForwardPass
from laplace_debias.curvature.layers.tap import Tap

BOUND = 40_000


class Pooled(nn.Module):
    """A network of sequences or images of any size.

    It lists the shapes of the inputs that it and its copies are run on.
    """

    shapes: ClassVar = []

    def __init__(self, layer, dims):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(8, 3)
        self.dims = dims

    def forward(self, x):
        self.shapes.append(x.shape)
        return self.head(self.layer(x).tanh().mean(self.dims))


def sequences(lengths, num_examples=12):
    """A network, and a batch of sequences of each length."""
    model = Pooled(nn.Linear(4, 8), 1).double().eval()
    inputs = [torch.randn(num_examples, length, 4).double() for length in lengths]
    return model, [(x, torch.randint(3, (num_examples,))) for x in inputs]


def images(sizes, num_examples=12):
    """A network, and a batch of square images of each size."""
    model = Pooled(nn.Conv2d(2, 8, 2), (2, 3)).double().eval()
    inputs = [torch.randn(num_examples, 2, size, size).double() for size in sizes]
    return model, [(x, torch.randint(3, (num_examples,))) for x in inputs]


def measured_chunks(monkeypatch):
    """For each backward pass, its number of examples, and the bytes of its output gradients."""
    chunks = []
    original = ForwardPass._records

    def measured(forward_pass, gradients_by_output):
        records = original(forward_pass, gradients_by_output)
        gradients = [g for record in records.values() for g in record.output_gradients]
        chunks.append((forward_pass.num_examples, sum(g.nbytes for g in gradients)))
        return records

    monkeypatch.setattr(ForwardPass, "_records", measured)
    return chunks


def dense_curvature(model, batches):
    """The GGN of the mean loss, `(1/N) Σ_n J_nᵀ H_n J_n`, one example at a time."""
    names = [name for name, _ in model.named_parameters()]
    total, num_examples = 0, 0
    for x, _ in batches:
        J = flat_jacobian(model, x, names)
        H = loss_hessian("classification", model(x))
        total = total + sum(J[n].T @ H[n] @ J[n] for n in range(len(x)))
        num_examples += len(x)
    return total / num_examples


CASES = {
    "longer sequences": (sequences, (1, 40)),
    "shorter sequences": (sequences, (40, 1)),
    "lengths that come again": (sequences, (1, 40, 1, 40)),
    "larger images": (images, (2, 7)),
}


@pytest.mark.parametrize("curvature", ["full", "diag"])
@pytest.mark.parametrize("case", CASES)
def test_chunks_of_every_shape_keep_the_memory_bound(case, curvature, monkeypatch):
    make, sizes = CASES[case]
    model, batches = make(sizes)
    expected = dense_curvature(model, batches)
    chunks = measured_chunks(monkeypatch)
    la = Laplace(model, curvature=curvature, memory_bound=BOUND, backend="hooks").fit(batches)
    assert max(num_bytes for _, num_bytes in chunks) <= BOUND
    # Small examples are still run together, also if larger ones came first.
    assert max(num_examples for num_examples, _ in chunks) > 6
    if curvature == "diag":
        expected = expected.diagonal().diag()
    close(la.posterior.curvature.to_dense(), expected)


def test_one_example_of_each_shape_is_run_to_size_its_chunks():
    model, batches = sequences((1, 40, 1, 40, 40))
    model.shapes.clear()
    Laplace(model, curvature="diag", backend="hooks").fit(batches[:1])
    num_before = model.shapes.count((1, 1, 4))
    model.shapes.clear()
    Laplace(model, curvature="diag", backend="hooks").fit(batches)
    assert model.shapes.count((1, 1, 4)) == num_before
    assert model.shapes.count((1, 40, 4)) == 1


@pytest.mark.usefixtures("batches_apart")
def test_chunks_of_every_shape_stay_small_after_memory_ran_out(monkeypatch):
    """Backward passes run out of memory above 6 kB: the first batch shows it for all."""
    model, batches = sequences((10, 10, 20, 5, 10))
    expected = dense_curvature(model, batches)
    original = ForwardPass._gradients
    failed = []

    def gradients(forward_pass, outputs, columns, *arguments):
        if len(outputs) * len(columns) * forward_pass.output_bytes > 6_000:
            failed.append(tuple(outputs.shape))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(forward_pass, outputs, columns, *arguments)

    la = Laplace(model, curvature="full", backend="hooks")
    monkeypatch.setattr(ForwardPass, "_gradients", gradients)
    la.fit(batches)
    # Three examples of 10 positions fit.
    assert failed == [(12, 3), (6, 3)]
    close(la.posterior.curvature.to_dense(), expected)


def test_batches_of_larger_examples_are_not_joined_as_small_ones_are():
    model, batches = sequences((1, 1, 1, 400, 400, 400), num_examples=256)
    model.shapes.clear()
    Laplace(model, curvature="diag", fisher="mc", backend="hooks").fit(batches)
    assert model.shapes.count((768, 1, 4)) == 1
    assert max(shape[0] for shape in model.shapes if shape[1] == 400) == 256


def test_a_later_example_that_does_not_fit_in_memory_is_refused_with_remedies(monkeypatch):
    model, batches = sequences((1, 40))
    original = Tap.forward

    def forward(tap, x, *arguments, **options):
        if x.shape[1] == 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(tap, x, *arguments, **options)

    monkeypatch.setattr(Tap, "forward", forward)
    with pytest.raises(RuntimeError, match=r'1 example .*fisher="signs".*memory_bound='):
        Laplace(model, backend="hooks").fit_batches(batches)


def test_a_later_example_for_which_the_memory_bound_is_too_small_is_refused():
    model, batches = sequences((1, 400))
    with pytest.raises(ValueError, match=r"Pass `memory_bound=25624`"):
        Laplace(model, curvature="diag", memory_bound=10_000, backend="hooks").fit(batches)


def test_the_error_of_an_example_of_another_shape_names_the_batch():
    model, batches = sequences((1, 1, 40))
    batches[2][0][0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN.*\(Batch 3 of the pass over the data"):
        Laplace(model).fit_batches(batches)
