"""Ways to fit as values: what they fit, and that a new one is a class."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from torch import nn

from laplace_debias import CrossFit, Full, Laplace, Split
from laplace_debias.curvature.data.batches import consecutive
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.laplace.fitting.schemes import Scheme


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def batch(seed, size=8):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=g)


A, B = [batch(0)], [batch(1)]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
@pytest.mark.parametrize(
    ("scheme", "arguments", "options"),
    [(Full(A), (A,), {}), (Split(A, B), (A, B), {}), (CrossFit(A, 4), (A,), {"folds": 4})],
    ids=["full", "split", "crossfit"],
)
def test_a_scheme_fits_what_the_arguments_say(model, curvature, scheme, arguments, options):
    by_scheme = Laplace(model, curvature=curvature).fit(scheme, num_data=100)
    by_arguments = Laplace(model, curvature=curvature).fit_batches(
        *arguments, num_data=100, **options
    )
    eye = torch.eye(len(by_scheme.mean), dtype=torch.float64)
    assert torch.equal(by_scheme.posterior.precision @ eye, by_arguments.posterior.precision @ eye)
    assert by_scheme.num_data == by_arguments.num_data == 100
    assert repr(by_scheme) == repr(by_arguments)


def test_modes_are_short_for_schemes(model):
    loader = [batch(0), batch(1), batch(2)]
    split = Laplace(model).fit(Split(loader[:1], loader[1:2]), num_data=24)
    mode = Laplace(model).fit(loader, mode="debiased", num_data=24)
    assert torch.equal(split.posterior.curvature.blocks["0.weight"].magnitudes,
                       mode.posterior.curvature.blocks["0.weight"].magnitudes)  # fmt: skip


def test_without_num_data_n_is_what_was_seen(model):
    assert Laplace(model).fit(Split(A, B)).num_data == 16


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diag", "lowrank", "full"])
def test_cross_fitting_takes_two_folds_unless_it_is_told(model, curvature):
    x, y = batch(0, size=6)
    loader = [(x, y)]
    la = Laplace(model, curvature=curvature)
    eye = torch.eye(len(la.fit(Full(loader)).mean), dtype=torch.float64)
    for folds, expected in ((None, 2), (3, 3)):
        precision = (
            la.fit(loader, mode="crossfit", num_data=50, folds=folds).posterior.precision @ eye
        )
        la.fit_batches(loader, folds=expected, num_data=50)
        assert torch.equal(precision, la.posterior.precision @ eye)


def test_a_batch_of_two_examples_can_be_cross_fitted(model):
    la = Laplace(model).fit([batch(0, size=2)], mode="crossfit", num_data=50)
    assert la.predict(batch(1)[0]).probs.isfinite().all()
    with pytest.raises(ValueError, match="at least two examples, but the data contains only one"):
        Laplace(model).fit([batch(0, size=1)], mode="crossfit", num_data=50)


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "full", "lowrank"])
def test_labels_of_the_magnitudes_are_not_those_of_the_directions(model, curvature, monkeypatch):
    """The labels of the magnitudes are drawn for the examples after those of the directions."""
    indices = []
    original = Cotangents.__call__

    def watched(cotangents, outputs, targets, first_index, *arguments):
        indices.extend(range(first_index, first_index + len(outputs)))
        return original(cotangents, outputs, targets, first_index, *arguments)

    monkeypatch.setattr(Cotangents, "__call__", watched)
    la = Laplace(model, curvature=curvature, fisher="mc")
    la.fit(Split([batch(0), batch(1, 5)], [batch(2), batch(3)]), num_data=100)
    assert indices == list(range(29))


@pytest.mark.parametrize("mode", ["full", "mini", "debiased"])
def test_folds_belong_to_cross_fitting(model, mode):
    with pytest.raises(ValueError, match='`folds=2` applies only to mode="crossfit"'):
        Laplace(model).fit([batch(0), batch(1)], mode=mode, num_data=50, folds=2)


@pytest.mark.parametrize("options", [{"folds": 2}, {"mode": "mini"}], ids=str)
def test_what_a_scheme_says_itself_is_refused(model, options):
    with pytest.raises(ValueError, match=r"Split\(...\) already defines the mode. Remove `mode="):
        Laplace(model).fit(Split(A, B), **options)


@pytest.mark.parametrize(("data", "mode"), [([*A, *B], "debiased"), (Split(A, B), "full")])
def test_progress_is_shown_of_all_that_a_fit_reads(model, capsys, data, mode):
    Laplace(model).fit(data, mode, 50, progress=True)
    assert capsys.readouterr().err.count("0/1") == 2


def test_illegal_combinations_cannot_be_written(model):
    with pytest.raises(TypeError):
        Full(A, B)
    with pytest.raises(TypeError):
        Split(A)
    with pytest.raises(FrozenInstanceError):
        Full(A).data = B
    with pytest.raises(ValueError, match="Remove `magnitudes="):
        Laplace(model).fit_batches(A, B, folds=2)


def test_an_iterator_is_refused_where_it_is_read_twice(model):
    with pytest.raises(TypeError, match="needs two passes over the data"):
        Laplace(model, curvature="ekfac").fit(Full(iter(A)))
    Laplace(model, curvature="kfac").fit(Full(iter(A)))


@dataclass(frozen=True)
class EveryOther(Scheme):
    """A user's scheme: directions from the batches of even numbers, magnitudes from the others."""

    label = "every other"
    data: list

    @property
    def sources(self):
        return {"data": self.data}

    def fit(self, prepared):
        (stream,) = prepared.streams
        batches = list(stream)
        even, odd = consecutive(batches[::2]), consecutive(batches[1::2])
        return prepared.config.structure.fit(prepared.context, even, odd)


def test_a_new_way_to_fit_is_one_class(model):
    batches = [batch(seed) for seed in range(4)]
    custom = Laplace(model).fit(EveryOther(batches), num_data=50)
    split = Laplace(model).fit(Split(batches[::2], batches[1::2]), num_data=50)
    for name, block in custom.posterior.curvature.blocks.items():
        assert torch.equal(block.magnitudes, split.posterior.curvature.blocks[name].magnitudes)
    assert "every other" in repr(custom)
