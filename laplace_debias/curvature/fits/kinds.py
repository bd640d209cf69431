"""Kinds of curvature, by their names: what fits each of them."""

from dataclasses import dataclass, field, replace

from laplace_debias.curvature.fits.crossfit import fit_crossfit
from laplace_debias.curvature.fits.dense import fit_crossfit_dense, fit_full, fit_low_rank
from laplace_debias.curvature.fits.kfac import FITS
from laplace_debias.curvature.fits.sweep import CurvatureFit, Problem
from laplace_debias.curvature.network.batches import Pairs
from laplace_debias.system.checks import whole

DENSE = ("lowrank", "full")
"""Curvatures of all parameters in one block."""
WITH_FACTORS = ("kfac", "ekfac")
"""Curvatures with a Kronecker product for each layer."""
CURVATURES = (*FITS, *DENSE)


@dataclass(frozen=True)
class CurvatureKind:
    """A kind of curvature, one of `CURVATURES`.

    Its rank is, of `"lowrank"`, the number of directions, 20 if None; of `"kfac"` and `"ekfac"`
    that of each factor, a number or a share of the curvature, all if None.

    Attributes:
        is_dense: Whether all parameters make a single block.
        num_directions: Directions of `"lowrank"`, at most; None of the others.
        directions_per_factor: Directions of each Kronecker factor, at most; None for all, or a
            share.
    """

    name: str
    rank: float | None = None

    is_dense: bool = field(init=False)
    num_directions: int | None = field(init=False)
    directions_per_factor: int | None = field(init=False)

    def __post_init__(self) -> None:
        if self.name not in CURVATURES:
            raise ValueError(
                f"Unknown curvature={self.name!r}: use one of {', '.join(CURVATURES)}."
            )
        if self.rank is not None and self.name not in (*WITH_FACTORS, "lowrank"):
            raise ValueError(
                f'rank belongs to curvature="kfac", "ekfac" and "lowrank", not to {self.name!r}.'
            )
        is_low_rank, number = self.name == "lowrank", None
        if is_low_rank or not isinstance(self.rank, float):
            number = None if self.rank is None else whole(self.rank, "rank")
        elif not 0 < self.rank < 1:
            raise ValueError(
                f"rank must be a number of directions, or a share of the trace below 1, such as "
                f"0.99, got {self.rank}."
            )
        vars(self).update(
            is_dense=self.name in DENSE,
            num_directions=(number or 20) if is_low_rank else None,
            directions_per_factor=None if is_low_rank else number,
        )

    def fit(
        self,
        problem: Problem,
        directions: Pairs,
        magnitudes: Pairs | None = None,
        num_folds: int | None = None,
    ) -> CurvatureFit:
        """Directions from some data; magnitudes from others, from the same, or out of fold."""
        if self.is_dense and num_folds is not None:
            return fit_crossfit_dense(problem, directions, num_folds, self.num_directions)
        if self.name == "full":
            return fit_full(problem, directions, magnitudes)
        if self.num_directions is not None:
            return fit_low_rank(problem, directions, magnitudes, self.num_directions)
        if num_folds is None:
            fitted = FITS[self.name](problem, directions, magnitudes)
        else:
            fitted = fit_crossfit(problem, directions, num_folds, self.name)
        if (rank := self.rank) is None:
            return fitted
        return replace(fitted, curvature=fitted.curvature.map(lambda _, of: of.leading(rank)))
