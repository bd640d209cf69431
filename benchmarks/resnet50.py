"""ResNet-50 at full size: a thousand classes, images of 224 × 224 pixels."""

from collections.abc import Callable

import torch

from benchmarks.report import Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, Run, measure
from examples.paper.networks import resnet50
from laplace_debias import Laplace

TITLE = "ResNet-50, 1,000 classes, 224 × 224 pixels: memory of a fit and of a prediction"
UNIT = "s per call"
REFERENCES = ("gradient of 8 images",)
_FIT = "Monte-Carlo K-FAC fit, 8 images, eigendecompositions included"
_PREDICT = "variances of the 5 largest logits, 4 images"
GOALS = (
    Goal(_FIT, at_most=12 * 1024, quantity="megabytes"),
    Goal(_PREDICT, at_most=12 * 1024, quantity="megabytes"),
)
_TOP = 5


def compare(settings: Settings) -> list[Row]:
    """Random weights; parameters of every convolution and of the last layer, float32."""
    torch.manual_seed(0)
    side, classes = (32, 10) if settings.quick else (224, 1000)
    model = (
        resnet50(classes, blocks=(1, 1, 1, 1), width_per_group=8)
        if settings.quick
        else resnet50(classes)
    )
    model = model.eval().to(settings.device)
    images = torch.randn(8, 3, side, side, device=settings.device)
    labels = torch.randint(classes, (8,), device=settings.device)

    def laplace() -> Laplace:
        return Laplace(model, params="weights", fisher="mc", factor_dtype=torch.float32)

    fitted: list[Laplace] = []

    def fit(size: int) -> object:
        fitted.clear()
        fitted[:] = [laplace().fit_batches([(images[:size], labels[:size])], num_data=1_281_167)]
        return fitted[0]

    def predict(size: int) -> object:
        return fitted[0].functional(images[:size], diagonal=True, outputs=_TOP)

    def gradient(size: int) -> object:
        loss = torch.nn.functional.cross_entropy(model(images[:size]), labels[:size])
        return torch.autograd.grad(loss, list(model.parameters()))

    contenders = [
        Contender("gradient of 8 images", _ready(gradient)),
        Contender(_FIT, _ready(fit), most_rounds=1),
        Contender(_PREDICT, _ready(predict), size=4, most_rounds=1),
    ]
    return measure(contenders, settings, 8, warm_up=4)


def _ready(run: Run) -> Callable[[], Run]:
    return lambda: run
