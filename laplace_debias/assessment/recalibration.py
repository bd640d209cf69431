"""Recalibrations of a classifier: vector scaling, Platt's and isotonic regression."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from laplace_debias.assessment.methods import RecalibrationName
from laplace_debias.system.checks import imports_of_extra

Recalibration = Callable[[Tensor], Tensor]
"""From logits to recalibrated logits, `[n, C]`; a single logit is that of class 1."""


def fit_recalibration(
    name: RecalibrationName,
    logits: Float[Tensor, "n outputs"],
    labels: Integer[Tensor, " n"] | Integer[Tensor, "n 1"],
) -> Recalibration:
    r"""Fit a recalibration to validation examples.

    - `"vector"`: logits $w_c z_c + b_c$ of the lowest NLL (Guo et al., 2017).
    - `"platt"`, for a single logit: $w z + b$ of the lowest NLL (Platt, 1999).
    - `"isotonic"`: the monotone step function of the logit, or of each class's probability against
      the others and then normalised, with the least squared error (Zadrozny & Elkan, 2002).
      Probabilities are bounded by 1/(2n) and 1 − 1/(2n).

    Args:
        name: The recalibration.
        logits: Logits of the validation examples.
        labels: Their classes.

    Raises:
        ValueError: If there is no example, a logit is not finite, or the examples have one class.
    """
    if not len(logits):
        raise ValueError("There are no validation examples to recalibrate with. Pass some.")
    if not logits.isfinite().all():
        raise ValueError("Logits are not finite. Check the network's inputs and weights.")
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
    # Imported here because it takes a third of a second.
    from scipy.optimize import minimize

    num_classes = z.shape[1]

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        weights, offsets = parameters.split(num_classes)
        nll = F.cross_entropy(weights * z + offsets, y)
        (gradient,) = torch.autograd.grad(nll, parameters)
        return nll.item(), gradient.numpy()

    start = np.concatenate([np.ones(num_classes), np.zeros(num_classes)])
    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    weights, offsets = torch.from_numpy(result.x).split(num_classes)
    return lambda logits: weights * logits.double() + offsets


def _fit_platt(z: Tensor, y: Tensor) -> Recalibration:
    with imports_of_extra("sklearn", "sklearn"):
        from sklearn.linear_model import LogisticRegression
    regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
    regression.fit(z.numpy(), y.numpy())
    weight = float(regression.coef_[0, 0])
    offset = float(regression.intercept_[0])
    return lambda logits: weight * logits.double() + offset


def _fit_isotonic(z: Tensor, y: Tensor) -> Recalibration:
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
