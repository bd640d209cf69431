"""The types of Fisher matrices and their names."""

from dataclasses import dataclass, replace

import torch

from laplace_debias.system.checks import whole
from laplace_debias.system.ranks import ALONE, Ranks

FISHERS = ("exact", "mc", "empirical")


@dataclass(frozen=True)
class FisherType:
    r"""The way in which a loss Hessian becomes a sum of outer products.

    `"exact"`: columns of the Hessian's root (the GGN, or type-II Fisher); `"mc"`: gradients at
    `mc_samples` labels per example, drawn from the model (type-I); `"empirical"`: the gradient at
    the true label. Drawn labels depend on the seed and the example's position in the data. They do
    not depend on how the data is cut into batches, nor on how far it is padded.
    """

    kind: str = "exact"
    mc_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FISHERS:
            raise ValueError(f"Unknown fisher={self.kind!r}. Use one of {', '.join(FISHERS)}.")
        if whole(self.mc_samples, "mc_samples") != 1 and self.kind != "mc":
            raise ValueError(
                f'`mc_samples={self.mc_samples}` applies only to `fisher="mc"`, got '
                f"`fisher={self.kind!r}`. Remove `mc_samples`."
            )

    def seeded(self, generator: torch.Generator | None, ranks: Ranks = ALONE) -> "FisherType":
        """Draw the seed of the labels from a generator, or from torch's global one.

        With several processes, the first one draws. If no labels are drawn, no seed is.
        """
        if self.kind != "mc":
            return self
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return replace(self, seed=ranks.exchange(seed)[0])
