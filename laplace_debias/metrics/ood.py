"""Metrics of how well a score separates out-of-distribution from in-distribution examples.

In-distribution (ID) is the negative class (0), out-of-distribution (OOD) the positive class (1). A
good score, such as the entropy of the predictive, is higher for OOD examples; only the order of the
scores matters.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_probs, check_score_pair


def entropy(probs: Float[Tensor, "n *classes"]) -> Float[Tensor, " n"]:
    """Compute the entropy `-Σ_c p_c log p_c` of each predicted distribution, in nats.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.

    Raises:
        TypeError: If `probs` is not a tensor.
        ValueError: If `probs` are not probabilities.
    """
    return torch.special.entr(check_probs(probs)).sum(dim=1)


def label_entropy(probs: Float[Tensor, "n labels"]) -> Float[Tensor, " n"]:
    """Compute the total entropy of each example's independent labels, in nats."""
    return entropy(probs.flatten()).view(probs.shape).sum(1)


def auroc(
    scores_id: Float[Tensor, " num_id"], scores_ood: Float[Tensor, " num_ood"]
) -> Float[Tensor, ""]:
    """Compute the area under the ROC curve of OOD detection (AUROC).

    The AUROC is the probability that a random OOD example has a higher score than a random ID
    example; ties count half. An uninformative score has an AUROC of 0.5.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If an argument is empty, not one-dimensional, or contains NaN, or if
            torch's default dtype has half precision.

    Reference:
        Hendrycks, Gimpel. A baseline for detecting misclassified and out-of-distribution examples
        in neural networks. ICLR, 2017.
    """
    ranks, target = _ranks_and_labels(scores_id, scores_ood)
    ranks_id = ranks[target == 0].sort().values
    ranks_ood = ranks[target == 1]
    num_below = torch.searchsorted(ranks_id, ranks_ood)
    num_below_or_tied = torch.searchsorted(ranks_id, ranks_ood, right=True)
    # Divide in float64, so that the result of perfect detection is exactly 1.
    num_pairs = len(ranks_id) * len(ranks_ood)
    share = (num_below + num_below_or_tied).sum().double() / (2 * num_pairs)
    return share.to(torch.get_default_dtype())


def aupr(
    scores_id: Float[Tensor, " num_id"], scores_ood: Float[Tensor, " num_ood"]
) -> Float[Tensor, ""]:
    """Compute the average precision (AUPR) with the OOD examples as positives.

    The AUPR is `Σ_k (R_k - R_{k-1}) P_k` over the thresholds, without interpolation. For an
    uninformative score, it equals the fraction of OOD examples, so compare it only between sets of
    equal sizes. Scores and errors are the same as for `auroc`.
    """
    ranks, target = _ranks_and_labels(scores_id, scores_ood)
    return _average_precision(ranks, target)


def aupr_in(
    scores_id: Float[Tensor, " num_id"], scores_ood: Float[Tensor, " num_ood"]
) -> Float[Tensor, ""]:
    """Compute the average precision (AUPR) with the ID examples as positives.

    It is `aupr` with the two sets exchanged and the order of the scores reversed. For an
    uninformative score, it equals the fraction of ID examples. Scores and errors are the same as
    for `auroc`.
    """
    ranks, target = _ranks_and_labels(scores_id, scores_ood)
    return _average_precision(1 - ranks, 1 - target)


def fpr95(
    scores_id: Float[Tensor, " num_id"], scores_ood: Float[Tensor, " num_ood"]
) -> Float[Tensor, ""]:
    """Compute the false-positive rate at the threshold that detects 95 % of the OOD examples.

    The FPR95 is the fraction of ID examples that are mistaken for OOD at this threshold. OOD is the
    positive class, as in the reference. In some papers, ID is the positive class, which gives a
    different number. Scores and errors are the same as for `auroc`.

    Reference:
        Hendrycks, Mazeika, Dietterich. Deep anomaly detection with outlier exposure. ICLR, 2019.
    """
    # torchmetrics is imported here, because the import takes seconds.
    from torchmetrics.functional.classification import binary_specificity_at_sensitivity

    ranks, target = _ranks_and_labels(scores_id, scores_ood)
    specificity, _ = binary_specificity_at_sensitivity(
        ranks, target, min_sensitivity=0.95, validate_args=False
    )
    return 1 - specificity


def _average_precision(ranks: Float[Tensor, " n"], target: Integer[Tensor, " n"]) -> Tensor:
    """Compute `Σ_k (R_k - R_{k-1}) P_k` in float64, so that a perfect score gives exactly 1."""
    _, index, counts = ranks.unique(return_inverse=True, return_counts=True)
    positives = torch.zeros(len(counts), dtype=torch.float64, device=ranks.device)
    positives = positives.index_add(0, index, target.double()).flip(0)
    num_above = counts.flip(0).cumsum(0)
    precision = (positives * positives.cumsum(0) / num_above).sum() / target.sum()
    return precision.to(torch.get_default_dtype())


def _ranks_and_labels(
    scores_id: Float[Tensor, " num_id"], scores_ood: Float[Tensor, " num_ood"]
) -> tuple[Float[Tensor, " n"], Integer[Tensor, " n"]]:
    """Return scores as ranks in [0, 1], and labels: 1 for OOD examples and 0 for ID examples.

    Ranks preserve order and ties exactly. torchmetrics would mistake scores outside of [0, 1] for
    logits, and its sigmoid would make all large scores equal.
    """
    check_score_pair(scores_id, scores_ood)
    if torch.finfo(torch.get_default_dtype()).bits < 32:
        raise ValueError(
            "Metrics of OOD detection are in the default dtype of torch, which is "
            f"{torch.get_default_dtype()}. This dtype cannot count beyond a few "
            "hundred examples. Call torch.set_default_dtype(torch.float32) first."
        )
    scores = torch.cat([scores_id, scores_ood])
    ranks = scores.unique(return_inverse=True)[1].double() / len(scores)
    target = (torch.arange(len(scores), device=scores.device) >= len(scores_id)).long()
    return ranks, target
