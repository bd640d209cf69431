"""Assessment of a network's uncertainty, by comparing several methods on the network's data."""

from typing import TYPE_CHECKING

from laplace_debias.assessment.methods import Method, PosteriorChoice, default_methods
from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.assessment.assessing import assess
    from laplace_debias.assessment.temperature import fit_temperature

__all__ = [
    "Method",
    "PosteriorChoice",
    "assess",
    "default_methods",
    "fit_temperature",
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.assessment.assessing": ("assess",),
        "laplace_debias.assessment.temperature": ("fit_temperature",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
