"""Small batches of small networks, which a pass over data runs together."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.curvature.fits import checkpoint, chunks, eigenbases


class Perceptron(nn.Sequential):
    """A network that lists the sizes of the batches that it and its copies are run on."""

    sizes: ClassVar = []

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        self.sizes.append(len(x))
        return super().forward(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Perceptron().double().eval()


def batches(sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for size in sizes
    ]


def empirical_fisher(model, data):
    """The mean outer product of the examples' gradients, one example after the other."""
    total = 0
    num_examples = 0
    for x, y in data:
        for example, label in zip(x, y, strict=True):
            loss = nn.functional.cross_entropy(model(example[None]), label[None])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([g.flatten() for g in gradients])
            total = total + torch.outer(gradient, gradient)
            num_examples += 1
    return total / num_examples


def test_small_batches_are_run_together(model):
    data = batches([4] * 20)
    model.sizes.clear()
    Laplace(model).fit(data)
    # The model is checked on four examples.
    assert model.sizes.count(4) == 1
    assert model.sizes.count(80) == 1


@pytest.mark.parametrize("sizes", [[3, 3, 2, 5], [2, 1200, 3, 3]], ids=["small", "one large"])
def test_batches_that_are_run_together_give_the_curvature_of_single_examples(model, sizes):
    data = batches(sizes)
    la = Laplace(model, curvature="full", fisher="empirical").fit(data)
    torch.testing.assert_close(
        la.posterior.curvature.to_dense(), empirical_fisher(model, data), rtol=1e-10, atol=1e-14
    )


def test_monte_carlo_labels_do_not_depend_on_which_batches_are_run_together(model, monkeypatch):
    data = batches([4, 6, 1, 9, 9, 2])
    options = {"fisher": "mc", "curvature": "ekfac"}
    together = Laplace(model, **options).fit(data, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(chunks, "_JOINED_BYTES", 0)
    apart = Laplace(model, **options).fit(data, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        together.posterior.curvature.to_dense(), apart.posterior.curvature.to_dense()
    )


def test_large_inputs_are_not_run_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sizes = []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    data = [(torch.randn(8, 3, 128, 128), torch.randint(8, (8,))) for _ in range(3)]
    Laplace(model.eval(), fisher="mc").fit(data)
    assert sizes.count(8) >= 3
    assert max(sizes) == 8


def test_inputs_of_several_shapes_are_run_apart():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model = model.double().eval()
    lengths = (5, 5, 9, 7)
    data = [(torch.randn(3, 2, n).double(), torch.randint(4, (3,))) for n in lengths]
    la = Laplace(model, curvature="full", fisher="empirical").fit(data)
    expected = empirical_fisher(model, data)
    torch.testing.assert_close(la.posterior.curvature.to_dense(), expected, rtol=1e-10, atol=1e-14)


def test_the_error_of_a_joined_batch_names_the_batch(model):
    data = batches([4] * 6)
    data[3] = (data[3][0], data[3][1] + 3)
    with pytest.raises(ValueError, match=r"\(Batch 4 of the pass over the data"):
        Laplace(model).fit(data)


def test_an_interrupted_fit_of_joined_batches_resumes_to_the_same_bits(
    model, monkeypatch, tmp_path
):
    monkeypatch.setattr(chunks, "_MOST_JOINED_EXAMPLES", 9)
    monkeypatch.setattr(checkpoint, "EVERY", 0)
    data = batches([4, 4, 3, 4, 9, 1, 2, 2])
    expected = Laplace(model).fit_batches(data, num_data=29)

    def interrupted():
        yield from data[:6]
        raise KeyboardInterrupt

    la = Laplace(model)
    with pytest.raises(KeyboardInterrupt):
        la.fit_batches(interrupted(), num_data=29, resume=tmp_path)
    model.sizes.clear()
    la.fit_batches(data, num_data=29, resume=tmp_path)
    # The batches up to the fifth are in the sums already.
    assert max(model.sizes) == 5
    assert torch.equal(la.posterior.curvature.to_dense(), expected.posterior.curvature.to_dense())


def in_the_same_memory(data):
    """The batches of a loader that writes every one of them over the one before."""
    num_examples = max(len(y) for _, y in data)
    inputs = torch.empty(num_examples, 5, dtype=torch.float64)
    targets = torch.empty(num_examples, dtype=torch.long)
    for x, y in data:
        yield inputs[: len(x)].copy_(x), targets[: len(y)].copy_(y)


@pytest.mark.parametrize(
    ("num_read", "num_saved"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)]
)
def test_a_fit_of_joined_batches_may_be_interrupted_before_any_batch(
    model, monkeypatch, tmp_path, num_read, num_saved
):
    monkeypatch.setattr(chunks, "_MOST_JOINED_EXAMPLES", 9)
    monkeypatch.setattr(checkpoint, "EVERY", 0)
    run_together = []
    original = chunks.ChunkRunner.run

    def run(self, batch, totals):
        run_together.append((batch.first_index, batch.num_examples))
        original(self, batch, totals)

    monkeypatch.setattr(chunks.ChunkRunner, "run", run)
    data = batches([4, 4, 3, 6, 9, 1, 2, 2])
    expected = Laplace(model).fit_batches(data, num_data=31)
    # The third batch does not fit to the first two, the fourth fills the second group.
    groups = [(0, 8), (8, 9), (17, 9), (26, 5)]
    assert run_together == groups

    def interrupted():
        yield from in_the_same_memory(data[:num_read])
        raise KeyboardInterrupt

    la = Laplace(model)
    with pytest.raises(KeyboardInterrupt):
        la.fit_batches(interrupted(), num_data=31, resume=tmp_path)
    run_together.clear()
    la.fit_batches(in_the_same_memory(data), num_data=31, resume=tmp_path)
    assert run_together == groups[num_saved:]
    assert torch.equal(la.posterior.curvature.to_dense(), expected.posterior.curvature.to_dense())


