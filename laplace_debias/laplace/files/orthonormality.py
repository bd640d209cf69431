"""Whether directions are orthonormal, for the cost of a few products."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

_NUM_PROBES = 4
_TIMES_ROUNDING = 100


def check_orthonormal(U: Float[Tensor, "*groups n k"], what: str) -> None:
    r"""Require orthonormal columns, to single precision.

    $U^\top U z = z$ for a few standard normal z: $O(nk)$ work, where $U^\top U$ would take
    $O(nk^2)$. A column that is off by a relative ε passes only if all the probes' entries there
    happen to be below about $100 \sqrt n\, u/ε$, with u the unit roundoff. Single precision is
    asked for whatever the dtype: directions may have been computed in it (`factor_dtype`).

    Args:
        U: The directions, as columns; of groups each have their own.
        what: What they are, the subject of the message.

    Raises:
        ValueError: Otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(U.shape[-1], _NUM_PROBES, generator=generator, dtype=torch.float64).to(U)
    residual = (U.mT @ (U @ z) - z).norm(dim=-2) / z.norm(dim=0).clamp_min(1.0)
    unit = torch.finfo(torch.float32).eps
    bound = _TIMES_ROUNDING * unit * math.sqrt(max(U.shape[-2], 1))
    # Not a comparison that NaN would pass.
    if not bool((residual <= bound).all()):
        raise ValueError(
            f"{what} are not orthonormal (off by {float(residual.max()):.1e}): it is damaged, save "
            "the posterior again."
        )
