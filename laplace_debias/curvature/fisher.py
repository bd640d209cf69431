"""The types of Fisher matrix, and their names."""

from dataclasses import dataclass, replace

import torch

from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import ALONE, Ranks

FISHERS = ("exact", "mc", "signs", "empirical")
# The types that draw `mc_samples` random vectors per example.
_RANDOM = ("mc", "signs")


@dataclass(frozen=True)
class FisherType:
    r"""A way of turning a loss Hessian into a sum of outer products.

    `"exact"`: columns of the Hessian's root (the GGN, or type-II Fisher); `"mc"`: gradients at
    `mc_samples` labels per example, drawn from the model (type-I); `"signs"`: sums of the columns
    of `"exact"` with random signs, $s = \sum_k \epsilon_k s_k$, `mc_samples` per example;
    `"empirical"`: the gradient at the true label. Drawn labels and signs depend on the seed and the
    example's position in the data, but not on how the data are split into batches or padded.

    Reference: Martens, Sutskever & Swersky (2012), "Estimating the Hessian by back-propagating
    curvature", for the signs.
    """

    kind: str = "exact"
    mc_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FISHERS:
            raise ValueError(f"Unknown fisher={self.kind!r}. Use one of {', '.join(FISHERS)}.")
        if whole(self.mc_samples, "mc_samples") != 1 and not self.is_random:
            raise ValueError(
                f'`mc_samples={self.mc_samples}` applies only to `fisher="mc"` and `"signs"`, got '
                f"`fisher={self.kind!r}`. Remove `mc_samples`."
            )

    @property
    def is_random(self) -> bool:
        """Whether labels or signs are drawn."""
        return self.kind in _RANDOM

    def seeded(self, generator: torch.Generator | None, ranks: Ranks = ALONE) -> "FisherType":
        """Return a copy whose seed is drawn from a generator, by default torch's global generator.

        With several processes, all use the first one's seed. A type that draws no labels or signs
        is returned unchanged.
        """
        if not self.is_random:
            return self
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return replace(self, seed=ranks.exchange(seed)[0])
