"""Compute all metrics of one predictive at once."""

from collections.abc import Callable, Mapping

from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import (
    check_classification,
    check_examples,
    check_level,
    check_probs,
    check_real,
    check_same_device,
    check_score_pair,
    check_tensor,
)
from laplace_debias.metrics.definitions import (
    CLASSIFICATION_METRICS,
    EXACT_MATCH,
    MOMENT_METRICS,
    OOD_METRICS,
    REGRESSION_METRICS,
    nll_statistic,
    over_labels,
    per_example,
    share_statistic,
    width_statistic,
)
from laplace_debias.metrics.ood import entropy, label_entropy
from laplace_debias.metrics.regression import Real, check_gaussian, interval_width
from laplace_debias.metrics.report import Report, report_of
from laplace_debias.metrics.statistics import Statistic, with_examples

Sets = Mapping[str, Float[Tensor, "..."]]
Examples = Integer[Tensor, " n"]
ExamplesOfSets = Mapping[str, Integer[Tensor, "..."]]


def evaluate(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    ood: Sets | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    examples: Examples | None = None,
    ood_examples: ExamplesOfSets | None = None,
    intervals: bool = True,
    level: float = 0.95,
) -> Report:
    """Evaluate a classifier's probabilities: accuracy, calibration and OOD detection.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        ood: For each out-of-distribution set, by name, the predicted probabilities `[m, classes]`
            or `[m]`.
        log_probs: Log-probabilities of the labels, `[n]`. Pass them if they are more precise than
            `probs`; they are used for the NLL.
        examples: The number of the example of each row, `[n]`, if an example has several rows, such
            as the tokens of a sentence. Confidence intervals treat examples as independent, but not
            their rows. Default: each row is an example.
        ood_examples: The same for out-of-distribution sets, `[m]`, by name.
        intervals: Whether to compute confidence intervals.
        level: Nominal coverage of the confidence intervals.

    Returns:
        `accuracy`, `nll` (nats), `brier`, `overconfidence`, `ece` (15 bins), `mean_entropy` (nats,
        of `probs`), `ece_equal_mass`, `smooth_ece`, `mce`, `classwise_ece` and `aurc`; for each
        out-of-distribution set `auroc_<name>`, `aupr_<name>` (OOD positive), `fpr95_<name>` and
        `aupr_in_<name>` (ID positive). Each metric is a float with `.low` and `.high`, the ends of
        its confidence interval: Wilson's interval for a fraction, Hall's interval for a mean, and a
        t interval for the logit of an area (with DeLong's variance for the AUROC). The interval of
        the FPR95 also accounts for the uncertain threshold. The ends are NaN for the calibration
        errors, for which no valid interval is known.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If values are not probabilities, `labels` do not match them, an
            out-of-distribution set and `probs` differ in their classes or device, examples do not
            match their rows, or `level` is not between 0 and 1.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> report = evaluate(probs, torch.tensor([0, 1]), {"noise": torch.full((3, 2), 0.5)})
        >>> print(report["accuracy"])
        1.00 [0.34, 1.00]
        >>> report["accuracy"] == 1 and report["auroc_noise"] == 1
        True
    """
    probs, labels = check_classification(probs, labels)
    check_examples(examples, probs, "examples")
    ood_probs = _checked_sets(ood, probs, check_probs, "classes")
    statistics = {metric.name: metric.statistic(probs, labels) for metric in CLASSIFICATION_METRICS}
    if log_probs is not None:
        statistics["nll"] = _nll_of_log_probs(log_probs, len(labels))
    statistics = with_examples(statistics, examples)
    scores_ood = {name: entropy(set_probs) for name, set_probs in ood_probs.items()}
    statistics |= separation(entropy(probs), scores_ood, examples, ood_examples)
    return report_of(statistics, labels, level, intervals)


