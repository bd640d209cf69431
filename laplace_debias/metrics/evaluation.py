"""All metrics of one predictive at once."""

from collections.abc import Mapping

from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import (
    check_classification,
    check_probs,
    check_same_device,
)
from laplace_debias.metrics.of_classification import CLASSIFICATION
from laplace_debias.metrics.of_scores import SCORES
from laplace_debias.metrics.ood import entropy
from laplace_debias.metrics.report import Report, report_of
from laplace_debias.metrics.statistics import Mean, Sampling, Statistic


def evaluate(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    ood: Mapping[str, Float[Tensor, "..."]] | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    intervals: bool = True,
    level: float = 0.95,
    num_resamples: int = 500,
    seed: int = 0,
) -> Report:
    """Calibration, and separation of OOD examples by the entropy of the predictive.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        ood: By the name of each out-of-distribution set, the probabilities `[m, classes]` (or
            `[m]`) predicted on it.
        log_probs: Log-probabilities of the labels, `[n]`, for the NLL, where they are known to more
            digits than `probs` has.
        intervals: Whether to make confidence intervals.
        level: Coverage that they aim at.
        num_resamples: Draws, for the metrics whose interval needs them.
        seed: Of these draws; torch's generators are left alone.

    Returns:
        `accuracy`, `nll` (nats), `ece` (15 bins), `brier`, `mean_entropy` (nats, of `probs`),
        `ece_equal_mass`, `smooth_ece`, `mce`, `classwise_ece` and `aurc`; for each
        out-of-distribution set `auroc_<name>`, `aupr_<name>` (OOD positive), `fpr95_<name>` and
        `aupr_in_<name>` (ID positive). Each is a float with `.low` and `.high`; `DESCRIPTIONS` says
        what they mean.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: Values are not probabilities, `labels` do not fit them, the classes or the
            device of an out-of-distribution set differ from those of `probs`, `level` is not
            between 0 and 1, or `num_resamples` < 2.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> report = evaluate(probs, torch.tensor([0, 1]), {"noise": torch.full((3, 2), 0.5)})
        >>> print(report["accuracy"])
        1.00 [0.34, 1.00]
        >>> report["accuracy"] == 1 and report["auroc_noise"] == 1
        True
    """
    how = Sampling(level, num_resamples, seed)
    probs, labels = check_classification(probs, labels)
    probs_ood = {name: check_probs(other, f"ood[{name!r}]") for name, other in (ood or {}).items()}
    for name, other in probs_ood.items():
        check_same_device(probs, other, "probs", f"ood[{name!r}]")
        if other.shape[1] != probs.shape[1]:
            raise ValueError(
                f"`ood[{name!r}]` has {other.shape[1]} classes and `probs` {probs.shape[1]}; "
                "expected as many. Predict both with the same model."
            )
    made = {metric.__name__: make(probs, labels) for metric, make in CLASSIFICATION.items()}
    if log_probs is not None:
        made["nll"] = nll_of_log_probs(log_probs, len(labels))
    entropies = entropy(probs)
    made["mean_entropy"] = Mean(entropies.mean().item(), entropies, lowest=0)
    first = ("accuracy", "nll", "ece", "brier", "mean_entropy")
    statistics = {name: made.pop(name) for name in first} | made
    scores = {name: entropy(other) for name, other in probs_ood.items()}
    statistics |= separation(entropies, scores)
    return report_of(statistics, labels, how if intervals else None)


def evaluate_ood(
    scores_id: Float[Tensor, " num_id"],
    scores_ood: Float[Tensor, " num_ood"],
    *,
    intervals: bool = True,
    level: float = 0.95,
    num_resamples: int = 500,
    seed: int = 0,
) -> Report:
    """How well any score tells OOD examples from ID ones.

    Args:
        scores_id: Scores of in-distribution examples, `[num_id]`.
        scores_ood: Of out-of-distribution ones, `[num_ood]`; higher is more OOD: `entropy`,
            `max_probability`, `mutual_information`, `logit_variance`.
        intervals: As `evaluate`.
        level: As `evaluate`.
        num_resamples: As `evaluate`.
        seed: As `evaluate`.

    Returns:
        `auroc`, `aupr_out`, `aupr_in` and `fpr95`. `compare` takes it as paired with another score
        of the same examples in the same order.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: Scores are empty, not one-dimensional, or hold NaN; as `evaluate`.
    """
    how = Sampling(level, num_resamples, seed)
    made = {metric.__name__: make(scores_id, scores_ood) for metric, make in SCORES.items()}
    statistics = {
        "auroc": made["auroc"],
        "aupr_out": made["aupr"],
        "aupr_in": made["aupr_in"],
        "fpr95": made["fpr95"],
    }
    return report_of(statistics, None, how if intervals else None)


def separation(
    scores_id: Float[Tensor, " num_id"], scores_ood: Mapping[str, Float[Tensor, " num_ood"]]
) -> dict[str, Statistic]:
    """`auroc_<name>`, `aupr_<name>`, `fpr95_<name>`, `aupr_in_<name>` of each OOD set.

    Args:
        scores_id: Scores of in-distribution examples, `[num_id]`.
        scores_ood: By the name of each set, the scores of its examples.
    """
    by_name = {metric.__name__: make for metric, make in SCORES.items()}
    return {
        f"{metric}_{name}": by_name[metric](scores_id, scores)
        for name, scores in scores_ood.items()
        for metric in ("auroc", "aupr", "fpr95", "aupr_in")
    }


def nll_of_log_probs(log_probs: Float[Tensor, " n"], num_examples: int) -> Statistic:
    """The mean of negative log-probabilities, in nats.

    Args:
        log_probs: `[n]`.
        num_examples: How many there have to be.

    Raises:
        ValueError: There are more or fewer.
    """
    if log_probs.shape != (num_examples,):
        raise ValueError(
            f"`log_probs` has shape {list(log_probs.shape)}; expected that of the label of each of "
            f"the {num_examples} examples, [{num_examples}]."
        )
    return Mean(-log_probs.double().mean().item(), -log_probs.double())
