"""Operators of networks: what curvature is, and how it is factored."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laplace_debias.curvature.kfac_operators import EKFAC, KFAC
    from laplace_debias.curvature.matrix_free import (
        GGN,
        EmpiricalFisher,
        Fisher,
        Hessian,
        Jacobian,
    )
    from laplace_debias.curvature.row_spectrum import RowSpectrum, ggn_spectrum

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "EmpiricalFisher",
    "Fisher",
    "Hessian",
    "Jacobian",
    "RowSpectrum",
    "ggn_spectrum",
]


def __getattr__(name: str) -> Any:
    # On first use: parts of this package import others, which need none of the operators.
    if name in ("KFAC", "EKFAC"):
        from laplace_debias.curvature import kfac_operators

        return getattr(kfac_operators, name)
    if name in ("RowSpectrum", "ggn_spectrum"):
        from laplace_debias.curvature import row_spectrum

        return getattr(row_spectrum, name)
    if name in __all__:
        from laplace_debias.curvature import matrix_free

        return getattr(matrix_free, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
