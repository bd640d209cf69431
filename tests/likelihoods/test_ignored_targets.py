"""Data in which no target counts tell nothing: every use of them is refused, batches may pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature.losses.likelihoods import Categorical, MultiLabel

CURVATURES = ("kfac", "ekfac", "diag", "lowrank", "full")
IGNORED = "are ignored"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def batch(size=8, seed=0, ignored=False, positions=()):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *positions, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (size, *positions), generator=generator)
    return x, torch.full_like(y, -100) if ignored else y


NOTHING, SOME = batch(seed=1, ignored=True), batch(seed=2)


def fits(la):
    """Every fit of data without a target, by what must be said of it."""
    return {
        "data": [
            lambda: la.fit([NOTHING, NOTHING]),
            lambda: la.fit([NOTHING, SOME], mode="mini", num_data=16),
            lambda: la.fit([NOTHING, SOME], mode="crossfit", num_data=16),
            lambda: la.fit_batches([NOTHING], folds=2),
        ],
        "batches of the magnitudes": [
            lambda: la.fit([SOME, NOTHING], mode="debiased", num_data=16),
            lambda: la.fit_batches([SOME], [NOTHING, NOTHING]),
        ],
        "batches of the directions": [
            lambda: la.fit([NOTHING, SOME], mode="debiased", num_data=16)
        ],
    }


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_fit_of_no_target_is_refused_and_leaves_the_posterior_as_it_was(curvature):
    la = Laplace(network(), curvature=curvature).fit_batches([SOME])
    before = la.posterior
    for what, ways in fits(la).items():
        if curvature == "diag" and what == "batches of the directions":
            continue  # Nothing is read of them: the coordinate axes are nobody's choice.
        for fit in ways:
            with pytest.raises(ValueError, match=rf"targets of the {what} .*-100. {IGNORED}"):
                fit()
    assert la.posterior is before


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_every_fisher_needs_a_target(fisher):
    la = Laplace(network(), fisher=fisher)
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([NOTHING])


@pytest.mark.parametrize("curvature", CURVATURES)
def test_an_ignored_batch_among_others_adds_examples_and_no_curvature(curvature):
    """C is a mean over all N examples, of which the ignored ones have no loss."""
    model = network()
    la = Laplace(model, curvature=curvature).fit(
        DataLoader(TensorDataset(*map(torch.cat, zip(NOTHING, SOME, strict=True))), batch_size=8)
    )
    alone = Laplace(model, curvature=curvature).fit_batches([SOME])
    assert (la.num_data, alone.num_data) == (16, 8)
    one, two = (fit.posterior.precision.to_dense() for fit in (la, alone))
    if curvature != "kfac":  # N·C is a sum over examples; K-FAC's is a product of two means.
        torch.testing.assert_close(one.trace(), two.trace(), rtol=1e-9, atol=1e-9)
    if curvature in ("diag", "lowrank", "full"):  # EKFAC's directions depend on the inputs, too.
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    nll = F.cross_entropy(model(SOME[0]), SOME[1], reduction="sum").item()
    assert la.fitted.nll == pytest.approx(nll, rel=1e-12)
    # A fold may be empty of targets, too.
    x, y = SOME
    la.fit_batches([(x, torch.where(torch.arange(8) % 2 == 0, y, -100))], folds=2)


def test_predictions_are_scored_where_targets_count():
    la = Laplace(network()).fit_batches([SOME])
    before = la.prior_precision
    for metric in ("nll", "brier"):
        with pytest.raises(ValueError, match=rf"loader {IGNORED}, so there is nothing to tune on"):
            la.tune([NOTHING, NOTHING], metric=metric)
        one, two = (
            la.tune(data, metric, grid=[0.5, 3.0]).table for data in ([NOTHING, SOME], [SOME])
        )
        assert one == two
        la.prior_precision = before
    with pytest.raises(ValueError, match=rf"loader {IGNORED}, so there is nothing to evaluate"):
        la.evaluate([NOTHING])
    assert la.evaluate([NOTHING, SOME]) == la.evaluate([SOME])


@pytest.mark.parametrize("positions", [(4,), (2, 3)])
def test_positions(positions):
    nothing, some = (batch(5, 3, ignored, positions) for ignored in (True, False))
    some[1].flatten()[1:] = -100  # One position of one example is enough.
    la = Laplace(network())
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([nothing])
    la.fit_batches([nothing, some])
    assert la.posterior.curvature.to_dense().abs().max() > 0
    with pytest.raises(ValueError, match=IGNORED):
        la.evaluate([nothing])
    log_probs = la.predict(some[0]).logits.log_softmax(-1).flatten(0, -2)[0]
    expected = -log_probs[some[1].flatten()[0]].item()
    assert la.evaluate([nothing, some])["nll"] == pytest.approx(expected, rel=1e-6)
    assert la.tune([nothing, some], grid=[1.0]).value == pytest.approx(expected, rel=1e-6)


def test_another_ignore_index_is_named():
    x, y = SOME
    la = Laplace(network(), Categorical(ignore_index=2))
    with pytest.raises(ValueError, match=r"ignore_index=2\)"):
        la.fit_batches([(x, torch.full_like(y, 2))])


def test_multi_label_targets_are_ignored_by_the_example():
    x, _ = SOME
    y = (torch.arange(24).reshape(8, 3) % 2).double()
    nothing = torch.full_like(y, -100)
    la = Laplace(network(), "multilabel")
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([(x, nothing)])
    half = torch.where(torch.arange(8)[:, None] < 4, y, nothing)
    la.fit_batches([(x, half)])
    alone = Laplace(network(), "multilabel", curvature="full").fit_batches([(x[:4], y[:4])])
    both = Laplace(network(), "multilabel", curvature="full").fit_batches([(x, half)])
    one, two = (fit.posterior.precision.to_dense() for fit in (both, alone))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert both.fitted.nll == pytest.approx(alone.fitted.nll, rel=1e-12)
    expected = both.evaluate([(x[:4], y[:4])])
    assert both.evaluate([(x, half)]) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=IGNORED):
        both.tune([(x, nothing)])
    half[5, 1] = 1.0
    with pytest.raises(ValueError, match="only some labels are known"):
        la.fit_batches([(x, half)])


@pytest.mark.parametrize("likelihood", [Categorical(), MultiLabel()])
def test_a_class_is_not_ignored_because_its_number_wraps_around(likelihood):
    """In uint8 the number −100 is 156."""
    label = torch.tensor([156], dtype=torch.uint8)
    rows = label if isinstance(likelihood, Categorical) else label[:, None]
    assert likelihood.counted(rows).tolist() == [True]


def test_class_156_in_bytes_is_a_class():
    model = nn.Sequential(nn.Linear(3, 160)).double().eval()
    x, y = torch.randn(4, 3).double(), torch.tensor([156, 156, 3, 156])
    la = Laplace(model, curvature="diag", fisher="empirical")
    expected = la.fit_batches([(x, y)]).posterior.precision.to_dense()
    actual = la.fit_batches([(x, y.byte())]).posterior.precision.to_dense()
    assert torch.equal(actual, expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize(("convolution", "positions"), [(nn.Conv2d, (8, 8)), (nn.Conv1d, (7,))])
def test_outputs_with_the_classes_first_are_refused_with_ignored_targets_too(
    convolution, positions, is_ignored
):
    torch.manual_seed(0)
    model = nn.Sequential(convolution(3, 4, 3, padding=1), nn.ReLU(), convolution(4, 5, 1)).eval()
    x, y = torch.randn(6, 3, *positions), torch.randint(5, (6, *positions))
    if is_ignored:
        y[:, 0] = -100
    with pytest.raises(ValueError, match=r"Targets of shape .* use class_dim=1"):
        Laplace(model).fit([(x, y)])
    Laplace(model, class_dim=1).fit([(x, y)])


@pytest.mark.usefixtures("unchecked")
def test_a_label_per_position_of_a_pooled_model_is_refused_with_ignored_targets_too():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 5)
    ).eval()
    y = torch.randint(5, (6, 7))
    y[:, 0] = -100
    with pytest.raises(ValueError, match="must be one class label per example"):
        Laplace(model).fit([(torch.randn(6, 3, 7), y)])
