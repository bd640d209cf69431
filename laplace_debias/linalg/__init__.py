"""Algorithms on any linear operator: they need its products and nothing else."""

from laplace_debias.linalg.conjugate_gradient import cg, debiased_cg, relative_progress, replay
from laplace_debias.linalg.solution import DebiasedSolution, Iterate, Solution, Status
from laplace_debias.linalg.subspaces import overlaps

__all__ = [
    "DebiasedSolution",
    "Iterate",
    "Solution",
    "Status",
    "cg",
    "debiased_cg",
    "overlaps",
    "relative_progress",
    "replay",
]
