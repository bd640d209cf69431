"""Laplace approximations of trained networks, debiased for mini-batches."""

from typing import TYPE_CHECKING

from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.curvature.data.shards import ShardedBatches
    from laplace_debias.curvature.losses.likelihoods import (
        Bernoulli,
        Categorical,
        Gaussian,
        HeteroscedasticGaussian,
        Likelihood,
        MultiLabel,
        Ordinal,
        Poisson,
    )
    from laplace_debias.curvature.network.inputs import OneArgument
    from laplace_debias.laplace import (
        Auto,
        Conformal,
        CrossFit,
        Full,
        GaussianPrior,
        Laplace,
        Link,
        Mixture,
        Plan,
        Split,
        posterior_as_prior,
    )
    from laplace_debias.quadratic import Quadratic
    from laplace_debias.system.ranks import alone

__all__ = [
    "Auto",
    "Bernoulli",
    "Categorical",
    "Conformal",
    "CrossFit",
    "Full",
    "Gaussian",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "Link",
    "Mixture",
    "MultiLabel",
    "OneArgument",
    "Ordinal",
    "Plan",
    "Poisson",
    "Quadratic",
    "ShardedBatches",
    "Split",
    "alone",
    "posterior_as_prior",
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.curvature.losses.likelihoods": (
            "Bernoulli",
            "Categorical",
            "Gaussian",
            "HeteroscedasticGaussian",
            "Likelihood",
            "MultiLabel",
            "Ordinal",
            "Poisson",
        ),
        "laplace_debias.curvature.network.inputs": ("OneArgument",),
        "laplace_debias.curvature.data.shards": ("ShardedBatches",),
        "laplace_debias.laplace": (
            "Auto",
            "Conformal",
            "CrossFit",
            "Full",
            "GaussianPrior",
            "Laplace",
            "Link",
            "Mixture",
            "Plan",
            "Split",
            "posterior_as_prior",
        ),
        "laplace_debias.quadratic": ("Quadratic",),
        "laplace_debias.system.ranks": ("alone",),
        "laplace_debias.system.version": ("__version__",),
    },
    subpackages=("curvature", "laplace", "linalg", "metrics", "operators", "quadratic"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
