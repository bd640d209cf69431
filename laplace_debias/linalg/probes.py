"""Random probe vectors with mean zero and covariance I."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator


def draw(
    A: LinearOperator,
    count: int,
    distribution: str,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "columns count"]:
    """Draw probes one by one, so that their values do not depend on how many are drawn in a call.

    The distribution is `"rademacher"` (entries ±1), `"gaussian"` (standard normal entries) or
    `"spherical"` (uniform on the sphere of radius √n).
    """
    n = A.shape[1]
    probes = torch.empty(n, count, dtype=A.dtype, device=A.device)
    for column in range(count):
        probe = torch.empty(n, dtype=A.dtype, device=A.device)
        if distribution == "rademacher":
            probe.bernoulli_(generator=generator).mul_(2).sub_(1)
        else:
            probe.normal_(generator=generator)
        if distribution == "spherical":
            probe *= n**0.5 / probe.norm()
        probes[:, column] = probe
    return probes
