"""Likelihoods: what the network's outputs mean, and how the loss curves in them."""

from collections.abc import Sequence

from torch import Tensor

from laplace_debias.curvature.losses.likelihoods.base import Likelihood
from laplace_debias.curvature.losses.likelihoods.bernoulli import Bernoulli, MultiLabel
from laplace_debias.curvature.losses.likelihoods.categorical import Categorical
from laplace_debias.curvature.losses.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MultiLabel",
    "likelihood_from",
]


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "classification": Categorical,
    "regression": Gaussian,
    "binary": Bernoulli,
    "multilabel": MultiLabel,
    "heteroscedastic": HeteroscedasticGaussian,
}

OF_SHAPES = (Categorical, Gaussian, Bernoulli, MultiLabel)
"""Likelihoods whose checks take targets on the CPU beside outputs on another device.

Of the outputs they look at shape and dtype alone. A user's likelihood, one derived from these too,
may calculate with both.
"""


def likelihood_from(
    name: str | Likelihood, sigma: float | Sequence[float] | Tensor | None = None
) -> Likelihood:
    """The likelihood of a name, or the instance itself."""
    if sigma is not None and name != "regression":
        raise ValueError(
            f'sigma belongs to likelihood="regression", not to {name!r}; build '
            "`Gaussian(sigma)` to pass an instance."
        )
    if isinstance(name, Likelihood):
        return name
    if name == "regression":
        return Gaussian(sigma)
    if isinstance(name, str) and name in LIKELIHOODS:
        return LIKELIHOODS[name]()
    raise ValueError(
        f"Unknown likelihood {name!r}: use 'classification', 'regression', 'binary', 'multilabel', "
        "'heteroscedastic', or an instance of Likelihood."
    )
