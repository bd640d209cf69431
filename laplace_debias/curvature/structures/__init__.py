"""Curvature structures, each in a file with its fits, its memory use and its saved tensors."""

from typing import TYPE_CHECKING, Any, Literal

from laplace_debias.system.lazy import LazyRegistry, attributes_from

if TYPE_CHECKING:
    from laplace_debias.curvature.structures.base import CurvatureStructure

__all__ = ["STRUCTURES", "CurvatureName", "CurvatureStructure", "curvature_structure"]

STRUCTURES: LazyRegistry["CurvatureStructure"] = LazyRegistry(
    __name__,
    {
        "kfac": "kfac.KfacCurvature",
        "ekfac": "ekfac.EkfacCurvature",
        "diag": "diagonal.DiagonalCurvature",
        "lowrank": "low_rank.LowRankCurvature",
        "full": "full.FullCurvature",
        "gp": "gp.GpCurvature",
    },
)
"""The structures, by the name that the user passes as `curvature`."""

if TYPE_CHECKING:
    CurvatureName = str
else:
    CurvatureName = Literal[tuple(STRUCTURES)]
"""The type of an option whose value is the name of a structure."""

__getattr__ = attributes_from(
    __name__, {"laplace_debias.curvature.structures.base": ("CurvatureStructure",)}
)


def curvature_structure(
    name: str,
    rank: float | None = None,
    inducing: Any = None,
    independent_outputs: bool = False,
) -> "CurvatureStructure":
    """Build the structure with the given name, and require that it has the options passed."""
    if name not in STRUCTURES:
        raise ValueError(f"Unknown curvature={name!r}. Use one of {', '.join(STRUCTURES)}.")
    structure = STRUCTURES[name]
    if rank is not None and not structure.takes_rank:
        *names, last = [f'"{key}"' for key, value in STRUCTURES.items() if value.takes_rank]
        raise ValueError(
            f"`rank` applies only to curvature={', '.join(names)} and {last}, got {name!r}. "
            "Remove `rank=`."
        )
    options: dict[str, Any] = {"rank": rank}
    if structure.takes_inducing:
        options["inducing"] = inducing
        options["independent_outputs"] = independent_outputs
    elif independent_outputs:
        raise ValueError(
            f'`independent_outputs` applies only to curvature="gp", got {name!r}. '
            "Remove `independent_outputs=`."
        )
    elif inducing is not None:
        names = [f'"{key}"' for key, value in STRUCTURES.items() if value.takes_inducing]
        raise ValueError(
            f"`inducing` applies only to curvature={', '.join(names)}, got {name!r}. "
            "Remove `inducing=`."
        )
    return structure(**options)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
