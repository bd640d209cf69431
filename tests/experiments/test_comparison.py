"""Properties of the comparison of posteriors, and of its distances and findings."""

import math
from dataclasses import replace

import pytest
import torch
from small_cifar import GRID, SETTINGS
from torch import nn

from laplace_debias import Laplace, metrics
from laplace_debias.experiments.posteriors.comparison import METHODS, compare
from laplace_debias.experiments.posteriors.comparison_report import (
    findings,
)
from laplace_debias.experiments.posteriors.distances import distances_by_precision
from laplace_debias.experiments.shared.methods import DEBIASED, FULL, MAP, MINI
from laplace_debias.problems import (
    Recipe,
    digits,
    train,
)

SPLIT = digits()
TRAIN = SPLIT.train.subset(range(80))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    ).eval()


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    model = small_net()
    recipe = Recipe(batch_size=20, cycles=((8, 0.1),))
    train(model, TRAIN, recipe, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def result(model):
    return compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)


def rows_of(rows, method, draw=0):
    return [row for row in rows if (row["method"], row["draw"]) == (method, draw)]


# --- the comparison ------------------------------------------------------------------------------


def test_every_method_draw_and_prior_precision_has_one_row(result):
    expected = [(MAP, 0, None)]
    expected += [(MINI, draw, delta) for draw in range(2) for delta in GRID]
    expected += [(DEBIASED, draw, delta) for draw in range(2) for delta in GRID]
    expected += [(FULL, 0, delta) for delta in GRID]
    assert [(r["method"], r["draw"], r["prior_precision"]) for r in result.sweep] == expected


def test_tuned_rows_cover_every_severity_once(result):
    found = [(row["method"], row["draw"], row["severity"]) for row in result.tuned]
    draws = {MAP: 1, MINI: 2, DEBIASED: 2, FULL: 1}
    assert found == [(m, d, s) for m in METHODS for d in range(draws[m]) for s in (0, 2, 5)]
    assert all((row["auroc"] is None) == (row["severity"] == 0) for row in result.tuned)


def test_same_settings_give_the_same_result(model, result):
    again = compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)
    assert again.sweep == result.sweep
    assert again.tuned == result.tuned
    assert again.distances == result.distances


def test_another_seed_draws_other_examples(model, result):
    other = compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, seed=1, draws=1))
    assert rows_of(other.sweep, MINI) != rows_of(result.sweep, MINI)


def test_results_do_not_depend_on_the_evaluation_batch_size(model, result):
    other = compare(
        model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, eval_batch_size=7, draws=1)
    )
    for method in METHODS:
        for one, two in zip(
            rows_of(result.sweep, method), rows_of(other.sweep, method), strict=True
        ):
            assert one["nll"] == pytest.approx(two["nll"], rel=1e-4)


def test_mini_batch_and_debiased_see_the_same_examples(model, monkeypatch):
    calls = []
    fit_batches = Laplace.fit_batches

    def spy(self, directions, magnitudes=None, **options):
        directions = list(directions)
        calls.append((directions, magnitudes, options["num_data"]))
        return fit_batches(self, directions, magnitudes, **options)

    monkeypatch.setattr(Laplace, "fit_batches", spy)
    compare(model, TRAIN, SPLIT.val, SPLIT.test, SETTINGS)
    *pairs, full = calls
    assert len(pairs) == 2 * SETTINGS.draws
    for mini, debiased in zip(pairs[::2], pairs[1::2], strict=True):
        ((images, labels),), none, _ = mini
        assert none is None
        assert len(labels) == 2 * SETTINGS.batch_size
        ((first, first_labels),), ((second, second_labels),), _ = debiased
        assert len(first) == len(second) == SETTINGS.batch_size
        assert torch.equal(torch.cat([first, second]), images)
        assert torch.equal(torch.cat([first_labels, second_labels]), labels)
    assert not torch.equal(pairs[0][0][0][0], pairs[2][0][0][0])
    assert sum(len(labels) for _, labels in full[0]) == SETTINGS.full_examples
    assert full[1] is None
    assert {num_data for _, _, num_data in calls} == {len(TRAIN)}


