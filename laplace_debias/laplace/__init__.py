"""The front-end: wrap a trained model, fit, predict, tune, evaluate, save."""

from typing import TYPE_CHECKING

from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.laplace.fitting.auto import Auto
    from laplace_debias.laplace.fitting.plan import Plan
    from laplace_debias.laplace.fitting.schemes import CrossFit, Full, Split
    from laplace_debias.laplace.gaussian_prior import GaussianPrior
    from laplace_debias.laplace.laplace import Laplace
    from laplace_debias.laplace.links import Link
    from laplace_debias.laplace.mixture import Mixture
    from laplace_debias.laplace.posterior_prior import posterior_as_prior
    from laplace_debias.laplace.prediction.conformal import Conformal

__all__ = [
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
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.laplace.fitting.auto": ("Auto",),
        "laplace_debias.laplace.prediction.conformal": ("Conformal",),
        "laplace_debias.laplace.gaussian_prior": ("GaussianPrior",),
        "laplace_debias.laplace.laplace": ("Laplace",),
        "laplace_debias.laplace.links": ("Link",),
        "laplace_debias.laplace.mixture": ("Mixture",),
        "laplace_debias.laplace.fitting.plan": ("Plan",),
        "laplace_debias.laplace.posterior_prior": ("posterior_as_prior",),
        "laplace_debias.laplace.fitting.schemes": ("CrossFit", "Full", "Split"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
