"""All metrics of predicted labels, several of which may apply to an example."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.binned import confidence_and_right, equal_width_bins
from laplace_debias.metrics.checks import check_classification, check_probs, check_same_device
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.evaluation import nll_of_log_probs, separation
from laplace_debias.metrics.of_classification import table_of
from laplace_debias.metrics.report import Report, report_of
from laplace_debias.metrics.statistics import Mean, Proportion, Resampled, Sampling, Statistic

_NUM_BINS = 15


def evaluate_multilabel(
    probs: Float[Tensor, "n labels"],
    labels: Integer[Tensor, "n labels"],
    ood: Mapping[str, Float[Tensor, "m labels"]] | None = None,
    *,
    log_probs: Float[Tensor, " n"] | None = None,
    intervals: bool = True,
    level: float = 0.95,
    num_resamples: int = 500,
    seed: int = 0,
) -> Report:
    """Calibration of independent labels, and separation of OOD examples by their entropy.

    Every label of every example is one binary problem. Accuracy, ECE and Brier score are taken over
    all of them; the accuracy is torchmetrics' `multilabel_accuracy` with `average="micro"`.

    Args:
        probs: The probability that each label applies, `[n, labels]`.
        labels: Whether it does, 0 or 1, `[n, labels]`.
        ood: By the name of each out-of-distribution set, the probabilities `[m, labels]` predicted
            on it.
        log_probs: Log-probabilities of each example's labels, `[n]`, summed over the labels, where
            they are known to more digits than `probs` has.
        intervals: As `evaluate`. Examples are drawn, not labels one by one.
        level: As `evaluate`.
        num_resamples: As `evaluate`.
        seed: As `evaluate`.

    Returns:
        `accuracy` (the share of labels that are right at a threshold of 0.5), `exact_match` (the
        share of examples with every label right), `nll` (nats, summed over an example's labels),
        `ece` (15 bins) and `brier` over all labels, `mean_entropy` (nats, summed over an example's
        labels), and for each out-of-distribution set `auroc_<name>`, `aupr_<name>`, `fpr95_<name>`
        and `aupr_in_<name>` by that entropy.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, or labels or an out-of-distribution set do not
            fit them; as `evaluate`.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.2], [0.3, 0.4]])
        >>> report = evaluate_multilabel(probs, torch.tensor([[1, 0], [0, 1]]))
        >>> report["accuracy"].value, report["exact_match"].value
        (0.75, 0.5)
    """
    how = Sampling(level, num_resamples, seed)
    _check_table(probs, "probs")
    if not isinstance(labels, Tensor) or labels.shape != probs.shape:
        came = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"`labels` is {came}; expected a tensor of the shape of `probs`, {list(probs.shape)}, "
            "0 or 1 for every label."
        )
    flat = probs.flatten()
    _, flat_labels = check_classification(flat, labels.flatten())
    statistics = _of_labels(probs, labels, flat, flat_labels)
    if log_probs is not None:
        statistics["nll"] = nll_of_log_probs(log_probs, len(labels))
    for name, other in (ood or {}).items():
        _check_table(other, f"ood[{name!r}]")
        check_same_device(probs, other, "probs", f"ood[{name!r}]")
        if other.shape[1] != probs.shape[1]:
            raise ValueError(
                f"`ood[{name!r}]` has {other.shape[1]} labels and `probs` {probs.shape[1]}; "
                "expected as many. Predict both with the same model."
            )
    scores = {name: _entropy(other) for name, other in (ood or {}).items()}
    statistics |= separation(_entropy(probs), scores)
    return report_of(statistics, labels, how if intervals else None)


def _of_labels(
    probs: Tensor, labels: Tensor, flat: Tensor, flat_labels: Tensor
) -> dict[str, Statistic]:
    # torchmetrics takes seconds to import: only what uses it waits for it.
    from torchmetrics.functional.classification import multilabel_exact_match

    n, num_labels = probs.shape

    def mean(value: Tensor, values: Tensor) -> Statistic:
        return Mean(value.item(), values.view(n, num_labels).double().mean(1), lowest=0)

    confidences, right = confidence_and_right(flat, flat_labels)
    bins = equal_width_bins(confidences, _NUM_BINS).view(n, num_labels)
    table = table_of(bins, ((right - confidences) / len(flat)).view(n, num_labels), _NUM_BINS)
    hits = accuracy(flat, flat_labels, reduction="none")
    exact = multilabel_exact_match(probs, labels, num_labels, validate_args=False)
    nlls = num_labels * nll(flat, flat_labels, reduction="none")
    return {
        "accuracy": mean(accuracy(flat, flat_labels), hits),
        "exact_match": Proportion(exact.item(), hits.view(n, num_labels).amin(1)),
        "nll": mean(num_labels * nll(flat, flat_labels), nlls),
        "ece": Resampled(
            ece(flat, flat_labels).item(),
            (n,),
            lambda counts: (counts @ table).abs().sum(1),
            table.device,
        ),
        "brier": mean(brier(flat, flat_labels), brier(flat, flat_labels, reduction="none")),
        "mean_entropy": Mean(_entropy(probs).mean().item(), _entropy(probs), lowest=0),
    }


def _entropy(probs: Float[Tensor, "n labels"]) -> Float[Tensor, " n"]:
    """Entropy of each example's independent labels, in nats."""
    pairs = check_probs(probs.flatten())
    return torch.special.entr(pairs).sum(1).view(probs.shape).sum(1)


def _check_table(probs: Float[Tensor, "n labels"], name: str) -> None:
    if not isinstance(probs, Tensor):
        raise TypeError(f"`{name}` is a {type(probs).__name__}; expected a tensor [n, labels].")
    if probs.ndim != 2:
        raise ValueError(
            f"`{name}` has shape {list(probs.shape)}; expected [n, labels]. Flatten the other "
            "dimensions into n."
        )
    check_probs(probs.flatten(), name)
