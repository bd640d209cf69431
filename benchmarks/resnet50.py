"""ResNet-50 at full size: a thousand classes, images of 224 × 224 pixels."""

import torch

from benchmarks.report import Goal
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Row, measure
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
_NUM_LOGITS = 5
# The number of training images of ImageNet.
_NUM_DATA = 1_281_167


def compare(settings: Settings) -> list[Row]:
    """Random weights; parameters of every convolution and of the last layer, float32."""
    torch.manual_seed(0)
    if settings.quick:
        side = 32
        num_classes = 10
        model = resnet50(num_classes, blocks=(1, 1, 1, 1), width_per_group=8)
    else:
        side = 224
        num_classes = 1000
        model = resnet50(num_classes)
    model = model.eval().to(settings.device)
    images = torch.randn(8, 3, side, side, device=settings.device)
    labels = torch.randint(num_classes, (8,), device=settings.device)
    # The posterior of the last fit, which the prediction uses.
    posterior: Laplace | None = None

    def fit(size: int) -> object:
        nonlocal posterior
        posterior = None  # frees the memory of the last fit
        la = Laplace(model, params="weights", fisher="mc", factor_dtype=torch.float32)
        posterior = la.fit_batches([(images[:size], labels[:size])], num_data=_NUM_DATA)
        return posterior

    def predict(size: int) -> object:
        assert posterior is not None
        return posterior.functional(images[:size], diagonal=True, outputs=_NUM_LOGITS)

    def gradient(size: int) -> object:
        loss = torch.nn.functional.cross_entropy(model(images[:size]), labels[:size])
        return torch.autograd.grad(loss, list(model.parameters()))

    contenders = [
        Contender("gradient of 8 images", lambda: gradient),
        Contender(_FIT, lambda: fit, most_rounds=1),
        Contender(_PREDICT, lambda: predict, size=4, most_rounds=1),
    ]
    return measure(contenders, settings, 8, warm_up=4)
