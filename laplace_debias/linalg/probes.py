"""Random probe vectors with mean zero and covariance I."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_debias.operators.base import LinearOperator


def _rademacher(n: int, like: LinearOperator, generator: torch.Generator | None) -> Tensor:
    signs = torch.empty(n, dtype=like.dtype, device=like.device)
    return signs.bernoulli_(generator=generator).mul_(2).sub_(1)


def _gaussian(n: int, like: LinearOperator, generator: torch.Generator | None) -> Tensor:
    return torch.randn(n, generator=generator, device=like.device, dtype=like.dtype)


def _spherical(n: int, like: LinearOperator, generator: torch.Generator | None) -> Tensor:
    probe = _gaussian(n, like, generator)
    return probe * (n**0.5 / probe.norm())


_DISTRIBUTIONS: dict[str, Callable[[int, LinearOperator, torch.Generator | None], Tensor]] = {
    "rademacher": _rademacher,
    "gaussian": _gaussian,
    "spherical": _spherical,
}
"""By name: entries ±1; standard normal entries; uniform on the sphere of radius √n."""


def draw(
    A: LinearOperator,
    count: int,
    distribution: str,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "columns count"]:
    """Draw probes one by one, so that they do not depend on how many are drawn at once."""
    function, n = _DISTRIBUTIONS[distribution], A.shape[1]
    probes = torch.empty(n, count, dtype=A.dtype, device=A.device)
    for column in range(count):
        probes[:, column] = function(n, A, generator)
    return probes
