"""K-FAC factors of one batch, without eigendecompositions: shared by two comparisons."""

import torch

from benchmarks import ours, peers
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, measure

_WARM_UP = 4


def compare_factors(settings: Settings, fisher: str) -> list[Row]:
    """Ours with both backends against the gradient and every peer.

    Args:
        settings: Network, data, rounds.
        fisher: `"mc"` (one label per example) or `"exact"`.
    """
    contenders = [
        Contender("gradient", ours.gradient(settings)),
        Contender("ours, hooks", ours.factors(settings, fisher, "hooks")),
        Contender("ours, BackPACK", ours.factors(settings, fisher, "backpack")),
        Contender(
            "ours, hooks, float64 sums", ours.factors(settings, fisher, "hooks", torch.float64)
        ),
        *peer_contenders(settings, fisher),
    ]
    return measure(contenders, settings, settings.batch, _WARM_UP)


def peer_contenders(settings: Settings, fisher: str) -> list[Contender]:
    """The factors of every other library; arguments as `compare_factors` takes them."""
    return [
        Contender("BackPACK", peers.backpack_factors(settings, fisher), is_peer=True),
        Contender("curvlinops", peers.curvlinops_factors(settings, fisher), is_peer=True),
        Contender("laplace-torch", peers.laplace_torch_factors(settings, fisher), is_peer=True),
        Contender("nngeometry", peers.nngeometry_factors(settings, fisher), is_peer=True),
    ]
