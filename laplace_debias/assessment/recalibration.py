"""Recalibrations of a classifier: vector scaling, Platt scaling and isotonic regression."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.assessment.methods import RecalibrationName
from laplace_debias.assessment.temperature import fit_temperature
from laplace_debias.system.checks import imports_of_extra

Recalibration = Callable[[Tensor], Tensor]
"""A function from logits to recalibrated logits, `[n, C]`. A single logit is that of class 1."""

# A lower bound is needed, because the best temperature is 0 if all examples are classified
# correctly.
_LEAST_TEMPERATURE = 0.5


def fit_recalibration(
    name: RecalibrationName,
    logits: Float[Tensor, "n outputs"],
    labels: Integer[Tensor, " n"] | Integer[Tensor, "n 1"],
) -> Recalibration:
    r"""Fit a recalibration to validation examples.

    - `"vector"`: logits $w_c z_c + b_c$ (Guo et al., 2017) that minimise the NLL plus the penalty
      $\tfrac12 \sum_c (w_c - 1/T)^2 + b_c^2$, where T is the temperature, at least 0.5.
    - `"platt"`, for a single logit: $w z + b$ with the lowest cross-entropy for the targets
      $(n_1 + 1) / (n_1 + 2)$ of the $n_1$ examples of class 1, and $1 / (n_0 + 2)$ of the $n_0$
      other examples (Platt, 1999).
    - `"isotonic"`: the monotone step function with the least squared error (Zadrozny & Elkan,
      2002), as a function of the logit; or, for several classes, of the probability of each class
      against all others, after which the results are normalised. Probabilities are bounded by
      1/(2n) and 1 − 1/(2n).

    The penalty, the targets and the bounds keep all parameters finite even if every example is
    classified correctly.

    Args:
        name: The recalibration.
        logits: Logits of the validation examples.
        labels: The classes of these examples.

    Raises:
        ValueError: If there are no examples, a logit is not finite, or all examples have the same
            class.
    """
    if not len(logits):
        raise ValueError(
            "There are no validation examples for a recalibration. Pass validation examples."
        )
    if not logits.isfinite().all():
        raise ValueError("Some logits are not finite. Check the network's inputs and weights.")
    z = logits.detach().double().cpu()
    y = labels.detach().cpu().long().flatten()
    if len(y.unique()) < 2:
        raise ValueError(
            f"All {len(y)} validation examples have the class {int(y[0])}. Pass examples of "
            "several classes."
        )
    fits = {"vector": _fit_vector, "platt": _fit_platt, "isotonic": _fit_isotonic}
    return fits[name](z, y)


def _fit_vector(z: Tensor, y: Tensor) -> Recalibration:
    """Fit a weight and an offset for each class to logits `[N, C]` and labels `[N]`.

    A penalty pulls the weights towards 1 / temperature and the offsets towards 0, so that classes
    with few examples change little.
    """
    # Import SciPy only here, because its import takes a third of a second.
    from scipy.optimize import minimize

    num_classes = z.shape[1]
    temperature = max(fit_temperature(z, y, "classification"), _LEAST_TEMPERATURE)
    start = np.concatenate([np.full(num_classes, 1 / temperature), np.zeros(num_classes)])
    center = torch.from_numpy(start)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        weights, offsets = parameters.split(num_classes)
        nll = F.cross_entropy(weights * z + offsets, y, reduction="sum")
        penalty = (parameters - center).square().sum() / 2
        objective = (nll + penalty) / len(y)
        (gradient,) = torch.autograd.grad(objective, parameters)
        return objective.item(), gradient.numpy()

    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    weights, offsets = torch.from_numpy(result.x).split(num_classes)
    return lambda logits: weights * logits.double() + offsets


def _fit_platt(z: Tensor, y: Tensor) -> Recalibration:
    """Fit a weight and an offset to logits `[N, 1]` and labels 0 and 1.

    As proposed by Platt, the targets lie slightly between 0 and 1, so that the fit stays finite if
    the data is separable.
    """
    with imports_of_extra("sklearn", "sklearn"):
        from sklearn.linear_model import LogisticRegression
    num_positive = int(y.sum())
    num_negative = len(y) - num_positive
    positive = (num_positive + 1) / (num_positive + 2)
    negative = 1 / (num_negative + 2)
    targets = np.where(y.numpy() == 1, positive, negative)
    labels = np.repeat([1, 0], len(y))
    weights = np.concatenate([targets, 1 - targets])
    regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
    regression.fit(z.repeat(2, 1).numpy(), labels, sample_weight=weights)
    weight = float(regression.coef_[0, 0])
    offset = float(regression.intercept_[0])
    return lambda logits: weight * logits.double() + offset


def _fit_isotonic(z: Tensor, y: Tensor) -> Recalibration:
    """Fit an increasing function from probabilities to frequencies, one per class.

    With several classes, each class is fitted against all others, and the results are normalised.
    """
    if z.shape[1] == 1:
        probability = _isotonic_regression(z[:, 0], y == 1)
        return lambda logits: probability(logits[:, 0]).logit().unsqueeze(1)
    scores = z.softmax(1).unbind(1)
    by_class = [_isotonic_regression(score, y == c) for c, score in enumerate(scores)]

    def recalibrate(logits: Tensor) -> Tensor:
        columns = logits.double().softmax(1).unbind(1)
        probabilities = [
            probability(column) for probability, column in zip(by_class, columns, strict=True)
        ]
        return torch.stack(probabilities, 1).log().log_softmax(1)

    return recalibrate


def _isotonic_regression(scores: Tensor, is_class: Tensor) -> Recalibration:
    with imports_of_extra("sklearn", "sklearn"):
        from sklearn.isotonic import IsotonicRegression
    margin = 0.5 / len(scores)
    regression: Any = IsotonicRegression(y_min=margin, y_max=1 - margin, out_of_bounds="clip")
    regression.fit(scores.numpy(), is_class.double().numpy())
    return lambda values: torch.from_numpy(regression.predict(values.double().numpy()))
