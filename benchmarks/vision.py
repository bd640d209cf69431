"""Networks of torchvision with depthwise convolutions, for three comparisons."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import ours, peers
from benchmarks.report import FASTEST_PEER, Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from laplace_debias import Laplace
from laplace_debias.curvature.data.batch import Batch
from laplace_debias.curvature.fits.context import FitContext
from laplace_debias.curvature.fits.eigenbases import eigenbases
from laplace_debias.curvature.fits.factor_sums import factor_sums

UNIT = "s"
REFERENCES = ("gradient",)
FACTORS = "factors, one batch"
GOALS: tuple[Goal, ...] = (
    Goal(FACTORS, "gradient", at_most=4.0),
    Goal(FASTEST_PEER, FACTORS, at_least=1.0),
)
_SIDE = 64
_CLASSES = 10


@dataclass(frozen=True)
class VisionSettings(Settings):
    """The settings, with a different network and different images.

    Attributes:
        architecture: The name of the network in torchvision.
    """

    architecture: str = "mobilenet_v3_small"

    @property
    def batch(self) -> int:
        """The number of images of a fit."""
        return 2 if self.quick else 32

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
    """Time the steps of our fit, and the factors of peers.

    Args:
        settings: The rounds, the device and the threads.
        architecture: The name of the network in torchvision.
    """
    vision_settings = VisionSettings(**asdict(settings), architecture=architecture)
    contenders = [
        Contender("gradient", ours.gradient(vision_settings)),
        Contender(FACTORS, _factors(vision_settings)),
        Contender("eigendecompositions, once a fit", _eigenbases(vision_settings), most_rounds=1),
        Contender("whole fit of one batch", _fit(vision_settings), most_rounds=1),
        Contender(
            "laplace-torch", peers.laplace_torch_factors(vision_settings, "mc"), is_peer=True
        ),
        Contender("nngeometry", peers.nngeometry_factors(vision_settings, "mc"), is_peer=True),
    ]
    return measure(contenders, vision_settings, size=vision_settings.batch, warm_up=2)


def _parameter_names(model: nn.Module) -> Sequence[str]:
    """Return all parameters except ConvNeXt's channels-first LayerNorm and LayerScale."""
    names = []
    for name, _ in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if "layer_scale" not in name and type(layer).__name__ != "LayerNorm2d":
            names.append(name)
    return names


def _fit_context(settings: VisionSettings) -> FitContext:
    model = settings.model()
    return ours.fit_context(model, "mc", dtype=torch.float64, params=_parameter_names(model))


def _factors(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        context = _fit_context(settings)
        # A fit examines its model only before the first batch.
        return lambda size: factor_sums(context, [Batch(*settings.data(size))], first_index=1)

    return build


def _eigenbases(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        context = _fit_context(settings)
        sums, totals = factor_sums(context, [Batch(*settings.data(settings.batch))])
        # `eigenbases` empties the dictionary, so each call gets a copy.
        return lambda _: eigenbases(context, dict(sums), totals)

    return build


def _fit(settings: VisionSettings) -> Callable[[], Run]:
    def build() -> Run:
        model = settings.model()

        def run(size: int) -> object:
            la = Laplace(model, fisher="mc", params=_parameter_names(model))
            return la.fit_batches([settings.data(size)], num_data=ours.NUM_DATA)

        return run

    return build