def evaluate_multilabel(
    probs: Float[Tensor, "n labels"],
    labels: Integer[Tensor, "n labels"],
    ood: Sets | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    examples: Examples | None = None,
    ood_examples: ExamplesOfSets | None = None,
    intervals: bool = True,
    level: float = 0.95,
) -> Report:
    """Evaluate predicted probabilities of independent labels: accuracy, calibration, OOD detection.

    Every label of every example is a binary problem. For the confidence intervals, the examples are
    treated as independent draws, but not the labels of an example. The accuracy is torchmetrics'
    `multilabel_accuracy` with `average="micro"`.

    Args:
        probs: Probability that each label applies, `[n, labels]`.
        labels: Whether each label applies, 0 or 1, `[n, labels]`.
        ood: For each out-of-distribution set, by name, the predicted probabilities `[m, labels]`.
        log_probs: Log-probabilities of the labels, `[n]`, summed over each example's labels. Pass
            them if they are more precise than `probs`.
        examples: The number of the example of each row, `[n]`; see `evaluate`.
        ood_examples: The same for out-of-distribution sets, `[m]`, by name.
        intervals: Whether to compute confidence intervals.
        level: Nominal coverage of the confidence intervals.

    Returns:
        `accuracy` (the fraction of labels that are right at a threshold of 0.5), `exact_match` (the
        fraction of examples with every label right), `nll` (nats, summed over an example's labels),
        `brier`, `overconfidence` and `ece` (15 bins) over all labels, `mean_entropy` (nats, summed
        over an example's labels), and the OOD metrics of `evaluate` for each out-of-distribution
        set, with this entropy as the score.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If `probs` are not probabilities, or labels or an out-of-distribution set do not
            match them. Also raises the errors of `evaluate`.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.2], [0.3, 0.4]])
        >>> report = evaluate_multilabel(probs, torch.tensor([[1, 0], [0, 1]]))
        >>> report["accuracy"].value, report["exact_match"].value
        (0.75, 0.5)
    """
    probs = _checked_table(probs, "probs")
    if not isinstance(labels, Tensor) or labels.shape != probs.shape:
        form = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"`labels` is {form}. Pass a tensor of the shape of `probs`, {list(probs.shape)}, "
            "with 0 or 1 for every label."
        )
    check_examples(examples, probs, "examples")
    ood_probs = _checked_sets(ood, probs, _checked_table, "labels")
    flat_probs, flat_labels = check_classification(probs.flatten(), labels.flatten())
    statistics: dict[str, Statistic] = {}
    for metric in CLASSIFICATION_METRICS:
        if metric.over_labels is not None:
            num_terms = probs.shape[1] if metric.over_labels == "sum" else 1
            per_label = metric.statistic(flat_probs, flat_labels)
            statistics[metric.name] = over_labels(per_label, probs.shape, num_terms)
    statistics["exact_match"] = EXACT_MATCH.statistic(probs, labels)
    if log_probs is not None:
        statistics["nll"] = _nll_of_log_probs(log_probs, len(labels))
    statistics = with_examples(statistics, examples)
    scores_ood = {name: label_entropy(set_probs) for name, set_probs in ood_probs.items()}
    statistics |= separation(label_entropy(probs), scores_ood, examples, ood_examples)
    return report_of(statistics, labels, level, intervals)


def evaluate_regression(
    mean: Real,
    standard_deviation: Real,
    targets: Real,
    ood: Sets | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    examples: Examples | None = None,
    ood_examples: ExamplesOfSets | None = None,
    intervals: bool = True,
    level: float = 0.95,
) -> Report:
    """Evaluate Gaussian predictions: errors, calibration and OOD detection.

    Args:
        mean: Predicted means, `[n]` or `[n, outputs]`.
        standard_deviation: Predicted standard deviations, including the noise; positive, and of the
            same shape.
        targets: Numbers in the same shape.
        ood: The predicted standard deviations of each out-of-distribution set, `[m]` or
            `[m, outputs]`, by the name of the set.
        log_probs: Joint log-densities of each example's targets, `[n]`. Pass them if outputs are
            correlated. Default: the sum over the outputs.
        examples: The number of the example of each row, `[n]`; see `evaluate`.
        ood_examples: The same for out-of-distribution sets, `[m]`, by name.
        intervals: Whether to compute confidence intervals.
        level: Nominal coverage of the confidence intervals. It is also the level of the predicted
            intervals that `coverage` and `width` measure.

    Returns:
        A report with these metrics:

        - `nll`, in nats per example;
        - `rmse` and `bias`, the mean of prediction minus target;
        - `crps` and `width`, in the units of the targets;
        - `scaled_error`, the root mean square of the errors divided by the standard deviations;
        - `coverage`, the fraction of targets in the central interval of probability `level`;
        - `quantile_calibration_error`, over 99 levels;
        - the OOD metrics of `evaluate` for each set, with an example's mean variance as its score.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If values are not finite, shapes do not match, or a standard deviation is not
            positive. Also raises the errors of `evaluate`.
    """
    check_level(level)
    check_gaussian(mean, standard_deviation, targets)
    check_examples(examples, mean, "examples")
    means = mean.double()
    deviations = standard_deviation.double()
    statistics = {
        metric.name: metric.statistic(means, deviations, targets.double(), level)
        for metric in REGRESSION_METRICS
    }
    if log_probs is not None:
        statistics["nll"] = _nll_of_log_probs(log_probs, len(means))
    statistics = with_examples(statistics, examples)
    variances_ood = {}
    for name, ood_deviation in (ood or {}).items():
        check_gaussian(ood_deviation, ood_deviation)
        variances_ood[name] = per_example(ood_deviation.double().square())
    variances = per_example(deviations.square())
    statistics |= separation(variances, variances_ood, examples, ood_examples)
    return report_of(statistics, targets, level, intervals)


