"""Likelihoods from the names that users pass."""

from collections.abc import Sequence

from torch import Tensor

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.losses.likelihoods.gaussian import Gaussian
from laplace_debias.curvature.losses.likelihoods.registry import LIKELIHOODS


def likelihood_from(
    name: str | Likelihood, sigma: float | Sequence[float] | Tensor | None = None
) -> Likelihood:
    """Return the likelihood with a name, or the instance itself."""
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
            "of Likelihood."
        )
    return LIKELIHOODS[name]() if sigma is None else Gaussian(sigma)
