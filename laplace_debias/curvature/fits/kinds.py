"""Kinds of curvature, by their names: what fits each of them."""

from dataclasses import dataclass

from laplace_debias.curvature.fits.crossfit import fit_crossfit
from laplace_debias.curvature.fits.dense import fit_crossfit_dense, fit_full, fit_low_rank
from laplace_debias.curvature.fits.kfac import FITS
from laplace_debias.curvature.fits.problem import CurvatureFit, Problem
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.system.checks import whole

DENSE = ("lowrank", "full")
"""Curvatures of all parameters in one block."""
WITH_FACTORS = ("kfac", "ekfac")
"""Curvatures with a Kronecker product for each layer."""
CURVATURES = (*FITS, *DENSE)
_RANK = 20


@dataclass(frozen=True)
class CurvatureKind:
    """A kind of curvature.

    Args:
        name: One of `CURVATURES`.
        rank: Directions of `"lowrank"`, 20 if None.

    Raises:
        ValueError: For an unknown name, or a rank that does not go with it.
    """

    name: str
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.name not in CURVATURES:
            raise ValueError(
                f"Unknown curvature={self.name!r}: use one of {', '.join(CURVATURES)}."
            )
        if self.rank is not None:
            whole(self.rank, "rank")
            if self.name != "lowrank":
                raise ValueError(f'rank belongs to curvature="lowrank", not to {self.name!r}.')

    @property
    def is_dense(self) -> bool:
        """Whether all parameters make a single block."""
        return self.name in DENSE

    @property
    def reads_twice(self) -> bool:
        """Whether a fit reads data twice that gives both directions and magnitudes."""
        return self.name in ("ekfac", "lowrank")

    @property
    def num_directions(self) -> int | None:
        """Directions of `"lowrank"`, at most; None of the others."""
        return (self.rank or _RANK) if self.name == "lowrank" else None

    def fit(self, problem: Problem, directions: Pairs, magnitudes: Pairs | None) -> CurvatureFit:
        """Directions from some data, magnitudes from others, or from the same for None."""
        if self.name == "full":
            return fit_full(problem, directions, magnitudes)
        if self.num_directions is not None:
            return fit_low_rank(problem, directions, magnitudes, self.num_directions)
        return FITS[self.name](problem, directions, magnitudes)

    def crossfit(self, problem: Problem, data: Pairs, num_folds: int) -> CurvatureFit:
        """Directions from all the data, magnitudes out of fold."""
        if self.is_dense:
            return fit_crossfit_dense(problem, data, num_folds, self.num_directions)
        return fit_crossfit(problem, data, num_folds, self.name)