def evaluate_numbers(
    mean: Real,
    standard_deviation: Real,
    targets: Real,
    log_probs: Float[Tensor, " n"],
    ood: Sets | None = None,
    *,
    levels: Real | None = None,
    interval: tuple[Real, Real] | None = None,
    examples: Examples | None = None,
    ood_examples: ExamplesOfSets | None = None,
    intervals: bool = True,
    level: float = 0.95,
) -> Report:
    """Evaluate the errors and the calibration of predicted numbers, such as counts.

    Args:
        mean: Means of the predictive, `[n]` or `[n, outputs]`.
        standard_deviation: Standard deviations of the predictive, at least 0, of the same shape.
        targets: Numbers in the same shape.
        log_probs: Log-probabilities or log-densities of each example's targets, `[n]`.
        ood: The predicted standard deviations of each out-of-distribution set, `[m]` or
            `[m, outputs]`, by the name of the set.
        levels: For each target, the smallest level of a central interval that contains it; None if
            the predictive has no distribution function.
        interval: Lower and upper ends of the predictive's central intervals of probability `level`;
            None if the predictive has no quantiles.
        examples: The number of the example of each row, `[n]`; see `evaluate`.
        ood_examples: The same for out-of-distribution sets, `[m]`, by name.
        intervals: Whether to compute confidence intervals.
        level: Nominal coverage of the confidence intervals, and the level of the predicted
            intervals.

    Returns:
        `nll` (nats per example), `rmse` and `bias` as for `evaluate_regression`, and `mae` (the
        mean absolute error in the units of the targets). If every standard deviation is positive,
        there is also `scaled_error`; with `levels`, `coverage`; and with `interval`, `width`. For
        each out-of-distribution set, there are the OOD metrics of `evaluate`, whose score is an
        example's mean variance.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If values are not finite, shapes do not match, a standard deviation is negative,
            or `level` is not between 0 and 1.

    Example:
        >>> import torch
        >>> counts = torch.tensor([0.0, 2.0, 5.0])
        >>> poisson = torch.distributions.Poisson(torch.tensor([1.0, 2.0, 4.0]))
        >>> log_probs = poisson.log_prob(counts)
        >>> report = evaluate_numbers(poisson.mean, poisson.stddev, counts, log_probs)
        >>> round(report["mae"].value, 2)
        0.67
    """
    check_level(level)
    check_real({"mean": mean, "standard_deviation": standard_deviation, "targets": targets})
    check_examples(examples, mean, "examples")
    if standard_deviation.min() < 0:
        raise ValueError(
            f"The smallest entry of `standard_deviation` is {standard_deviation.min():.4g}, but no "
            "entry may be negative. Pass the standard deviations of the predictive."
        )
    means = mean.double()
    deviations = standard_deviation.double()
    statistics = {"nll": _nll_of_log_probs(log_probs, len(means))}
    for metric in MOMENT_METRICS:
        if metric.name == "scaled_error" and not (deviations > 0).all():
            continue
        statistics[metric.name] = metric.statistic(means, deviations, targets.double(), level)
    if levels is not None:
        check_tensor(levels, "levels")
        statistics["coverage"] = share_statistic((levels <= level).double())
    if interval is not None:
        low, high = interval
        statistics["width"] = width_statistic(interval_width(low, high, reduction="none"))
    statistics = with_examples(statistics, examples)
    variances_ood = {}
    for name, ood_deviation in (ood or {}).items():
        check_real({f"ood[{name!r}]": ood_deviation})
        variances_ood[name] = per_example(ood_deviation.double().square())
    variances = per_example(deviations.square())
    statistics |= separation(variances, variances_ood, examples, ood_examples)
    return report_of(statistics, targets, level, intervals)


