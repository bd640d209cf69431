"""All metrics of one predictive at once."""

from collections.abc import Mapping

from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_classification, check_probs, check_same_device
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.ood import entropy, separation


def evaluate(
    probs: Float[Tensor, "n *classes"],
    labels: Integer[Tensor, " n"],
    ood: Mapping[str, Float[Tensor, "..."]] | None = None,
) -> dict[str, float]:
    """Calibration, and separation of OOD examples by the entropy of the predictive.

    Args:
        probs: Probabilities `[n, classes]`, or `[n]` of class 1.
        labels: Class indices `[n]`.
        ood: By the name of each out-of-distribution set, the probabilities `[m, classes]` (or
            `[m]`) predicted on it.

    Returns:
        `accuracy`, `nll` (nats), `ece` (15 bins), `brier`, `mean_entropy` (nats, of `probs`), and
        for each out-of-distribution set `auroc_<name>`, `aupr_<name>` and `fpr95_<name>`.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: Values are not probabilities, `labels` do not fit them, or the classes or the
            device of an out-of-distribution set differ from those of `probs`.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> metrics = evaluate(probs, torch.tensor([0, 1]), {"noise": torch.full((3, 2), 0.5)})
        >>> metrics["accuracy"], metrics["auroc_noise"]
        (1.0, 1.0)
    """
    probs, labels = check_classification(probs, labels)
    probs_ood = {name: check_probs(other, f"ood[{name!r}]") for name, other in (ood or {}).items()}
    for name, other in probs_ood.items():
        check_same_device(probs, other, "probs", f"ood[{name!r}]")
        if other.shape[1] != probs.shape[1]:
            raise ValueError(
                f"`ood[{name!r}]` has {other.shape[1]} classes and `probs` {probs.shape[1]}; "
                "expected as many. Predict both with the same model."
            )
    entropies = entropy(probs)
    metrics = {
        "accuracy": accuracy(probs, labels),
        "nll": nll(probs, labels),
        "ece": ece(probs, labels),
        "brier": brier(probs, labels),
        "mean_entropy": entropies.mean(),
    }
    scores = {name: entropy(other) for name, other in probs_ood.items()}
    metrics |= separation(entropies, scores)
    return {name: value.item() for name, value in metrics.items()}
