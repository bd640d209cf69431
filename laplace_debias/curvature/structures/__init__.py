"""Curvature structures: one file for each, with its fits, its memory and its tensors."""

from laplace_debias.curvature.structures.base import CurvatureStructure
from laplace_debias.curvature.structures.diagonal import DiagonalCurvature
from laplace_debias.curvature.structures.ekfac import EkfacCurvature
from laplace_debias.curvature.structures.full import FullCurvature
from laplace_debias.curvature.structures.kfac import KfacCurvature
from laplace_debias.curvature.structures.low_rank import LowRankCurvature

STRUCTURES: dict[str, type[CurvatureStructure]] = {
    "kfac": KfacCurvature,
    "ekfac": EkfacCurvature,
    "diag": DiagonalCurvature,
    "lowrank": LowRankCurvature,
    "full": FullCurvature,
}
"""The structures by the names that a user passes as `curvature`."""

__all__ = ["STRUCTURES", "CurvatureStructure", "curvature_structure"]


def curvature_structure(name: str, rank: float | None = None) -> CurvatureStructure:
    """The structure of a name, with a rank where it takes one."""
    if name not in STRUCTURES:
        raise ValueError(f"Unknown curvature={name!r}: use one of {', '.join(STRUCTURES)}.")
    structure = STRUCTURES[name]
    if rank is not None and not structure.takes_rank:
        *names, last = [f'"{key}"' for key, value in STRUCTURES.items() if value.takes_rank]
        raise ValueError(
            f"rank belongs to curvature={', '.join(names)} and {last}, not to {name!r}. Leave rank "
            "out."
        )
    return structure(rank)