def evaluate_ood(
    scores_id: Float[Tensor, " num_id"],
    scores_ood: Float[Tensor, " num_ood"],
    *,
    examples_id: Integer[Tensor, " num_id"] | None = None,
    examples_ood: Integer[Tensor, " num_ood"] | None = None,
    intervals: bool = True,
    level: float = 0.95,
) -> Report:
    """Evaluate OOD detection by an arbitrary score.

    The score should be higher for OOD examples than for ID examples, as it is for `entropy`,
    `max_probability` and the epistemic part of `uncertainty`. Intervals and their level are the
    same as for `evaluate`; `examples_id` and `examples_ood` are the numbers of the examples of the
    scores, if examples have several scores.

    Returns:
        `auroc`, `aupr_out`, `aupr_in` and `fpr95`. To compare two scores, pass their reports on the
        same examples, in the same order, to `compare`.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If scores are empty, not one-dimensional, or contain NaN. Also raises the errors
            of `evaluate`.
    """
    check_score_pair(scores_id, scores_ood)
    check_examples(examples_id, scores_id, "examples_id")
    check_examples(examples_ood, scores_ood, "examples_ood")
    statistics = {
        metric.name: metric.statistic(scores_id, scores_ood, examples_id, examples_ood)
        for metric in OOD_METRICS
    }
    return report_of(statistics, None, level, intervals)


def separation(
    scores_id: Tensor,
    scores_ood: Mapping[str, Tensor],
    examples: Examples | None,
    ood_examples: ExamplesOfSets | None,
) -> dict[str, Statistic]:
    """Compute the statistics `auroc_<name>`, `aupr_<name>` and so on for each OOD set."""
    ood_examples = ood_examples or {}
    unknown = [name for name in ood_examples if name not in scores_ood]
    if unknown:
        raise ValueError(
            f"`ood_examples` has {unknown}, but the out-of-distribution sets are "
            f"{list(scores_ood)}. Use the names of `ood`."
        )
    statistics: dict[str, Statistic] = {}
    for name, scores in scores_ood.items():
        examples_ood = ood_examples.get(name)
        check_examples(examples_ood, scores, f"ood_examples[{name!r}]")
        for metric in OOD_METRICS:
            key = f"{metric.name.removesuffix('_out')}_{name}"
            if key in statistics:
                raise ValueError(
                    f"Two metrics of the out-of-distribution sets {list(scores_ood)} would be "
                    f"called {key!r}. Rename {name!r}."
                )
            statistics[key] = metric.statistic(scores_id, scores, examples, examples_ood)
    return statistics


def _nll_of_log_probs(log_probs: Float[Tensor, " n"], num_examples: int) -> Statistic:
    """Build the statistic of the NLL from the log-probabilities of the labels."""
    check_tensor(log_probs, "log_probs")
    if log_probs.shape != (num_examples,):
        raise ValueError(
            f"`log_probs` has shape {list(log_probs.shape)}. Pass the log-probability of each "
            f"example's label, as a tensor of shape [{num_examples}]."
        )
    return nll_statistic(log_probs)


def _checked_sets(
    ood: Sets | None, probs: Tensor, check: Callable[[Tensor, str], Tensor], columns: str
) -> dict[str, Tensor]:
    """Check the OOD sets, which must have the same columns (classes or labels) as the test set."""
    checked = {}
    for name, ood_probs in (ood or {}).items():
        checked[name] = check(ood_probs, f"ood[{name!r}]")
        check_same_device(probs, ood_probs, "probs", f"ood[{name!r}]")
        if checked[name].shape[1] != probs.shape[1]:
            raise ValueError(
                f"`ood[{name!r}]` has {checked[name].shape[1]} {columns}, but `probs` has "
                f"{probs.shape[1]}. Compute both with the same model."
            )
    return checked


def _checked_table(probs: Float[Tensor, "n labels"], name: str) -> Float[Tensor, "n labels"]:
    """Check the probabilities of labels, and return them as `check_probs` does."""
    check_tensor(probs, name)
    if probs.ndim != 2:
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}. Pass [n, labels], and flatten other "
            "dimensions into n."
        )
    return check_probs(probs.flatten(), name)[:, 1].view(probs.shape)
