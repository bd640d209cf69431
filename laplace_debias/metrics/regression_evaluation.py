"""All metrics of one predictive of real numbers at once."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from laplace_debias.metrics.evaluation import nll_of_log_probs, separation
from laplace_debias.metrics.regression import (
    Real,
    check_gaussian,
    crps,
    gaussian_interval,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_width,
    quantile_calibration_error,
    quantile_levels,
)
from laplace_debias.metrics.report import Report, report_of
from laplace_debias.metrics.statistics import Mean, Proportion, Resampled, Sampling, Statistic

_NUM_LEVELS = 99


def evaluate_regression(
    mean: Real,
    standard_deviation: Real,
    targets: Real,
    ood: Mapping[str, Float[Tensor, "..."]] | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    intervals: bool = True,
    level: float = 0.95,
    num_resamples: int = 500,
    seed: int = 0,
) -> Report:
    """Errors and calibration of a Gaussian predictive; separation of OOD examples by its variance.

    Args:
        mean: `[n]` or `[n, outputs]`.
        standard_deviation: Of the same shape, positive, the noise included.
        targets: Of the same shape.
        ood: By the name of each out-of-distribution set, the standard deviations predicted on it,
            `[m]` or `[m, outputs]`.
        log_probs: Log-densities of the targets of each example, `[n]`, where outputs are
            correlated; by default the sum over the outputs of each alone.
        intervals: Whether to make confidence intervals.
        level: Coverage that they aim at, and of the predictive's intervals that `coverage` and
            `width` measure.
        num_resamples: Draws, for the metrics whose interval needs them.
        seed: Of these draws; torch's generators are left alone.

    Returns:
        `nll` (nats per example), `rmse`, `crps` and `width` (units of the targets), `coverage` (the
        share of targets in the central interval of probability `level`; compare it with `level`),
        `quantile_calibration_error` (99 levels); for each out-of-distribution set `auroc_<name>`,
        `aupr_<name>`, `fpr95_<name>` and `aupr_in_<name>` by the mean variance of an example.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: Values are not finite, shapes do not fit, or a standard deviation is not
            positive; as `evaluate`.
    """
    how = Sampling(level, num_resamples, seed)
    check_gaussian(mean, standard_deviation, targets)
    root = rmse_statistic(mean, targets)
    mean, standard_deviation, targets = mean.double(), standard_deviation.double(), targets.double()
    statistics: dict[str, Statistic] = {}
    if log_probs is None:
        log_probs = -_per_example(
            gaussian_nll(mean, standard_deviation, targets, reduction="none"), "sum"
        )
    statistics["nll"] = nll_of_log_probs(log_probs, len(mean))
    statistics["rmse"] = root
    scores = crps(mean, standard_deviation, targets, reduction="none")
    statistics["crps"] = Mean(scores.mean().item(), _per_example(scores), lowest=0)
    ends = gaussian_interval(mean, standard_deviation, level)
    inside = interval_coverage(*ends, targets, reduction="none")
    is_single = inside.numel() == len(inside)
    covered = inside.mean().item()
    shares = _per_example(inside)
    statistics["coverage"] = (
        Proportion(covered, shares) if is_single else Mean(covered, shares, lowest=0)
    )
    widths = interval_width(*ends, reduction="none")
    statistics["width"] = Mean(widths.mean().item(), _per_example(widths), lowest=0)
    statistics["quantile_calibration_error"] = _quantile_calibration(
        gaussian_pit(mean, standard_deviation, targets)
    )
    variances = {}
    for name, deviation in (ood or {}).items():
        check_gaussian(deviation, deviation)
        variances[name] = _per_example(deviation.double().square())
    statistics |= separation(_per_example(standard_deviation.square()), variances)
    return report_of(statistics, targets, how if intervals else None)


def rmse_statistic(mean: Real, targets: Real) -> Statistic:
    """`rmse`, the root of a mean."""
    squares = (mean - targets).square().double()
    return Mean(squares.mean().sqrt().item(), _per_example(squares), squared=True)


def _quantile_calibration(pit: Real) -> Statistic:
    levels = quantile_levels(_NUM_LEVELS, pit)
    below = (pit.flatten(1)[:, :, None] if pit.ndim > 1 else pit[:, None, None]) <= levels
    table = (below.double() - levels).mean(1).float() / len(pit)
    return Resampled(
        quantile_calibration_error(pit, _NUM_LEVELS).item(),
        (len(pit),),
        lambda counts: (counts @ table).abs().mean(1),
        table.device,
        highest=0.5,
    )


def _per_example(values: Real, how: str = "mean") -> Float[Tensor, " n"]:
    flat = values.flatten(1) if values.ndim > 1 else values[:, None]
    return flat.mean(1) if how == "mean" else flat.sum(1)
