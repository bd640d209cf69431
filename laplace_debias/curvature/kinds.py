"""Kinds of curvature and of Fisher matrices, by the names that a user gives."""

from dataclasses import dataclass, field, replace

import torch

from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import ALONE, Ranks

DENSE = ("lowrank", "full")
"""Curvatures of all parameters in one block."""
WITH_FACTORS = ("kfac", "ekfac")
"""Curvatures with a Kronecker product for each layer."""
CURVATURES = (*WITH_FACTORS, "diag", *DENSE)


FISHERS = ("exact", "mc", "empirical")


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


@dataclass(frozen=True)
class FisherType:
    r"""How the loss Hessian of an example becomes a sum of outer products $\sum_k s_k s_k^\top$.

    `"exact"`: columns of the Hessian's root (the GGN, or type-II Fisher); `"mc"`: gradients at
    `mc_samples` labels an example drawn from the model (type-I); `"empirical"`: the gradient at the
    true label. Drawn labels depend on the seed and the example's position in the data alone, not on
    how the data is cut into batches, nor on how far it is padded.
    """

    kind: str = "exact"
    mc_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FISHERS:
            raise ValueError(f"Unknown fisher={self.kind!r}: use one of {', '.join(FISHERS)}.")
        if whole(self.mc_samples, "mc_samples") != 1 and self.kind != "mc":
            raise ValueError(
                f'mc_samples={self.mc_samples} belongs to fisher="mc", not to {self.kind!r}.'
            )

    def seeded(self, generator: torch.Generator | None, ranks: Ranks = ALONE) -> "FisherType":
        """The same with labels that a generator decides; torch's global one if None.

        Of several processes the first one draws; where there are no labels to draw none does.
        """
        if self.kind != "mc":
            return self
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return replace(self, seed=ranks.exchange(seed)[0])
