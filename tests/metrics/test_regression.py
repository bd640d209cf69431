"""Metrics of real-valued predictives against integrals, loops and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchmetrics.functional.regression import mean_squared_error

from laplace_debias import metrics


def predictive(shape=(200,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    deviation = 0.3 + torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, deviation, mean + 1.3 * deviation * noise


def test_gaussian_nll_equals_torch_distributions():
    mean, deviation, y = predictive((30, 2))
    expected = -torch.distributions.Normal(mean, deviation).log_prob(y)
    nll = metrics.gaussian_nll(mean, deviation, y, reduction="none")
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(metrics.gaussian_nll(mean, deviation, y), expected.mean())


def test_rmse_equals_torchmetrics():
    mean, _, y = predictive()
    torch.testing.assert_close(metrics.rmse(mean, y), mean_squared_error(mean, y, squared=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "metric",
    [
        metrics.gaussian_nll,
        metrics.crps,
        metrics.gaussian_pit,
        lambda mean, deviation, y: metrics.rmse(mean, y),
        lambda mean, deviation, y: metrics.interval_coverage(mean - deviation, mean + deviation, y),
        lambda mean, deviation, y: metrics.interval_width(-deviation, mean.abs() + deviation),
        lambda mean, deviation, y: metrics.interval_score(mean, mean + deviation, y, 0.99),
        lambda mean, deviation, y: metrics.pinball(mean, y, 0.95),
        lambda mean, deviation, y: metrics.gaussian_interval(mean, deviation)[1],
    ],
)
def test_half_precision_is_computed_in_single_precision(metric, dtype):
    """In half precision, squares above 65504 overflow, and a share such as 0.954 is rounded."""
    mean, deviation, y = (values.to(dtype) for values in predictive((1000,)))
    y[0] = 2000
    mean = torch.zeros_like(mean)
    value = metric(mean, deviation, y)
    assert value.dtype == torch.float32
    expected = metric(mean.double(), deviation.double(), y.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_crps_equals_the_integral_of_its_definition():
    mean, deviation, y = predictive((5,))
    t = np.linspace(-15, 15, 400_001)
    scores = metrics.crps(mean, deviation, y, reduction="none")
    for m, s, target, value in zip(mean, deviation, y, scores, strict=True):
        gaps = (stats.norm.cdf(t, m.item(), s.item()) - (t >= target.item())) ** 2
        assert value.item() == pytest.approx(np.trapezoid(gaps, t), abs=1e-4)
    assert metrics.crps(mean, torch.full_like(mean, 1e-9), y).item() == pytest.approx(
        (mean - y).abs().mean().item()
    )


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_have_their_probability_and_are_counted(level):
    mean, deviation, y = predictive()
    low, high = metrics.gaussian_interval(mean, deviation, level)
    expected = stats.norm.interval(level, mean.numpy(), deviation.numpy())
    np.testing.assert_allclose(torch.stack([low, high]), expected)
    inside = [bool(a <= t <= b) for a, b, t in zip(low, high, y, strict=True)]
    assert metrics.interval_coverage(low, high, y).item() == pytest.approx(np.mean(inside))
    assert metrics.interval_width(low, high).item() == pytest.approx((high - low).mean().item())


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_scores_and_pinball_losses_are_those_of_a_loop(level):
    mean, deviation, y = predictive((50, 2))
    low, high = metrics.gaussian_interval(mean, deviation, level)
    scores = metrics.interval_score(low, high, y, level, reduction="none")
    losses = metrics.pinball(high, y, level, reduction="none")
    for a, b, t, score, loss in zip(
        *(values.flatten().tolist() for values in (low, high, y, scores, losses)), strict=True
    ):
        penalty = 0.0
        if t < a:
            penalty = 2 / (1 - level) * (a - t)
        if t > b:
            penalty = 2 / (1 - level) * (t - b)
        assert score == pytest.approx(b - a + penalty)
        assert loss == pytest.approx(level * (t - b) if t > b else (1 - level) * (b - t))
    assert metrics.interval_score(low, high, y, level) == pytest.approx(scores.mean())
    assert metrics.pinball(high, y, level) == pytest.approx(losses.mean())


def test_pinball_losses_are_those_of_scikit_learn_and_add_up_to_the_interval_score():
    from sklearn.metrics import mean_pinball_loss

    mean, deviation, y = predictive()
    low, high = metrics.gaussian_interval(mean, deviation, 0.8)
    lower = metrics.pinball(low, y, 0.1).item()
    assert lower == pytest.approx(mean_pinball_loss(y.numpy(), low.numpy(), alpha=0.1))
    total = lower + metrics.pinball(high, y, 0.9).item()
    assert metrics.interval_score(low, high, y, 0.8).item() == pytest.approx(2 / 0.2 * total)


def test_interval_scores_are_those_of_mapie():
    mapie = pytest.importorskip("mapie.metrics.regression", reason="compares with MAPIE")
    mean, deviation, y = predictive()
    low, high = metrics.gaussian_interval(mean, deviation, 0.8)
    intervals = torch.stack([low, high], dim=1).unsqueeze(-1)
    expected = mapie.regression_mwi_score(y.numpy(), intervals.numpy(), 0.8)
    assert metrics.interval_score(low, high, y, 0.8).item() == pytest.approx(expected)


def test_ends_of_an_interval_belong_to_it():
    low = torch.zeros(3)
    high = torch.ones(3)
    y = torch.tensor([0.0, 1.0, 1.1])
    assert metrics.interval_coverage(low, high, y, reduction="none").tolist() == [1, 1, 0]


def test_quantile_calibration_error_equals_a_loop_over_quantiles():
    mean, deviation, y = predictive()
    pit = metrics.gaussian_pit(mean, deviation, y)
    gaps = []
    for k in range(1, 100):
        quantiles = stats.norm.ppf(k / 100, mean.numpy(), deviation.numpy())
        gaps.append(abs(np.mean(y.numpy() <= quantiles) - k / 100))
    assert metrics.quantile_calibration_error(pit).item() == pytest.approx(np.mean(gaps))
    assert metrics.quantile_calibration_error(torch.zeros(5)).item() == pytest.approx(0.5)
    uniform = (torch.arange(1000) + 0.5) / 1000
    assert metrics.quantile_calibration_error(uniform).item() < 1e-3
    with_one_quantile = metrics.quantile_calibration_error(torch.tensor([0.2, 0.4, 0.6]), 1)
    assert with_one_quantile.item() == pytest.approx(2 / 3 - 1 / 2)


def test_evaluate_gathers_the_single_metrics():
    mean, deviation, y = predictive((150, 2))
    report = metrics.evaluate_regression(mean, deviation, y, {"far": 3 * deviation[:99]}, level=0.8)
    ends = metrics.gaussian_interval(mean, deviation, 0.8)
    pit = metrics.gaussian_pit(mean, deviation, y)
    scores = [scale.square().mean(1) for scale in (deviation, 3 * deviation[:99])]
    expected = {
        "nll": 2 * metrics.gaussian_nll(mean, deviation, y).item(),
        "rmse": metrics.rmse(mean, y).item(),
        "bias": (mean - y).mean().item(),
        "scaled_error": ((mean - y) / deviation).square().mean().sqrt().item(),
        "crps": metrics.crps(mean, deviation, y).item(),
        "coverage": metrics.interval_coverage(*ends, y).item(),
        "width": metrics.interval_width(*ends).item(),
        "quantile_calibration_error": metrics.quantile_calibration_error(pit).item(),
        "auroc_far": metrics.auroc(*scores).item(),
        "aupr_far": metrics.aupr(*scores).item(),
        "fpr95_far": metrics.fpr95(*scores).item(),
        "aupr_in_far": metrics.aupr_in(*scores).item(),
    }
    assert {name: metric.value for name, metric in report.items()} == pytest.approx(expected)
    assert all(m.low <= m.value <= m.high for m in report.values() if m.is_known)


@pytest.mark.usefixtures("unchecked")
def test_a_joint_log_density_takes_the_place_of_independent_ones():
    mean, deviation, y = predictive((20, 2))
    report = metrics.evaluate_regression(mean, deviation, y, log_probs=torch.full((20,), -3.0))
    assert report["nll"].value == 3
    with pytest.raises(ValueError, match="`log_probs` has shape"):
        metrics.evaluate_regression(mean, deviation, y, log_probs=torch.zeros(19))


GOOD = torch.ones(3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.crps(GOOD, GOOD, GOOD[:2]), "`targets` has shape"),
        (lambda: metrics.crps(GOOD, 0 * GOOD, GOOD), "must be positive"),
        (lambda: metrics.gaussian_pit(GOOD, 0 * GOOD, GOOD), "must be positive"),
        (lambda: metrics.gaussian_pit(GOOD, GOOD, GOOD[:2]), "`targets` has shape"),
        (lambda: metrics.crps(GOOD, GOOD, GOOD / 0), "NaN or Inf"),
        (lambda: metrics.crps(GOOD.long(), GOOD, GOOD), "floating point"),
        (lambda: metrics.rmse(GOOD[:0], GOOD[:0]), "is empty"),
        (lambda: metrics.gaussian_interval(GOOD, GOOD, 95), "`level` is 95"),
        (lambda: metrics.interval_coverage(GOOD, 0 * GOOD, GOOD), "`high` is below `low`"),
        (lambda: metrics.interval_score(GOOD, 0 * GOOD, GOOD, 0.9), "`high` is below `low`"),
        (lambda: metrics.interval_score(GOOD, GOOD, GOOD, 90), "`level` is 90"),
        (lambda: metrics.pinball(GOOD, GOOD[:2], 0.5), "Squeeze or expand"),
        (lambda: metrics.pinball(GOOD, GOOD, 0.0), "`level` is 0"),
        (lambda: metrics.quantile_calibration_error(2 * GOOD), "`pit` has values from"),
        (lambda: metrics.quantile_calibration_error(GOOD, 0), "num_levels must be at least 1"),
        (lambda: metrics.gaussian_nll(GOOD, GOOD, GOOD, reduction="sum"), "`reduction` is 'sum'"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(TypeError, match="as_tensor"):
        metrics.rmse(math.pi, GOOD)
