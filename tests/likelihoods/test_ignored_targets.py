"""Data without any counted target are refused everywhere; single batches may have none."""

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


ALL_IGNORED = batch(seed=1, ignored=True)
COUNTED = batch(seed=2)


def fits(la):
    """Fits of data without a target, by the name of the data in the error message."""
    return {
        "data": [
            lambda: la.fit([ALL_IGNORED, ALL_IGNORED]),
            lambda: la.fit([ALL_IGNORED, COUNTED], mode="mini", num_data=16),
            lambda: la.fit([ALL_IGNORED, COUNTED], mode="crossfit", num_data=16),
            lambda: la.fit_batches([ALL_IGNORED], folds=2),
        ],
        "batches of the magnitudes": [
            lambda: la.fit([COUNTED, ALL_IGNORED], mode="debiased", num_data=16),
            lambda: la.fit_batches([COUNTED], [ALL_IGNORED, ALL_IGNORED]),
        ],
        "batches of the directions": [
            lambda: la.fit([ALL_IGNORED, COUNTED], mode="debiased", num_data=16)
        ],
    }


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_fit_of_no_target_is_refused_and_leaves_the_posterior_as_it_was(curvature):
    la = Laplace(network(), curvature=curvature).fit_batches([COUNTED])
    posterior_before = la.posterior
    for data_name, fits_of_data in fits(la).items():
        if curvature == "diag" and data_name == "batches of the directions":
            continue  # The directions are the coordinate axes, so these batches are not read.
        for fit in fits_of_data:
            with pytest.raises(ValueError, match=rf"targets of the {data_name} .*-100. {IGNORED}"):
                fit()
    assert la.posterior is posterior_before


@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
def test_every_fisher_needs_a_target(fisher):
    la = Laplace(network(), fisher=fisher)
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([ALL_IGNORED])


@pytest.mark.parametrize("curvature", CURVATURES)
def test_an_ignored_batch_among_others_adds_examples_and_no_curvature(curvature):
    """C is a mean over all N examples, of which the ignored ones have no loss."""
    model = network()
    la = Laplace(model, curvature=curvature).fit(
        DataLoader(
            TensorDataset(*map(torch.cat, zip(ALL_IGNORED, COUNTED, strict=True))), batch_size=8
        )
    )
    alone = Laplace(model, curvature=curvature).fit_batches([COUNTED])
    assert (la.num_data, alone.num_data) == (16, 8)
    actual = la.posterior.precision.to_dense()
    expected = alone.posterior.precision.to_dense()
    if curvature != "kfac":  # N·C is a sum over examples; K-FAC's is a product of two means.
        torch.testing.assert_close(actual.trace(), expected.trace(), rtol=1e-9, atol=1e-9)
    if curvature in ("diag", "lowrank", "full"):  # EKFAC's directions depend on the inputs, too.
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    nll = F.cross_entropy(model(COUNTED[0]), COUNTED[1], reduction="sum").item()
    assert la.fitted.nll == pytest.approx(nll, rel=1e-12)
    # A fold may be empty of targets, too.
    x, y = COUNTED
    la.fit_batches([(x, torch.where(torch.arange(8) % 2 == 0, y, -100))], folds=2)


def test_predictions_are_scored_where_targets_count():
    la = Laplace(network()).fit_batches([COUNTED])
    delta_before = la.prior_precision
    for metric in ("nll", "brier"):
        with pytest.raises(ValueError, match=rf"loader {IGNORED}, so there is nothing to tune on"):
            la.tune([ALL_IGNORED, ALL_IGNORED], metric=metric)
        actual = la.tune([ALL_IGNORED, COUNTED], metric, grid=[0.5, 3.0]).table
        expected = la.tune([COUNTED], metric, grid=[0.5, 3.0]).table
        assert actual == expected
        la.prior_precision = delta_before
    with pytest.raises(ValueError, match=rf"loader {IGNORED}, so there is nothing to evaluate"):
        la.evaluate([ALL_IGNORED])
    assert la.evaluate([ALL_IGNORED, COUNTED]) == la.evaluate([COUNTED])


@pytest.mark.parametrize("positions", [(4,), (2, 3)])
def test_positions(positions):
    all_ignored = batch(5, 3, True, positions)
    counted = batch(5, 3, False, positions)
    counted[1].flatten()[1:] = -100  # One position of one example is enough.
    la = Laplace(network())
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([all_ignored])
    la.fit_batches([all_ignored, counted])
    assert la.posterior.curvature.to_dense().abs().max() > 0
    with pytest.raises(ValueError, match=IGNORED):
        la.evaluate([all_ignored])
    log_probs = la.predict(counted[0]).logits.log_softmax(-1).flatten(0, -2)[0]
    expected = -log_probs[counted[1].flatten()[0]].item()
    assert la.evaluate([all_ignored, counted])["nll"] == pytest.approx(expected, rel=1e-6)
    assert la.tune([all_ignored, counted], grid=[1.0]).value == pytest.approx(expected, rel=1e-6)


def test_another_ignore_index_is_named():
    x, y = COUNTED
    la = Laplace(network(), Categorical(ignore_index=2))
    with pytest.raises(ValueError, match=r"ignore_index=2\)"):
        la.fit_batches([(x, torch.full_like(y, 2))])


def test_multi_label_targets_are_ignored_by_the_example():
    x, _ = COUNTED
    y = (torch.arange(24).reshape(8, 3) % 2).double()
    all_ignored = torch.full_like(y, -100)
    la = Laplace(network(), "multilabel")
    with pytest.raises(ValueError, match=IGNORED):
        la.fit_batches([(x, all_ignored)])
    half = torch.where(torch.arange(8)[:, None] < 4, y, all_ignored)
    la.fit_batches([(x, half)])
    alone = Laplace(network(), "multilabel", curvature="full").fit_batches([(x[:4], y[:4])])
    with_ignored = Laplace(network(), "multilabel", curvature="full").fit_batches([(x, half)])
    actual = with_ignored.posterior.precision.to_dense()
    expected = alone.posterior.precision.to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert with_ignored.fitted.nll == pytest.approx(alone.fitted.nll, rel=1e-12)
    expected = with_ignored.evaluate([(x[:4], y[:4])])
    assert with_ignored.evaluate([(x, half)]) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=IGNORED):
        with_ignored.tune([(x, all_ignored)])
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
    x = torch.randn(4, 3).double()
    y = torch.tensor([156, 156, 3, 156])
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
    x = torch.randn(6, 3, *positions)
    y = torch.randint(5, (6, *positions))
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