def test_full_batch_rows_are_those_of_a_posterior_fitted_and_tuned_by_hand(model):
    settings = replace(SETTINGS, full_examples=None, validation_examples=None, test_examples=None)
    found = compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(settings, draws=1, severities=()))
    la = Laplace(model, params="weights").fit_batches([TRAIN.tensors()], num_data=len(TRAIN))
    images, labels = SPLIT.test.tensors()
    for row in rows_of(found.sweep, FULL):
        la.prior_precision = row["prior_precision"]
        probs = la.predict(images).probs
        assert row["nll"] == pytest.approx(metrics.nll(probs, labels).item(), rel=1e-4)
        assert row["brier"] == pytest.approx(metrics.brier(probs, labels).item(), rel=1e-4)
        assert row["accuracy"] == pytest.approx(metrics.accuracy(probs, labels).item(), abs=0.003)
    tuning = la.tune([SPLIT.val.tensors()], grid=torch.tensor(GRID))
    (tuned,) = rows_of(found.tuned, FULL)
    assert tuned["prior_precision"] == pytest.approx(tuning.prior_precision)
    assert tuned["validation_nll"] == pytest.approx(tuning.value, rel=1e-4)
    assert found.num_full == found.num_data == len(TRAIN)


def test_tuned_prior_precision_has_the_least_validation_nll(result):
    for row in result.tuned:
        candidates = rows_of(result.sweep, row["method"], row["draw"])
        best = min(candidates, key=lambda candidate: candidate["validation_nll"])
        of_point = ["prior_precision", "validation_nll"]
        if row["severity"] == 0:
            of_point += ["nll", "ece", "accuracy", "brier"]
        assert [row[key] for key in of_point] == [best[key] for key in of_point]


def test_map_does_not_depend_on_prior_precisions_or_batches(model, result):
    settings = replace(SETTINGS, prior_precisions=(7.0,), batch_size=2, draws=1)
    other = compare(model, TRAIN, SPLIT.val, SPLIT.test, settings)
    assert rows_of(other.sweep, MAP) == rows_of(result.sweep, MAP)
    assert rows_of(other.tuned, MAP) == rows_of(result.tuned, MAP)


def test_a_large_prior_precision_gives_map_predictions(model):
    settings = replace(SETTINGS, prior_precisions=(1e9,), draws=1)
    found = compare(model, TRAIN, SPLIT.val, SPLIT.test, settings)
    (trained,) = rows_of(found.sweep, MAP)
    assert all(row["nll"] == pytest.approx(trained["nll"], rel=1e-4) for row in found.sweep)


def test_reliability_holds_the_tuned_predictions_of_the_first_draw(result):
    for method in METHODS:
        probs, labels = result.reliability[method]
        (clean, *_) = rows_of(result.tuned, method)
        assert metrics.nll(probs, labels).item() == clean["nll"]


def test_what_the_user_had_is_left_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    during = []
    hook = model.register_forward_hook(lambda *_: during.append(torch.get_num_threads()))
    compare(
        model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, num_threads=threads + 1, draws=1)
    )
    hook.remove()
    assert set(during) == {threads + 1}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"draws": 0}, "draws is 0"),
        ({"test_examples": 0}, "test_examples is 0"),
        ({"prior_precisions": ()}, "prior_precisions"),
        ({"prior_precisions": (1.0, -1.0)}, "prior_precisions"),
        ({"prior_precisions": (1.0, math.inf)}, "prior_precisions"),
        ({"prior_precisions": (2.0, 1.0)}, "ascend"),
        ({"prior_precisions": (2.0, 2.0)}, "ascend"),
        ({"distance_range": (5.0, 6.0)}, "distance_range"),
        ({"severities": (0,)}, "severities"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"full_examples": 81}, "full_examples is 81; there are 80"),
        ({"test_examples": 501}, "test_examples is 501; there are 500"),
        ({"ood_examples": 41}, "ood_examples is 41; there are 40"),
        ({"batch_size": 41}, "asks for 82 training images"),
    ],
)
def test_more_examples_than_there_are_is_refused(model, changes, named):
    with pytest.raises(ValueError, match=named):
        compare(model, TRAIN, SPLIT.val, SPLIT.test, replace(SETTINGS, **changes))


