"""The curvature of neural networks, exact or factored, as linear operators."""

from typing import TYPE_CHECKING

from laplace_debias.system.lazy import attributes_from

if TYPE_CHECKING:
    from laplace_debias.curvature.network.bradley_terry import BradleyTerry
    from laplace_debias.curvature.network.function_model import FunctionModel
    from laplace_debias.curvature.network.inputs import OneArgument
    from laplace_debias.curvature.network.subnetwork import (
        Subnetwork,
        largest_magnitude,
        largest_variance,
    )
    from laplace_debias.curvature.operators import (
        EKFAC,
        GGN,
        KFAC,
        EmpiricalFisher,
        Fisher,
        Hessian,
        Jacobian,
    )

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "BradleyTerry",
    "EmpiricalFisher",
    "Fisher",
    "FunctionModel",
    "Hessian",
    "Jacobian",
    "OneArgument",
    "Subnetwork",
    "largest_magnitude",
    "largest_variance",
]

__getattr__ = attributes_from(
    __name__,
    {
        "laplace_debias.curvature.network.bradley_terry": ("BradleyTerry",),
        "laplace_debias.curvature.network.function_model": ("FunctionModel",),
        "laplace_debias.curvature.network.inputs": ("OneArgument",),
        "laplace_debias.curvature.network.subnetwork": (
            "Subnetwork",
            "largest_magnitude",
            "largest_variance",
        ),
        "laplace_debias.curvature.operators": (
            "EKFAC",
            "GGN",
            "KFAC",
            "EmpiricalFisher",
            "Fisher",
            "Hessian",
            "Jacobian",
        ),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
