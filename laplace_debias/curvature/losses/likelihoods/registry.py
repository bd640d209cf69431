"""A registry of likelihoods by name that imports a likelihood only when it is used."""

from typing import TYPE_CHECKING, Literal

from laplace_debias.system.lazy import LazyRegistry

if TYPE_CHECKING:
    from laplace_debias.curvature.losses.likelihoods.base import Likelihood

LIKELIHOODS: LazyRegistry["Likelihood"] = LazyRegistry(
    "laplace_debias.curvature.losses.likelihoods",
    {
        "classification": "categorical.Categorical",
        "regression": "gaussian.Gaussian",
        "heteroscedastic": "gaussian.HeteroscedasticGaussian",
        "binary": "bernoulli.Bernoulli",
        "multilabel": "bernoulli.MultiLabel",
        "poisson": "poisson.Poisson",
        "ordinal": "ordinal.Ordinal",
    },
)
"""The likelihoods, by the name that the user passes as `likelihood`, or as `--task`."""

if TYPE_CHECKING:
    LikelihoodName = str
else:
    LikelihoodName = Literal[tuple(LIKELIHOODS)]
"""The type of an option whose value is the name of a likelihood."""
