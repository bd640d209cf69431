"""All metrics of predicted labels, several of which may apply to an example."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.metrics.checks import check_classification, check_probs, check_same_device
from laplace_debias.metrics.classification import accuracy, brier, ece, nll
from laplace_debias.metrics.ood import separation


def evaluate_multilabel(
    probs: Float[Tensor, "n labels"],
    labels: Integer[Tensor, "n labels"],
    ood: Mapping[str, Float[Tensor, "m labels"]] | None = None,
) -> dict[str, float]:
    """Calibration of independent labels, and separation of OOD examples by their entropy.

    Every label of every example is one binary problem. Accuracy, ECE and Brier score are taken over
    all of them; the accuracy is torchmetrics' `multilabel_accuracy` with `average="micro"`.

    Args:
        probs: The probability that each label applies, `[n, labels]`.
        labels: Whether it does, 0 or 1, `[n, labels]`.
        ood: By the name of each out-of-distribution set, the probabilities `[m, labels]` predicted
            on it.

    Returns:
        `accuracy` (the share of labels that are right at a threshold of 0.5), `exact_match` (the
        share of examples with every label right), `nll` (nats, summed over an example's labels),
        `ece` (15 bins) and `brier` over all labels, `mean_entropy` (nats, summed over an example's
        labels), and for each out-of-distribution set `auroc_<name>`, `aupr_<name>` and
        `fpr95_<name>` by that entropy.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: `probs` are not probabilities, or labels or an out-of-distribution set do not
            fit them.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.2], [0.3, 0.4]])
        >>> metrics = evaluate_multilabel(probs, torch.tensor([[1, 0], [0, 1]]))
        >>> metrics["accuracy"], metrics["exact_match"]
        (0.75, 0.5)
    """
    # torchmetrics takes seconds to import: only what uses it waits for it.
    from torchmetrics.functional.classification import multilabel_exact_match

    _check_table(probs, "probs")
    if not isinstance(labels, Tensor) or labels.shape != probs.shape:
        came = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"`labels` is {came}; expected a tensor of the shape of `probs`, {list(probs.shape)}, "
            "0 or 1 for every label."
        )
    num_labels = probs.shape[1]
    _, flat_labels = check_classification(probs.flatten(), labels.flatten())
    entropies = _entropy(probs)
    exact = multilabel_exact_match(probs, labels, num_labels, validate_args=False)
    flat = probs.flatten()
    metrics = {
        "accuracy": accuracy(flat, flat_labels),
        "exact_match": exact,
        "nll": num_labels * nll(flat, flat_labels),
        "ece": ece(flat, flat_labels),
        "brier": brier(flat, flat_labels),
        "mean_entropy": entropies.mean(),
    }
    for name, other in (ood or {}).items():
        _check_table(other, f"ood[{name!r}]")
        check_same_device(probs, other, "probs", f"ood[{name!r}]")
        if other.shape[1] != num_labels:
            raise ValueError(
                f"`ood[{name!r}]` has {other.shape[1]} labels and `probs` {num_labels}; expected "
                "as many. Predict both with the same model."
            )
    scores = {name: _entropy(other) for name, other in (ood or {}).items()}
    metrics |= separation(entropies, scores)
    return {name: value.item() for name, value in metrics.items()}


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