# --- distances -----------------------------------------------------------------------------------


def measured(method, draw, delta, nll):
    return {"method": method, "draw": draw, "prior_precision": delta, "nll": nll}


SWEEP = [
    measured(MAP, 0, None, 9.0),
    *(measured(FULL, 0, delta, nll) for delta, nll in ((0.1, 1.0), (1.0, 2.0), (10.0, 4.0))),
    *(measured(MINI, 0, delta, nll) for delta, nll in ((0.1, 1.5), (1.0, 2.2), (10.0, 4.1))),
    *(measured(MINI, 1, delta, nll) for delta, nll in ((0.1, 0.9), (1.0, 2.4), (10.0, 9.0))),
    *(measured(DEBIASED, 0, delta, nll) for delta, nll in ((0.1, 1.2), (1.0, 1.9), (10.0, 4.0))),
    *(measured(DEBIASED, 1, delta, nll) for delta, nll in ((0.1, 0.9), (1.0, 2.0), (10.0, 4.0))),
]


def test_distances_equal_those_worked_out_by_hand():
    low, middle, overall = distances_by_precision(SWEEP, (0.1, 1.0))
    assert [row.prior_precision for row in (low, middle, overall)] == [0.1, 1.0, None]
    assert (low.mini, low.debiased) == pytest.approx((0.3, 0.15))
    assert (middle.mini, middle.debiased) == pytest.approx((0.3, 0.05))
    assert (overall.mini, overall.debiased) == pytest.approx((0.3, 0.1))
    assert [row.ratio for row in (low, middle, overall)] == pytest.approx([1 / 2, 1 / 6, 1 / 3])
    # Two draws: the standard error of a mean is half their difference, and by the jackknife that of
    # a ratio is half the difference of the two ratios.
    assert (low.mini_se, low.debiased_se) == pytest.approx((0.2, 0.05))
    assert low.ratio_se == pytest.approx(abs(0.2 / 0.5 - 0.1 / 0.1) / 2)
    assert overall.mini_se == pytest.approx(abs(0.35 - 0.25) / 2)


def test_distances_are_over_the_whole_grid_by_default():
    rows = distances_by_precision(SWEEP)
    assert [row.prior_precision for row in rows] == [0.1, 1.0, 10.0, None]
    assert rows[2].ratio == 0
    assert rows[3].mini == pytest.approx((0.5 + 0.2 + 0.1 + 0.1 + 0.4 + 5.0) / 6)


def test_a_single_draw_has_no_standard_error():
    (row, *_) = distances_by_precision([r for r in SWEEP if r["draw"] == 0])
    assert row.mini_se is row.debiased_se is row.ratio_se is None


def test_distances_of_the_comparison_are_those_of_its_sweep(result):
    rows = distances_by_precision(result.sweep)
    assert rows == result.distances
    nll = {(r["method"], r["draw"], r["prior_precision"]): r["nll"] for r in result.sweep}
    by_hand = [abs(nll[MINI, draw, GRID[1]] - nll[FULL, 0, GRID[1]]) for draw in range(2)]
    assert rows[1].mini == pytest.approx(sum(by_hand) / 2)


def test_findings_name_methods_tuned_to_the_edge_of_the_grid(result):
    edge = {r["method"] for r in result.tuned if r["prior_precision"] in (GRID[0], GRID[-1])}
    told = " ".join(findings(result)[2:])
    assert all((method in told) == (method in edge) for method in METHODS)
