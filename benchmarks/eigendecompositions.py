"""Eigendecompositions of all Kronecker factors, which every K-FAC posterior needs once."""

from collections.abc import Callable

import torch

from benchmarks import peers
from benchmarks.ours import fit_context
from benchmarks.report import Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import factor_sums

TITLE = "Eigendecompositions of all factors"
UNIT = "s"
REFERENCES = ("ours, float32",)
GOALS: tuple[Goal, ...] = ()


def compare(settings: Settings) -> list[Row]:
    """The table compares our eigendecompositions with laplace-torch's `Kron.decompose`."""
    contenders = [
        Contender("ours, float32", _ours(settings, torch.float32)),
        Contender("ours, float64", _ours(settings, torch.float64)),
        Contender("laplace-torch", _laplace_torch(settings), is_peer=True),
    ]
    return measure(contenders, settings, size=settings.batch, warm_up=settings.batch)


def _ours(settings: Settings, dtype: torch.dtype) -> Callable[[], Run]:
    def build() -> Run:
        context = fit_context(settings.model(), "mc", dtype=dtype)
        sums, totals = factor_sums(context, [Batch(*settings.data(settings.batch))])
        # `eigenbases` empties the dictionary, so each call gets a copy.
        return lambda _: eigenbases(context, dict(sums), totals)

    return build


def _laplace_torch(settings: Settings) -> Callable[[], Run]:
    def build() -> Run:
        kron = peers.laplace_torch_factors(settings, "mc")()(settings.batch)[1]  # type: ignore[index]
        return lambda _: kron.decompose()

    return build
