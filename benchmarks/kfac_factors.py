"""K-FAC factors of one batch, without eigendecompositions, for two comparisons."""

import torch

from benchmarks import ours, peers
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, measure

_WARM_UP = 4


def compare_factors(settings: Settings, fisher: str) -> list[Row]:
    """Compare our factors, with both backends, with the gradient and every peer.

    Args:
        settings: The network, the data and the rounds.
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
    """Return the factors of every other library; for the arguments, see `compare_factors`."""
    return [
        Contender("BackPACK", peers.backpack_factors(settings, fisher), is_peer=True),
        Contender("curvlinops", peers.curvlinops_factors(settings, fisher), is_peer=True),
        Contender("laplace-torch", peers.laplace_torch_factors(settings, fisher), is_peer=True),
        Contender("nngeometry", peers.nngeometry_factors(settings, fisher), is_peer=True),
    ]
