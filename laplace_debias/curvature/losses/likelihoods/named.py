"""Likelihoods from the names that users pass."""

import difflib
from collections.abc import Sequence

from torch import Tensor

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.losses.likelihoods.gaussian import Gaussian
from laplace_debias.curvature.losses.likelihoods.registry import LIKELIHOODS

LIKELIHOODS_OF_LOSSES = {
    "BCELoss": '"binary" or "multilabel", and remove the sigmoid from the model',
    "BCEWithLogitsLoss": '"binary" for one logit, or "multilabel"',
    "CrossEntropyLoss": '"classification", or Categorical(class_weights=..., label_smoothing=...)',
    "GaussianNLLLoss": '"heteroscedastic"',
    "MSELoss": '"regression"',
    "NLLLoss": '"classification"',
    "PoissonNLLLoss": '"poisson"',
}
"""The likelihoods that correspond to torch's losses, by the names of their classes."""


def likelihood_from(
    name: str | Likelihood, sigma: float | Sequence[float] | Tensor | None = None
) -> Likelihood:
    """Return the likelihood with the given name; an instance is returned unchanged."""
    if sigma is not None and name != Gaussian.name:
        raise ValueError(
            '`sigma` applies only to `likelihood="regression"`, got '
            f"`likelihood={name!r}`. Remove `sigma=`. If you pass a likelihood object, "
            "set the noise there: `Gaussian(sigma)`."
        )
    if isinstance(name, Likelihood):
        return name
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise ValueError(
            f"Unknown likelihood {name!r}. Use {', '.join(map(repr, LIKELIHOODS))}, or an instance "
            f"of Likelihood.{_hint(name)}"
        )
    return LIKELIHOODS[name]() if sigma is None else Gaussian(sigma)


def _hint(name: object) -> str:
    """Return which likelihood was probably meant, or ""."""
    loss = type(name).__name__
    if loss in LIKELIHOODS_OF_LOSSES:
        return f" For {loss}, use {LIKELIHOODS_OF_LOSSES[loss]}."
    nearest = difflib.get_close_matches(str(name), LIKELIHOODS, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