def test_of_a_group_only_the_batches_that_are_not_saved_are_run(model, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "EVERY", 0)
    data = batches([4, 4, 3, 4])
    expected = Laplace(model).fit_batches(data, num_data=15)

    def interrupted():
        yield from data[:2]
        raise KeyboardInterrupt

    la = Laplace(model)
    with monkeypatch.context() as apart:
        apart.setattr(chunks, "_JOINED_BYTES", 0)
        with pytest.raises(KeyboardInterrupt):
            la.fit_batches(interrupted(), num_data=15, resume=tmp_path)
    model.sizes.clear()
    la.fit_batches(data, num_data=15, resume=tmp_path)
    assert max(model.sizes) == 7
    torch.testing.assert_close(
        la.posterior.curvature.to_dense(),
        expected.posterior.curvature.to_dense(),
        rtol=1e-10,
        atol=1e-14,
    )


def test_the_factor_that_weight_and_bias_share_is_decomposed_once(model, monkeypatch):
    decomposed = []
    original = eigenbases.descending_eigenpairs_of_each

    def descending_eigenpairs_of_each(factors, description):
        decomposed.extend(factors)
        return original(factors, description)

    monkeypatch.setattr(eigenbases, "descending_eigenpairs_of_each", descending_eigenpairs_of_each)
    la = Laplace(model, fisher="mc").fit(batches([8]))
    # G of both layers, A of both weights, and A of both biases, which is one number.
    assert sorted(len(factor) for factor in decomposed) == [1, 1, 3, 5, 7, 7]
    dense = la.posterior.curvature.to_dense()
    weight = torch.arange(3 * 7) + 5 * 7 + 7
    bias = weight[-1] + 1 + torch.arange(3)
    # The weight's block is G ⊗ A, the bias's is G.
    blocks = dense[weight][:, weight].view(3, 7, 3, 7)
    A = blocks.diagonal(dim1=0, dim2=2).sum(-1)
    G = dense[bias][:, bias]
    torch.testing.assert_close(
        dense[weight][:, weight] * G.trace(), torch.kron(G, A), rtol=1e-10, atol=1e-14
    )
