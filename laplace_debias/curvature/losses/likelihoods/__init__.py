"""Likelihoods: the distribution of the targets given the network's outputs."""

from typing import TYPE_CHECKING

from laplace_debias.curvature.losses.likelihoods.registry import LIKELIHOODS, LikelihoodName
from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.curvature.losses.likelihoods.base import Likelihood
    from laplace_debias.curvature.losses.likelihoods.bernoulli import Bernoulli, MultiLabel
    from laplace_debias.curvature.losses.likelihoods.categorical import Categorical
    from laplace_debias.curvature.losses.likelihoods.gaussian import (
        Gaussian,
        HeteroscedasticGaussian,
    )
    from laplace_debias.curvature.losses.likelihoods.named import likelihood_from
    from laplace_debias.curvature.losses.likelihoods.ordinal import Ordinal
    from laplace_debias.curvature.losses.likelihoods.poisson import Poisson

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "LikelihoodName",
    "MultiLabel",
    "Ordinal",
    "Poisson",
    "likelihood_from",
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.curvature.losses.likelihoods.base": ("Likelihood",),
        "laplace_debias.curvature.losses.likelihoods.bernoulli": ("Bernoulli", "MultiLabel"),
        "laplace_debias.curvature.losses.likelihoods.categorical": ("Categorical",),
        "laplace_debias.curvature.losses.likelihoods.gaussian": (
            "Gaussian",
            "HeteroscedasticGaussian",
        ),
        "laplace_debias.curvature.losses.likelihoods.named": ("likelihood_from",),
        "laplace_debias.curvature.losses.likelihoods.ordinal": ("Ordinal",),
        "laplace_debias.curvature.losses.likelihoods.poisson": ("Poisson",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
