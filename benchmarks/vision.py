"""Networks of torchvision with depthwise convolutions, for three comparisons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import ours, peers
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias import Laplace
from laplace_debias.curvature.fisher import FisherType
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import factor_sums
from laplace_debias.curvature.layers.backends import make_backend
from laplace_debias.curvature.layers.blocks import curvature_blocks
from laplace_debias.curvature.layers.tap import Tap
from laplace_debias.curvature.losses.base import NegativeLogLikelihood
from laplace_debias.curvature.losses.cotangents import Cotangents
from laplace_debias.curvature.losses.likelihoods import Categorical
from laplace_debias.curvature.network.batch import Batch
from laplace_debias.curvature.network.shared_copy import shared_copy

UNIT = "s"
REFERENCES = ("gradient",)
FACTORS = "factors, one batch"
GOALS: tuple[Goal, ...] = (
    Goal(FACTORS, "gradient", at_most=4.0),
    Goal(FASTEST_PEER, FACTORS, at_least=1.0),
)
_IMAGES = 32
_SIDE = 64
_CLASSES = 10


@dataclass(frozen=True)
class VisionSettings(Settings):
    """The settings, with a different network and different images.

    Attributes:
        architecture: The name of the network in torchvision.
    """

    architecture: str = "mobilenet_v3_small"

    def model(self) -> nn.Module:  # type: ignore[override]
        """Return the network, or a narrow one, in eval mode, with fixed random weights."""
        # torchvision is imported here, because other comparisons do not need it.
        import torchvision

        build = getattr(torchvision.models, self.architecture)
        if self.quick:
            build = partial(torchvision.models.mobilenet_v3_small, width_mult=0.25)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build(num_classes=_CLASSES).eval().to(self.device)

    def data(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return random images `[size, 3, side, side]` and labels `[size]`."""
        generator = torch.Generator().manual_seed(seed)
        side = 32 if self.quick else _SIDE
        images = torch.randn(size, 3, side, side, generator=generator)
        labels = torch.randint(_CLASSES, (size,), generator=generator)
        return images.to(self.device), labels.to(self.device)


def compare_vision(settings: Settings, architecture: str) -> list[Row]:
    """Compare the parts of our fit, and the factors of peers.

    Args:
        settings: The rounds, the device and the threads.
        architecture: The name of the network in torchvision.
    """
    of_network = VisionSettings(
        settings.device, settings.quick, settings.repetitions, settings.threads, architecture
    )
    contenders = [
        Contender("gradient", ours.gradient(of_network)),
        Contender(FACTORS, _factors(of_network)),
        Contender("eigendecompositions, once a fit", _eigenbases(of_network), most_rounds=1),
        Contender("whole fit of one batch", _fit(of_network), most_rounds=1),
        Contender("laplace-torch", peers.laplace_torch_factors(of_network, "mc"), is_peer=True),
        Contender("nngeometry", peers.nngeometry_factors(of_network, "mc"), is_peer=True),
    ]
    return measure(contenders, of_network, size=_size(settings), warm_up=2)


def _size(settings: Settings) -> int:
    return 2 if settings.quick else _IMAGES


def _names(model: nn.Module) -> Sequence[str]:
    """Return all parameters except ConvNeXt's channels-first LayerNorm and LayerScale."""
    modules = dict(model.named_modules())
    return [
        name
        for name, _ in model.named_parameters()
        if "layer_scale" not in name
        and type(modules[name.rpartition(".")[0]]).__name__ != "LayerNorm2d"
    ]


def _problem(settings: VisionSettings) -> FitContext:
    model = settings.model()
    cotangents = Cotangents(NegativeLogLikelihood(Categorical()), FisherType("mc"))
    blocks = curvature_blocks(model, _names(model))
    made = make_backend("auto", model, Tap(shared_copy(model)), blocks)
    return FitContext(cotangents, blocks, made, torch.float64, None)


def _factors(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        problem = _problem(settings)
        # A fit examines its model only before the first batch.
        return lambda size: factor_sums(problem, [Batch(*settings.data(size))], first_index=1)

    return build


def _eigenbases(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        problem = _problem(settings)
        sums, seen = factor_sums(problem, [Batch(*settings.data(_size(settings)))])
        return lambda _: eigenbases(problem, dict(sums), seen)

    return build


def _fit(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        model = settings.model()

        def run(size: int) -> object:
            la = Laplace(model, fisher="mc", params=_names(model))
            return la.fit_batches([settings.data(size)], num_data=ours.NUM_DATA)

        return run

    return build
